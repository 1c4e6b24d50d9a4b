"""Random documents instead of a recipe's own, for runs in which the text does not matter."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np

from llmtrain.data.cache import Cache, key_of
from llmtrain.data.prepare import Prepared, packed_source, unique_names
from llmtrain.data.progress import Progress
from llmtrain.data.sources.corpus import SPLITS
from llmtrain.data.store import StreamWriter, TokenStore, write_counts
from llmtrain.data.tokenizer import PreparedTokenizer
from llmtrain.recipe import Recipe

DOCUMENTS = {"train": 512, "eval": 64}
"""Number of documents per source: a few hundred sequences."""
EOS = 0


def synthetic(recipe: Recipe, folder: Path) -> Prepared:
    """Makes as many sources as the recipe has, mixed and packed in the same way, in `folder`; made only once.

    Documents are 2 to 1.5 · T tokens long, so that sequences contain several of them, and some are cut; those of
    completions are at most T / 2 long. The vocabulary is that of the model; there is no tokenizer. The result is the
    same for the same recipe.
    """
    vocabulary = recipe.vocab_size
    assert vocabulary is not None, "a model for random tokens must state its vocabulary size"
    cache = Cache(folder, Progress())
    tokenizer = PreparedTokenizer(
        folder=folder, identity="synthetic", vocab_size=vocabulary, eos_id=EOS, bos_id=None, made=True
    )
    length = recipe.data.sequence_length
    sources, names, objective = [], unique_names(recipe.data.sources), recipe.objective
    columns = objective.columns
    kind = "" if not objective.reads_completions else "pairs" if objective.compares_pairs else "judged"
    for number, source in enumerate(recipe.data.sources):
        key = key_of("synthetic", number, vocabulary, length, *([kind] if kind else []), *columns)
        entry = cache.entry("tokens", key, lambda path, n=number: _write(path, n, vocabulary, length, kind, columns))  # type: ignore[misc]
        sources.append(packed_source(recipe.data, names[number], source.weight, TokenStore(entry), tokenizer, cache))
    return Prepared(tokenizer, tuple(sources), (), length, made=True, seconds=0.0)


def _write(folder: Path, seed: int, vocabulary: int, length: int, kind: str, columns: Sequence[str]) -> dict[str, Any]:
    """Writes the token store of one source; returns its metadata, in the form that `store` reads.

    kind: the key of the metadata that says what documents are, if they are completions. columns: `objective.columns`.
    """
    random = np.random.default_rng(seed)
    with ExitStack() as stack:
        writers = {split: StreamWriter(folder, split, vocabulary, stack, columns) for split in SPLITS}
        for split, writer in writers.items():
            sizes = random.integers(2, max(3, length // 2 if kind else length * 3 // 2), DOCUMENTS[split])
            ends = np.cumsum(sizes)
            tokens = random.integers(EOS + 1, vocabulary, ends[-1])
            tokens[ends - 1] = EOS
            together = 2 if kind == "pairs" else 1
            shape = (len(sizes) // together, len(columns))
            # From 0 to 1, and often 1: what a class, a weight or a score may be, as in the trial of a loss.
            values = np.where(random.random(shape) < 0.5, 1.0, random.random(shape)).repeat(together, axis=0)
            writer.append(tokens, ends, values)
            if kind == "judged":
                writer.open("desirable", np.bool_).append(random.integers(0, 2, len(sizes) // 2))
    meta = write_counts(folder, writers) | {"characters": 0, "seconds": 0.0}
    return meta | ({kind: True} if kind else {})
