"""Chat templates that other programs know by name and tokenizers of base models lack, as Jinja texts of our own."""

from __future__ import annotations

ALPACA_SYSTEM = (
    "Below is an instruction that describes a task. Write a response that appropriately completes the request."
)
"""The text before the first instruction of a row in Alpaca's form, if it has no input."""

_FOR_EACH = "{%- for message in messages %}"
_END = "{%- endfor %}"


def _headed(before: str, after: str, *, assistant: str = "assistant", begin: str = "{{- bos_token or '' }}") -> str:
    """Returns a template that writes each message between two texts. before: has ROLE for the role.

    assistant: the role of the assistant, as the template writes it.
    """
    role = f"('{assistant}' if message.role == 'assistant' else message.role)"
    opening = "{{- '" + before.replace("ROLE", f"' + {role} + '") + "' }}"
    prompt = before.replace("ROLE", assistant)
    return (
        f"{begin}{_FOR_EACH}{opening}{{{{- message.content | trim + '{after}' }}}}{_END}"
        f"{{%- if add_generation_prompt %}}{{{{- '{prompt}' }}}}{{%- endif %}}"
    )


CHAT_TEMPLATES: dict[str, str] = {
    "chatml": "chatml",
    "llama3": _headed(r"<|start_header_id|>ROLE<|end_header_id|>\n\n", "<|eot_id|>"),
    "gemma": _headed(r"<start_of_turn>ROLE\n", r"<end_of_turn>\n", assistant="model"),
    "phi_3": _headed(r"<|ROLE|>\n", r"<|end|>\n"),
    "zephyr": _headed(r"<|ROLE|>\n", r"' + eos_token + '\n", begin=""),
    "alpaca": (
        "{{- bos_token or '' }}{%- if messages[0].role != 'system' %}"
        f"{{{{- '{ALPACA_SYSTEM}\\n\\n' }}}}{{%- endif %}}{_FOR_EACH}"
        "{%- if message.role == 'user' %}{{- '### Instruction:\\n' + message.content + '\\n\\n' }}"
        "{%- elif message.role == 'assistant' %}{{- '### Response:\\n' + message.content + eos_token }}"
        "{%- if not loop.last %}{{- '\\n\\n' }}{%- endif %}"
        f"{{%- else %}}{{{{- message.content + '\\n\\n' }}}}{{%- endif %}}{_END}"
        "{%- if add_generation_prompt %}{{- '### Response:\\n' }}{%- endif %}"
    ),
}
"""Name → `data.chat_template`: the name of a built-in one, or a Jinja text."""
