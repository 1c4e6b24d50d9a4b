"""Where the assistant's turns begin and end in a rendered conversation.

A turn begins where the prompt ends that a model is given to write it: the template renders the messages before it with
`add_generation_prompt`, and what follows the last of them there must be what precedes the turn here. It ends with the
end token that the template also writes where the conversation ends with that turn. Both are established from
renderings, and what cannot be is refused.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise, takewhile

from llmtrain.data.chat.conversation import Conversation, Message, RowError
from llmtrain.data.chat.marks import (
    CONTROL,
    SPECIAL,
    Controls,
    Rendered,
    broken_up,
    marked,
    reject_reserved,
)
from llmtrain.data.chat.template import ChatTemplate

MOST_SKELETONS = 10_000
"""Number of proven skeletons that are kept."""
PARTS = ("tool_calls", "content", "reasoning_content")
"""Of a message: what a template may have no form for."""


@dataclass(frozen=True)
class Turn:
    """A turn of the assistant, as it follows from the skeleton of a rendering alone."""

    message: int
    start: tuple[int, int]
    """Number of a gap, and the place within it."""
    end: tuple[int, int]
    ended: bool
    """Whether it ends with an end token."""


@dataclass(frozen=True)
class Renderer:
    """Renders conversations with marks."""

    template: ChatTemplate
    controls: Controls
    parses: bool = False
    """Whether texts of special tokens in messages are the tokens."""
    bos: str | None = None
    """The character of the token that begins a text and ends none."""

    @property
    def breaks(self) -> Controls | None:
        """What is broken up in messages."""
        return None if self.parses else self.controls

    def rendered(self, conversation: Conversation, plain: str) -> Rendered:
        """Returns the whole conversation with marks. Raises RowError unless it is, without these, `plain`."""
        tools = conversation.tools
        reject_reserved([conversation.messages, tools])
        with_marks = self._render(conversation.messages, tools)
        if self.controls.plain(with_marks.text) != plain:
            raise RowError("the template changes the text of messages, so it is not known who wrote what")
        written = {one.message for one in with_marks.stretches}
        for number, message in enumerate(conversation.messages):
            if number not in written and (message["content"].strip() or "tool_calls" in message):
                raise RowError(f"the template leaves out message {number + 1} ({message['role']})")
        return with_marks

    def turns(self, conversation: Conversation, whole: Rendered) -> list[Turn]:
        """Finds the assistant's turns. Raises RowError if they cannot be established."""
        self._require_parts(conversation, whole)
        if conversation.messages[-1]["role"] == "assistant":
            last, written = len(conversation.messages) - 1, whole.stretches[-1].message
            if written != last:
                raise RowError(f"the template writes message {written + 1} again after the last turn of the assistant")
        if self.template.has_spans:
            return self._said_turns(conversation, whole)
        return [
            self._turn(conversation, whole, number)
            for number, message in enumerate(conversation.messages)
            if message["role"] == "assistant"
        ]

    def _require_parts(self, conversation: Conversation, whole: Rendered) -> None:
        """Raises RowError if the template writes the same without the tools, or without a part of a message.

        Many templates have no form for calls or reasoning, and pass over them. Only the reasoning of a last message
        must be there, since templates leave out that of earlier turns.
        """
        messages, tools = conversation.messages, conversation.tools
        without: dict[str, tuple[tuple[Message, ...], tuple[object, ...]]] = {"tools": (messages, ())} if tools else {}
        for number, message in enumerate(messages):
            is_last = number + 1 == len(messages)
            for part in PARTS:
                is_needed = is_last if part == "reasoning_content" else "tool_calls" in message
                if is_needed and str(message.get(part, "")).strip():
                    rest = {"content": "", **{name: value for name, value in message.items() if name != part}}
                    some = (*messages[:number], rest, *messages[number + 1 :])
                    without[f"{part} of message {number + 1}"] = (some, tools)
        for what, (some, known) in without.items():
            try:
                same = self._render(some, known) == whole
            except RowError:  # it needs them
                continue
            if same:
                raise RowError(f"the template leaves out the {what}")

    def _render(self, messages: tuple[Message, ...], tools: tuple[object, ...], prompt: bool = False) -> Rendered:
        texts = self.template.render(marked(messages, self.breaks), broken_up(tools, self.breaks), prompt)
        return Rendered.of(texts, self.controls)

    def prompt(self, messages: Sequence[Message]) -> str:
        """Returns what a model is given to write the next turn, with control characters. Raises RowError."""
        return self._render(tuple(messages), (), prompt=True).text

    def _tail(self, conversation: Conversation, count: int, prompt: bool = False) -> tuple[int, str] | None:
        """Returns what stands after the last text of the first messages, and whose text that is."""
        try:
            return self._render(conversation.messages[:count], conversation.tools, prompt).gaps[-1]
        except RowError:
            return None

    def _turn(self, conversation: Conversation, whole: Rendered, number: int) -> Turn:
        first, last = _stretches_of(whole, number)
        owner, before = whole.gaps[first]
        what = f"the turn of the assistant in message {number + 1}"
        prompted = self._tail(conversation, number, prompt=True)
        if prompted is None or prompted[0] != owner:
            raise RowError(f"the template cannot render the messages before {what} alone")
        bare = self._tail(conversation, number)
        head = prompted[1]
        opening = head[len(_common(bare[1], head)) :] if bare and bare[0] == owner else ""
        if bare == prompted:
            head = self._head_of_text(conversation, number, owner, head)
            alone = self._tail(conversation, number + 1)
            if alone and SPECIAL.search(_common(alone[1][::-1], before[::-1])):
                raise RowError(f"the template begins another turn of the assistant after {what}")
        start = len(_common(head, before))
        if start < len(head) and before[start:].strip():
            raise RowError(
                f"{what} does not begin with the template's generation prompt {self.controls.plain(head)!r}, "
                f"but with {self.controls.plain(before)!r}"
            )
        end, ended = self._end(conversation, number, whole.gaps[last + 1][1], opening)
        return Turn(number, (first, start), (last + 1, end), ended)

    def _opening(self, conversation: Conversation) -> str:
        """Returns what the generation prompt adds to a whole conversation; nothing if it is not known."""
        count = len(conversation.messages)
        bare, prompted = (self._tail(conversation, count, prompt) for prompt in (False, True))
        return prompted[1].removeprefix(bare[1]) if bare and prompted and bare[0] == prompted[0] else ""

    def _head_of_text(self, conversation: Conversation, number: int, owner: int, head: str) -> str:
        """Returns what precedes a turn of plain text, for a template that has no generation prompt."""
        answer = ({"role": "assistant", "content": "answer"},)
        try:
            gaps = self._render((*conversation.messages[:number], *answer), conversation.tools).gaps
        except RowError:
            return head
        found = next((text for (who, text), (by, _) in pairwise(gaps) if by == number), head)
        # White space before an answer is written by the model, since the prompt ends before it.
        return found if found.startswith(head) and found[len(head) :].strip() else head

    def _end(self, conversation: Conversation, number: int, after: str, opening: str) -> tuple[int, bool]:
        """Returns where a turn ends in what follows its text, and whether with an end token."""
        is_last = number + 1 == len(conversation.messages)
        alone = self._tail(conversation, number + 1)
        ends = [alone[1]] if alone and alone[0] == number else []
        prompted = self._tail(conversation, number + 1, prompt=True)
        if opening and prompted and prompted[0] == number and prompted[1].endswith(opening):
            # Comes first: some templates end the last turn in another way, or write more after it.
            ends.insert(0, prompted[1].removesuffix(opening))
        shared = [_common(end, after) for end in ends]
        for pattern in (SPECIAL, CONTROL):
            for text in shared:
                if found := [match.end() for match in pattern.finditer(text)]:
                    return found[-1], True
            if pattern is SPECIAL and not any(SPECIAL.search(end) for end in ends) and ends:
                # The template ends no turn; the model stops by writing the token of the next role.
                following = after[len(ends[-1]) :] if after.startswith(ends[-1]) else ""
                if SPECIAL.match(following) and following[0] != self.bos:
                    return len(ends[-1]) + 1, True
        if is_last:
            return len(after), False
        return max((len(text.rstrip()) for text in shared), default=0), False

    def _said_turns(self, conversation: Conversation, whole: Rendered) -> list[Turn]:
        """Returns the turns that the template marks with `{% generation %}`, each extended to its end token."""
        messages, tools = conversation.messages, conversation.tools
        text, spans = self.template.render_spans(marked(messages, self.breaks), broken_up(tools, self.breaks))
        if Rendered.of(text, self.controls) != whole:
            raise RowError("the template renders it differently each time")
        opening = self._opening(conversation)
        turns = []
        for first, end in spans:
            position = len(Rendered.partial(text[:first], self.controls))
            if opening and whole.text.startswith(opening, position):
                position += len(opening)  # the prompt, which the model is given
            start = _place(whole, position)
            stop = _place(whole, len(Rendered.partial(text[:end], self.controls)))
            owners = {one.message for one in whole.stretches[start[0] : stop[0]]}
            if not owners and not text[first:end].strip():
                continue
            if len(owners) != 1 or messages[min(owners)]["role"] != "assistant":
                raise RowError(f"the template's generation block {text[first:end]!r} is not a turn of the assistant")
            turns.append(Turn(min(owners), start, stop, ended=False))
        last = {turn.message: place for place, turn in enumerate(turns)}
        for place in last.values():
            turns[place] = _to_end_token(turns[place], whole, self.bos)
        inside = {number for turn in turns for number in range(turn.start[0], turn.end[0])}
        for number, one in enumerate(whole.stretches):
            if messages[one.message]["role"] == "assistant" and number not in inside:
                raise RowError(f"the template's generation blocks leave out the assistant's message {one.message + 1}")
        return turns


