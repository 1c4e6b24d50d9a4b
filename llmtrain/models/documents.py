"""Packed documents in layers: attention masks, and modules that compute each document on its own.

The document boundaries of a micro-batch are known on the host, so no device has to be read. `transformers` looks for
them in the positions before it makes a mask, and waits for the device in each forward pass. Some families (OPT, BLOOM,
gpt-oss) give it no positions to look at, and their documents would see each other.

No mask separates documents in a recurrence, a convolution, or an indexer that chooses among all tokens of a row. Such a
part of a decoder layer, found by trial (`llmtrain.models.tiny.documents_check`), is called with documents as rows. It
begins each with an empty state, and needs no boundaries, so this is right for every kernel on every machine.

If ranks hold slices of the sequences, a part that can continue from states (`llmtrain.models.states`) computes its own
slice, from those of the rank before, and hands its states on to the next rank. Other parts gather the slices, and
compute what the own slice depends on: the documents that reach into it, from their beginning to the end of the slice.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, cached_property, partial, wraps
from inspect import signature
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.masking_utils import and_masks, packed_sequence_mask_function

from llmtrain.data import Documents, MicroBatch
from llmtrain.models.own_attention import routed
from llmtrain.models.stages import decoder_layers
from llmtrain.models.states import Handover, States, with_states
from llmtrain.overrides.transformers import document_indices, mask_arguments

BOUNDARIES = (*Documents.NAMES, "seq_idx")
"""Arguments by which `transformers` gives boundaries to a module. Rows with one document each have none."""
Kinds = Mapping[type[nn.Module], bool]
"""Classes of parts that compute each document on its own, and whether they can continue one from states."""
LEAST_FILLED = 0.5
"""Rows are computed together if the shortest has at least this share of the tokens of the longest: the rest of a row is
filled up, so that at most half of what is computed is dropped."""


@dataclass(frozen=True)
class Slices:
    """The slices of sequences that ranks hold."""

    rank: int
    size: int
    gather: Callable[[Tensor], Tensor]
    """Joins the slices of all ranks, [batch, T / size, …] → [batch, T, …]; differentiable."""
    handover: Callable[[nn.Module, Tensor], Handover]
    """Begins to exchange the states of a part, which gets these hidden states, with the ranks of adjacent slices."""


@dataclass(frozen=True)
class RowGroup:
    """Documents that are computed together, as rows."""

    tokens: Tensor
    """The number of the token at each place, [documents, longest]; after the end of a document, its last one again."""
    lengths: Tensor
    """[documents]."""
    before: int | None = None
    """Which of the states that arrive from the slice before are those of its document, if that began there."""
    is_continued: bool = False
    """Whether it continues in the slice after."""

    def to(self, device: torch.device) -> RowGroup:
        """Copies it to a device."""
        tokens, lengths = (each.to(device, non_blocking=True) for each in (self.tokens, self.lengths))
        return RowGroup(tokens, lengths, self.before, self.is_continued)


class Rows:
    """The documents of a micro-batch, or those that a slice of it depends on, as rows of about the same length."""

    def __init__(
        self, position_ids: Tensor, documents: Documents | None = None, columns: tuple[int, int] | None = None
    ) -> None:
        """position_ids: [batch, T], of whole sequences. documents: in them; by default they are found. columns: first
        and end of the slice whose results are needed; by default all."""
        self.shape = position_ids.shape
        self.columns = columns or (0, self.shape[1])
        self._positions, self._documents = position_ids, documents
        self._on: dict[torch.device, tuple[list[RowGroup], Tensor]] = {}
        self._slices: dict[tuple[int, int], Rows] = {}
        self._segments: dict[tuple[int, int], Segments] = {}

    @property
    def result_shape(self) -> tuple[int, int]:
        """The shape of what is computed, [batch, columns]."""
        return self.shape[0], self.columns[1] - self.columns[0]

    def slice(self, rank: int, size: int) -> Rows:
        """Returns the rows that one of `size` equal slices depends on."""
        if (rank, size) not in self._slices:
            length = self.shape[1] // size
            columns = (rank * length, (rank + 1) * length)
            self._slices[rank, size] = Rows(self._positions, self.documents, columns)
        return self._slices[rank, size]

    def segments(self, rank: int, size: int) -> Segments:
        """Returns the parts of the documents in one of `size` equal slices."""
        if (rank, size) not in self._segments:
            self._segments[rank, size] = Segments(self.documents, self.shape, rank, size)
        return self._segments[rank, size]

    @cached_property
    def documents(self) -> Documents:
        """The documents; waits for a device that has the positions."""
        return self._documents or Documents.of(self._positions.cpu())

    @cached_property
    def _groups(self) -> list[RowGroup]:
        bounds = self.documents.bounds.long()
        begins, first, end = bounds[:-1], *self.columns
        column = begins % self.shape[1]
        lengths = bounds.diff().minimum(end - column)  # nothing depends on what comes after the slice
        needed = (lengths > 0) & (column + lengths > first)
        return _grouped(begins[needed], lengths[needed])

    def on(self, device: torch.device) -> tuple[list[RowGroup], Tensor]:
        """Returns the groups on a device, and the place of each result in their rows one after the other, [results]."""
        if device not in self._on:
            found = torch.cat([group.tokens.flatten() for group in self._groups])
            real = [torch.arange(group.tokens.shape[1]) < group.lengths[:, None] for group in self._groups]
            is_real = torch.cat([each.flatten() for each in real])
            places = torch.empty(self.shape.numel(), dtype=torch.int64)
            places[found[is_real]] = is_real.nonzero()[:, 0]
            places = places.view(self.shape)[:, slice(*self.columns)].flatten()
            self._on[device] = [group.to(device) for group in self._groups], places.to(device, non_blocking=True)
        return self._on[device]


class Segments(Rows):
    """The parts of the documents in a slice of a micro-batch, in the order in which they are computed.

    What the next rank waits for comes first, and what only waits for the rank before comes last; in the backward pass
    it is the other way around. Documents that reach into adjacent slices are computed one after the other, so that a
    rank computes one while the next rank computes the one before.
    """

    def __init__(self, documents: Documents, shape: torch.Size, rank: int, size: int) -> None:
        """documents: of whole sequences with this shape."""
        length = shape[1] // size
        self._bounds, self._length, self._first = documents.bounds.long(), shape[1], rank * length
        super().__init__(torch.empty(shape[0], length), documents)

    @cached_property
    def _groups(self) -> list[RowGroup]:
        length, first = self.shape[1], self._first
        begins, columns = self._bounds[:-1], self._bounds[:-1] % self._length - first
        ends = columns + self._bounds.diff()
        needed = (columns < length) & (ends > 0)
        row, columns, ends = begins[needed] // self._length, columns[needed], ends[needed]
        continues, is_continued = columns < 0, ends > length
        begins = row * length + columns.clamp(min=0)
        lengths = ends.clamp(max=length) - columns.clamp(min=0)

        def single(number: int) -> RowGroup:
            # A part takes a single token that continues from a state for one that is generated.
            before = int(continues[:number].sum()) if continues[number] else None
            tokens = torch.arange(max(int(lengths[number]), 1 if before is None else 2))
            tokens = begins[number] + tokens.clamp(max=int(lengths[number]) - 1)
            return RowGroup(tokens[None], lengths[number, None], before, bool(is_continued[number]))

        sent, last = (chosen.nonzero()[:, 0].tolist() for chosen in (is_continued, continues & ~is_continued))
        alone = ~continues & ~is_continued
        return [*map(single, sent), *_grouped(begins[alone], lengths[alone]), *map(single, last)]


def _grouped(begins: Tensor, lengths: Tensor) -> list[RowGroup]:
    """Returns documents in groups of about the same length. begins: the number of the first token of each."""
    groups = []
    order = lengths.argsort(descending=True, stable=True)
    while len(order):
        longest = int(lengths[order[0]])
        together = lengths[order] >= LEAST_FILLED * longest
        mine, order = order[together], order[~together]
        places = torch.arange(longest).minimum(lengths[mine, None] - 1)
        groups.append(RowGroup(begins[mine, None] + places, lengths[mine]))
    return groups


class _Active(threading.local):
    """The documents of the forward pass that runs in this thread."""

    rows: Rows | None = None


class _Process:
    """The slices that ranks hold, for all threads: autograd recomputes layers of a GPU in a thread of its own."""

    slices: Slices | None = None


_active, _process = _Active(), _Process()


@contextmanager
def document_masks(batch: MicroBatch) -> Iterator[None]:
    """A context in which the attention masks that a model makes keep documents apart, as do its other parts.

    batch: whole sequences, as the data provided them. If its documents are unknown, as for a batch on a device, the
    masks remain those of `transformers`.
    """
    with documents_as_rows(Rows(batch.position_ids, batch.documents)):
        if batch.documents is None:
            yield
            return
        documents = batch.documents
        indices = _document_indices(documents, batch.position_ids)
        if indices is None:
            with mask_arguments(lambda mask: mask):  # within it, transformers does not search positions for documents
                yield
            return

        def find(position_ids: Tensor) -> Tensor | None:
            if len(position_ids) == len(indices):
                return None  # `_keep_apart_in_mask` has them
            # Some of the rows, as on a device of `nn.DataParallel`: their documents follow from their positions.
            return _document_indices(documents, position_ids)

        with mask_arguments(partial(_keep_apart_in_mask, indices)), document_indices(find):
            yield


@contextmanager
def documents_as_rows(rows: Rows | None) -> Iterator[None]:
    """A context in which the modules of `keep_apart` compute these documents; None: what they are given as it is."""
    before, _active.rows = _active.rows, rows
    try:
        yield
    finally:
        _active.rows = before


@contextmanager
def sequences_in_slices(slices: Slices | None) -> Iterator[None]:
    """A context in which this rank holds slices of sequences; None for whole ones."""
    before, _process.slices = _process.slices, slices
    try:
        yield
    finally:
        _process.slices = before


def active_rows() -> Rows | None:
    """Returns the documents of the running forward pass, or recomputation."""
    return _active.rows


def holds_slices() -> bool:
    """Whether the running part of a model is given slices of sequences."""
    return _process.slices is not None


def on_same_documents(function: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a function that has the active documents whenever it is called, as a recomputed layer needs them."""
    rows = _active.rows

    def call(*args: Any, **named: Any) -> Any:
        with documents_as_rows(rows):
            return function(*args, **named)

    return call


