"""What a `Source` of a recipe means: its documents and the name of their content."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import Protocol

import xxhash

from llmtrain.data.cache import Cache
from llmtrain.data.files import STDLIB, file_corpus, find_files, stdlib_corpus
from llmtrain.data.formats import COMPRESSIONS, READERS, Document
from llmtrain.data.hub import hub_corpus
from llmtrain.errors import DataError, Problem
from llmtrain.recipe import Source
from llmtrain.untrusted import expanded

HUB_NAME = re.compile(r"[\w-][\w.-]*(/[\w-][\w.-]*)?")
"""NAME or OWNER/NAME."""


class Corpus(Protocol):
    """Documents in a fixed order."""

    @property
    def name(self) -> str:
        """As the recipe names it."""

    @property
    def identity(self) -> str:
        """Names the content: equal for equal documents in equal order, read in the same way."""

    def documents(self) -> Iterator[Document]:
        """The documents, from the first one. Raises DataError where they cannot be read."""


def open_corpora(sources: Sequence[Source], cache: Cache) -> list[Corpus]:
    """The corpus of each source. Raises DataError with the faults of all of them."""
    corpora: list[Corpus] = []
    problems: list[Problem] = []
    for number, source in enumerate(sources):
        try:
            corpora.append(_open_corpus(source, f"data.sources.{number}", cache))
        except DataError as error:
            problems += error.problems
    if problems:
        raise DataError(problems)
    return corpora


def held_out(text: str, eval_fraction: float) -> bool:
    """Whether a document belongs to the evaluation split.

    It depends on nothing but the text, so neither the order of the documents nor new ones move a
    document to the other split, and copies of a document are never on both sides.
    """
    return xxhash.xxh3_64_intdigest(text.encode()) < eval_fraction * 2**64


def _open_corpus(source: Source, field: str, cache: Cache) -> Corpus:
    if source.name == STDLIB:
        return stdlib_corpus(cache)
    files = find_files(source.name, source.split, field)
    if files:
        return file_corpus(source, files, cache)
    if HUB_NAME.fullmatch(source.name) and not source.name.endswith((*READERS, *COMPRESSIONS)):
        return hub_corpus(source, field, cache)
    here = expanded(source.name).absolute()
    message = f"'{source.name}' was not found: no file, folder or match of a glob at {here}, and not a hub dataset name"
    raise DataError(Problem("data.missing", f"{field}.name", message))
