"""The data of an axolotl configuration: data sets, the form of their rows, templates and packing."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from llmtrain.errors import format_value
from llmtrain.plan.migrate.axolotl.settings import DATA_SET, SETTINGS, TITLE, names_in, number
from llmtrain.plan.migrate.chat_templates import CHAT_TEMPLATES
from llmtrain.plan.migrate.completion import hold_pairs
from llmtrain.plan.migrate.program import Given
from llmtrain.plan.migrate.translation import Settings, Translation

Values = Mapping[str, Any]
ROLE_KEYS = {"role": ("role", "from"), "content": ("content", "value")}
"""Property of a message → the keys that hold it."""
MARKS_TRAINED = frozenset({"train", "weight", "loss", "trainable", "loss_mask", "loss_weight"})
"""Keys of a message whose value says whether it is trained on."""
USUAL_ROLES = {
    "system": {"system", "developer"},
    "user": {"user", "human"},
    "assistant": {"assistant", "gpt", "model", "chatgpt", "bot", "function_call", "tool_call"},
    "tool": {"tool", "function", "observation", "function_response", "tool_response", "ipython"},
}
PAIRS = frozenset({"dpo", "ipo", "orpo", "simpo"})
"""Values of `rl` whose rows are pairs of completions."""
FILE_TYPES = frozenset({"json", "jsonl", "csv", "parquet", "arrow", "text"})
"""What `path` may name in place of a data set, if `data_files` has the files."""
INSTRUCTION_TYPES: dict[str, dict[str, str]] = {
    "alpaca": {},
    "alpaca_chat": {},
    "alpaca_instruct": {},
    "gpteacher": {"output": "response"},
}
"""Type of a data set in Alpaca's form → columns that do not have the usual names."""
COMPLETION_COLUMNS: dict[str, dict[str, str]] = {
    "argilla": {"prompt": "instruction", "chosen": "chosen_response", "rejected": "rejected_response"},
    "icr": {"prompt": "input"},
    "intel": {"prompt": "question"},
    "prompt_pairs": {"prompt": "prompt"},
    "ultra": {"prompt": "prompt"},
}
"""What a type of preferences ends in → the columns that it reads."""


def translate_data(result: Translation, settings: Settings, given: Given, rl: Any) -> None:
    """Translates the data. rl: axolotl's name of a preference loss, or None."""
    packed = settings.take("sample_packing")
    texts = settings.take("pretraining_dataset")
    result.fields["data.sources"] = []
    if texts:
        result.fields["data.sources"] = _texts(result, given, texts)
        joined = settings.take("pretraining_sample_concatenation", True)
        apart = settings.take("pretrain_multipack_attn", True)
        if packed is None and joined:
            result.set("data.packing", "best_fit", "pretraining_sample_concatenation")
            text = (
                "no text of at most `sequence_length` tokens is split, and longer ones are not cut off: axolotl leaves"
            )
            result.different("pretraining_dataset", _short(texts), f"{text} out the rest", "data.sources")
        if not (packed and apart):
            result.set("data.mask_documents", False, "texts of a sequence attend to each other in axolotl")
    result.apply(settings, [row for row in SETTINGS if row.key == "sequence_len"])
    strategy = settings.take("excess_length_strategy")
    if strategy in ("truncate", "raise"):
        cut = strategy == "truncate"
        result.set("data.too_long", "cut_turns" if cut else "drop", "excess_length_strategy")
        text = "whole turns are removed from the end, not tokens" if cut else "longer rows are dropped and counted"
        result.different("excess_length_strategy", strategy, text, "data.too_long")
    elif strategy:
        result.same("excess_length_strategy", strategy, "data.too_long")
    if rl in PAIRS or settings.take("reward_model"):
        hold_pairs(result, "sequence_len", result.fields["data.sequence_length"])
    elif packed is not None or not texts:
        result.set("data.packing", "best_fit" if packed else "none", "sample_packing")
        if packed is not None:
            result.same("sample_packing", packed, "data.packing" if "data.packing" in result.fields else "")
    chat: dict[str, Any] = {}
    for key, name in (("datasets", "data.sources"), ("test_datasets", "evaluation.sources")):
        sets = settings.take(key) or []
        sources = result.fields.setdefault(name, [])
        for place, one in enumerate(sets if isinstance(sets, list) else [sets]):
            if not isinstance(one, Mapping):
                raise given.file.error("import.value", f"{key}.{place}", f"is {format_value(one)}, not a data set")
            check_data_set(given, f"{key}.{place}" if isinstance(sets, list) else key)
            sources += _sources(result, one, f"{key}.{place}.", len(sources), name, rl, chat)
        if not sources:
            del result.fields[name]
    _finish_data(result, settings, chat)


