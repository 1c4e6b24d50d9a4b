"""Finds the conversations in the rows of a source and converts them to one validated form."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain, takewhile
from typing import Any, Literal

from llmtrain.errors import DataError, Problem, did_you_mean, format_value

Format = Literal["messages", "prompt_completion", "instruction", "preference", "unpaired_preference"]
Message = dict[str, Any]
"""A message in the form that chat templates read. It has `role` and `content`, and optionally `reasoning_content`,
`tool_calls`, `tool_call_id` and `name`. The arguments of a tool call are an object."""

ROLES = {
    "system": ("system", "developer"),
    "user": ("user", "human"),
    "assistant": ("assistant", "gpt", "model", "chatgpt", "bot"),
    "tool": ("tool", "function", "observation", "function_response", "tool_response"),
}
_ROLE = {name: role for role, names in ROLES.items() for name in names}
FUNCTION_CALL = ("function_call", "tool_call")
"""ShareGPT's roles for an assistant turn that is a tool call."""
_EXCHANGE = ("user", "assistant")
_WITH_IMAGES = ("system", "user", "tool")
"""Roles whose messages may have images."""
REASONING = ("reasoning_content", "thinking", "reasoning")
TRAINED = ("train", "weight", "loss", "trainable", "loss_mask", "loss_weight")
"""Keys of a message whose value says whether it is trained on: 0 or 1, false or true."""
KEYS = frozenset(
    ("role", "from", "content", "value", "tool_calls", "function_call", "name", "tool_call_id", *REASONING, *TRAINED)
)
"""The keys of a message that are read."""
IMAGE_KEYS = ("image", "path", "url", "bytes", "base64", "image_url")
"""Keys of a part of a content that hold an image. Without any, the part stands for the next one of the column of
images."""
PART_KEYS = frozenset(("type", "text", *IMAGE_KEYS))
IMAGE_PARTS = ("image", "image_url", "input_image")
IMAGE = "\ufdd0"
"""Stands for an image in the content of a message: a character that Unicode leaves to programs, which no text may
contain."""
TEXT_PARTS = (None, "text", "input_text", "output_text")
"""Types of the parts of a content that are read."""
_MASK = re.compile("(?<![a-z])(mask|loss|train|weight|ignore)", re.IGNORECASE)
"""Names of keys and columns that may say what is trained on."""
_SPEAKERS = frozenset(("role", "from", "speaker", "author", "sender"))
"""Names of keys and columns that may say who speaks."""

MAX_MESSAGES = 1000
"""Largest number of messages of a conversation: the template renders all earlier ones for each turn, which takes 20 s
for this number."""
MAX_NESTED = 100
"""Maximum nesting depth of a call's arguments, and of the list of tools."""
_CONTAINERS = (Mapping, list, tuple)

_PROMPT_COMPLETION: dict[str, tuple[str, ...]] = {
    "prompt": ("prompt", "question", "query"),
    "completion": ("completion", "response", "answer"),
}
_CONTEXT: dict[str, tuple[str, ...]] = {"system": ("system", "system_prompt"), "tools": ("tools",)}
NAMES: dict[Format, dict[str, tuple[str, ...]]] = {
    "messages": {"messages": ("messages", "conversations", "conversation", "dialogue")},
    "prompt_completion": _PROMPT_COMPLETION,
    "instruction": {"instruction": ("instruction",), "output": ("output", "response", "completion")},
    "preference": {"chosen": ("chosen",), "rejected": ("rejected",)},
    "unpaired_preference": {**_PROMPT_COMPLETION, "label": ("label", "desirable")},
}
"""The parts that each format requires → their usual column names, in order of preference."""
_IMAGES: dict[str, tuple[str, ...]] = {"images": ("images",)}
OPTIONAL: dict[Format, dict[str, tuple[str, ...]]] = {
    "messages": {**_CONTEXT, "tools": ("tools", "functions"), **_IMAGES},
    "prompt_completion": {"history": ("history",), **_CONTEXT, **_IMAGES},
    "instruction": {"input": ("input", "context"), "history": ("history",), "system": _CONTEXT["system"]},
    "preference": {"prompt": _PROMPT_COMPLETION["prompt"], **_CONTEXT},
    "unpaired_preference": _CONTEXT,
}
FORMATS_TO_TRY: dict[Format | None, tuple[Format, ...]] = {
    None: ("messages", "prompt_completion", "instruction"),
    "unpaired_preference": ("unpaired_preference", "preference"),
}
"""Format in the recipe → formats to try, in order, if there are several. A preference pair can be read as two labelled
completions."""
_LABELS = NAMES["unpaired_preference"]["label"]
_COMPARED = ("chosen", "rejected")
_TURN_NAMES = {name for parts in (*NAMES.values(), *OPTIONAL.values()) for names in parts.values() for name in names}
_TURN_NAMES = _TURN_NAMES - {*_LABELS, *_COMPARED} | {*_EXCHANGE, *REASONING, "human", "gpt", "turns", "chat", "dialog"}
"""Names of keys and columns that may hold a part of a conversation."""


