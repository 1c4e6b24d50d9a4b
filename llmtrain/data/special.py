"""Texts of a tokenizer's special tokens within documents: counted, and refused above a handful.

`<|im_start|>` in a document may mean the token, where somebody has applied a chat template, or the characters, where a
page writes about it. Only the user knows, and the wrong choice trains other tokens than are met in use.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import groupby

from llmtrain.errors import DataError, Problem

HANDFUL = 10
"""Texts of special tokens that are treated as text without asking."""
CHARACTERS_EACH = 1_000_000
"""In a large corpus, so many characters for each of them: pages that write about such tokens are met everywhere."""
NAMED = 5
"""Tokens that a message names."""
EXAMPLE_CHARACTERS = 60


@dataclass(frozen=True)
class Found:
    """The texts of special tokens in the documents of a corpus, or in the first of them."""

    count: int
    documents: int
    """Documents that hold some."""
    of_documents: int
    """Documents that were looked at."""
    characters: int
    """Characters of these."""
    tokens: dict[str, int]
    """The most frequent tokens, and how often each was found."""
    example: str
    """The beginning of a document from its first special token on."""

    @property
    def is_handful(self) -> bool:
        """Whether they are too few to come from a template."""
        return self.count <= max(HANDFUL, self.characters // CHARACTERS_EACH)

    def __str__(self) -> str:
        tokens = ", ".join(f"{token} {count:,}" for token, count in self.tokens.items())
        return (
            f"{self.count:,} texts of the tokenizer's special tokens ({tokens}) "
            f"in {self.documents:,} of {self.of_documents:,} documents, such as {self.example!r}"
        )


class Finder:
    """Counts the texts of special tokens, document by document."""

    def __init__(self, special_tokens: Iterable[str]) -> None:
        texts = sorted(filter(None, special_tokens))
        # One for each first character: a search for a common beginning is ten times as fast as one for several.
        self._patterns = [re.compile(_expression(list(group))) for _, group in groupby(texts, key=lambda text: text[0])]
        self._tokens: Counter[str] = Counter()
        self._documents = self._of_documents = self._characters = 0
        self._example = ""

    def look(self, text: str) -> None:
        """Counts those of one document."""
        self._of_documents += 1
        self._characters += len(text)
        if tokens := [token for pattern in self._patterns for token in pattern.findall(text)]:
            self._tokens.update(tokens)
            self._documents += 1
            start = text.find(tokens[0])
            self._example = self._example or text[start : start + EXAMPLE_CHARACTERS]

    def found(self) -> Found:
        """What was found so far."""
        return Found(
            count=self._tokens.total(),
            documents=self._documents,
            of_documents=self._of_documents,
            characters=self._characters,
            tokens=dict(self._tokens.most_common(NAMED)),
            example=self._example,
        )


def check_handful(found: Found, corpus: str, field: str, end_of_text: str) -> None:
    """Raises DataError for more than a handful. end_of_text: the text of the token that ends documents."""
    if found.is_handful:
        return
    message = (
        f"'{corpus}' holds {found}; as text they are read as ordinary characters, while `transformers` and "
        "`llmtrain generate` read the tokens"
    )
    fix = (
        "--set data.special_tokens=parse trains the tokens (right where a chat template was applied), "
        "--set data.special_tokens=text the characters"
    )
    if end_of_text in found.tokens:
        fix += (
            f"\n    where {end_of_text} stands between documents, neither is right: "
            'split the text there, and write each document as a line {"text": ...} of a .jsonl file'
        )
    raise DataError(Problem("data.special_tokens", field, message, fix))


def _expression(texts: list[str]) -> str:
    """A regular expression that matches these texts, sorted and different, the longest first.

    Common beginnings are taken out, so that hundreds of them are searched for as fast as one.
    """
    branches = [
        re.escape(first) + (_expression([text[1:] for text in group]) if first else "")
        for first, group in groupby(texts, key=lambda text: text[:1])
    ]
    # "" sorts first, and matches always.
    return branches[0] if len(branches) == 1 else f"(?:{'|'.join(reversed(branches))})"
