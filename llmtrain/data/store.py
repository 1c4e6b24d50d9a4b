"""The tokens of a corpus on disk: written by `StreamWriter`, opened memory-mapped by `TokenStore`."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

from llmtrain.data.arrays import ArrayWriter, open_array, require_all_intact
from llmtrain.data.cache import Entry
from llmtrain.data.sources.corpus import SPLITS, Split
from llmtrain.data.sources.special import SpecialTokenCounts


@dataclass(frozen=True)
class Stream:
    """The documents of a split, concatenated.

    A document consists of its tokens and the end-of-text token, preceded by the token that the tokenizer puts first, if
    any.
    """

    tokens: NDArray[Any]
    """[tokens], uint16 or uint32."""
    documents: NDArray[np.uint64]
    """[documents + 1]: the start of each document, and the end of the last one."""
    loss_mask: NDArray[np.bool_] | None = None
    """[tokens]: whether a token is a label, so that the loss includes its prediction; None if all are."""
    holds_pairs: bool = False
    """Whether each two documents are a pair: the chosen conversation, then the rejected one."""
    desirable: NDArray[np.bool_] | None = None
    """[documents / 2]: whether a labelled conversation is desirable; None for others. Each is followed by a mismatched
    one: its prompt with the completion of another prompt."""

    def __len__(self) -> int:
        return len(self.tokens)


class TokenStore:
    """The tokens of one corpus under one tokenizer, in both splits."""

    def __init__(self, entry: Entry) -> None:
        self.path = entry.path
        self.key = entry.path.name
        self.made = entry.made
        self.meta = entry.meta
        self.streams = {split: self._stream(split) for split in SPLITS}

    @property
    def seconds(self) -> float:
        """Duration of its preparation."""
        return float(self.meta["seconds"])

    @property
    def special(self) -> SpecialTokenCounts:
        """Texts of special tokens in the documents."""
        return SpecialTokenCounts(**self.meta["special_tokens"])

    def counts(self) -> NDArray[np.int64]:
        """Returns how many times each token occurs in the training split, [vocabulary]."""
        counts = open_array(self.path, "train_counts", np.int64, self.meta["vocab_size"])
        require_all_intact(counts)
        return counts

    def _stream(self, split: Split) -> Stream:
        length = self.meta["splits"][split]
        tokens = open_array(self.path, f"{split}_tokens", self.meta["dtype"], length["tokens"])
        documents = open_array(self.path, f"{split}_documents", np.uint64, length["documents"] + 1)
        of_chats = "conversations" in self.meta
        trained = open_array(self.path, f"{split}_trained", np.bool_, length["tokens"]) if of_chats else None
        labelled = self.meta.get("judged", False)
        labels = open_array(self.path, f"{split}_desirable", np.bool_, length["documents"] // 2) if labelled else None
        return Stream(tokens, documents, trained, self.meta.get("pairs", False), labels)


class StreamWriter:
    """Writes the stream of one split to the folder of a store."""

    def __init__(self, folder: Path, split: Split, vocab_size: int, stack: ExitStack) -> None:
        self._folder, self._split, self._stack = folder, split, stack
        self.dtype = np.dtype(np.uint16 if vocab_size <= 2**16 else np.uint32)
        self.counts = np.zeros(vocab_size, np.int64)
        """[vocabulary]: how many times each token has been written."""
        self._tokens = self.open("tokens", self.dtype)
        self._documents = self.open("documents", np.uint64)
        self._documents.append(np.zeros(1, np.uint64))

    @property
    def tokens(self) -> int:
        """Number of tokens written."""
        return self._tokens.length

    @property
    def documents(self) -> int:
        """Number of documents written."""
        return self._documents.length - 1

    def open(self, name: str, dtype: DTypeLike) -> ArrayWriter:
        """Opens another array of the split, which is closed with `stack`."""
        return self._stack.enter_context(ArrayWriter(self._folder, f"{self._split}_{name}", dtype))

    def append(self, tokens: NDArray[Any], ends: NDArray[Any]) -> None:
        """Appends tokens. ends: the ends of documents among them, counted from the beginning of the stream."""
        self._tokens.append(tokens)
        self._documents.append(ends)
        self.counts += np.bincount(tokens, minlength=len(self.counts))


def write_counts(folder: Path, writers: Mapping[Split, StreamWriter]) -> dict[str, Any]:
    """Writes the token counts of the training split; returns the metadata from which `TokenStore` opens the streams."""
    train = writers["train"]
    with ArrayWriter(folder, "train_counts", np.int64) as counts:
        counts.append(train.counts)
    splits = {split: {"documents": writer.documents, "tokens": writer.tokens} for split, writer in writers.items()}
    return {"dtype": train.dtype.name, "vocab_size": len(train.counts), "splits": splits}