class RowError(Exception):
    """Describes a fault of one row. The caller adds the row's position."""


@dataclass(frozen=True)
class Conversation:
    """Messages in order, and which of them may be trained on."""

    messages: tuple[Message, ...]
    trained: tuple[bool, ...]
    """For each message, False if it is marked as not to be trained on (`TRAINED`)."""
    tools: tuple[dict[str, Any], ...] = ()
    """JSON schemas of the functions that may be called."""
    images: tuple[Any, ...] = ()
    """The images that `IMAGE` stands for in the contents, as the row gives them."""

    def text(self) -> str:
        """Returns text to train a tokenizer on: the texts of the messages, and the calls and tools as JSON."""
        texts = [json.dumps(tool) for tool in self.tools]
        for message in self.messages:
            texts += [message.get("reasoning_content", ""), message["content"]]
            texts += [json.dumps(call["function"], ensure_ascii=False) for call in message.get("tool_calls", ())]
        return "\n".join(filter(None, texts))


@dataclass(frozen=True)
class Layout:
    """The columns in which the rows of a source hold their conversations."""

    format: Format
    columns: Mapping[str, str]
    """Part → column, for the parts that the rows have."""
    system: str | None = None
    """System text for conversations that have none."""
    ignored: frozenset[str] = frozenset()
    """Names of columns, and of keys of messages, that are not read on purpose."""
    loss_columns: tuple[str, ...] = ()
    """Columns of numbers, which a user's own loss reads."""

    def __str__(self) -> str:
        return ", ".join(f"{part} from '{column}'" for part, column in self.columns.items())

    def read(self, row: Mapping[str, Any]) -> tuple[Conversation, ...]:
        """Returns the conversation of a row, or one per completion (chosen before rejected). Raises RowError."""
        if self.format in _COMPLETIONS:
            return self.read_completions(row).conversations
        row = self._considered(row)
        parts = self._parts(row)
        conversations = (self._conversation(_TURNS[self.format](parts), parts),)
        self._require_read(row, conversations)
        return conversations

    def read_completions(self, row: Mapping[str, Any]) -> PromptWithCompletions:
        """Returns the prompt of a row with its completions. Raises RowError."""
        row = self._considered(row)
        parts = self._parts(row)
        prompt, completions = _COMPLETIONS[self.format](parts)

        def conversation(turns: list[Any]) -> Conversation:
            whole = self._conversation([*prompt, *turns], parts)
            return replace(
                whole, trained=(*[False] * (len(whole.messages) - len(turns)), *whole.trained[-len(turns) :])
            )

        turns, labels = zip(*completions, strict=True)
        conversations = tuple(map(conversation, turns))
        self._require_read(row, conversations)
        return PromptWithCompletions(prompt, turns, labels, conversations, conversation)

    def unread(self, row: Mapping[str, Any]) -> set[str]:
        """Returns the columns of a row, and the keys of its messages, that hold values and are not read."""
        row = self._considered(row)
        names = {f"column '{name}'" for name in self._unread_columns(row)}
        for turn in self._turns(row):
            names |= {f"key '{key}'" for key in turn.keys() - KEYS if turn[key] is not None}
            names |= {f"key 'content.{key}'" for part in _parts_of(turn) for key in part.keys() - PART_KEYS}
        return names

    def _considered(self, row: Mapping[str, Any]) -> Mapping[str, Any]:
        """Returns a row without the columns, and without the keys of its messages, that are ignored.

        Messages that are JSON are parsed. Raises RowError.
        """
        column = self.columns.get("messages")
        if column and isinstance(row.get(column), str):
            row = {**row, column: _json(row[column], "the messages")}
        if not self.ignored:
            return row

        def without(value: Any) -> Any:
            if isinstance(value, (list, tuple)):
                return [without(item) for item in value]
            return {key: value[key] for key in value if key not in self.ignored} if _role(value) else value

        return {name: without(value) for name, value in row.items() if name not in self.ignored}

    def _unread_columns(self, row: Mapping[str, Any]) -> dict[str, Any]:
        read = (*self.columns.values(), *self.loss_columns)
        return {name: value for name, value in row.items() if name not in read and value is not None}

    def _turns(self, row: Mapping[str, Any]) -> list[Mapping[str, Any]]:
        """Returns the messages in the columns that are read, without those that only have a role and a text."""
        lists = [row[name] for name in self.columns.values() if isinstance(row.get(name), (list, tuple))]
        return [
            turn
            for turn in chain.from_iterable(lists)
            if isinstance(turn, Mapping)
            and not (KEYS.issuperset(turn) and isinstance(_content(turn), str))
            and _role(turn)
        ]

    def _parts(self, row: Mapping[str, Any]) -> dict[str, Any]:
        for name, value in self._unread_columns(row).items():
            if _may_mask(name, value):
                raise RowError(
                    f"nothing reads the column '{name}', which may say what is trained on; "
                    f"a message is left out of training by its key `train: false`, {_or_ignore(name)}"
                )
            if self.format == "prompt_completion" and name in _LABELS and truth_value(value) is not None:
                raise RowError(
                    f"nothing reads the column '{name}', which may say whether the completion is desirable; "
                    f"set objective.name=kto, {_or_ignore(name)}"
                )
        return {part: row.get(column) for part, column in self.columns.items()}

    def _require_read(self, row: Mapping[str, Any], conversations: tuple[Conversation, ...]) -> None:
        """Raises RowError if an unread column, or key of a message, may say who speaks, or what."""
        columns = self._unread_columns(row)
        suspects: list[tuple[str, str, Any, str | None]] = [
            ("column", name, value, None) for name, value in columns.items() if _may_be_turn(name, value)
        ]
        for turn in self._turns(row):
            suspects += [
                ("key", name, turn[name], _role(turn)) for name in turn.keys() - KEYS if _may_be_turn(name, turn[name])
            ]
        if not suspects:
            return
        known_text = "\n".join(conversation.text() for conversation in conversations)
        for what, name, value, role in suspects:
            if name.lower() in _SPEAKERS:
                if _ROLE[value] != role:
                    raise RowError(f"nothing reads the {what} '{name}', which may say who speaks; {_or_ignore(name)}")
            elif not all(text.strip() in known_text for text in _texts(value)):
                raise RowError(
                    f"nothing reads the {what} '{name}', which may be a part of the conversation: "
                    f"{format_value(value)}; name its part in `columns` of the source, {_or_ignore(name)}"
                )

    def _conversation(self, turns: list[Any], parts: Mapping[str, Any]) -> Conversation:
        if (system := parts.get("system") or self.system) and not any(_role(turn) == "system" for turn in turns):
            turns = [{"role": "system", "content": system}, *turns]
        return conversation(turns, parts.get("tools"), parts.get("images"))


