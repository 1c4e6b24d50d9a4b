"""Counts the texts of a tokenizer's special tokens in documents, and refuses documents with more than a few.

`<|im_start|>` in a document may stand for the token (a chat template was applied) or for its characters (a page about
such tokens). Only the user knows which. The wrong choice trains on tokens that differ from those at inference.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import groupby

from llmtrain.errors import Problem

MAX_ACCEPTED = 10
"""Number of texts of special tokens that are accepted as plain text, without asking the user."""
CHARACTERS_EACH = 1_000_000
"""A large corpus may have one such text per this many characters, because pages about such tokens are common."""
MAX_NAMED = 5
"""Number of tokens that an error message lists."""
EXAMPLE_CHARACTERS = 60


@dataclass(frozen=True)
class SpecialTokenCounts:
    """The texts of special tokens found in a corpus, or in its first documents."""

    count: int
    documents: int
    """Number of documents that contain such texts."""
    of_documents: int
    """Number of documents examined."""
    characters: int
    """Number of characters in the examined documents."""
    tokens: dict[str, int]
    """The most frequent tokens → their counts."""
    example: str
    """The text of a document from its first special token on, truncated."""

    @property
    def are_few(self) -> bool:
        """Whether there are too few such texts to come from a chat template."""
        return self.count <= max(MAX_ACCEPTED, self.characters // CHARACTERS_EACH)

    def __str__(self) -> str:
        tokens = ", ".join(f"{token} {count:,}" for token, count in self.tokens.items())
        return (
            f"{self.count:,} texts of the tokenizer's special tokens ({tokens}) "
            f"in {self.documents:,} of {self.of_documents:,} documents, such as {self.example!r}"
        )


class SpecialTokenCounter:
    """Counts texts of special tokens, document by document."""

    def __init__(self, special_tokens: Iterable[str]) -> None:
        texts = sorted(filter(None, special_tokens))
        # One pattern per first character: a search is ten times as fast if all alternatives share a prefix. Of several
        # texts that match, the longest one is preferred, which is the last one in the order of texts.
        groups = (reversed(list(group)) for _, group in groupby(texts, key=lambda text: text[0]))
        self._patterns = [re.compile("|".join(map(re.escape, group))) for group in groups]
        self._tokens: Counter[str] = Counter()
        self._documents = self._of_documents = self._characters = 0
        self._example = ""

    def count(self, text: str) -> None:
        """Counts the texts of special tokens in one document."""
        self._of_documents += 1
        self._characters += len(text)
        if tokens := [token for pattern in self._patterns for token in pattern.findall(text)]:
            self._tokens.update(tokens)
            self._documents += 1
            start = text.find(tokens[0])
            self._example = self._example or text[start : start + EXAMPLE_CHARACTERS]

    def counts(self) -> SpecialTokenCounts:
        """Returns the counts so far."""
        return SpecialTokenCounts(
            count=self._tokens.total(),
            documents=self._documents,
            of_documents=self._of_documents,
            characters=self._characters,
            tokens=dict(self._tokens.most_common(MAX_NAMED)),
            example=self._example,
        )


def too_many(counts: SpecialTokenCounts, corpus: str, field: str, end_of_text: str) -> Problem:
    """Returns the fault of a corpus with more than a few. end_of_text: text of the token that ends documents."""
    message = (
        f"'{corpus}' contains {counts}; as text they are read as ordinary characters, while "
        "`transformers` and `llmtrain generate` read them as the tokens"
    )
    fix = (
        "--set data.special_tokens=parse trains on the tokens (right if a chat template was "
        "applied), --set data.special_tokens=text trains on the characters"
    )
    if end_of_text in counts.tokens:
        fix += (
            f"\n    if {end_of_text} separates documents, neither is right: "
            'split the text there, and write each document as a line {"text": ...} of a .jsonl file'
        )
    return Problem("data.special_tokens", field, message, fix)
