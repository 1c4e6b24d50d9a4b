"""Conversations to token ids, and which of them are trained on."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from llmtrain.data.chat.conversation import Conversation, RowError
from llmtrain.data.chat.marks import CONTROL, MOST_MESSAGES, Controls, Rendered, reject_reserved
from llmtrain.data.chat.spans import Renderer, Turn
from llmtrain.data.chat.template import ChatTemplate

Array = NDArray[np.int64]
TrainOn = Literal["assistant", "last_assistant", "all"]
MOST_SKELETONS = 10_000
"""Number of proven skeletons that are kept."""


@dataclass(frozen=True)
class Encoded:
    """The tokens of a conversation."""

    ids: NDArray[np.int64]
    trained: NDArray[np.bool_]
    """Whether the loss includes the prediction of this token."""
    turns: tuple[int, ...]
    """Number of tokens up to the end of each turn of the assistant: where it may be cut."""


class ChatEncoder:
    """Renders conversations, proves their spans, and tokenizes each as a whole."""

    def __init__(
        self, tokenizer: Path, template: ChatTemplate, *, train_on: TrainOn = "assistant", parse_special: bool = False
    ) -> None:
        """parse_special: read a special token's text within a message as the token."""
        from tokenizers import Tokenizer

        self.template = template
        self._train_on = train_on
        self._plain: Any = Tokenizer.from_file(str(tokenizer / "tokenizer.json"))
        self._plain.no_truncation()
        self._plain.no_padding()
        tokens = self._plain.get_added_tokens_decoder().values()
        literal = template.literal_text
        added = {one.content for one in tokens if not one.special and not one.content.isspace()}
        controls = Controls(
            [one.content for one in tokens if one.special], sorted(text for text in added if text in literal)
        )
        self._tokenizer, self._aliases = _with_aliases(self._plain, controls)
        special = template.special
        self._eos = self._plain.token_to_id(special["eos_token"]) if "eos_token" in special else None
        bos = special.get("bos_token")
        bos = controls.aliases.get(bos) if bos and bos != special.get("eos_token") else None
        self._renderer = Renderer(template, controls, parse_special, bos)
        self._proven: dict[Any, list[Turn]] = {}

    def encode(self, conversations: Sequence[Conversation]) -> list[Encoded | RowError]:
        """Returns the tokens of each conversation, or why it has none."""
        prepared = [self._prepare(one) for one in conversations]
        texts = [one[0].text for one in prepared if not isinstance(one, RowError)]
        encodings = iter(self._tokenizer.encode_batch(texts, add_special_tokens=False))
        return [
            one if isinstance(one, RowError) else self._encoded(conversation, *one, next(encodings))
            for conversation, one in zip(conversations, prepared, strict=True)
        ]

    def _prepare(self, conversation: Conversation) -> tuple[Rendered, list[Turn]] | RowError:
        try:
            reject_reserved([conversation.messages, conversation.tools])
            if len(conversation.messages) > MOST_MESSAGES:
                raise RowError(f"has {len(conversation.messages):,} messages; at most {MOST_MESSAGES:,} can be marked")
            whole = self._renderer.rendered(conversation)
            roles = tuple(message["role"] for message in conversation.messages)
            key = (roles, whole.gaps)
            if key not in self._proven:
                turns = self._renderer.turns(conversation, whole)
                self._check_tokens(whole)
                if len(self._proven) >= MOST_SKELETONS:
                    self._proven.clear()
                self._proven[key] = turns
            return whole, self._proven[key]
        except RowError as fault:
            return fault

    def _check_tokens(self, whole: Rendered) -> None:
        """Raises RowError if the tokens are not those of the tokenizer as it is, where no text was broken up."""
        controls = self._renderer.controls
        plain = controls.plain(whole.text)
        if controls.alias(plain) != whole.text:
            return  # a message spells a control token; its text and the token look the same in `plain`
        ids, _, _ = self._aligned(whole.text, self._tokenizer.encode(whole.text, add_special_tokens=False))
        if ids.tolist() != self._plain.encode(plain, add_special_tokens=False).ids:
            raise RowError("the tokenizer reads the template's special tokens in another way than one by one")

    def _aligned(self, text: str, encoding: Any) -> tuple[Array, Array, Array]:
        """Returns the tokens of a text, and where each begins and ends in it. Raises RowError if that is not known."""
        ids = np.array(encoding.ids, np.int64)
        starts, ends = np.array(encoding.offsets, np.int64).reshape(-1, 2).T.copy()
        places = np.array([found.start() for found in CONTROL.finditer(text)], np.int64)
        aliases = np.array([self._aliases[text[place]] for place in places], np.int64).reshape(-1, 2)
        tokens = np.searchsorted(ends, places, side="right")
        covered = np.zeros(len(text) + 1, np.int64)
        np.add.at(covered, starts, 1)
        np.add.at(covered, ends, -1)
        bare = np.flatnonzero(np.cumsum(covered)[:-1] == 0)
        known = not any(text[place].isalnum() for place in bare) and (np.diff(starts) >= 0).all()
        if not known or (len(tokens) and (tokens[-1] >= len(ids) or (ids[tokens] != aliases[:, 0]).any())):
            raise RowError("the tokenizer does not say which characters its tokens stand for")
        # Some tokens take in the white space beside them; their place is their own.
        ids[tokens], starts[tokens], ends[tokens] = aliases[:, 1], places, places + 1
        return ids, starts, ends

    def _encoded(
        self, conversation: Conversation, whole: Rendered, turns: list[Turn], encoding: Any
    ) -> Encoded | RowError:
        text = whole.text
        try:
            ids, starts, ends = self._aligned(text, encoding)
        except RowError as fault:
            return fault
        if turns[-1].message + 1 == len(conversation.messages) and not turns[-1].ended and self._eos is not None:
            # Otherwise no model would learn to stop.
            ids = np.append(ids, self._eos)
            starts, ends = (np.append(places, len(text)) for places in (starts, ends))
        spans = [(_position(whole, turn.start), _position(whole, turn.end)) for turn in turns]
        trained = self._trained(conversation, whole, turns, spans, starts, ends)
        if not trained[1:].any():
            return RowError("nothing of it is trained on")
        cuts = {turn.message: int((ends <= end).sum()) for turn, (_, end) in zip(turns, spans, strict=True)}
        return Encoded(ids, trained, tuple(cuts.values()))

    def _trained(
        self,
        conversation: Conversation,
        whole: Rendered,
        turns: list[Turn],
        spans: list[tuple[int, int]],
        starts: Array,
        ends: Array,
    ) -> NDArray[np.bool_]:
        if self._train_on == "all":
            trained = np.ones(len(starts), bool)
            pieces = [(one.message, (one.start, one.end)) for one in whole.stretches]
            pieces += [(turn.message, span) for turn, span in zip(turns, spans, strict=True)]
            for message, (first, end) in pieces:
                if not conversation.trained[message]:
                    trained &= (ends <= first) | (starts >= end)
            return trained
        last = turns[-1].message
        trained = np.zeros(len(starts), bool)
        for turn, (first, end) in zip(turns, spans, strict=True):
            if conversation.trained[turn.message] and (self._train_on == "assistant" or turn.message == last):
                trained |= (starts >= first) & (ends <= end)
        return trained


def _position(whole: Rendered, place: tuple[int, int]) -> int:
    """Returns the position in the text of a place in a gap."""
    number, offset = place
    return (whole.stretches[number - 1].end if number else 0) + offset


def _with_aliases(plain: Any, controls: Controls) -> tuple[Any, dict[str, tuple[int, int]]]:
    """Returns a copy of a tokenizer that knows control tokens by their characters only, and for each character its id
    in the copy and the token's id.

    So each conversation is tokenized as a whole, exactly as the original would, and yet a message's text that spells a
    control token is text.
    """
    from tokenizers import AddedToken, Tokenizer

    described = json.loads(plain.to_str())
    described["post_processor"] = None  # adds nothing here, but some trim the offsets
    for one in described["added_tokens"]:
        one["special"] |= one["content"] in controls.aliases
    copy: Any = Tokenizer.from_str(json.dumps(described))
    by_text = {one.content: one for one in plain.get_added_tokens_decoder().values()}
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