@dataclass(frozen=True)
class PromptWithCompletions:
    """A prompt with completions, each labelled as desirable or undesirable."""

    prompt: list[Any]
    completions: tuple[list[Any], ...]
    desirable: tuple[bool, ...]
    conversations: tuple[Conversation, ...]
    """One conversation per completion: the prompt followed by the completion."""
    conversation: Callable[[list[Any]], Conversation]
    """Returns the conversation of the prompt and any completion; only the completion is trained on."""


@dataclass(frozen=True)
class ChatSource:
    """The settings of a recipe for a source of conversations."""

    format: Format | None = None
    """None: detect the format from the columns."""
    columns: tuple[tuple[str, str], ...] = ()
    """Pairs of a part and its column, for columns without a usual name."""
    system: str | None = None
    ignored: tuple[str, ...] = ()
    loss_columns: tuple[str, ...] = ()
    """As in `Layout`."""

    def layout(self, columns: Iterable[str], field: str) -> Layout:
        """Returns the layout that `find_layout` finds for these columns."""
        layout = find_layout(
            (name for name in columns if name not in self.ignored),
            field,
            format=self.format,
            named=dict(self.columns),
            system=self.system,
        )
        return replace(layout, ignored=frozenset(self.ignored), loss_columns=self.loss_columns)


