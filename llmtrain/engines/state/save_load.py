"""The state of an engine, saved as pieces and restored by an engine of the same plan or another one."""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Annotated, Any, Literal, Protocol

import torch
from pydantic import BaseModel, ConfigDict, Field
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from llmtrain.engines.guard import Guard
from llmtrain.engines.runtime.distributed import rank
from llmtrain.engines.state import files
from llmtrain.engines.state.files import Files, Stored, read_tensors
from llmtrain.engines.state.held import HeldState, first_index, local_flat
from llmtrain.engines.state.pieces import Box, Piece, Region
from llmtrain.engines.state.writer import Writer
from llmtrain.errors import CheckpointError, Problem
from llmtrain.overrides.torch import persistent_buffers
from llmtrain.system.piece_headers import SCALE, WEIGHT
from llmtrain.system.untrusted import UNREADABLE, file_fault, read_json

PROGRESS_FILE = f"{files.FOLDER}/progress.json"
GUARD_FILE = f"{files.FOLDER}/guard.safetensors"

Place = tuple[str, Region, tuple[int, int]]
"""Location of what this rank would hold of a parameter without ZeRO: the weight's Hugging Face name, the region, and
(index of this copy, number of copies)."""
PlaceOf = Callable[[nn.Parameter], Place]
HeldLists = Iterable[list[HeldState]]


class HasState(Protocol):
    """The state of an engine, which any engine of the same model restores. All ranks call `save` and `load`."""

    guard: Guard
    """Equal on all ranks."""

    def pieces(self) -> Iterator[list[Piece]]:
        """Yields live pieces, in lists; the pieces of a list are valid until the next list is requested."""

    def progress(self) -> dict[str, Any]:
        """Returns the state other than tensors as JSON values, equal on all ranks."""

    def resumed(self, progress: dict[str, Any]) -> None:
        """Continues from loaded pieces and from the values that `progress` returned."""

    def save(self, writer: Writer) -> None:
        """Writes this rank's share of the state."""
        files.write(writer, rank(), self.pieces())
        if rank() == 0:
            writer.text(PROGRESS_FILE, json.dumps(self.progress(), indent=1))
            writer.tensors(GUARD_FILE, self.guard.state())

    @torch.no_grad()
    def load(self, folder: Path) -> None:
        """Restores what `save` wrote, under any plan.

        Raises CheckpointError if the checkpoint lacks something that this rank needs.
        """
        source = StateSource(folder, rank())
        for pieces in self.pieces():
            fill_pieces(pieces, source)
        self.resumed(_read_progress(folder / PROGRESS_FILE))
        if (folder / GUARD_FILE).exists():  # checkpoints of earlier versions have no guard
            self.guard.load(read_tensors(folder / GUARD_FILE, self.guard.state()))


class EngineProgress(BaseModel):
    """The values that `HasState.progress` of any engine returns."""

    model_config = ConfigDict(strict=True, extra="forbid")

    schedule: Annotated[int, Field(ge=0, lt=2**63)]
    """Number of steps that the learning rate schedule has taken."""
    deepspeed: dict[Literal["global_steps", "global_samples", "skipped_steps"], int] | None = None
    """DeepSpeed's own counters, by the names of its attributes."""
    loss_scale: dict[Literal["loss_scaler", "gradscaler"], dict[str, bool | int | float]] | None = None
    """The values of each kind of loss scaler."""


def _read_progress(file: Path) -> dict[str, Any]:
    try:
        return read_json(file, EngineProgress).model_dump(exclude_none=True)
    except UNREADABLE as error:
        raise CheckpointError(
            Problem("checkpoint.progress", str(file), f"cannot be read: {file_fault(error)}")
        ) from None


def fill_pieces(pieces: list[Piece], source: StateSource) -> None:
    """Copies saved values into pieces. Raises CheckpointError if the checkpoint lacks one."""
    for piece in pieces:
        if piece.steps is not None:
            piece.steps.zero_()
    for piece in pieces:
        source.fill(piece)


