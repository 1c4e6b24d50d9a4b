"""Marks in rendered text: which text came from which message, and which special tokens the template wrote.

A template is a program, so a search cannot tell where its own text ends and a message's text begins. Messages are
therefore rendered with marks: characters of Unicode's private planes. Marks enclose each span of a message's text.
A break mark splits each special token text that a message contains. Removing the marks gives their positions, and must
give the same text as rendering without marks. This is checked for each conversation.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from llmtrain.data.chat.conversation import Message, RowError

FIRST_SPECIAL = 0xF0000
"""First of the characters that stand for special tokens written by the template, one per token."""
FIRST_ADDED = 0xF8000
"""First of the characters that stand for added tokens that are not special, such as `<tool_call>`."""
BREAK = "\U000fffff"
"""Inserted into a message's text where it contains the text of a special token, so that it is not read as the token."""
FIRST_MARK = 0x100000
"""The text of message i is enclosed by the characters with code FIRST_MARK + 2 · i and FIRST_MARK + 2 · i + 1."""
RESERVED = re.compile(r"[\ud800-\udfff\U000f0000-\U0010ffff]")
"""Characters that no message may contain: halves of surrogate pairs, and the characters with a meaning here."""
SPECIAL = re.compile("[\U000f0000-\U000f7fff]")
CONTROL = re.compile("[\U000f0000-\U000ffffe]")
_NOT_WRITTEN = re.compile(r"[\ud800-\udfff\U000f0000-\U000ffffe]")
"""The reserved characters that no template may write. The other reserved characters are marks within messages."""
_MARK = re.compile("([\U000fffff-\U0010ffff])")
_TAG = re.compile(r"(<[^<>\s]{1,40}>|\[/?[A-Z_]{2,20}\])")
"""Tags in messages, mostly of reasoning. Templates search for them and strip the text next to them, so marks are kept
outside of the tags."""
_NOT_MARKED = ("role", "type", "id", "tool_call_id")
"""Fields without marks, because templates compare them or count their characters."""


class ControlTokens:
    """The tokens that structure a conversation: special tokens, and added tokens that the template itself writes."""

    def __init__(self, special: Iterable[str], added: Iterable[str]) -> None:
        first = {text: chr(FIRST_SPECIAL + number) for number, text in enumerate(special) if len(text) > 1}
        more = {text: chr(FIRST_ADDED + number) for number, text in enumerate(added) if len(text) > 1}
        self.aliases = more | first
        """Text of each control token → the character that stands for it."""
        self._texts = {alias: text for text, alias in self.aliases.items()}
        self._all = _any_of(self.aliases)
        self._special = _any_of(first)

    def break_up(self, text: str, role: str | None) -> str:
        """Returns the text of a message with a `BREAK` in the text of each control token.

        An assistant may write an added token that is not special, such as `<think>`, so its messages keep these.
        """
        tokens = self._special if role == "assistant" else self._all
        return tokens.sub(lambda match: match[0][0] + BREAK + match[0][1:], text)

    def contains_token_text(self, text: str) -> bool:
        """Whether a text contains the text of a control token."""
        return self._all.search(text) is not None

    def alias(self, text: str) -> str:
        """Returns a text written by a template, with each control token replaced by its character.

        Raises RowError if the template wrote a reserved character.
        """
        if match := _NOT_WRITTEN.search(text):
            raise RowError(f"the template writes the character U+{ord(match[0]):X}, which is reserved")
        return self._all.sub(lambda match: self.aliases[match[0]], text)

    def plain(self, text: str) -> str:
        """Returns a text with each such character replaced by its control token's text."""
        return CONTROL.sub(lambda match: self._texts[match[0]], text)


@dataclass(frozen=True)
class TextSpan:
    """A contiguous part of a message's text in a rendering, by start and end position."""

    message: int
    start: int
    end: int