def find_layout(
    columns: Iterable[str], field: str, *, format: Format | None, named: Mapping[str, str], system: str | None = None
) -> Layout:
    """Finds the columns that hold conversations; pairs and labelled completions only if `format` asks for it.

    field: the recipe field of the source. named: part → column, for columns without a usual name.
    Raises DataError if no format matches, or if `named` has an unknown column or part.
    """
    available = list(columns)
    for part, column in named.items():
        if column not in available:
            message = f"has no column '{column}'{did_you_mean(column, available)} (columns: {', '.join(available)})"
            raise DataError(Problem("data.column", f"{field}.columns.{part}", message))
    formats = FORMATS_TO_TRY.get(format, (format,) if format else ())
    for name in formats:
        columns_of = {
            part: _column(part, names, named, available) for part, names in (NAMES[name] | OPTIONAL[name]).items()
        }
        if all(columns_of[part] for part in NAMES[name]):
            if unused := set(named) - set(columns_of):
                message = f"'{name}' has no part {', '.join(sorted(unused))}; its parts are {', '.join(columns_of)}"
                raise DataError(Problem("data.column", f"{field}.columns", message))
            return Layout(name, {part: column for part, column in columns_of.items() if column}, system)
    parts = "; ".join(f"{name}: {', '.join(NAMES[name])}" for name in formats)
    message = f"no conversations were found in the columns {', '.join(available) or '(none)'}"
    fix = f'name the columns: columns={{"PART": "COLUMN"}} ({parts})'
    raise DataError(Problem("data.column", f"{field}.columns", message, fix))


def conversation(turns: Any, tools: Any = None, images: Any = None) -> Conversation:
    """Validates messages in OpenAI's or ShareGPT's form and returns the conversation. Raises RowError.

    images: those that parts of contents stand for without having one.
    """
    if not isinstance(turns, (list, tuple)) or not turns:
        raise RowError(f"messages are {format_value(turns)}, not a list of messages")
    if len(turns) > MAX_MESSAGES:
        raise RowError(f"has {len(turns):,} messages, of at most {MAX_MESSAGES:,}")
    messages = [_message(number, turn) for number, turn in enumerate(turns, start=1)]
    trained = [_is_trained(number, turn) for number, turn in enumerate(turns, start=1)]
    roles = [message["role"] for message in messages]
    if "system" in roles[1:]:
        raise RowError(f"message {roles.index('system', 1) + 1} is a system text that is not the first message")
    if "assistant" not in roles:
        raise RowError("the assistant says nothing")
    if "tool" in roles:
        for number, (role, previous) in enumerate(zip(roles, [None, *messages], strict=False), start=1):
            if role == "tool" and not (previous and (previous["role"] == "tool" or "tool_calls" in previous)):
                raise RowError(f"message {number} is the result of a tool that was not called")
    return Conversation(tuple(messages), tuple(trained), tuple(_tools(tools)), _images(turns, images))


def _column(part: str, usual: tuple[str, ...], named: Mapping[str, str], available: list[str]) -> str | None:
    return named.get(part) or next((name for name in usual if name in available), None)


