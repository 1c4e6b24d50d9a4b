"""Saves the state of an engine as checkpoint shards, and loads it into an engine of the same plan or another one."""

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
from llmtrain.engines.state.files import ShardFiles, StoredShard, read_tensors
from llmtrain.engines.state.optimizer_shards import OptimizerShardLists, first_index, local_flat
from llmtrain.engines.state.shards import CheckpointShard, Chunk, ReplicaIndex, ShardLocation, WeightSlice
from llmtrain.engines.state.writer import Writer
from llmtrain.errors import CheckpointError, Problem
from llmtrain.overrides.torch import persistent_buffers
from llmtrain.system.piece_headers import SCALE, WEIGHT
from llmtrain.system.untrusted import UNREADABLE, file_fault, read_json

PROGRESS_FILE = f"{files.FOLDER}/progress.json"
GUARD_FILE = f"{files.FOLDER}/guard.safetensors"

Locate = Callable[[nn.Parameter], ShardLocation]


class HasState(Protocol):
    """The state of an engine, which any engine of the same model can load. All ranks call `save` and `load`."""

    guard: Guard
    """Equal on all ranks."""

    def checkpoint_shards(self) -> Iterator[list[CheckpointShard]]:
        """Yields the engine's own tensors as shards, in lists, each of which is valid until the next is requested."""

    def progress(self) -> dict[str, Any]:
        """Returns the state other than tensors as JSON values, equal on all ranks."""

    def resumed(self, progress: dict[str, Any]) -> None:
        """Continues from loaded shards and from the values that `progress` returned."""

    def save(self, writer: Writer) -> None:
        """Writes this rank's part of the state."""
        files.write(writer, rank(), self.checkpoint_shards())
        if rank() == 0:
            writer.text(PROGRESS_FILE, json.dumps(self.progress(), indent=1))
            writer.tensors(GUARD_FILE, self.guard.state())

    @torch.no_grad()
    def load(self, folder: Path) -> None:
        """Restores what `save` wrote, under any plan.

        Raises CheckpointError if the checkpoint lacks something that this rank needs.
        """
        reader = CheckpointReader(folder, rank())
        for shards in self.checkpoint_shards():
            load_shards(shards, reader)
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


def load_shards(shards: list[CheckpointShard], reader: CheckpointReader) -> None:
    """Copies saved values into the tensors of shards. Raises CheckpointError if the checkpoint lacks any."""
    for shard in shards:
        if shard.steps is not None:
            shard.steps.zero_()
    for shard in shards:
        reader.load(shard)


def checkpoint_shards(lists: OptimizerShardLists, locate: Locate) -> Iterator[list[CheckpointShard]]:
    """Yields what an optimizer holds as checkpoint shards.

    Factors are saved by every rank that has them: they are small, and each rank continues from its own files.
    """
    for optimizer_shards in lists:
        shards = []
        for shard in optimizer_shards:
            name, weight_slice, replica = locate(shard.parameter)
            shards.append(CheckpointShard(name, weight_slice, shard.start, shard.tensors, shard.steps, replica))
            for kind, factor in shard.factors.items():
                values = {kind: factor.values}
                shards.append(CheckpointShard(name, factor.weight_slice, factor.start, values, replica=replica))
        yield shards


def untrained_shards(
    model: nn.Module,
    replica: ReplicaIndex,
    omits_base_weights: bool,
    hugging_face_name: Callable[[str], str],
    locate: Callable[[str, Tensor], tuple[WeightSlice, ReplicaIndex] | None] = lambda name, tensor: None,
) -> list[CheckpointShard]:
    """Returns a model's untrained tensors as shards: frozen parameters, and buffers that belong to its weights.

    omits_base_weights: whether to leave out frozen parameters, because the files of the base model have them. replica:
    this rank's, of tensors that it holds whole. hugging_face_name: maps a name in `model`. locate: returns the slice
    and the replica of what this rank holds of a tensor; None for whole tensors.
    """
    frozen = {
        name: parameter
        for name, parameter in model.named_parameters()
        if not (parameter.requires_grad or omits_base_weights)
    }
    shards = []
    for name, tensor in (frozen | persistent_buffers(model)).items():
        weight_slice, own_replica = locate(name, tensor) or (WeightSlice.whole(tensor.shape), replica)
        if isinstance(tensor, DTensor):
            own_replica = ReplicaIndex()  # FSDP2's shards are not replicas of each other
        values = {WEIGHT: local_flat(tensor)}
        name = hugging_face_name(name)
        shards.append(CheckpointShard(name, weight_slice, first_index(tensor), values, replica=own_replica))
    return shards


def shape_of(parameter: Tensor) -> torch.Size:
    """Returns the whole shape of a parameter, which ZeRO-3 may have partitioned."""
    shape: torch.Size = getattr(parameter, "ds_shape", parameter.shape)
    return shape