class PerDocument:
    """What the modules of `keep_apart` are, besides what they were."""


def keep_apart(model: PreTrainedModel, kinds: Kinds) -> None:
    """Lets parts of the decoder layers of a model, or of a stage of it, compute each document on its own."""
    if not kinds:
        return
    for layer in decoder_layers(model)[1]:
        for part in layer.children():
            if type(part) in kinds:
                # Not an attribute of the instance: a copy of the module must not call the original.
                part.__class__ = _per_document(type(part), kinds[type(part)])  # type: ignore[arg-type]


def per_document(module: nn.Module) -> list[nn.Module]:
    """Returns the modules within a module that compute each document on its own."""
    return [part for part in module.modules() if isinstance(part, PerDocument)]


def outside_of_parts(module: nn.Module) -> list[nn.Module]:
    """Returns the modules within a module that are given slices of sequences if a rank holds slices."""
    inside = {inner for part in per_document(module) for inner in part.modules()}
    return [inner for inner in module.modules() if inner not in inside]


@cache
def _per_document(kind: type[nn.Module], hands_on: bool) -> type[nn.Module]:
    """Returns a subclass that computes each document on its own. hands_on: whether it can continue one from states."""

    @wraps(kind.forward)
    def forward(self: nn.Module, *args: Any, **named: Any) -> Any:
        rows, slices = _active.rows, _process.slices
        if rows is None or (slices is None and not rows.documents.has_shared_rows):
            return kind.forward(self, *args, **named)
        if slices is not None and hands_on and rows.shape[1] > slices.size:
            segments = rows.segments(slices.rank, slices.size)
            handover = slices.handover(self, _hidden(segments, (args, named)))
            return compute_segments(partial(kind.forward, self), segments, handover, args, named)
        if slices is not None:
            args, named = _gathered(rows, slices, args), _gathered(rows, slices, named)
            rows = rows.slice(slices.rank, slices.size)
        return compute_per_document(partial(kind.forward, self), rows, args, named)

    first = list(signature(kind.forward).parameters)[1]

    def call(self: nn.Module, *args: Any, **named: Any) -> Any:
        # The hooks with which ZeRO-3 gathers weights in the backward pass only see inputs without a name.
        return kind.__call__(self, *((named.pop(first),) if first in named else ()), *args, **named)

    body = {
        "forward": torch.compiler.disable(forward),  # type: ignore[no-untyped-call]
        "__call__": call,
        "__module__": kind.__module__,
        "__doc__": kind.__doc__,
    }
    return type(kind.__name__, (kind, PerDocument), body)


