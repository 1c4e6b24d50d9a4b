"""Turns conversations into token ids, with a mask of the tokens that are trained on."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from llmtrain.data.chat.conversation import Conversation, Message, RowError
from llmtrain.data.chat.marks import CONTROL, ControlTokens, Rendered, reject_reserved
from llmtrain.data.chat.template import ChatTemplate
from llmtrain.data.chat.turns import PARTS, Renderer, Turn
from llmtrain.errors import Problem, RecipeError

Array = NDArray[np.int64]
TrainOn = Literal["assistant", "last_assistant", "all"]
MAX_CACHED_TURNS = 10_000
"""Largest number of template texts whose turns are cached."""
UNKNOWN_OFFSETS = "the tokenizer does not say which characters its tokens stand for"


@dataclass(frozen=True)
class Encoded:
    """The tokens of a conversation."""

    ids: NDArray[np.int64]
    loss_mask: NDArray[np.bool_]
    """[tokens]: whether a token is a label, so that the loss includes its prediction."""
    turns: tuple[int, ...]
    """For each message of the assistant, the number of tokens up to its end, where the conversation may be cut."""
    ends: frozenset[int]
    """The tokens that end these turns. Generation stops at them."""


@dataclass(frozen=True)
class RenderedChat:
    """A rendered conversation."""

    conversation: Conversation
    rendered: Rendered
    turns: list[Turn]
    """The turns of the assistant."""


class ChatEncoder:
    """Renders conversations, determines the assistant's turns exactly, and tokenizes each conversation as a whole."""

    def __init__(
        self, tokenizer: Path, template: ChatTemplate, *, train_on: TrainOn = "assistant", parse_special: bool = False
    ) -> None:
        """parse_special: whether the text of a special token within a message becomes that token."""
        from tokenizers import Tokenizer

        self.template = template
        self._train_on = train_on
        self._plain: Any = Tokenizer.from_file(str(tokenizer / "tokenizer.json"))
        self._plain.no_truncation()
        self._plain.no_padding()
        tokens = self._plain.get_added_tokens_decoder().values()
        literal = template.literal_text
        added = {token.content for token in tokens if not token.special and not token.content.isspace()}
        controls = ControlTokens(
            [token.content for token in tokens if token.special], sorted(text for text in added if text in literal)
        )
        self._tokenizer, self._aliases = _with_control_characters(self._plain, controls)
        self._control_of = np.full(max(self._tokenizer.get_vocab().values()) + 1, -1)
        """Token id in the copy → id of the control token that it stands for; -1 for all other tokens."""
        for copy, token in self._aliases.values():
            self._control_of[copy] = token
        special = template.special
        self._eos = self._plain.token_to_id(special["eos_token"]) if "eos_token" in special else None
        bos = special.get("bos_token")
        bos = controls.aliases.get(bos) if bos and bos != special.get("eos_token") else None
        self._renderer = Renderer(template, controls, parse_special, bos)
        self._cached_turns: dict[Any, list[Turn]] = {}
        """What the template writes around the texts of messages → the turns of such conversations."""

    @property
    def ordinary_end(self) -> str:
        """The text of the token that ends turns, if it is not special in the tokenizer; empty if it is."""
        return self._renderer.controls.plain(self._renderer.added_end)

    def encode(self, conversations: Sequence[Conversation]) -> list[Encoded | RowError]:
        """Returns the tokens of each conversation, or the error that prevented it."""
        return self.tokenize(self.render(conversations))

    def prompt(self, messages: Sequence[Message]) -> list[int]:
        """Returns the prompt tokens from which a model generates the next turn.

        Raises RecipeError if the template or the tokenizer cannot handle the messages.
        """
        try:
            reject_reserved(list(messages))
            text = self._renderer.prompt(messages)
            return self._ids(text, self._tokenizer.encode(text, add_special_tokens=False)).tolist()  # type: ignore[no-any-return]
        except RowError as fault:
            raise RecipeError(Problem("chat.template", "the messages", str(fault))) from None

    def render(self, conversations: Sequence[Conversation | RowError]) -> list[RenderedChat | RowError]:
        """Renders each conversation and finds its assistant turns; returns an error where that is impossible."""
        valid = [conversation for conversation in conversations if isinstance(conversation, Conversation)]
        plain = self.template.render_each(valid)
        marked = self.template.render_each([self._renderer.marked(conversation) for conversation in valid])
        rendered = map(self._rendered, valid, plain, marked)
        return [chat if isinstance(chat, RowError) else next(rendered) for chat in conversations]

    def tokenize(self, chats: Sequence[RenderedChat | RowError]) -> list[Encoded | RowError]:
        """Returns the tokens of rendered conversations, on all cores."""
        texts = [chat.rendered.text for chat in chats if isinstance(chat, RenderedChat)]
        encodings = iter(self._tokenizer.encode_batch(texts, add_special_tokens=False))
        return [chat if isinstance(chat, RowError) else self._encoded(chat, next(encodings)) for chat in chats]

    def _rendered(
        self, conversation: Conversation, plain: str | RowError, marked: str | RowError
    ) -> RenderedChat | RowError:
        """plain, marked: what the template renders for the conversation without and with marks."""
        try:
            rendered = self._renderer.checked(conversation, plain, marked)
            return RenderedChat(conversation, rendered, self._turns(conversation, rendered))
        except RowError as fault:
            return fault

    def _turns(self, conversation: Conversation, rendered: Rendered) -> list[Turn]:
        parts = tuple(
            (message["role"], *filter(message.get, PARTS), len(message.get("tool_calls", ())))
            for message in conversation.messages
        )
        key = (parts, bool(conversation.tools), rendered.gaps, rendered.repeated)
        if key not in self._cached_turns:
            turns = self._renderer.turns(conversation, rendered)
            self._check_tokens(rendered)
            if len(self._cached_turns) >= MAX_CACHED_TURNS:
                self._cached_turns.clear()
            self._cached_turns[key] = turns
        return self._cached_turns[key]

    def _check_tokens(self, rendered: Rendered) -> None:
        """Raises RowError if the unmodified tokenizer gives other tokens, or if their offsets are unusable."""
        encoding = self._tokenizer.encode(rendered.text, add_special_tokens=False)
        ids = self._ids(rendered.text, encoding)
        starts, ends = np.array(encoding.offsets, np.int64).reshape(-1, 2).T
        covered = np.zeros(len(rendered.text) + 1, np.int64)
        np.add.at(covered, starts, 1)
        np.add.at(covered, ends, -1)
        bare = np.flatnonzero(np.cumsum(covered)[:-1] == 0)
        if any(rendered.text[position].isalnum() for position in bare) or (np.diff(starts) < 0).any():
            raise RowError(UNKNOWN_OFFSETS)
        controls = self._renderer.controls
        plain = controls.plain(rendered.text)
        if controls.alias(plain) != rendered.text:
            return  # a message contains a control token's text, which cannot be told from the token in `plain`
        if ids.tolist() != self._plain.encode(plain, add_special_tokens=False).ids:
            raise RowError("the tokenizer does not read each special token of the template as one token")

    def _ids(self, text: str, encoding: Any) -> Array:
        """Returns the token ids of a text that has characters in place of control tokens.

        Raises RowError if such a character did not become exactly its control token.
        """
        ids = np.array(encoding.ids, np.int64)
        control_ids = np.array([self._aliases[alias] for alias in CONTROL.findall(text)], np.int64).reshape(-1, 2)
        positions = np.flatnonzero(self._control_of[ids] >= 0)
        if not np.array_equal(ids[positions], control_ids[:, 0]):
            raise RowError("the tokenizer merges special tokens of the template with the text next to them")
        ids[positions] = control_ids[:, 1]
        return ids

    def _encoded(self, chat: RenderedChat, encoding: Any) -> Encoded | RowError:
        rendered, turns = chat.rendered, chat.turns
        try:
            ids = self._ids(rendered.text, encoding)
            offsets = _TokenOffsets(rendered.text, encoding)
            spans = [
                (offsets.first(_position(rendered, turn.start)), offsets.after(_position(rendered, turn.end)))
                for turn in turns
            ]
            size, last = len(ids), turns[-1]
            closing = self._aliases[last.closing][1] if last.closing else self._eos
            if not last.ended and last.message + 1 == len(chat.conversation.messages) and closing is not None:
                # Without an end token, the model would not learn to stop.
                ids = np.append(ids, closing)
                spans[-1] = (spans[-1][0], len(ids))
            mask = self._loss_mask(chat, spans, offsets, len(ids))
        except RowError as fault:
            return fault
        if not mask[1:].any():
            return RowError("none of its tokens are trained on")
        cuts = {turn.message: end for turn, (_, end) in zip(turns, spans, strict=True)}
        ends = {int(ids[end - 1]) for turn, (_, end) in zip(turns, spans, strict=True) if turn.ended or end > size}
        return Encoded(ids, mask, tuple(cuts.values()), frozenset(ends))

    def _loss_mask(
        self, chat: RenderedChat, spans: list[tuple[int, int]], offsets: _TokenOffsets, length: int
    ) -> NDArray[np.bool_]:
        """Returns whether each token is trained on, [length].

        spans: for each turn of the assistant, the index of its first token, and the index after its last token.
        """
        is_trained = chat.conversation.trained
        mask = np.full(length, self._train_on == "all")
        if self._train_on == "all":
            for text_span in chat.rendered.spans:
                if not is_trained[text_span.message]:
                    # A token that only partly belongs to such a message is not trained on either.
                    mask[offsets.after(text_span.start) : offsets.first(text_span.end)] = False
        last = chat.turns[-1].message
        for turn, (first, end) in zip(chat.turns, spans, strict=True):
            if self._train_on != "last_assistant" or turn.message == last:
                mask[first:end] = is_trained[turn.message]
        return mask