def check_data_set(given: Given, key: str) -> None:
    """Raises RecipeError for settings of a data set that are not of their kind. key: the dotted key that has them."""
    given.file.check(
        within=key,
        text="path split field field_messages field_chosen field_rejected field_tools text_column conversation "
        "chat_template chat_template_jinja message_field_training field_thinking train_on_eos train_on_eot "
        "revision name",
        names="data_files roles_to_train",
        mapping="message_property_mappings roles",
    )
    roles = given.file.value(f"{key}.roles") or {}
    given.file.check(within=f"{key}.roles", names=" ".join(str(role) for role in roles))


def _finish_data(result: Translation, settings: Settings, chat: dict[str, Any]) -> None:
    if system := settings.take("default_system_message"):
        for source in (*result.fields.get("data.sources", ()), *result.fields.get("evaluation.sources", ())):
            source.setdefault("system", system)
        result.same("default_system_message", system, "data.sources", "`system` of each source")
    _template(result, settings, chat)
    if len(result.fields.get("data.sources", ())) > 1 and settings.take("max_steps"):
        text = "each source has the same share of the steps; axolotl reads as many rows of each as it has. Set `weight`"
        result.different("datasets", None, f"{text} of the sources to change the shares", "data.sources")
    share = settings.take("val_set_size", 0)
    if "evaluation.sources" in result.fields or not share:
        result.set("data.eval_fraction", 0, "val_set_size")
        if "val_set_size" in settings:
            result.same("val_set_size", share, "data.eval_fraction")
    elif number(share) < 1:
        result.set("data.eval_fraction", number(share), "val_set_size")
        result.different("val_set_size", share, "the rows are chosen by the hash of their text", "data.eval_fraction")
    else:
        result.missing("val_set_size", "is a number of rows; set data.eval_fraction to their share", share)
    if settings.take("shuffle_merged_datasets") is False:
        text = "the order of the rows is always random, and depends on train.seed"
        result.unsupported("shuffle_merged_datasets", False, text)


def _short(value: Any) -> Any:
    """Returns what a report shows of a data set: its path."""
    one = value[0] if isinstance(value, list) and value else value
    return one.get("path", one) if isinstance(one, Mapping) else one


def _texts(result: Translation, given: Given, texts: Any) -> list[dict[str, Any]]:
    """Returns the sources of `pretraining_dataset`: a name, a mapping, or a list of these."""
    sources: list[dict[str, Any]] = []
    for place, one in enumerate(texts if isinstance(texts, list) else [texts]):
        if not isinstance(one, (str, Mapping)):
            raise given.file.error("import.value", "pretraining_dataset", f"is {format_value(one)}, not a data set")
        if isinstance(one, Mapping):
            check_data_set(given, f"pretraining_dataset.{place}" if isinstance(texts, list) else "pretraining_dataset")
        values = {"path": one} if isinstance(one, str) else dict(one)
        values.setdefault("type", "completion")
        if values["type"] == "pretrain":
            values["type"] = "completion"
        sources += _sources(result, values, f"pretraining_dataset.{place}.", len(sources), "data.sources", None, {})
    return sources


def _sources(
    result: Translation, given: Values, prefix: str, first: int, name: str, rl: Any, chat: dict[str, Any]
) -> list[dict[str, Any]]:
    """Returns the sources of a data set: one, or one for each of its files.

    first: the number of its first source. name: the field that they are for. chat: gets what is set for all of them.
    """
    settings, own = Settings(given, prefix), Translation(TITLE)
    path, files = settings.take("path"), names_in(settings.take("data_files") or [])
    split = settings.take("split")
    source: dict[str, Any] = {}
    columns: dict[str, str] = {}
    _rows(own, settings, rl, source, columns, chat)
    own.apply(settings, DATA_SET)
    source |= {field.removeprefix("data.sources."): value for field, value in own.fields.items()}
    if columns:
        source["columns"] = {**source.get("columns", {}), **columns}
    is_local = path in FILE_TYPES or Path(str(path)).suffix in (".json", ".jsonl", ".csv", ".parquet", ".txt", ".arrow")
    if split and not is_local:
        if re.search(r"[\[+]", split):
            own.unsupported(f"{prefix}split", split, "all rows of the split are read; leave rows out with `filter`")
            split = re.split(r"[\[+]", split)[0]
        source["split"] = split
        own.same(f"{prefix}split", split, "data.sources.split")
    elif split and split != "train":
        own.same(f"{prefix}split", split, text="a file has one split, which is read")
    names = files if path in FILE_TYPES and files else [path]
    if files and path not in FILE_TYPES:
        text = "all files of the data set are read; download these, and name them as sources"
        own.unsupported(f"{prefix}data_files", files, text)
    place = f"{name}.{first}"
    own.same(f"{prefix}path", path, "data.sources.name")
    if names != [path]:
        own.same(f"{prefix}data_files", names, "data.sources.name")
    own.same_as_read(settings, "data.sources")
    own.report_untaken(settings)
    for line in own.lines:
        field = line.field.replace("data.sources", place) if line.field.startswith("data.sources.") else line.field
        result.lines.append(type(line)(line.kind, line.key, line.value, field, line.text))
    result.comments[f"{place}.name"] = f"{prefix}path"
    return [{"name": one, **source} for one in names]