def _message(number: int, turn: Any) -> Message:
    if not isinstance(turn, Mapping):
        raise RowError(f"message {number} is {format_value(turn)}, not an object")
    role = _role(turn)
    content = _text(number, _content(turn), role in _WITH_IMAGES)
    message: Message = {"role": role, "content": content}
    if turn.get("role", turn.get("from")) in FUNCTION_CALL:
        message |= {"content": "", "tool_calls": [_call(number, _json(content, f"the call of message {number}"))]}
    elif role is None:
        raise RowError(f"message {number} has the unknown role {format_value(turn.get('role', turn.get('from')))}")
    elif calls := turn.get("tool_calls") or [turn[name] for name in ("function_call",) if turn.get(name)]:
        if role != "assistant" or not isinstance(calls, (list, tuple)):
            raise RowError(f"message {number} has tool_calls that are not a list of the assistant's calls")
        message["tool_calls"] = [_call(number, call) for call in calls]
    reasoning = next((turn[name] for name in REASONING if turn.get(name)), None)
    if reasoning is not None:
        message["reasoning_content"] = _text(number, reasoning)
    message |= {name: turn[name] for name in ("name", "tool_call_id") if isinstance(turn.get(name), str)}
    if not message["content"].strip() and "tool_calls" not in message and role != "tool":
        raise RowError(f"message {number} ({role}) is empty")
    return message


def _images(turns: Sequence[Any], column: Any) -> tuple[Any, ...]:
    """Returns the images of messages in order. column: the row's column of images. Raises RowError."""
    rest = [] if column is None else list(column) if isinstance(column, (list, tuple)) else [column]
    found, given = [], iter(rest)
    parts = [part for turn in turns for part in _parts_of(turn) if _is_image(part)]
    for part in parts:
        values = {key: part[key] for key in IMAGE_KEYS if part.get(key) is not None}
        image = values.pop("image_url", values)
        found.append(image or next(given, None))
    placeholders = sum(not any(part.get(key) is not None for key in IMAGE_KEYS) for part in parts)
    if placeholders != len(rest):
        raise RowError(f"{placeholders} parts stand for images of the column of images, which has {len(rest)}")
    return tuple(found)


def _is_image(part: Any) -> bool:
    return isinstance(part, Mapping) and part.get("type") in IMAGE_PARTS and not part.get("text")


def _content(turn: Any) -> Any:
    return turn.get("content", turn.get("value")) if isinstance(turn, Mapping) else turn


def _role(turn: Any) -> str | None:
    name = turn.get("role", turn.get("from")) if isinstance(turn, Mapping) else None
    return "assistant" if name in FUNCTION_CALL else _ROLE.get(name) if isinstance(name, str) else None


def _text(number: int, content: Any, with_images: bool = False) -> str:
    """Returns the text of a message's content, which may be a list of parts, with `IMAGE` for each image.

    with_images: whether there may be images. Raises RowError.
    """
    if content is None:
        return ""
    if isinstance(content, (list, tuple)):
        if not all(_is_text(part) or (with_images and _is_image(part)) for part in content):
            if any(map(_is_image, content)):
                raise RowError(f"message {number} has an image, but only messages of {' and '.join(_WITH_IMAGES)} may")
            raise RowError(f"message {number} has parts that are not text: {format_value(content)}")
        for name, value in chain.from_iterable(part.items() for part in content):
            if name not in PART_KEYS and _may_mask(name, value):
                raise RowError(f"a part of message {number} has the unknown key '{name}', which may be a mask")
        texts = [None if _is_image(part) else _plain(number, part["text"]) for part in content]
        return "".join(IMAGE if text is None else text for text in texts)
    if not isinstance(content, str):
        raise RowError(f"the content of message {number} is {format_value(content)}, not text")
    return _plain(number, content)


def _plain(number: int, text: str) -> str:
    if IMAGE in text:
        raise RowError(f"message {number} contains the character U+{ord(IMAGE):X}, which is reserved")
    return text


def _is_text(part: Any) -> bool:
    return isinstance(part, Mapping) and isinstance(part.get("text"), str) and part.get("type") in TEXT_PARTS


