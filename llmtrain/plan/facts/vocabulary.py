"""New tokens of pretrained weights (`model.new_tokens`): how many rows embedding and head get.

The files of the tokenizer are read as they are, since a plan has to answer immediately; `transformers` adds the tokens
when the data are prepared, which also checks that it counts as many.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from importlib.resources import files
from pathlib import Path
from typing import Any, NoReturn

from llmtrain.errors import DataError, Problem, RecipeError, format_value
from llmtrain.plan.facts.pretrained_config import pretrained_config
from llmtrain.plan.facts.template_limits import TEMPLATE_FIELD, TemplateRefusedError, limited_templates, run_template
from llmtrain.recipe import NewTokens, Recipe
from llmtrain.system.hub import stored_file
from llmtrain.system.untrusted import expanded, is_file, read_json, read_text, refusing

FIELD = "model.new_tokens"
DEFAULT = "default"
"""Name of the template that is used without tools, if a tokenizer has several."""
MULTIPLE = 128
"""A grown vocabulary is padded to a multiple of this, the divisor of Megatron-LM (`make-vocab-size-divisible-by`).

Tensor cores want matrices in multiples of 8 rows, and up to 16 tensor parallel ranks get such slices. Unlike
Megatron-LM's, it is not multiplied by the number of these ranks: all layouts train the same matrix.
"""
CONTROL = re.compile(r"<\|[^|<>{}\s'\"]+\|>|<｜[^｜<>{}\s'\"]+｜>|<(?:start|end)_of_\w+>")
"""Matches texts like `<|im_start|>`, `<｜User｜>`, `<end_of_turn>`."""
_TURNS = ({"role": "user", "content": "question"}, {"role": "assistant", "content": "answer"})
_CALL = {"id": "abcdefghi", "type": "function", "function": {"name": "name", "arguments": {"key": "value"}}}
PROBES: tuple[tuple[dict[str, Any], ...], ...] = (
    ({"role": "system", "content": "text"}, *_TURNS),
    _TURNS,
    (
        _TURNS[0],
        {"role": "assistant", "content": "", "tool_calls": [_CALL]},
        {"role": "tool", "name": "name", "tool_call_id": "abcdefghi", "content": "result"},
        _TURNS[1],
    ),
)
"""Conversations with all roles; most templates accept all of them."""


def with_resized_vocabulary(recipe: Recipe) -> Recipe:
    """Returns a recipe with the size of the vocabulary that `model.new_tokens` asks for.

    It is as large as the tokenizer with the new tokens, padded, or as that of the pretrained weights if that is enough.
    Without new tokens, or if the size is known already, the recipe is returned as it is. Raises RecipeError or
    DataError for a model, a tokenizer or a template that cannot be read.
    """
    model, tokenizer = recipe.model, recipe.data.tokenizer
    if not model.new_tokens or model.kept_rows or model.pretrained is None or not isinstance(tokenizer, str):
        return recipe
    rows = pretrained_config(model)[1].get("vocab_size")
    if not isinstance(rows, int):
        message = f"the configuration of '{model.pretrained}' has no vocab_size that could grow"
        raise RecipeError(Problem("model.new_tokens", FIELD, message, "--set model.new_tokens=[]"))
    known = _tokens(tokenizer)
    size = max(known.values()) + 1
    template = read_template(recipe.data.chat_template, tokenizer) if model.new_tokens == "template" else None
    needed = size + sum(token not in known for token in tokens_to_add(model.new_tokens, template))
    fields: dict[str, Any] = {"model.kept_rows": min(size, rows) if needed > size else rows}
    if needed > rows and "vocab_size" not in model.config:
        fields["model.config.vocab_size"] = -(-needed // MULTIPLE) * MULTIPLE
    return recipe.with_(**fields)


def tokens_to_add(new_tokens: NewTokens, template: str | None) -> tuple[str, ...]:
    """Returns the tokens of `model.new_tokens` in the order in which they are added.

    template: the source of the chat template, for `template`. Raises DataError if there is none.
    """
    if new_tokens != "template":
        return tuple(dict.fromkeys(new_tokens))
    if template is None:
        raise DataError(no_template())
    if not (found := control_tokens(template)):
        message = "the chat template writes no text like <|im_start|>, <start_of_turn> or <｜User｜>"
        raise DataError(Problem("model.new_tokens", FIELD, message, """list the tokens: ["TOKEN", ...]"""))
    return found


def control_tokens(template: str) -> tuple[str, ...]:
    """Returns the texts that a chat template writes and that are meant to be single tokens.

    The template contains them, or composes them when it is rendered: `'<|' + message.role + '|>'`.
    """
    return tuple(dict.fromkeys(CONTROL.findall("\n".join([template, *_rendered(template)]))))


def _rendered(template: str) -> list[str]:
    """Returns what a template makes of short conversations, without those that it refuses.

    Raises DataError for a template that exceeds the limits.
    """
    plain = re.sub(r"\{%[-+]?\s*(end)?generation\s*[-+]?%\}", "", template)  # a tag of `transformers` alone
    found = []
    with limited_templates():
        for messages in PROBES:
            with suppress(TemplateRefusedError):
                found += run_template(_render, len(messages), plain, messages)[0]
    return found


def _render(template: str, messages: Sequence[Mapping[str, str]]) -> tuple[list[str], None]:
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
    )
    environment.globals |= {"strftime_now": lambda _: "", "raise_exception": _refuse, "bos_token": "", "eos_token": ""}
    return [environment.from_string(template).render(messages=messages, tools=None, add_generation_prompt=True)], None


def _refuse(message: str) -> NoReturn:
    raise ValueError(message)


def no_template() -> Problem:
    """Returns the refusal of a tokenizer without a chat template."""
    message = "the tokenizer has no chat template"
    fix = f"--set {TEMPLATE_FIELD}=chatml, or name a file with one"
    return Problem("data.chat_template", TEMPLATE_FIELD, message, fix)


def read_template(wanted: str | None, tokenizer: str | Path) -> str | None:
    """Returns the source of the template that a recipe names (text, file, or name of a shipped one).

    Without a name, that of the tokenizer in a folder or on the hub, if it has one; of several, the default one. Raises
    DataError if it cannot be read, and as `named_template` does.
    """
    if wanted is not None:
        return named_template(wanted)
    if path := stored_file(tokenizer, "chat_template.jinja"):
        return _template_in(path)
    found = read_tokenizer_config(tokenizer).get("chat_template")
    if isinstance(found, list):
        named = [template for template in found if isinstance(template, dict) and template.get("name") == DEFAULT]
        found = named[-1].get("template") if named else None
    if found is not None and not isinstance(found, str):
        message = (
            f"chat_template in the tokenizer_config.json of '{tokenizer}' is {format_value(found)}, not a template"
        )
        raise DataError(Problem("data.chat_template", TEMPLATE_FIELD, message))
    return found


def read_tokenizer_config(tokenizer: str | Path) -> dict[str, Any]:
    """Returns the content of a tokenizer's `tokenizer_config.json`; empty without one. Raises DataError."""
    path = stored_file(tokenizer, "tokenizer_config.json")
    if path is None:
        return {}
    with refusing(DataError, "data.tokenizer", path):
        return read_json(path, dict[str, Any])


