"""Turns a `Source` of a recipe into its documents and an identity of their content."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple, Protocol

import xxhash

from llmtrain.data.cache import Cache, key_of
from llmtrain.data.sources.files import STDLIB, file_corpus, find_files, stdlib_corpus
from llmtrain.data.sources.formats import COMPRESSIONS, READERS, Document
from llmtrain.data.sources.hub import hub_corpus
from llmtrain.errors import DataError, Problem
from llmtrain.recipe import Source
from llmtrain.system.untrusted import expanded

HUB_NAME = re.compile(r"[\w-][\w.-]*(/[\w-][\w.-]*)?")
"""Matches NAME or OWNER/NAME."""
LINE_END = re.compile(r"(?<=\S)\n(?=\S)")
WORD_START = re.compile(r"(?<=\S)(?= \S)")


class Corpus(Protocol):
    """Documents in a fixed order."""

    @property
    def name(self) -> str:
        """The name in the recipe."""

    @property
    def identity(self) -> str:
        """Identifies the content: equal for equal documents in equal order, read in the same way."""

    @property
    def is_one_document(self) -> bool:
        """Whether the corpus is known to be a single document without reading it."""

    def documents(self) -> Iterator[Document]:
        """Yields the documents from the beginning. Raises DataError if they cannot be read."""


class CorpusPart(NamedTuple):
    """A document of a split, or the part of a single document that belongs to it."""

    text: str
    fraction: float
    """Fraction of the corpus that has been read, including this part."""
    is_held_out: bool


def open_corpora(sources: Sequence[Source], cache: Cache, field: str = "data.sources") -> list[Corpus]:
    """Opens the corpus of each source; `field` is the recipe field that lists them.

    Raises DataError with all faults.
    """
    corpora: list[Corpus] = []
    problems: list[Problem] = []
    for number, source in enumerate(sources):
        try:
            corpora.append(_open_corpus(source, f"{field}.{number}", cache))
        except DataError as error:
            problems += error.problems
    if problems:
        raise DataError(problems)
    return corpora


def held_out(text: str, eval_fraction: float) -> bool:
    """Whether a document belongs to the evaluation split.

    This depends only on the text, so neither the order of the documents nor new ones move a document to the other
    split, and copies of a document are always in the same split.
    """
    return xxhash.xxh3_64_intdigest(text.encode()) < eval_fraction * 2**64


def split_documents(
    corpus: Corpus, eval_fraction: float, look: Callable[[str], None] = lambda _: None
) -> Iterator[CorpusPart]:
    """Yields the documents with their split. A single document is cut, and its end held out.

    `look` is called with each document.
    """
    for text, fraction in corpus.documents():
        look(text)
        if _holds_out_the_end(corpus, eval_fraction):
            place = _cut_before_the_end(text, eval_fraction)
            yield CorpusPart(text[:place], fraction * (1 - eval_fraction), is_held_out=False)
            yield CorpusPart(text[place:], fraction, is_held_out=True)
        else:
            yield CorpusPart(text, fraction, held_out(text, eval_fraction))


def split_identity(corpus: Corpus, eval_fraction: float) -> str:
    """Identifies the result of `split_documents`, together with the fraction."""
    return key_of(corpus.identity, "end") if _holds_out_the_end(corpus, eval_fraction) else corpus.identity


def first_break(text: str, lowest: int, highest: int) -> int | None:
    """Returns where byte-level tokenizers split a text anyway: after a line end, else before a space, else None."""
    found = LINE_END.search(text, lowest, highest) or WORD_START.search(text, lowest, highest)
    return found.end() if found else None


def _holds_out_the_end(corpus: Corpus, eval_fraction: float) -> bool:
    return corpus.is_one_document and 0 < eval_fraction < 1


def _cut_before_the_end(text: str, fraction: float) -> int:
    """Returns where the last `fraction` of a text begins, moved to the next start of a line or word if one is near."""
    exact = int(len(text) * (1 - fraction))
    return first_break(text, exact, (exact + len(text)) // 2) or exact


def _open_corpus(source: Source, field: str, cache: Cache) -> Corpus:
    if source.name == STDLIB:
        return stdlib_corpus(cache)
    files = find_files(source.name, source.split, field)
    if files:
        return file_corpus(source, files, cache)
    if HUB_NAME.fullmatch(source.name) and not source.name.endswith((*READERS, *COMPRESSIONS)):
        return hub_corpus(source, field, cache)
    here = expanded(source.name).absolute()
    message = (
        f"'{source.name}' was not found: no file, folder or glob matches {here}, and it is not the "
        "name of a hub dataset"
    )
    raise DataError(Problem("data.missing", f"{field}.name", message))