def _common(one: str, other: str) -> str:
    """Returns the longest common beginning."""
    return one[: sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False)))]


def _stretches_of(whole: Rendered, message: int) -> tuple[int, int]:
    """Returns the first and the last stretch of a message. Raises RowError if others are between them."""
    mine = [number for number, one in enumerate(whole.stretches) if one.message == message]
    if mine != list(range(mine[0], mine[-1] + 1)):
        raise RowError(f"the template writes another message into message {message + 1}")
    return mine[0], mine[-1]


def _place(whole: Rendered, position: int) -> tuple[int, int]:
    """Returns the gap that a position of the text is in, and its place there."""
    start = 0
    for number, one in enumerate(whole.stretches):
        if position <= one.start:
            return number, position - start
        start = one.end
        if position < start:
            raise RowError("a generation block of the template begins or ends within a message's text")
    return len(whole.stretches), position - start


def _to_end_token(turn: Turn, whole: Rendered, bos: str | None) -> Turn:
    """Extends a turn to an end token that follows it."""
    number, place = turn.end
    after = whole.gaps[number][1]
    if found := [match.end() for match in SPECIAL.finditer(after, 0, place)]:
        return Turn(turn.message, turn.start, (number, max(place, found[-1])), ended=True)
    following = after[place:]
    skipped = len(following) - len(following.lstrip())
    if SPECIAL.match(following, skipped) and following[skipped] != bos:
        return Turn(turn.message, turn.start, (number, place + skipped + 1), ended=True)
    return turn