def compute_per_document(
    function: Callable[..., Any], rows: Rows, args: tuple[Any, ...], named: Mapping[str, Any]
) -> Any:
    """Calls a function of [batch, T, …] with documents as rows, and returns its results [batch, T, …], or a slice.

    The function is causal, so what follows a document in its row has no influence on it. All arguments are cut that
    have a dimension of tokens, masks [batch, heads, T, T] among them; boundaries are left out. Results without a
    dimension of tokens, such as states at the end of a sequence, are None. Raises ValueError if no argument has the
    shape of the micro-batch.
    """
    groups, places = rows.on(_hidden(rows, (args, named)).device)
    results = [(_call(function, rows.shape, group, args, named), group.tokens.shape) for group in groups]
    return _joined(results, places, rows.result_shape)


def compute_segments(
    function: Callable[..., Any],
    segments: Segments,
    handover: Handover,
    args: tuple[Any, ...],
    named: Mapping[str, Any],
) -> Any:
    """Calls a function of a slice, [batch, T / size, …], as `compute_per_document` does for whole sequences.

    Documents continue from the states of the rank before, and those of documents that continue are sent to the next
    rank. The function takes `States`.
    """
    groups, places = segments.on(_hidden(segments, (args, named)).device)
    received: list[States] = []
    results = []
    for group in groups:
        states = States()
        if group.before is not None:
            while len(received) <= group.before:
                received.append(handover.receive())
            states = received[group.before]
        uses_states = group.before is not None or group.is_continued
        result = _call(function, segments.shape, group, args, with_states(named, states) if uses_states else named)
        if group.is_continued:
            output, *others = result if isinstance(result, tuple | list) else (result,)
            output = handover.send(output, states)
            result = type(result)((output, *others)) if isinstance(result, tuple | list) else output
        results.append((result, group.tokens.shape))
    return _joined(results, places, segments.result_shape)