@dataclass(frozen=True)
class _TokenOffsets:
    """Finds tokens by positions in a text.

    It queries single tokens: building the list of all offsets would take longer than tokenizing.
    """

    text: str
    encoding: Any

    def first(self, position: int) -> int:
        """Returns the index of the first token that begins at or after a position."""
        return self._skip(position, lambda start, end: start < position)

    def after(self, position: int) -> int:
        """Returns the index of the first token that ends after a position."""
        return self._skip(position, lambda start, end: end <= position)

    def _skip(self, position: int, before: Callable[[int, int], bool]) -> int:
        token = self._covering(position)
        while token < len(self.encoding) and before(*self._token_span(token)):
            token += 1
        return token

    def _covering(self, position: int) -> int:
        """Returns the index of the token at a position, or at the next position that belongs to a token.

        Raises RowError if an alphanumeric character belongs to no token.
        """
        for character in range(position, len(self.text)):
            token = self.encoding.char_to_token(character)
            if token is not None:
                return int(token)
            if self.text[character].isalnum():
                raise RowError(UNKNOWN_OFFSETS)
        return len(self.encoding)

    def _token_span(self, token: int) -> tuple[int, int]:
        """Returns the start and end of a token, without the white space that some control tokens absorb."""
        start, end = self.encoding.token_to_chars(token)
        control = CONTROL.search(self.text, start, end)
        return control.span() if control else (start, end)