def _call(number: int, call: Any) -> dict[str, Any]:
    function = call.get("function", call) if isinstance(call, Mapping) else None
    name = function.get("name") if isinstance(function, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(name, str) or not name:
        raise RowError(f"a tool call of message {number} names no function: {format_value(call)}")
    arguments = function.get("arguments", function.get("parameters"))
    if isinstance(arguments, str):
        arguments = _json(arguments, f"the arguments of message {number} for {name}")
    if arguments is not None and not isinstance(arguments, Mapping):
        raise RowError(f"the arguments of message {number} for {name} are {format_value(arguments)}, not an object")
    values = dict(arguments or {})
    _check_nesting(values, f"the arguments of message {number} for {name}")
    call_id = {"id": call["id"]} if isinstance(call.get("id"), str) else {}
    return {"type": "function", **call_id, "function": {"name": name, "arguments": values}}


def _is_trained(number: int, turn: Mapping[str, Any]) -> bool:
    given = {name: turn[name] for name in turn if turn[name] is not None}
    for name, value in given.items():
        if name in TRAINED and value not in (0, 1):
            raise RowError(f"message {number} has {name} {format_value(value)}; only 0 and 1 (false, true) are known")
        if name not in KEYS and _may_mask(name, value):
            known = ", ".join(TRAINED)
            raise RowError(f"message {number} has the unknown key '{name}', which may be a mask (known: {known})")
    return all(given.get(name, True) for name in TRAINED)


def _may_mask(name: str, value: Any) -> bool:
    """Whether a column or a key that nothing reads may say what is trained on."""
    return _MASK.search(name) is not None and (isinstance(value, (list, tuple)) or truth_value(value) is not None)


def truth_value(value: Any) -> bool | None:
    """Returns a truth value, which is a text in a cell of a CSV file; None for anything else."""
    values = {"true": True, "1": True, "false": False, "0": False}
    return values.get(value.lower()) if isinstance(value, str) else bool(value) if value in (0, 1) else None


def _or_ignore(name: str) -> str:
    return f"or list '{name}' in `ignore` of the source"


def _may_be_turn(name: str, value: Any) -> bool:
    """Whether a column or a key that nothing reads may say who speaks, or hold a text of the conversation."""
    if name.lower() in _SPEAKERS:
        return isinstance(value, str) and value in _ROLE
    is_list = isinstance(value, (list, tuple)) and bool(value) and all(map(_role, value))
    return is_list or (name.lower() in _TURN_NAMES and any(_texts(value)))


def _texts(value: Any) -> Iterator[str]:
    """Yields the texts of messages, or of another value."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        yield from _texts(_content(value) if _role(value) else list(value.values()))
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _texts(item)


def _parts_of(turn: Any) -> list[Mapping[str, Any]]:
    content = _content(turn)
    return [part for part in content if isinstance(part, Mapping)] if isinstance(content, (list, tuple)) else []


def _tools(tools: Any) -> list[dict[str, Any]]:
    if isinstance(tools, str):
        tools = _json(tools, "the list of tools") if tools.strip() else None
    if tools is None:
        return []
    if not isinstance(tools, (list, tuple)) or not all(isinstance(tool, Mapping) for tool in tools):
        raise RowError(f"tools are {format_value(tools)}, not a list of JSON schemas")
    _check_nesting(tools, "tools")
    return [dict(tool) for tool in tools]


def _check_nesting(value: Any, what: str) -> None:
    """Raises RowError for JSON data that is nested too deeply for a template, which writes it recursively."""
    level = [value]
    for _ in range(MAX_NESTED):
        nested = (item for item in level if isinstance(item, _CONTAINERS))
        inner = [item.values() if isinstance(item, Mapping) else item for item in nested]
        if not inner:
            return
        level = list(chain.from_iterable(inner))
    raise RowError(f"{what} are nested more than {MAX_NESTED} levels deep")


def _json(text: str, what: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise RowError(f"{what} are not JSON ({error}): {format_value(text)}") from None


def _from_messages(parts: dict[str, Any]) -> list[Any]:
    turns = parts["messages"]
    if not isinstance(turns, (list, tuple)):
        raise RowError(f"messages are {format_value(turns)}, not a list of messages")
    return list(turns)


def _from_prompt(parts: dict[str, Any]) -> list[Any]:
    return [*_history(parts), *_turns(parts["prompt"], "user"), *_turns(parts["completion"], "assistant")]


def _history(parts: Mapping[str, Any]) -> list[Any]:
    """Returns the earlier turns of a row, which are pairs of a question and its answer. Raises RowError."""
    pairs, lists = parts.get("history") or [], (list, tuple)
    if not isinstance(pairs, lists) or not all(isinstance(pair, lists) and len(pair) == 2 for pair in pairs):
        raise RowError(f"the history is {format_value(pairs)}, not a list of pairs of a question and its answer")
    return [{"role": role, "content": text} for pair in pairs for role, text in zip(_EXCHANGE, pair, strict=True)]


def _turns(value: Any, role: str) -> list[Any]:
    """Returns the turns of a part: those of a list, one message, or the text of a role."""
    if isinstance(value, (list, tuple)):
        return list(value)
    return [value if isinstance(value, Mapping) and _role(value) else {"role": role, "content": value}]


Completions = list[tuple[list[Any], bool]]
"""The turns of each completion, and whether it is desirable."""


def _labelled(parts: dict[str, Any]) -> tuple[list[Any], Completions]:
    """Returns the turns of the prompt, and the completion with its label. Raises RowError."""
    prompt = [] if parts["prompt"] is None else _turns(parts["prompt"], "user")
    turns, label = _turns(parts["completion"], "assistant"), parts["label"]
    if not prompt:
        raise RowError("has no prompt")
    if not turns or _role(turns[0]) != "assistant":
        raise RowError("the completion does not continue the prompt with a turn of the assistant")
    if (desirable := truth_value(label)) is None:
        raise RowError(f"the label is {format_value(label)}; it must be true (desirable) or false")
    return prompt, [(turns, desirable)]


def _pair(parts: dict[str, Any]) -> tuple[list[Any], Completions]:
    """Returns the turns of the prompt, then the chosen and the rejected completion. Raises RowError."""
    chosen, rejected = (_turns(parts[part], "assistant") for part in ("chosen", "rejected"))
    prompt = [] if parts.get("prompt") is None else _turns(parts["prompt"], "user")
    if chosen and rejected and _role(chosen[0]) != "assistant":  # both begin with the prompt
        size = sum(1 for _ in takewhile(lambda two: two[0] == two[1], zip(chosen, rejected, strict=False)))
        shared, chosen, rejected = chosen[:size], chosen[size:], rejected[size:]
        if prompt and [_content(turn) for turn in prompt] != [_content(turn) for turn in shared[-len(prompt) :]]:
            raise RowError("the prompt differs from the messages with which chosen and rejected both begin")
        prompt = shared
    if not prompt:
        raise RowError("has no prompt: neither a column, nor messages with which chosen and rejected both begin")
    if chosen == rejected:
        raise RowError("chosen and rejected are the same")
    for name, turns in (("chosen", chosen), ("rejected", rejected)):
        if not turns or _role(turns[0]) != "assistant":
            raise RowError(f"{name} does not continue the prompt with a turn of the assistant")
    return prompt, [(chosen, True), (rejected, False)]


def _from_instruction(parts: dict[str, Any]) -> list[Any]:
    texts = [text for text in (parts["instruction"], parts.get("input")) if text is not None]
    if wrong := [text for text in texts if not isinstance(text, str)]:
        raise RowError(f"the instruction is {format_value(wrong[0])}, not text")
    question = "\n\n".join(text for text in texts if text)
    return [*_history(parts), {"role": "user", "content": question}, {"role": "assistant", "content": parts["output"]}]


_TURNS: dict[Format, Callable[[dict[str, Any]], list[Any]]] = {
    "messages": _from_messages,
    "prompt_completion": _from_prompt,
    "instruction": _from_instruction,
}
_COMPLETIONS: dict[Format, Callable[[dict[str, Any]], tuple[list[Any], Completions]]] = {
    "preference": _pair,
    "unpaired_preference": _labelled,
}
