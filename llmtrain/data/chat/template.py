"""The chat template of a recipe, rendered in the same way as by `transformers`."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from functools import cached_property
from pathlib import Path
from typing import Any

from llmtrain.data.chat.conversation import IMAGE, Conversation, Message, RowError
from llmtrain.errors import DataError, Problem, reason
from llmtrain.plan.facts.template_limits import TEMPLATE_FIELD, run_template
from llmtrain.plan.facts.vocabulary import no_template, read_template, read_tokenizer_config

DATE = datetime(2024, 7, 26)
"""The date that templates write as today's, because tokens must not depend on the day. Llama 3.1's template writes this
date if it has no clock."""
_FIXED_DATE = (
    "{%- macro strftime_now(format) -%}{{- format"
    + "".join(f"|replace('%{code}', '{DATE.strftime(f'%{code}')}')" for code in ("-d", "-m", *"aAbBdHIjmMpSyY"))
    + " -}}{%- endmacro -%}"
)
"""Macro that replaces the environment's `strftime_now`, because `transformers` passes no functions to a template."""
SPECIAL_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
_CALL: Message = {"type": "function", "function": {"name": "name", "arguments": {"key": "value"}}}
_PROBE: tuple[Message, ...] = (
    {"role": "user", "content": "question"},
    {"role": "assistant", "content": "", "tool_calls": [{**_CALL, "id": "abcdefghi"}]},
)


@dataclass(frozen=True)
class ChatTemplate:
    """A Jinja template, with the variables that it gets from the tokenizer."""

    source: str
    special: Mapping[str, str] = field(default_factory=dict)
    """Texts of the tokenizer's special tokens by name (`bos_token`, `eos_token`, ...)."""

    def render(self, messages: Sequence[Message], tools: Sequence[Any] = (), prompt: bool = False) -> str:
        """Returns the text of messages. prompt: whether to add the beginning of the assistant's next turn.

        Raises RowError if the template refuses the messages.
        """
        return self._render(messages, tools, prompt, spans=False)[0]

    def render_each(self, conversations: Sequence[Conversation]) -> list[str | RowError]:
        """Returns the text of each conversation, or the error of the template."""
        simple = [
            number
            for number, conversation in enumerate(conversations)
            if not conversation.tools and not any("tool_calls" in message for message in conversation.messages)
        ]
        try:
            # One call for all: `transformers` prepares each call for about as long as it renders.
            texts = dict(zip(simple, self._call([conversations[number].messages for number in simple])[0], strict=True))
        except Exception:  # one conversation failed; a template is a program and can raise anything
            texts = {}
        return [
            texts.get(number) or self._render_one(conversation) for number, conversation in enumerate(conversations)
        ]

    def render_spans(self, messages: Sequence[Message], tools: Sequence[Any]) -> tuple[str, list[tuple[int, int]]]:
        """Returns the text of messages, and the spans that the template marks with `{% generation %}`.

        Raises RowError if the template refuses the messages.
        """
        return self._render(messages, tools, prompt=False, spans=True)

    @cached_property
    def writes_date(self) -> bool:
        """Whether the template writes today's date, which is replaced by `DATE`."""
        return "strftime_now" in self.source

    @cached_property
    def has_spans(self) -> bool:
        """Whether the template marks generated text with `{% generation %}`."""
        return re.search(r"\{%[-+]?\s*generation\s*[-+]?%\}", self.source) is not None

    @cached_property
    def literal_text(self) -> str:
        """All literal text in the template's source. Raises jinja2.TemplateSyntaxError."""
        from jinja2 import Environment, nodes

        plain = re.sub(r"\{%[-+]?\s*(end)?generation\s*[-+]?%\}", "", self.source)  # only in `transformers`
        tree = Environment(extensions=["jinja2.ext.loopcontrols"]).parse(plain)
        data = [node.data for node in tree.find_all(nodes.TemplateData)]
        return "\n".join([*data, *(str(node.value) for node in tree.find_all(nodes.Const))])

    @cached_property
    def arguments_as_text(self) -> bool:
        """Whether the template expects the arguments of tool calls as JSON text, as DeepSeek-V3's does.

        Other templates expect an object and write it as JSON; they would write a text as a JSON string.
        """
        try:
            return "{'key': 'value'}" in self._call([_PROBE])[0][0]
        except Exception:
            return True

    def _render_one(self, conversation: Conversation) -> str | RowError:
        try:
            return self.render(conversation.messages, conversation.tools)
        except RowError as fault:
            return fault

    def _render(
        self, messages: Sequence[Message], tools: Sequence[Any], prompt: bool, spans: bool
    ) -> tuple[str, list[tuple[int, int]]]:
        if any("tool_calls" in message for message in messages) and self.arguments_as_text:
            messages = [_with_text_arguments(message) for message in messages]
        try:
            texts, all_spans = self._call([messages], tools, prompt, spans)
        except DataError:  # it exceeds its limits
            raise
        except Exception as error:  # a template is a program and can raise anything
            raise RowError(f"the chat template refuses it: {reason(error)}") from error
        return texts[0], list(all_spans[0]) if all_spans else []

    def _call(
        self, chats: Sequence[Sequence[Message]], tools: Sequence[Any] = (), prompt: bool = False, spans: bool = False
    ) -> tuple[list[str], Any]:
        from transformers.utils.chat_template_utils import render_jinja_template

        return run_template(
            render_jinja_template,
            sum(map(len, chats)),
            [list(map(_with_parts, messages)) for messages in chats],
            tools=list(tools) or None,
            chat_template=_FIXED_DATE + self.source if self.writes_date else self.source,
            add_generation_prompt=prompt,
            return_assistant_tokens_mask=spans,
            **self.special,
        )


def _with_parts(message: Message) -> Message:
    """Returns a message with images in the form that templates read: its content is a list of parts."""
    content = message.get("content")
    if not isinstance(content, str) or IMAGE not in content:
        return message
    parts: list[dict[str, str]] = []
    for number, text in enumerate(content.split(IMAGE)):
        parts += [{"type": "image"}] if number else []
        parts += [{"type": "text", "text": text}] if text else []
    return {**message, "content": parts}


def _with_text_arguments(message: Message) -> Message:
    if "tool_calls" not in message:
        return message
    functions = [call["function"] for call in message["tool_calls"]]
    texts = [{**function, "arguments": json.dumps(function["arguments"], ensure_ascii=False)} for function in functions]
    calls = [{**call, "function": text} for call, text in zip(message["tool_calls"], texts, strict=True)]
    return {**message, "tool_calls": calls}


def load_template(wanted: str | None, tokenizer: Path) -> ChatTemplate:
    """Returns the template that a recipe names (text, file, or name of a shipped one), or else the tokenizer's own.

    Raises DataError if there is none, or if it is not a Jinja template.
    """
    config = read_tokenizer_config(tokenizer)
    values = {name: config.get(name) for name in SPECIAL_TOKENS}
    texts = {name: value.get("content") if isinstance(value, dict) else value for name, value in values.items()}
    special = {name: text for name, text in texts.items() if isinstance(text, str)}
    source = read_template(wanted, tokenizer)
    if source is None:
        raise DataError(no_template())
    template = ChatTemplate(source, special)
    try:
        _ = template.literal_text  # parses the template
    except Exception as error:
        raise DataError(
            Problem("data.chat_template", TEMPLATE_FIELD, f"is not a Jinja template: {reason(error)}")
        ) from error
    return template