def _position(rendered: Rendered, place: tuple[int, int]) -> int:
    """Returns the position in the whole text of a place: the number of a gap, and an offset in it."""
    number, offset = place
    return (rendered.spans[number - 1].end if number else 0) + offset


def _with_control_characters(plain: Any, controls: ControlTokens) -> tuple[Any, dict[str, tuple[int, int]]]:
    """Returns a copy of a tokenizer that recognizes control tokens only by their single characters.

    Also returns, for each such character, its id in the copy and the id of its control token. With the copy, each
    conversation is tokenized as a whole, exactly as by the original tokenizer, while a message that contains the text
    of a control token keeps it as text.
    """
    from tokenizers import AddedToken, Tokenizer

    described = json.loads(plain.to_str())
    described["post_processor"] = None  # it adds no tokens here, but some post-processors trim the offsets
    for added_token in described["added_tokens"]:
        added_token["special"] |= added_token["content"] in controls.aliases
    copy: Any = Tokenizer.from_str(json.dumps(described))
    by_text = {token.content: token for token in plain.get_added_tokens_decoder().values()}
    flags = ("single_word", "lstrip", "rstrip", "normalized")
    copy.add_tokens(
        [
            AddedToken(alias, special=False, **{name: getattr(by_text[text], name) for name in flags})
            for text, alias in controls.aliases.items()
        ]
    )
    copy.encode_special_tokens = True
    ids = {alias: (copy.token_to_id(alias), plain.token_to_id(text)) for text, alias in controls.aliases.items()}
    return copy, ids