@dataclass(frozen=True)
class Rendered:
    """A rendered text, with a single character for each control token that the template wrote."""

    text: str
    spans: tuple[TextSpan, ...]

    @classmethod
    def of(cls, marked: str, controls: ControlTokens) -> Rendered:
        """Reads and removes the marks. Raises RowError if the template split or cut off a span."""
        parts = _MARK.split(controls.alias(marked))
        text, spans, opened = [parts[0]], [], None
        length = len(parts[0])
        for mark, part in zip(parts[1::2], parts[2::2], strict=True):
            if mark != BREAK:
                message, is_end = divmod(ord(mark) - FIRST_MARK, 2)
                if (opened is not None) != bool(is_end) or (opened and opened[0] != message):
                    raise RowError(f"the template splits the text of message {message + 1}")
                if opened:
                    spans.append(TextSpan(*opened, length))
                opened = None if is_end else (message, length)
            text.append(part)
            length += len(part)
        if opened:
            raise RowError(f"the template cuts off the text of message {opened[0] + 1}")
        return cls("".join(text), tuple(spans))

    @classmethod
    def filled(cls, gaps: tuple[tuple[int, str], ...], contents: Sequence[str]) -> Rendered:
        """Returns the rendering made of the gaps, with one content after each gap except the last."""
        parts, spans, length = [], [], 0
        for number, ((_, gap), content) in enumerate(zip(gaps, contents, strict=False)):
            start = length + len(gap)
            length = start + len(content)
            parts += [gap, content]
            spans.append(TextSpan(number, start, length))
        return cls("".join([*parts, gaps[-1][1]]), tuple(spans))

    @staticmethod
    def partial(marked: str, controls: ControlTokens) -> str:
        """Returns the text, without marks, of the beginning of a rendering."""
        return _MARK.sub("", controls.alias(marked))

    @cached_property
    def gaps(self) -> tuple[tuple[int, str], ...]:
        """The template's own text before the first span and after each span, each with the number of the message
        that precedes it (-1 for none)."""
        owners = [-1, *(span.message for span in self.spans)]
        starts = [0, *(span.end for span in self.spans)]
        ends = [*(span.start for span in self.spans), len(self.text)]
        return tuple((owner, self.text[start:end]) for owner, start, end in zip(owners, starts, ends, strict=True))

    def texts(self, message: int) -> list[str]:
        """Returns the text of each span of a message."""
        return [self.text[span.start : span.end] for span in self.spans if span.message == message]

    @cached_property
    def repeated(self) -> frozenset[int]:
        """The indices of the spans whose text is that of an earlier span of the same message."""
        seen: set[tuple[int, str]] = set()
        repeated = []
        for number, span in enumerate(self.spans):
            text = span.message, self.text[span.start : span.end]
            if text in seen:
                repeated.append(number)
            seen.add(text)
        return frozenset(repeated)


def reject_reserved(values: Any) -> None:
    """Raises RowError for a text with a reserved character."""
    if match := RESERVED.search(json.dumps(values, ensure_ascii=False, default=str)):
        raise RowError(f"contains the character U+{ord(match[0]):X}, which is reserved")


def marked(messages: Sequence[Message], controls: ControlTokens) -> list[Message]:
    """Returns messages with marks, in which the texts of control tokens are broken up."""
    return [_marked(message, number, controls) for number, message in enumerate(messages)]


def _marked(message: Message, number: int, controls: ControlTokens) -> Message:
    role = message["role"]

    def change(key: str, text: str) -> str:
        return _mark(key, text, number, role, controls)

    def rename(name: str) -> str:
        return controls.break_up(name, role)

    return {key: value if key == "role" else _map(value, change, rename, key) for key, value in message.items()}


def plain_contents(messages: Sequence[Message], controls: ControlTokens) -> list[str] | None:
    """Returns the contents of messages that consist of one plain text each; None if marks would split or change one."""
    texts = [message["content"] for message in messages]
    if not all(texts) or max(map(len, messages)) > 2 or [text.strip() for text in texts] != texts:
        return None
    together = "\n".join(texts)
    return None if controls.contains_token_text(together) or _TAG.search(together) else texts


def broken_up(values: Any, controls: ControlTokens) -> Any:
    """Returns JSON data, such as tool schemas, with the texts of control tokens broken up."""
    return _map(values, lambda _, text: controls.break_up(text, None), lambda name: controls.break_up(name, None))


def _mark(key: str, text: str, number: int, role: str, controls: ControlTokens) -> str:
    if key in _NOT_MARKED or (key == "name" and role == "tool"):
        return controls.break_up(text, None)
    text = controls.break_up(text, role)
    parts = _TAG.split(text)
    if not any(part.strip() for part in parts[::2]):  # nothing but tags
        return _around(text, number)
    parts[::2] = [_around(part, number) for part in parts[::2]]
    return "".join(parts)


def _around(text: str, number: int) -> str:
    """Returns a text with marks inside its leading and trailing white space, because templates strip white space."""
    core = text.strip()
    if not core:
        return text
    start = text.index(core)
    first = chr(FIRST_MARK + 2 * number)
    return f"{text[:start]}{first}{core}{chr(ord(first) + 1)}{text[start + len(core) :]}"


def _map(value: Any, change: Callable[[str, str], str], rename: Callable[[str], str], key: str = "") -> Any:
    """Returns JSON data with `change` applied to each text, given its key, and `rename` applied to each key."""
    if isinstance(value, str):
        return change(key, value)
    if isinstance(value, dict):
        return {rename(name): _map(item, change, rename, name) for name, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_map(item, change, rename, key) for item in value]
    return value


def _any_of(texts: Iterable[str]) -> re.Pattern[str]:
    longest_first = sorted(texts, key=len, reverse=True)
    return re.compile("|".join(map(re.escape, longest_first)) or "(?!)")


NO_CONTROL_TOKENS = ControlTokens((), ())
"""Breaks up nothing, so that the texts of special tokens in messages become the tokens."""
