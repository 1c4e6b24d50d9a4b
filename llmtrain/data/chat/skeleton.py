"""The text that a chat template writes around the contents of messages: found for one conversation, reused for others.

Unless the template inspects contents, its renderings of two conversations with the same roles differ only in these. The
second rendering then equals the first with other contents, character for character. If that comparison succeeds, the
turns of the second conversation are known as well.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from llmtrain.data.chat.marks import CONTROL, RESERVED, ControlTokens
from llmtrain.data.chat.turns import Turn

Gaps = tuple[tuple[int, str], ...]


@dataclass(frozen=True)
class Bounds:
    """Locates turns by control tokens and by the tokens of the text that follows them, such as `assistant\\n`.

    Only for byte-level tokenizers, whose tokens stand for the same bytes everywhere. If the tokens after a control
    token are exactly those of the template's text, the turn begins after them. Otherwise the first token of the turn
    includes the end of that text, and the turn is located by token offsets.
    """

    controls: NDArray[np.int64]
    """All control tokens in order, as ids of the tokenizer copy that has characters for control tokens."""
    first: NDArray[np.int64]
    """For each turn, the index in `controls` of the control token before it."""
    head: tuple[int, ...]
    """The tokens between that control token and the turn, the same for all turns."""
    last: NDArray[np.int64]
    """For each turn, the index in `controls` of the control token that ends it."""
    ends: frozenset[int]
    """The tokens that end turns."""

    @classmethod
    def of(cls, gaps: Gaps, turns: list[Turn], tokenizer: Any, control_of: NDArray[np.int64]) -> Bounds | None:
        """Returns the bounds of turns, or None if these do not all lie between control tokens with the same head.

        tokenizer: the copy that has characters for control tokens. control_of: for each of its tokens, the control
        token that it stands for, or -1.
        """
        texts = [text for _, text in gaps]
        controls_before = [0, *np.cumsum([len(CONTROL.findall(text)) for text in texts]).tolist()]
        heads, first, last = set(), [], []
        for turn in turns:
            (number, offset), (end_number, end_offset) = turn.start, turn.end
            lead, end = texts[number][:offset], texts[end_number][:end_offset]
            tokens = list(CONTROL.finditer(lead))
            if not tokens or not turn.ended or not CONTROL.fullmatch(end[-1:]):
                return None
            heads.add(lead[tokens[-1].start() :])
            first.append(controls_before[number] + len(tokens) - 1)
            last.append(controls_before[end_number] + len(CONTROL.findall(end)) - 1)
        if len(heads) > 1 or len({turn.message for turn in turns}) < len(turns):
            return None
        head = tokenizer.encode(lead := heads.pop(), add_special_tokens=False).ids
        added = tokenizer.get_added_tokens_decoder()
        if not lead[1:].isascii() or control_of[head[0]] < 0 or any(token in added for token in head[1:]):
            return None
        controls = np.array(
            [tokenizer.token_to_id(character) for character in CONTROL.findall("".join(texts))], np.int64
        )
        ends = frozenset(control_of[controls[last]].tolist())
        return cls(controls, np.array(first), tuple(head[1:]), np.array(last), ends)


class Skeleton:
    """The text that a template writes before, between and after contents that are plain texts."""

    def __init__(self, gaps: Gaps, turns: list[Turn], controls: ControlTokens, bounds: Bounds | None) -> None:
        self.gaps = gaps
        self.turns = turns
        self.bounds = bounds
        self._texts = [text for _, text in gaps]
        self._plain = [controls.plain(text) for text in self._texts]

    def renders(self, contents: Sequence[str], text: str) -> bool:
        """Whether a text that the template rendered consists of exactly this skeleton and the contents."""
        return _interleave(self._plain, contents) == text and (text.isascii() or not RESERVED.search(text))

    def filled(self, contents: Sequence[str]) -> str:
        """Returns the skeleton filled with contents, with characters for control tokens."""
        return _interleave(self._texts, contents)


def is_byte_level(tokenizer: Any) -> bool:
    """Whether a tokenizer is a byte-level BPE (Radford et al. 2019): each byte of a text is in exactly one token."""
    from tokenizers import pre_tokenizers

    described = json.loads(tokenizer.to_str())
    model, pre_tokenizer_steps = described["model"], _components(described["pre_tokenizer"], "pretokenizers")
    vocabulary = model["vocab"] if model["type"] == "BPE" else {}
    return (
        bool(pre_tokenizer_steps)
        and not (model.get("dropout") or model.get("continuing_subword_prefix") or model.get("end_of_word_suffix"))
        and all(step["type"] == "NFC" for step in _components(described["normalizer"], "normalizers"))
        and pre_tokenizer_steps[-1]["type"] == "ByteLevel"
        and all(_keeps(step) for step in pre_tokenizer_steps)
        and all(letter in vocabulary for letter in pre_tokenizers.ByteLevel.alphabet())
    )


def _components(described: dict[str, Any] | None, name: str) -> list[dict[str, Any]]:
    if described is None:
        return []
    steps: list[dict[str, Any]] = described[name] if described["type"] == "Sequence" else [described]
    return steps


def _keeps(step: dict[str, Any]) -> bool:
    """Whether a pre-tokenizer step splits a text without changing it."""
    kind = step["type"]
    changes = (kind == "ByteLevel" and step["add_prefix_space"]) or (kind == "Split" and step["behavior"] == "Removed")
    return kind in ("ByteLevel", "Digits", "Split") and not changes


def _interleave(gaps: Sequence[str], contents: Sequence[str]) -> str:
    parts = [""] * (2 * len(contents) + 1)
    parts[::2] = gaps
    parts[1::2] = contents
    return "".join(parts)