def _rows(
    own: Translation,
    settings: Settings,
    rl: Any,
    source: dict[str, Any],
    columns: dict[str, str],
    chat: dict[str, Any],
) -> None:
    """Translates what the rows of a data set contain: its type, columns, roles and template."""
    kind, key = settings.take("type"), settings.prefix + "type"
    messages, mapped = settings.take("field_messages"), settings.take("message_property_mappings", {})
    for part, old in (("role", "message_field_role"), ("content", "message_field_content")):
        if (value := settings.take(old)) is not None:
            mapped = {part: value, **mapped}
    for part, value in mapped.items() if isinstance(mapped, Mapping) else ():
        if value not in ROLE_KEYS.get(part, (part,)):
            text = f"the {part} of a message is read from {' or '.join(ROLE_KEYS.get(part, (part,)))}"
            own.unsupported(
                f"{settings.prefix}message_property_mappings.{part}", value, f"{text}; rename it with `map`"
            )
    for target, names in (settings.take("roles") or {}).items():
        if unusual := sorted(set(names_in(names)) - USUAL_ROLES.get(target, set())):
            text = f"are not read as {target}; rename them with `map` of the source"
            own.unsupported(f"{settings.prefix}roles.{target}", unusual, text)
    marked = settings.take("message_field_training")
    if marked not in (None, *MARKS_TRAINED):
        text = "a message says by `train: false` that it is not trained on; rename the key with `map` of the source"
        own.unsupported(f"{settings.prefix}message_field_training", marked, text)
    thinking = settings.take("field_thinking")
    if thinking not in (None, "reasoning_content", "thinking", "reasoning"):
        text = "reasoning is read from `reasoning_content`; rename the key with `map` of the source"
        own.unsupported(f"{settings.prefix}field_thinking", thinking, text)
    _trained_roles(own, settings, chat)
    for name, part in (("field_tools", "tools"), ("field_chosen", "chosen"), ("field_rejected", "rejected")):
        if (value := settings.take(name)) not in (None, part):
            columns[part] = value
            own.same(settings.prefix + name, value, "data.sources.columns")
    for name in ("chat_template", "chat_template_jinja"):
        if value := settings.take(name):
            chat[name] = value
    if isinstance(kind, Mapping):
        _own_type(own, kind, key, rl, source, columns)
    elif rl or str(kind).startswith("bradley_terry"):
        _completions(own, str(kind or ""), key, rl, source, columns, messages, chat)
    else:
        _sft_type(own, settings, kind, key, source, columns, messages, chat)


def _trained_roles(own: Translation, settings: Settings, chat: dict[str, Any]) -> None:
    roles = settings.take("roles_to_train")
    key = f"{settings.prefix}roles_to_train"
    names = None if roles is None else set(names_in(roles))
    if names is not None and names <= USUAL_ROLES["assistant"] and names:
        own.same(key, roles, "data.train_on")
    elif names is not None:
        chat["train_on"] = "all" if names & USUAL_ROLES["user"] else "assistant"
        text = "the turns of the assistant are trained on" if chat["train_on"] == "assistant" else "all tokens are"
        own.different(key, roles, f"{text}; a message with `train: false` is not", "data.train_on")
    for name in ("train_on_eos", "train_on_eot"):
        value = settings.take(name)
        if value == "turn":
            own.same(settings.prefix + name, value)
        elif value:
            text = "the token that ends a turn is trained where the turn is, and nowhere else"
            own.different(settings.prefix + name, value, text)