def pieces_of(lists: HeldLists, place: PlaceOf) -> Iterator[list[Piece]]:
    """Yields what an optimizer holds, as pieces.

    Factors are saved by every rank that has them: they are small, and each rank continues from its own files.
    """
    for some in lists:
        pieces = []
        for one in some:
            name, region, copy = place(one.parameter)
            pieces.append(Piece(name, region, one.start, one.tensors, one.steps, copy))
            for kind, factor in one.factors.items():
                pieces.append(Piece(name, factor.region, factor.start, {kind: factor.values}, copy=copy))
        yield pieces


def untrained_pieces(
    model: nn.Module,
    copy: tuple[int, int],
    omits_base_weights: bool,
    hugging_face_name: Callable[[str], str],
    portion: Callable[[str, Tensor], tuple[Region, tuple[int, int]] | None] = lambda name, tensor: None,
) -> list[Piece]:
    """Returns live pieces of a model's untrained tensors: frozen parameters, and buffers that belong to its weights.

    omits_base_weights: whether to leave out frozen parameters, because the files of the base model have them. copy: as
    in `Piece`, for tensors that are whole on this rank. hugging_face_name: maps a name in `model`. portion: returns the
    region and the copy of what this rank holds of a tensor; None for whole tensors.
    """
    frozen = {name: one for name, one in model.named_parameters() if not (one.requires_grad or omits_base_weights)}
    pieces = []
    for name, tensor in (frozen | persistent_buffers(model)).items():
        region, own = portion(name, tensor) or (Region.whole(tensor.shape), copy)
        if isinstance(tensor, DTensor):
            own = (0, 1)  # FSDP2's shards are not copies of each other
        content = {WEIGHT: local_flat(tensor)}
        pieces.append(Piece(hugging_face_name(name), region, first_index(tensor), content, copy=own))
    return pieces


def shape_of(parameter: Tensor) -> torch.Size:
    """Returns the whole shape of a parameter, which ZeRO-3 may have partitioned."""
    shape: torch.Size = getattr(parameter, "ds_shape", parameter.shape)
    return shape


def multiplied(copy: tuple[int, int], other: tuple[int, int]) -> tuple[int, int]:
    """Returns (index, number) of a copy if every copy of one kind has copies of another kind."""
    return copy[0] * other[1] + other[0], copy[1] * other[1]


