"""Turns conversations into token ids, with a mask of the tokens that are trained on."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from llmtrain.data.chat.conversation import Conversation, Message, RowError
from llmtrain.data.chat.marks import CONTROL, ControlTokens, Rendered, plain_contents, reject_reserved
from llmtrain.data.chat.skeleton import Bounds, Skeleton, is_byte_level
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
    cuts: tuple[int, ...]
    """For each message of the assistant, the number of tokens up to its end, where the conversation may be cut."""
    ends: frozenset[int]
    """The tokens that end these turns. Generation stops at them."""
    images: tuple[tuple[int, int], ...] = ()
    """For each image, the index of its first image token, and the index after its last token."""

    def with_images(self, written: int, token: int, images: Sequence[Sequence[int]]) -> Encoded:
        """Returns the tokens with those of images in place of each `written`; none of them is a label.

        token: the image token. images: the tokens that stand for each image. Raises RowError unless there are as many.
        """
        places = np.flatnonzero(self.ids == written)
        if len(places) != len(images):
            raise RowError(f"the chat template writes {len(places)} image tokens for {len(images)} images")
        sizes = np.ones(len(self.ids), np.int64)
        sizes[places] = [len(image) for image in images]
        ids, mask = np.repeat(self.ids, sizes), np.repeat(self.loss_mask, sizes)
        before = np.cumsum(sizes) - sizes
        spans = []
        for start, image in zip(before[places].tolist(), images, strict=True):
            end = start + len(image)
            ids[start:end], mask[start:end] = image, False
            spans.append((start + image.index(token), end))
        cuts = tuple(int(sizes[:cut].sum()) for cut in self.cuts)
        return Encoded(ids, mask, cuts, self.ends, tuple(spans))


@dataclass(frozen=True)
class RenderedChat:
    """A rendered conversation."""

    conversation: Conversation
    text: str
    """The rendered text, with a single character for each control token that the template wrote."""
    turns: list[Turn]
    """The turns of the assistant."""
    source: Rendered | Skeleton
    """The rendering with marks of this conversation, or the skeleton of one that only differs in contents."""

    @cached_property
    def rendered(self) -> Rendered:
        """The rendering with the positions of the messages."""
        if isinstance(self.source, Rendered):
            return self.source
        return Rendered.filled(self.source.gaps, [message["content"] for message in self.conversation.messages])

    @property
    def bounds(self) -> Bounds | None:
        """The bounds by which its turns are found without token offsets; None if they are not known."""
        return self.source.bounds if isinstance(self.source, Skeleton) and all(self.conversation.trained) else None


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
        self._skeletons: dict[tuple[str, ...], Skeleton] = {}
        """Roles of the messages → skeleton of the last conversation of plain texts that was rendered with marks."""
        self._is_byte_level = is_byte_level(self._plain)

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
        by_skeleton = [self._from_skeleton(*pair) for pair in zip(valid, plain, strict=True)]
        rest = [pair for pair, chat in zip(zip(valid, plain, strict=True), by_skeleton, strict=True) if chat is None]
        marked = self.template.render_each([self._renderer.marked(conversation) for conversation, _ in rest])
        others = (self._rendered(*pair, text) for pair, text in zip(rest, marked, strict=True))
        rendered = iter([chat or next(others) for chat in by_skeleton])
        return [chat if isinstance(chat, RowError) else next(rendered) for chat in conversations]

    def tokenize(self, chats: Sequence[RenderedChat | RowError]) -> list[Encoded | RowError]:
        """Returns the tokens of rendered conversations, on all cores.

        Conversations with bounds need no token offsets, and take less than half the time.
        """
        valid = [chat for chat in chats if isinstance(chat, RenderedChat)]
        bounds = [(chat, chat_bounds) for chat in valid if (chat_bounds := chat.bounds) is not None]
        fast = self._tokenizer.encode_batch_fast([chat.text for chat, _ in bounds], add_special_tokens=False)
        by_bounds = iter(
            self._encode_by_bounds([(one, tokens.ids) for (_, one), tokens in zip(bounds, fast, strict=True)])
        )
        results = [next(by_bounds) if chat.bounds else None for chat in valid]
        texts = [chat.text for chat, result in zip(valid, results, strict=True) if result is None]
        encodings = iter(self._tokenizer.encode_batch(texts, add_special_tokens=False))
        encoded = iter(
            [result or self._encoded(chat, next(encodings)) for chat, result in zip(valid, results, strict=True)]
        )
        return [chat if isinstance(chat, RowError) else next(encoded) for chat in chats]

    def _from_skeleton(self, conversation: Conversation, text: str | RowError) -> RenderedChat | None:
        """Returns a conversation that only differs in its contents from one that was rendered with marks, else None.

        text: what the template renders for it without marks.
        """
        contents = self._contents(conversation)
        skeleton = self._skeletons.get(_roles(conversation))
        if contents is None or skeleton is None or isinstance(text, RowError) or not skeleton.renders(contents, text):
            return None
        return RenderedChat(conversation, skeleton.filled(contents), skeleton.turns, skeleton)

    def _contents(self, conversation: Conversation) -> list[str] | None:
        """Returns the contents of a conversation of plain texts; None for others."""
        return None if conversation.tools else plain_contents(conversation.messages, self._renderer.controls)

    def _rendered(
        self, conversation: Conversation, plain: str | RowError, marked: str | RowError
    ) -> RenderedChat | RowError:
        """plain, marked: what the template renders for the conversation without and with marks."""
        try:
            rendered = self._renderer.checked(conversation, plain, marked)
            turns = self._turns(conversation, rendered)
        except RowError as fault:
            return fault
        roles = _roles(conversation)
        if self._contents(conversation) and [owner for owner, _ in rendered.gaps] == list(range(-1, len(roles))):
            if len(self._skeletons) >= MAX_CACHED_TURNS:
                self._skeletons.clear()
            is_located = self._is_byte_level
            bounds = Bounds.of(rendered.gaps, turns, self._tokenizer, self._control_of) if is_located else None
            self._skeletons[roles] = Skeleton(rendered.gaps, turns, self._renderer.controls, bounds)
        return RenderedChat(conversation, rendered.text, turns, rendered)

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

    def _encode_by_bounds(self, chats: Sequence[tuple[Bounds, list[int]]]) -> list[Encoded | None]:
        """Returns the encoded conversations whose turns lie between control tokens; None for the others.

        Does for all conversations at once what `_encoded` does for one: all of their messages are trained on.
        """
        if not chats:
            return []
        bounds = [chat_bounds for chat_bounds, _ in chats]
        lists = [ids for _, ids in chats]
        stops = np.cumsum([len(token_ids) for token_ids in lists])
        ids = np.fromiter(chain.from_iterable(lists), np.int64, int(stops[-1]))
        positions = np.flatnonzero(self._control_of[ids] >= 0)
        ends = np.searchsorted(positions, stops)  # number of control tokens up to the end of each conversation
        expected = np.cumsum([len(chat_bounds.controls) for chat_bounds in bounds])
        if (
            not np.array_equal(ends, expected)
            or (ids[positions] != np.concatenate([chat_bounds.controls for chat_bounds in bounds])).any()
        ):
            return [None] * len(chats)
        ids[positions] = self._control_of[ids[positions]]
        sizes = [len(chat_bounds.first) for chat_bounds in bounds]
        owners = np.repeat(np.arange(len(bounds)), sizes)
        before = np.concatenate([[0], ends[:-1]])[owners]
        first = positions[np.concatenate([chat_bounds.first for chat_bounds in bounds]) + before] + 1
        after = positions[np.concatenate([chat_bounds.last for chat_bounds in bounds]) + before] + 1
        fits = np.ones(len(bounds), bool)
        heads = [chat_bounds.head for chat_bounds in bounds]
        for head in set(heads):
            with_head = np.array([chat_head == head for chat_head in heads])[owners]
            for token in head:
                fits[owners[with_head][ids[np.minimum(first[with_head], len(ids) - 1)] != token]] = False
                first[with_head] += 1
        if self._train_on == "all":
            mask = np.ones(len(ids), bool)
        else:
            turns = np.cumsum(sizes) - 1 if self._train_on == "last_assistant" else slice(None)
            begin = np.minimum(first, after)  # a turn that does not fit may be shorter than the head
            edges = np.stack([begin[turns], after[turns]], axis=1).ravel()
            lengths = np.diff(edges, prepend=0, append=len(ids))
            mask = np.repeat(np.arange(len(lengths)) % 2 == 1, lengths)
        starts = np.concatenate([[0], stops[:-1]])
        cuts = np.split(after - starts[owners], np.cumsum(sizes)[:-1])
        return [
            Encoded(ids[start:stop], mask[start:stop], tuple(cut.tolist()), chat_bounds.ends) if fit else None
            for chat_bounds, fit, start, stop, cut in zip(bounds, fits, starts, stops, cuts, strict=True)
        ]

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


def _roles(conversation: Conversation) -> tuple[str, ...]:
    return tuple([message["role"] for message in conversation.messages])


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