class CheckpointReader:
    """Reads any range of any slice of a weight from the shards of a checkpoint.

    A rank that continues under the same plan reads only its own files.
    """

    def __init__(self, folder: Path, rank: int | None = None) -> None:
        """rank: the rank whose files are tried first; None for all files."""
        self.folder = folder
        self._shards_of_rank = _by_name(files.read_index(folder, rank)) if rank is not None else {}
        self._shards: dict[str, list[StoredShard]] | None = None
        self._last_whole: tuple[str, str, Tensor] | None = None
        self._files = ShardFiles()

    @property
    def shards(self) -> dict[str, list[StoredShard]]:
        """The shards of all ranks, by the weight's name."""
        if self._shards is None:
            self._shards = _by_name(files.read_index(self.folder))
        return self._shards

    def load(self, shard: CheckpointShard) -> None:
        """Copies saved values into the tensors of a shard. Raises CheckpointError if the checkpoint lacks them."""
        for kind, tensor in shard.tensors.items() if shard.numel else ():
            saved = self._range(shard, kind)
            self._check_type(saved, tensor, shard.name)
            tensor.copy_(saved)
        if shard.steps is not None:
            stored_shards = self._shards_of_rank.get(shard.name) or self.shards.get(shard.name, [])
            counted = max((stored.steps or 0.0 for stored in stored_shards), default=0.0)
            shard.steps.fill_(max(shard.steps.item(), counted))

    def read_as(self, name: str, like: Tensor) -> Tensor:
        """Returns a whole weight, flat, on the CPU. Raises CheckpointError if size or type differ from `like`."""
        weight = self.whole(name)
        self._check_type(weight, like, name)
        self._check_size(weight, like.numel(), name)
        return weight

    def whole(self, name: str, kind: str = WEIGHT) -> Tensor:
        """Returns a whole weight, or an optimizer's state of it, flat, on the CPU.

        Raises CheckpointError if the checkpoint does not contain exactly one value for each element (for scales, at
        least one).
        """
        if self._last_whole is not None and self._last_whole[:2] == (name, kind):
            return self._last_whole[2]
        self._last_whole = None  # frees the previous one, so that there are never two at a time
        by_slice: dict[WeightSlice, list[StoredShard]] = {}
        for shard in self.shards.get(name, []):
            if kind in shard.kinds:
                by_slice.setdefault(shard.weight_slice, []).append(shard)
        # Checked before memory is allocated, because a damaged header may contain any shape.
        sizes = {math.prod(weight_slice.shape) for weight_slice in by_slice}
        present = sum(shard.numel for shards in by_slice.values() for shard in shards)
        is_exact = sizes == {sum(weight_slice.numel for weight_slice in by_slice)} and not _overlap(by_slice)
        may_repeat = kind.endswith(SCALE)  # ranks that have parts of a block have equal scales
        if len(sizes) != 1 or present < max(sizes) or not (is_exact or may_repeat):
            raise self._lacks(name, kind)
        whole: Tensor | None = None
        for weight_slice, shards in by_slice.items():
            part = self._joined(shards, kind, 0, weight_slice.numel)
            if part is None:
                raise self._lacks(name, kind)
            if whole is None:
                whole = torch.full((sizes.pop(),), -1 if may_repeat else 0, dtype=part.dtype)
            self._check_type(part, whole, name)
            weight_slice.put(part, whole)
        if whole is None or (may_repeat and bool((whole < 0).any())):  # an element has no value
            raise self._lacks(name, kind)
        self._last_whole = (name, kind, whole)
        return whole

    def _range(self, shard: CheckpointShard, kind: str) -> Tensor:
        """Returns the saved values of a shard: of the rank's own files, else of all files, else cut from the whole."""
        end = shard.start + shard.numel
        saved = self._joined(_of_same_slice(self._shards_of_rank, shard), kind, shard.start, end)
        if saved is None:
            saved = self._joined(_of_same_slice(self.shards, shard), kind, shard.start, end)
        if saved is None:
            whole = self.whole(shard.name, kind)
            self._check_size(whole, math.prod(shard.weight_slice.shape), shard.name)
            saved = shard.weight_slice.take(whole)[shard.start : end]
        return saved

    def _joined(self, shards: list[StoredShard], kind: str, first: int, last: int) -> Tensor | None:
        """Returns elements `first` to `last` of a slice, joined from its shards; None if the shards lack any."""
        parts, position = [torch.empty(0)], first
        for shard in sorted(shards, key=lambda shard: shard.start):
            end = min(shard.start + shard.numel, last)
            if kind in shard.kinds and shard.start <= position < end:
                parts.append(self._files.read(shard, kind, position, end))
                position = end
        return torch.cat(parts[1:] or parts) if position >= last else None

    def _check_type(self, saved: Tensor, expected: Tensor, name: str) -> None:
        if saved.is_floating_point() != expected.is_floating_point():
            message = f"'{name}' is {saved.dtype} there, where {expected.dtype} is needed"
            raise CheckpointError(Problem("checkpoint.type", str(self.folder), message))

    def _check_size(self, saved: Tensor, expected: int, name: str) -> None:
        if saved.numel() != expected:
            message = f"'{name}' has {saved.numel():,} elements there, but {expected:,} are needed"
            raise CheckpointError(Problem("checkpoint.shape", str(self.folder), message))

    def _lacks(self, name: str, kind: str) -> CheckpointError:
        what = "the weight" if kind == WEIGHT else f"'{kind}' of the optimizer"
        return CheckpointError(Problem("checkpoint.pieces", str(self.folder), f"does not hold {what} for '{name}'"))


def _of_same_slice(stored: dict[str, list[StoredShard]], shard: CheckpointShard) -> list[StoredShard]:
    return [other for other in stored.get(shard.name, []) if other.weight_slice == shard.weight_slice]


def _overlap(slices: Iterable[WeightSlice]) -> bool:
    """Returns whether any element is in several chunks."""
    chunks = [chunk for weight_slice in slices for chunk in weight_slice.chunks]
    return any(_intersect(first, second) for first, second in itertools.combinations(chunks, 2))


def _intersect(first: Chunk, second: Chunk) -> bool:
    dims = zip(first.offsets, first.sizes, second.offsets, second.sizes, strict=True)
    return all(start < other + width and other < start + size for start, size, other, width in dims)


def _by_name(shards: Iterable[StoredShard]) -> dict[str, list[StoredShard]]:
    by_name: dict[str, list[StoredShard]] = {}
    for shard in shards:
        by_name.setdefault(shard.name, []).append(shard)
    return by_name
