"""The tokens of a corpus on disk: written by `StreamWriter`, opened memory-mapped by `TokenStore`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

from llmtrain.data.arrays import ArrayWriter, open_array, require_all_intact, require_intact
from llmtrain.data.cache import Entry
from llmtrain.data.sources.corpus import SPLITS, Split
from llmtrain.data.sources.special import SpecialTokenCounts


@dataclass(frozen=True)
class StoredImages:
    """The encoded images of a split, in the order of their tokens."""

    tokens: NDArray[np.uint64]
    """[images]: the index in the stream of the first image token of each."""
    ends: NDArray[np.uint64]
    """[images + 1]: 0, then the end of each image in the bytes."""
    content: NDArray[np.uint8]
    """[bytes]."""

    def read(self, start: int, length: int) -> list[tuple[int, bytes]]:
        """Returns the images of a segment of the stream, each with the place of its first image token in it."""
        first, end = np.searchsorted(self.tokens, np.array([start, start + length], np.uint64))
        # A search is right if the items on both sides of its results are, whatever else it has compared.
        bounds = np.array([max(0, first - 1)]), np.array([min(end + 1, len(self.tokens))])
        require_intact(self.tokens, *bounds)
        require_intact(self.ends, np.array([first]), np.array([end + 1]))
        ends = self.ends[first : end + 1].astype(np.int64)
        require_intact(self.content, ends[:1], ends[-1:])
        columns = (self.tokens[first:end].astype(np.int64) - start).tolist()
        pieces = zip(columns, ends[:-1].tolist(), ends[1:].tolist(), strict=True)
        return [(column, self.content[begin:stop].tobytes()) for column, begin, stop in pieces]


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
    loss_columns: tuple[str, ...] = ()
    """Columns of numbers that a user's own loss is given (`objective.columns`)."""
    values: NDArray[np.float32] | None = None
    """[documents · columns]: the numbers of the first document, then those of the next one; None without columns."""

    images: StoredImages | None = None
    """The images of conversations; None if the model reads texts only."""

    def __len__(self) -> int:
        return len(self.tokens)

    def values_at(self, tokens: NDArray[np.int64]) -> NDArray[np.float32]:
        """Returns the numbers of the documents that contain some tokens, [..., columns].

        tokens: [...], indices in the stream.
        """
        assert self.values is not None, "the documents have numbers"
        after = np.searchsorted(self.documents, tokens.ravel().astype(np.uint64), side="right")
        # A search is right if the items on both sides of its result are, whatever else it has compared.
        require_intact(self.documents, after - 1, np.minimum(after + 1, len(self.documents)))
        first = (after - 1) * len(self.loss_columns)
        require_intact(self.values, first, first + len(self.loss_columns))
        found: NDArray[np.float32] = self.values[first[:, None] + np.arange(len(self.loss_columns))]
        return found.reshape(*tokens.shape, len(self.loss_columns))


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
        columns = tuple(self.meta.get("loss_columns", ()))
        size = len(columns) * length["documents"]
        values = open_array(self.path, f"{split}_values", np.float32, size) if columns else None
        images = None
        if counts := self.meta.get("images"):
            number = counts[split]["images"]
            images = StoredImages(
                open_array(self.path, f"{split}_image_tokens", np.uint64, number),
                open_array(self.path, f"{split}_image_ends", np.uint64, number + 1),
                open_array(self.path, f"{split}_images", np.uint8, counts[split]["bytes"]),
            )
        return Stream(tokens, documents, trained, self.meta.get("pairs", False), labels, columns, values, images)


class StreamWriter:
    """Writes the stream of one split to the folder of a store."""

    def __init__(
        self, folder: Path, split: Split, vocab_size: int, stack: ExitStack, loss_columns: Sequence[str] = ()
    ) -> None:
        """loss_columns: those in which each document has a number (`objective.columns`)."""
        self._folder, self._split, self._stack = folder, split, stack
        self.dtype = np.dtype(np.uint16 if vocab_size <= 2**16 else np.uint32)
        self.counts = np.zeros(vocab_size, np.int64)
        """[vocabulary]: how many times each token has been written."""
        self._tokens = self.open("tokens", self.dtype)
        self._documents = self.open("documents", np.uint64)
        self._documents.append(np.zeros(1, np.uint64))
        self.loss_columns = loss_columns
        self._values = self.open("values", np.float32) if loss_columns else None

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

    def append(
        self, tokens: NDArray[Any], ends: NDArray[Any], values: Sequence[Sequence[float]] | NDArray[Any] = ()
    ) -> None:
        """Appends tokens. ends: the ends of documents among them, counted from the beginning of the stream.

        values: the numbers of each of these documents.
        """
        self._tokens.append(tokens)
        self._documents.append(ends)
        if self._values:
            self._values.append(np.array(values, np.float32).reshape(len(ends) * len(self.loss_columns)))
        self.counts += np.bincount(tokens, minlength=len(self.counts))


class ImageWriter:
    """Writes the images of a split, besides its stream."""

    def __init__(self, stream: StreamWriter) -> None:
        self._tokens = stream.open("image_tokens", np.uint64)
        self._ends = stream.open("image_ends", np.uint64)
        self._ends.append(np.zeros(1, np.uint64))
        self._content = stream.open("images", np.uint8)

    @property
    def counts(self) -> dict[str, int]:
        """The numbers of images and bytes written."""
        return {"images": self._tokens.length, "bytes": self._content.length}

    def append(self, token: int, image: bytes) -> None:
        """Appends an encoded image. token: the index in the stream of its first image token."""
        self._tokens.append(np.array([token], np.uint64))
        self._content.append(np.frombuffer(image, np.uint8))
        self._ends.append(np.array([self._content.length], np.uint64))


def write_counts(folder: Path, writers: Mapping[Split, StreamWriter]) -> dict[str, Any]:
    """Writes the token counts of the training split; returns the metadata from which `TokenStore` opens the streams."""
    train = writers["train"]
    with ArrayWriter(folder, "train_counts", np.int64) as counts:
        counts.append(train.counts)
    splits = {split: {"documents": writer.documents, "tokens": writer.tokens} for split, writer in writers.items()}
    columns = {"loss_columns": list(train.loss_columns)} if train.loss_columns else {}
    return {"dtype": train.dtype.name, "vocab_size": len(train.counts), "splits": splits, **columns}