class StateSource:
    """The pieces of a checkpoint, from which any range of any region is assembled.

    A rank that continues under the same plan reads only its own files.
    """

    def __init__(self, folder: Path, rank: int | None = None) -> None:
        """rank: the rank whose files are tried first; None for all files."""
        self.folder = folder
        self._own = _by_name(files.read_index(folder, rank)) if rank is not None else {}
        self._all: dict[str, list[Stored]] | None = None
        self._whole: tuple[str, str, Tensor] | None = None
        self._files = Files()

    @property
    def all(self) -> dict[str, list[Stored]]:
        """The pieces of all ranks, by name."""
        if self._all is None:
            self._all = _by_name(files.read_index(self.folder))
        return self._all

    def fill(self, piece: Piece) -> None:
        """Copies saved values into the tensors of a piece. Raises CheckpointError if the checkpoint lacks them."""
        for kind, tensor in piece.tensors.items() if piece.numel else ():
            found = self._range(piece, kind)
            self._check_type(found, tensor, piece.name)
            tensor.copy_(found)
        if piece.steps is not None:
            stored = self._own.get(piece.name) or self.all.get(piece.name, [])
            counted = max((one.steps or 0.0 for one in stored), default=0.0)
            piece.steps.fill_(max(piece.steps.item(), counted))

    def read_as(self, name: str, like: Tensor) -> Tensor:
        """Returns a whole weight, flat, on the CPU. Raises CheckpointError if size or type differ from `like`."""
        found = self.whole(name)
        self._check_type(found, like, name)
        self._check_size(found, like.numel(), name)
        return found

    def whole(self, name: str, kind: str = WEIGHT) -> Tensor:
        """Returns a whole weight, or an optimizer's state of it, flat, on the CPU.

        Raises CheckpointError if the checkpoint does not contain exactly one value for each element (for scales, at
        least one).
        """
        if self._whole is not None and self._whole[:2] == (name, kind):
            return self._whole[2]
        self._whole = None  # frees the previous one, so that there are never two at a time
        by_region: dict[Region, list[Stored]] = {}
        for one in self.all.get(name, []):
            if kind in one.kinds:
                by_region.setdefault(one.region, []).append(one)
        # Checked before memory is allocated, because a damaged header may contain any shape.
        sizes = {math.prod(region.shape) for region in by_region}
        present = sum(one.numel for stored in by_region.values() for one in stored)
        is_exact = sizes == {sum(region.numel for region in by_region)} and not _overlap(by_region)
        may_repeat = kind.endswith(SCALE)  # ranks that have parts of a block have equal scales
        if len(sizes) != 1 or present < max(sizes) or not (is_exact or may_repeat):
            raise self._lacks(name, kind)
        result: Tensor | None = None
        for region, stored in by_region.items():
            part = self._joined(stored, kind, 0, region.numel)
            if part is None:
                raise self._lacks(name, kind)
            if result is None:
                result = torch.full((sizes.pop(),), -1 if may_repeat else 0, dtype=part.dtype)
            self._check_type(part, result, name)
            region.put(part, result)
        if result is None or (may_repeat and bool((result < 0).any())):  # an element has no value
            raise self._lacks(name, kind)
        self._whole = (name, kind, result)
        return result

    def _range(self, piece: Piece, kind: str) -> Tensor:
        last = piece.start + piece.numel
        found = self._joined(_alike(self._own, piece), kind, piece.start, last)
        if found is None:
            found = self._joined(_alike(self.all, piece), kind, piece.start, last)
        if found is None:
            whole = self.whole(piece.name, kind)
            self._check_size(whole, math.prod(piece.region.shape), piece.name)
            found = piece.region.take(whole)[piece.start : last]
        return found

    def _joined(self, stored: list[Stored], kind: str, first: int, last: int) -> Tensor | None:
        """Returns elements `first` to `last` of a region, joined from its pieces; None if the pieces lack any."""
        parts, at = [torch.empty(0)], first
        for one in sorted(stored, key=lambda one: one.start):
            end = min(one.start + one.numel, last)
            if kind in one.kinds and one.start <= at < end:
                parts.append(self._files.read(one, kind, at, end))
                at = end
        return torch.cat(parts[1:] or parts) if at >= last else None

    def _check_type(self, found: Tensor, expected: Tensor, name: str) -> None:
        if found.is_floating_point() != expected.is_floating_point():
            message = f"'{name}' is {found.dtype} there, where {expected.dtype} is needed"
            raise CheckpointError(Problem("checkpoint.type", str(self.folder), message))

    def _check_size(self, found: Tensor, expected: int, name: str) -> None:
        if found.numel() != expected:
            message = f"'{name}' has {found.numel():,} elements there, but {expected:,} are needed"
            raise CheckpointError(Problem("checkpoint.shape", str(self.folder), message))

    def _lacks(self, name: str, kind: str) -> CheckpointError:
        what = "the weight" if kind == WEIGHT else f"'{kind}' of the optimizer"
        return CheckpointError(Problem("checkpoint.pieces", str(self.folder), f"does not hold {what} for '{name}'"))


def _alike(stored: dict[str, list[Stored]], piece: Piece) -> list[Stored]:
    """Returns the stored pieces of exactly the same region."""
    return [one for one in stored.get(piece.name, []) if one.region == piece.region]


def _overlap(regions: Iterable[Region]) -> bool:
    """Returns whether any element is held twice."""
    boxes = [box for region in regions for box in region.boxes]
    return any(_meet(one, other) for one, other in itertools.combinations(boxes, 2))


def _meet(one: Box, other: Box) -> bool:
    ranges = zip(one.first, one.size, other.first, other.size, strict=True)
    return all(first < second + width and second < first + size for first, size, second, width in ranges)


def _by_name(stored: Iterable[Stored]) -> dict[str, list[Stored]]:
    found: dict[str, list[Stored]] = {}
    for one in stored:
        found.setdefault(one.name, []).append(one)
    return found