def _call(
    function: Callable[..., Any], shape: torch.Size, group: RowGroup, args: tuple[Any, ...], named: Mapping[str, Any]
) -> Any:
    """Calls a function with the documents of a group as rows. shape: that of the micro-batch."""
    cut = partial(_cut, shape, group.tokens, group.lengths)
    named = {name: value for name, value in named.items() if name not in BOUNDARIES}
    with documents_as_rows(None), sequences_in_slices(None), routed(None):
        return function(*_mapped(cut, args), **_mapped(cut, named))


def _gathered(rows: Rows, slices: Slices, arguments: Any) -> Any:
    """Joins the slices of all ranks in each argument that is one."""
    batch, length = rows.shape

    def gather(tensor: Tensor) -> Tensor:
        return slices.gather(tensor) if tensor.shape[:2] == (batch, length // slices.size) else tensor

    return _mapped(gather, arguments)


def _hidden(rows: Rows, arguments: Any) -> Tensor:
    """Returns the first tensor with the shape of the micro-batch."""
    found: list[Tensor] = []
    _mapped(lambda tensor: found.append(tensor) if tensor.shape[:2] == rows.shape else None, arguments)
    if not found:
        raise ValueError(f"its part that mixes tokens does not get whole sequences, {tuple(rows.shape)}")
    return found[0]


def _mapped(change: Callable[[Tensor], Any], value: Any) -> Any:
    """Changes all tensors of an argument."""
    if isinstance(value, Tensor):
        return change(value)
    if isinstance(value, Mapping):
        return {name: _mapped(change, item) for name, item in value.items()}
    if isinstance(value, tuple | list):
        return type(value)(_mapped(change, item) for item in value)
    return value


def _cut(shape: torch.Size, tokens: Tensor, lengths: Tensor, tensor: Tensor) -> Tensor:
    """Cuts a tensor of a micro-batch of this shape into rows. tokens, lengths: of a group, see `Rows`."""
    batch, length = shape
    first, *rest = tensor.shape or (0,)
    if first in (1, batch) and rest[:1] == [length]:
        whole = tensor.expand(batch, *rest).flatten(0, 1)
        return whole.index_select(0, tokens.flatten()).view(*tokens.shape, *rest[1:])
    if first in (1, batch) and len(rest) == 3 and rest[1:] == [length, length]:
        return _cut_mask(tensor, tokens, lengths, length)
    return tensor


def _cut_mask(mask: Tensor, tokens: Tensor, lengths: Tensor, length: int) -> Tensor:
    """Cuts the block of each document out of a mask, [1 or batch, heads, T, T] → [documents, heads, longest, longest].

    Nothing attends to what is after a document, and what is there attends as the last token does, so that no row of
    the mask is empty.
    """
    columns = tokens % length
    sample = tokens[:, 0] // length if len(mask) > 1 else torch.zeros_like(tokens[:, 0])
    blocks = mask[sample[:, None, None], :, columns[:, :, None], columns[:, None, :]].movedim(-1, 1)
    is_after = torch.arange(tokens.shape[1], device=mask.device) >= lengths[:, None]
    masked = mask[0, 0, 0, -1]  # what the first token has for the last one, in any kind of mask
    return torch.where(is_after[:, None, None, :], masked, blocks)


def _joined(results: list[tuple[Any, torch.Size]], places: Tensor, shape: tuple[int, int]) -> Any:
    """Joins the results of the groups, each with the shape of its rows. places: see `Rows.on`."""
    first = results[0][0]
    if isinstance(first, tuple | list):
        by_index = zip(*([(part, size) for part in result] for result, size in results), strict=True)
        return type(first)(_joined(list(parts), places, shape) for parts in by_index)
    if not isinstance(first, Tensor) or any(result.shape[:2] != size for result, size in results):
        return None
    flat = torch.cat([result.flatten(0, 1) for result, _ in results])
    return flat.index_select(0, places).view(*shape, *flat.shape[1:])


def _keep_apart_in_mask(indices: Tensor, arguments: dict[str, Any]) -> dict[str, Any]:
    """Changes the arguments of a mask so that no token attends to another document. indices: [batch, T], on the host.

    The lengths among the arguments may still be those of a slice.
    """
    is_of_sequences = arguments["batch_size"] == len(indices) and arguments["q_length"] == arguments["kv_length"]
    if not is_of_sequences or arguments["attention_mask"] is not None:
        return arguments
    same_document = packed_sequence_mask_function(indices.to(arguments["device"], non_blocking=True))
    function = arguments["mask_function"]
    if getattr(arguments.get("config"), "attention_chunk_size", None):
        function = _within_documents(function, indices.to(arguments["device"], non_blocking=True))
    apart = and_masks(function, same_document)
    return arguments | {"mask_function": apart, "allow_is_causal_skip": False}


def _within_documents(function: Callable[..., Any], indices: Tensor) -> Callable[..., Any]:
    """Returns a mask function of the places of two tokens in their document: chunks begin with it (Llama 4)."""
    places = torch.arange(indices.shape[1], device=indices.device).expand_as(indices)
    begins = torch.diff(indices, prepend=indices[:, :1] - 1, dim=-1) != 0
    places = places - torch.where(begins, places, 0).cummax(-1).values

    def mask(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Any:
        return function(batch, head, places[batch, query], places[batch, key])

    return mask


def _document_indices(documents: Documents, position_ids: Tensor) -> Tensor | None:
    """Returns document indices per row, [batch, T], as `transformers` does; None if every row has one document."""
    if not documents.has_shared_rows:
        return None
    begins = torch.diff(position_ids, prepend=position_ids[:, :1] - 1, dim=-1) != 1
    return begins.cumsum(-1)
