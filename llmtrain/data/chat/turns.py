"""Finds where the assistant's turns begin and end in a rendered conversation.

A turn begins where the prompt for it ends. To find that place, the template renders the earlier messages with
`add_generation_prompt`; the text after the last of them must be the text that precedes the turn. A turn ends with the
end token that the template also writes if the conversation ends with that turn. Both are derived from renderings. A
conversation for which this fails is refused.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise, takewhile

from llmtrain.data.chat.conversation import Conversation, Message, RowError
from llmtrain.data.chat.marks import (
    CONTROL,
    NO_CONTROL_TOKENS,
    SPECIAL,
    ControlTokens,
    Rendered,
    broken_up,
    marked,
    reject_reserved,
)
from llmtrain.data.chat.template import ChatTemplate
from llmtrain.errors import format_value

PARTS = ("tool_calls", "content", "reasoning_content")
"""Parts of a message that some templates ignore."""

PROBE: tuple[Message, ...] = ({"role": "user", "content": "question"}, {"role": "assistant", "content": "answer"})
"""A conversation that shows how the template ends a turn."""
FIRST = "; it begins the conversation: give a system text (field `system` of the source), or leave it out"
"""Added to faults of a turn before which there is no message. Many templates have no prompt for such a turn."""


@dataclass(frozen=True)
class Turn:
    """A turn of the assistant. Its positions only depend on what the template writes around the texts of messages."""

    message: int
    start: tuple[int, int]
    """Number of a gap, and the offset within it; the same for `end`."""
    end: tuple[int, int]
    ended: bool
    """Whether it ends with an end token."""
    closing: str = ""
    """The character for the token before the result of a call; only set if no end token ends the turn."""


@dataclass(frozen=True)
class Renderer:
    """Renders conversations with marks."""

    template: ChatTemplate
    controls: ControlTokens
    parses: bool = False
    """Whether the text of a special token in a message becomes the token."""
    bos: str | None = None
    """The character for a token that begins texts and is not also the end token; None if there is none."""

    @cached_property
    def added_end(self) -> str:
        """The character for the token that is not special and ends a turn of the assistant; empty if none does.

        It is taken from a turn without reasoning and calls, so it is not a token of these, such as `</think>`.
        """
        try:
            after = self._render(PROBE, ()).gaps[-1][1]
        except RowError:
            return ""
        tokens = [] if SPECIAL.search(after) else CONTROL.findall(after)
        return tokens[-1] if tokens else ""

    @cached_property
    def end(self) -> re.Pattern[str]:
        """Matches the tokens that may end a turn: special tokens, and `added_end`."""
        return re.compile(f"{SPECIAL.pattern}|{self.added_end}") if self.added_end else SPECIAL

    @property
    def breaks(self) -> ControlTokens:
        """The control tokens whose texts are broken up in messages."""
        return NO_CONTROL_TOKENS if self.parses else self.controls

    def marked(self, conversation: Conversation) -> Conversation:
        """Returns a conversation with marks, in which the texts of control tokens are broken up."""
        messages, tools = marked(conversation.messages, self.breaks), broken_up(conversation.tools, self.breaks)
        return replace(conversation, messages=tuple(messages), tools=tuple(tools))

    def checked(self, conversation: Conversation, plain: str | RowError, marked: str | RowError) -> Rendered:
        """Returns the rendering of a conversation, given the texts rendered without and with marks.

        Raises RowError unless both texts are the same and contain every message.
        """
        if isinstance(plain, RowError):
            raise plain
        reject_reserved([conversation.messages, conversation.tools])
        if isinstance(marked, RowError):
            raise marked
        with_marks = Rendered.of(marked, self.controls)
        if self.controls.plain(with_marks.text) != plain:
            raise RowError("the template changes the text of messages, so it is not known who wrote what")
        written = {span.message for span in with_marks.spans}
        for number, message in enumerate(conversation.messages):
            if number not in written and (message["content"].strip() or "tool_calls" in message):
                raise RowError(f"the template leaves out message {number + 1} ({message['role']})")
        self._require_text(conversation.messages, with_marks)
        return with_marks

    def _require_text(self, messages: tuple[Message, ...], rendered: Rendered) -> None:
        """Raises RowError if the template cuts the text of the last turn: reasoning between tags, as DeepSeek's do."""
        if messages[-1]["role"] != "assistant":
            return
        given = Rendered.of(marked(messages[-1:], self.breaks)[0]["content"], self.controls).texts(0)
        if missing := Counter(given) - Counter(rendered.texts(len(messages) - 1)):
            text = format_value(self.controls.plain(next(iter(missing))))
            raise RowError(f"the template leaves out a part of message {len(messages)}: {text}")

    def turns(self, conversation: Conversation, rendered: Rendered) -> list[Turn]:
        """Returns the assistant's turns. Raises RowError if they cannot be determined."""
        self._require_parts(conversation, rendered)
        if conversation.messages[-1]["role"] == "assistant":
            last, written = len(conversation.messages) - 1, rendered.spans[-1].message
            if written != last:
                raise RowError(f"the template writes message {written + 1} again after the last turn of the assistant")
        if self.template.has_spans:
            turns = self._turns_of_generation_blocks(conversation, rendered)
        else:
            turns = [
                self._turn(conversation, rendered, number)
                for number, message in enumerate(conversation.messages)
                if message["role"] == "assistant"
            ]
        if turns and not turns[-1].ended and "tool_calls" in conversation.messages[-1]:
            turns[-1] = replace(turns[-1], closing=self._before_result(conversation))
        return turns

    def _require_parts(self, conversation: Conversation, rendered: Rendered) -> None:
        """Raises RowError if the template ignores the tools or a part of a message: it renders the same without it.

        Many templates silently ignore tool calls or reasoning. Reasoning is only required for the last message, because
        templates leave out that of earlier turns.
        """
        messages, tools = conversation.messages, conversation.tools
        without: dict[str, tuple[tuple[Message, ...], tuple[object, ...]]] = {"tools": (messages, ())} if tools else {}
        for number, message in enumerate(messages):
            is_last = number + 1 == len(messages)
            for part in PARTS:
                is_needed = is_last if part == "reasoning_content" else "tool_calls" in message
                if is_needed and str(message.get(part, "")).strip():
                    rest = {"content": "", **{name: value for name, value in message.items() if name != part}}
                    remaining = (*messages[:number], rest, *messages[number + 1 :])
                    without[f"{part} of message {number + 1}"] = (remaining, tools)
            calls = message.get("tool_calls", ())
            for index in range(len(calls) if len(calls) > 1 else 0):
                fewer = {**message, "tool_calls": [*calls[:index], *calls[index + 1 :]]}
                remaining = (*messages[:number], fewer, *messages[number + 1 :])
                without[f"call {index + 1} of message {number + 1}"] = (remaining, tools)
        for what, (remaining, known_tools) in without.items():
            try:
                same = self._render(remaining, known_tools) == rendered
            except RowError:  # the template fails without this part, so it does use it
                continue
            if same:
                raise RowError(f"the template leaves out the {what}")

    def _render(self, messages: tuple[Message, ...], tools: tuple[object, ...], prompt: bool = False) -> Rendered:
        texts = self.template.render(marked(messages, self.breaks), broken_up(tools, self.breaks), prompt)
        return Rendered.of(texts, self.controls)

    def prompt(self, messages: Sequence[Message]) -> str:
        """Returns the prompt for the next turn, with characters for control tokens. Raises RowError."""
        return self._render(tuple(messages), (), prompt=True).text

    def _tail(
        self, conversation: Conversation, count: int, prompt: bool = False, before: bool = False
    ) -> tuple[int, str] | None:
        """Renders the first `count` messages; returns the number of the last message with text, and what follows it.

        Returns None if the template cannot render them. before: return the same for the message before the last text.
        """
        try:
            return self._render(conversation.messages[:count], conversation.tools, prompt).gaps[-2 if before else -1]
        except RowError:
            return None

    def _turn(self, conversation: Conversation, rendered: Rendered, number: int) -> Turn:
        first = next(index for index, span in enumerate(rendered.spans) if span.message == number)
        owner, before = rendered.gaps[first]
        what = f"the turn of the assistant in message {number + 1}"
        prompted = self._tail(conversation, number, prompt=True)
        if prompted is None or prompted[0] != owner:
            raise RowError(f"the template cannot render the messages before {what} alone{'' if number else FIRST}")
        bare = self._tail(conversation, number)
        head = prompted[1]
        opening = head[len(_common(bare[1], head)) :] if bare and bare[0] == owner else ""
        if bare == prompted:
            head = self._head_of_text(conversation, number, head)
            alone = self._tail(conversation, number + 1)
            if alone and SPECIAL.search(_common(alone[1][::-1], before[::-1])):
                raise RowError(f"the template begins another turn of the assistant after {what}")
        start = len(_common(head, before))
        if start < len(head) and before[start:].strip():
            raise RowError(
                f"{what} does not begin with the template's generation prompt {self.controls.plain(head)!r}, "
                f"but with {self.controls.plain(before)!r}{'' if number else FIRST}"
            )
        ends = self._ends(conversation, number, opening)
        last = _last_span(rendered, number, ends)
        end, ended = self._end(conversation, number, rendered.gaps[last + 1][1], ends)
        return Turn(number, (first, start), (last + 1, end), ended)

    def _opening(self, conversation: Conversation) -> str:
        """Returns what the generation prompt adds to a whole conversation; empty if this is unknown."""
        count = len(conversation.messages)
        bare, prompted = (self._tail(conversation, count, prompt) for prompt in (False, True))
        return prompted[1].removeprefix(bare[1]) if bare and prompted and bare[0] == prompted[0] else ""

    def _before_result(self, conversation: Conversation) -> str:
        """Returns the character for the special token that precedes the result of the last call; empty if none does."""
        messages = conversation.messages
        call = messages[-1]["tool_calls"][0]
        call_id = {"tool_call_id": call["id"]} if "id" in call else {}
        result = {"role": "tool", "name": call["function"]["name"], "content": "result", **call_id}
        bare = self._tail(conversation, len(messages))
        answered = self._tail(replace(conversation, messages=(*messages, result)), len(messages) + 1, before=True)
        if not bare or not answered or answered[0] != bare[0] or not answered[1].startswith(bare[1]):
            return ""
        match = SPECIAL.match(answered[1], len(bare[1]))
        return match[0] if match and match[0] != self.bos else ""

    def _head_of_text(self, conversation: Conversation, number: int, head: str) -> str:
        """Returns the text before a plain-text turn, for a template without a generation prompt."""
        answer = ({"role": "assistant", "content": "answer"},)
        try:
            gaps = self._render((*conversation.messages[:number], *answer), conversation.tools).gaps
        except RowError:
            return head
        text_before = next((text for (who, text), (by, _) in pairwise(gaps) if by == number), head)
        # The prompt ends before the white space that precedes an answer, so the model writes it.
        return text_before if text_before.startswith(head) and text_before[len(head) :].strip() else head

    def _ends(self, conversation: Conversation, number: int, opening: str) -> list[str]:
        """Returns what the template writes after a turn if the conversation ends with it."""
        alone = self._tail(conversation, number + 1)
        ends = [alone[1]] if alone and alone[0] == number else []
        prompted = self._tail(conversation, number + 1, prompt=True)
        if opening and prompted and prompted[0] == number and prompted[1].endswith(opening):
            # This one takes precedence: some templates end the last turn differently, or write more after it.
            ends.insert(0, prompted[1].removesuffix(opening))
        return ends

    def _end(self, conversation: Conversation, number: int, after: str, ends: list[str]) -> tuple[int, bool]:
        """Returns where a turn ends within `after`, the text that follows it, and whether an end token ends it."""
        is_last = number + 1 == len(conversation.messages)
        shared = [_common(end, after) for end in ends]
        for text in shared:
            if positions := [match.end() for match in self.end.finditer(text)]:
                return positions[-1], True
        if not any(self.end.search(end) for end in ends) and ends:
            # The template has no end token for turns. The model stops by writing the token of the next role.
            following = after[len(ends[-1]) :] if after.startswith(ends[-1]) else ""
            if SPECIAL.match(following) and following[0] != self.bos:
                return len(ends[-1]) + 1, True
        if is_last:
            return len(after), False
        return max((len(text.rstrip()) for text in shared), default=0), False

    def _turns_of_generation_blocks(self, conversation: Conversation, rendered: Rendered) -> list[Turn]:
        """Returns the turns that the template marks with `{% generation %}`, each extended to its end token."""
        messages, tools = conversation.messages, conversation.tools
        text, spans = self.template.render_spans(marked(messages, self.breaks), broken_up(tools, self.breaks))
        if Rendered.of(text, self.controls) != rendered:
            raise RowError("the template renders it differently each time")
        opening = self._opening(conversation)
        turns = []
        for first, end in spans:
            position = len(Rendered.partial(text[:first], self.controls))
            position += _overlap(rendered.text, position, opening)  # the model does not write the prompt
            start = _place(rendered, position)
            stop = _place(rendered, len(Rendered.partial(text[:end], self.controls)))
            owners = {span.message for span in rendered.spans[start[0] : stop[0]]}
            if not owners and not text[first:end].strip():
                continue
            if len(owners) != 1 or messages[min(owners)]["role"] != "assistant":
                raise RowError(f"the template's generation block {text[first:end]!r} is not a turn of the assistant")
            turns.append(Turn(min(owners), start, stop, ended=False))
        last = {turn.message: index for index, turn in enumerate(turns)}
        for index in last.values():
            turns[index] = _to_end_token(turns[index], rendered, self.end, self.bos)
        inside = {number for turn in turns for number in range(turn.start[0], turn.end[0])}
        for number, span in enumerate(rendered.spans):
            if (
                messages[span.message]["role"] == "assistant"
                and number not in inside
                and number not in rendered.repeated
            ):
                raise RowError(f"the template's generation blocks leave out the assistant's message {span.message + 1}")
        return turns