def shipped_templates() -> dict[str, str]:
    """Returns the templates that come with llmtrain, by name."""
    folder = files("llmtrain.data.chat") / "templates"
    return {
        file.name.removesuffix(".jinja"): file.read_text(encoding="utf-8")
        for file in sorted(folder.iterdir(), key=lambda file: file.name)
        if file.name.endswith(".jinja")
    }


def named_template(wanted: str) -> str:
    """Returns the template that a recipe names. Raises DataError for an unknown name."""
    shipped = shipped_templates()
    if wanted in shipped:
        return shipped[wanted]
    if "{" in wanted:
        return wanted
    path = expanded(wanted)
    if is_file(path):
        return _template_in(path)
    message = f"'{wanted}' is neither a file, nor a template's text, nor one of {', '.join(shipped)}"
    fix = f"--set {TEMPLATE_FIELD}=null takes that of the tokenizer"
    raise DataError(Problem("data.chat_template", TEMPLATE_FIELD, message, fix))


def _template_in(path: Path) -> str:
    with refusing(DataError, TEMPLATE_FIELD, path):
        return read_text(path)


def _tokens(tokenizer: str) -> dict[str, int]:
    """Returns the ids of a tokenizer's tokens, as its `tokenizer.json` declares them."""
    path = stored_file(tokenizer, "tokenizer.json")
    if path is None:
        message = f"'{tokenizer}' has no tokenizer.json, which says how many tokens it has"
        fix = "save it with transformers: AutoTokenizer.from_pretrained(NAME).save_pretrained(FOLDER)"
        raise DataError(Problem("data.tokenizer", "data.tokenizer", message, fix))
    with refusing(DataError, "data.tokenizer", path):
        declared = read_json(path, dict[str, Any])
        vocabulary: Any = declared["model"]["vocab"]
        if isinstance(vocabulary, list):  # of unigrams, each with its score
            vocabulary = {piece: number for number, (piece, _) in enumerate(vocabulary)}
        return dict(vocabulary) | {token["content"]: token["id"] for token in declared.get("added_tokens") or []}