def _sft_type(
    own: Translation,
    settings: Settings,
    kind: Any,
    key: str,
    source: dict[str, Any],
    columns: dict[str, str],
    messages: Any,
    chat: dict[str, Any],
) -> None:
    name = str(kind or "").partition(":")[0].partition(".")[0]
    if name == "completion":
        source["format"] = "text"
        text = "a text is only split if it is longer than a sequence; axolotl cuts off what is beyond 64 of them"
        own.different(key, kind, text, "data.sources.format")
    elif name in ("chat_template", "sharegpt", "messages"):
        source["format"] = "messages"
        usual = ("messages", "conversations", "conversation", "dialogue")
        if messages and messages not in usual:
            columns["messages"] = messages
        own.same(key, kind, "data.sources.format")
        if messages:
            own.same(f"{settings.prefix}field_messages", messages, "data.sources.columns" if columns else "")
        if name == "sharegpt":
            chat["chat_template"] = {None: "tokenizer_default"}.get(talk := settings.take("conversation"), talk)
    elif name in INSTRUCTION_TYPES:
        source["format"] = "instruction"
        columns.update(INSTRUCTION_TYPES[name])
        chat.setdefault("chat_template", "alpaca")
        text = (
            "rows are conversations of one question, which data.chat_template writes in Alpaca's form; an `input` is "
            "part of the question, without a heading of its own"
        )
        own.different(key, kind, text, "data.sources.format")
    elif not kind:
        own.missing(key, "the form of the rows is recognised by their columns; set `format` of the source if it is not")
    else:
        text = "rows of this form are not read; turn them into messages with `map` of the source"
        own.unsupported(key, kind, f"{text}, and set its `format`")


def _own_type(
    own: Translation, kind: Values, key: str, rl: Any, source: dict[str, Any], columns: dict[str, str]
) -> None:
    """Translates a type that the file describes: columns, and texts in which they are written."""
    parts = {"field_system": "system"}
    if rl == "kto":
        source["format"] = "unpaired_preference"
        parts |= {"field_prompt": "prompt", "field_completion": "completion", "field_label": "label"}
    elif rl:
        source["format"] = "preference"
        parts |= {"field_prompt": "prompt", "field_chosen": "chosen", "field_rejected": "rejected"}
    else:
        source["format"] = "instruction"
        parts |= {"field_instruction": "instruction", "field_input": "input", "field_output": "output"}
    for name, value in kind.items():
        if name in parts:
            if value:
                columns[parts[name]] = value
                own.same(f"{key}.{name}", value, "data.sources.columns")
        elif name == "system_prompt":
            if value:
                source["system"] = value
                own.same(f"{key}.{name}", value, "data.sources.system")
        elif value:
            text = "the template writes the texts around a row; set data.chat_template to one that writes these"
            own.different(f"{key}.{name}", value, text, "data.chat_template")


def _completions(
    own: Translation,
    kind: str,
    key: str,
    rl: Any,
    source: dict[str, Any],
    columns: dict[str, str],
    messages: Any,
    chat: dict[str, Any],
) -> None:
    """Translates a type of preferences, such as `chatml.intel`."""
    source["format"] = "unpaired_preference" if rl == "kto" else "preference"
    family, _, form = kind.removeprefix("bradley_terry.").partition(".")
    has = ("prompt", "completion", "label") if rl == "kto" else ("prompt", "chosen", "rejected")
    columns.update({part: name for part, name in COMPLETION_COLUMNS.get(form, {}).items() if part in has})
    if family == "chat_template" and not form.startswith("argilla") and not kind.startswith("bradley_terry"):
        columns["prompt"] = messages or "messages"
    if family in ("chatml", "llama3"):
        chat.setdefault("chat_template", family)
    if form in ("nectar", "passthrough") or family not in ("", "chat_template", "chatml", "llama3", "zephyr"):
        text = "rows of this form are not read; give `prompt` and completions, or use `map` of the source"
        own.unsupported(key, kind, text)
    else:
        own.same(key, kind, "data.sources.format")


def _template(result: Translation, settings: Settings, chat: dict[str, Any]) -> None:
    name = settings.take("chat_template") or chat.get("chat_template")
    text = settings.take("chat_template_jinja") or chat.get("chat_template_jinja")
    train = chat.get("train_on")
    if train == "all":
        result.set("data.train_on", "all", "roles_to_train")
    if text:
        result.set("data.chat_template", text, "chat_template_jinja")
        result.same("chat_template_jinja", text, "data.chat_template")
        if name:
            result.same("chat_template", name, text="chat_template_jinja comes first")
    elif name in CHAT_TEMPLATES:
        result.set("data.chat_template", CHAT_TEMPLATES[name], f"chat_template: {name}")
        result.same("chat_template", name, "data.chat_template", "a text that writes the same turns")
    elif str(name).startswith("tokenizer_default_fallback_"):
        other = str(name).removeprefix("tokenizer_default_fallback_")
        shown = other if other in CHAT_TEMPLATES else "one"
        result.same(
            "chat_template", name, text=f"the tokenizer's own; if it has none, set data.chat_template to {shown}"
        )
    elif name in ("tokenizer_default", "jinja"):
        result.same("chat_template", name, text="the tokenizer's own")
    elif name:
        what = "the tokenizer's own template is used, which may write other texts than axolotl's of this name"
        result.different("chat_template", name, f"{what}; a base model's tokenizer may have none: set one then", "")