def _common(first: str, second: str) -> str:
    """Returns the longest common prefix."""
    return first[: sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(first, second, strict=False)))]


def _last_span(rendered: Rendered, message: int, ends: list[str]) -> int:
    """Returns the index of the last span of a turn. Raises RowError if spans of other messages lie within it.

    A template may write a text of the turn again in a later message, as gpt-oss does with the name of a call in the
    header of its result. ends: what follows the turn if the conversation ends with it; this tells the two apart.
    """
    indices = [number for number, span in enumerate(rendered.spans) if span.message == message]
    repeated = sum(1 for _ in takewhile(lambda number: number in rendered.repeated, reversed(indices)))
    size = len(indices)
    if repeated:

        def shared(count: int) -> int:
            """Returns how much of an end follows the first `count` spans."""
            after = rendered.gaps[indices[count - 1] + 1][1]
            common = [(text, _common(text, after)) for text in ends]
            return max((len(it) for text, it in common if SPECIAL.search(it) or (it.strip() and it == text)), default=0)

        size = max(range(size - repeated, size + 1), key=lambda count: (shared(count), count))
    if indices[:size] != list(range(indices[0], indices[0] + size)):
        raise RowError(f"the template writes another message into message {message + 1}")
    return indices[size - 1]


def _place(rendered: Rendered, position: int) -> tuple[int, int]:
    """Returns the number of the gap that contains a position, and the offset in it. Raises RowError if no gap does."""
    start = 0
    for number, span in enumerate(rendered.spans):
        if position <= span.start:
            return number, position - start
        start = span.end
        if position < start:
            raise RowError("a generation block of the template begins or ends within a message's text")
    return len(rendered.spans), position - start


def _overlap(text: str, position: int, opening: str) -> int:
    """Returns how many characters after a position belong to a generation prompt that begins at or before it."""
    sizes = range(len(opening) + 1)
    return next((size for size in sizes if text.endswith(opening, 0, position + size)), 0)


def _to_end_token(turn: Turn, rendered: Rendered, tokens: re.Pattern[str], bos: str | None) -> Turn:
    """Returns a turn that ends with the end token in its last gap, or else with the one that follows, if there is one.

    tokens: matches end tokens.
    Blocks of many templates also contain the line end after the end token, which the model never writes.
    """
    number, offset = turn.end
    after = rendered.gaps[number][1]
    end_tokens = [match.end() for match in tokens.finditer(after, 0, offset)]
    if end_tokens and not after[end_tokens[-1] : offset].strip():
        return Turn(turn.message, turn.start, (number, end_tokens[-1]), ended=True)
    following = after[offset:]
    skipped = len(following) - len(following.lstrip())
    if tokens.match(following, skipped) and following[skipped] != bos:
        return Turn(turn.message, turn.start, (number, offset + skipped + 1), ended=True)
    return turn
