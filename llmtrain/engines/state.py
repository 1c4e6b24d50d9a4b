"""The state of an engine, saved as pieces and taken back by an engine of the same plan or of another one."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.optim.lr_scheduler import LRScheduler

from llmtrain.engines import state_file
from llmtrain.engines.distributed import rank
from llmtrain.engines.guard import Guard
from llmtrain.engines.held import Held
from llmtrain.engines.pieces import WEIGHT, Piece, Region
from llmtrain.engines.state_file import Files, Stored
from llmtrain.engines.writer import Writer
from llmtrain.errors import CheckpointError, Problem

PROGRESS_FILE = f"{state_file.FOLDER}/progress.json"
GUARD_FILE = f"{state_file.FOLDER}/guard.safetensors"

Place = tuple[str, Region, tuple[int, int]]
"""Where what this rank holds of a parameter, ZeRO aside, lies: the weight's Hugging Face name, the region, and
which copy of it this is of how many."""


class HasState(Protocol):
    """What an engine shows of itself to be saved."""

    @property
    def guard(self) -> Guard:
        """Equal on all ranks."""

    def pieces(self) -> Iterator[list[Piece]]:
        """Live pieces, in lists; those of a list may be gone when the next one is asked for."""

    def progress(self) -> dict[str, Any]:
        """JSON values beside the tensors, equal on all ranks."""

    def resumed(self, progress: dict[str, Any]) -> None:
        """Goes on from written pieces and what `progress` gave."""


def save_state(engine: HasState, writer: Writer) -> None:
    """Writes this rank's share of the state; called by all ranks."""
    state_file.write(writer, rank(), engine.pieces())
    if rank() == 0:
        writer.text(PROGRESS_FILE, json.dumps(engine.progress(), indent=1))
        writer.tensors(GUARD_FILE, engine.guard.state())


@torch.no_grad()
def load_state(engine: HasState, folder: Path) -> None:
    """Takes back what `save_state` wrote, under whatever plan; called by all ranks.

    Raises CheckpointError where something that this rank needs is not there.
    """
    source = Source(folder, rank())
    for pieces in engine.pieces():
        fill(pieces, source)
    engine.resumed(json.loads((folder / PROGRESS_FILE).read_text()))
    if (folder / GUARD_FILE).exists():  # else it was written before there was a guard
        engine.guard.load(load_file(folder / GUARD_FILE))


def fill(pieces: list[Piece], source: Source) -> None:
    """Writes what was saved into pieces. Raises CheckpointError where it is not there."""
    for piece in pieces:
        if piece.steps is not None:
            piece.steps.zero_()
    for piece in pieces:
        source.fill(piece)


def pieces_of(lists: Iterable[list[Held]], place: Callable[[nn.Parameter], Place]) -> Iterator[list[Piece]]:
    """What an optimizer holds, as pieces."""
    for some in lists:
        pieces = []
        for one in some:
            name, region, copy = place(one.parameter)
            pieces.append(Piece(name, region, one.start, one.tensors, one.steps, copy))
        yield pieces


def untrained_pieces(model: nn.Module, whole: Callable[[nn.Parameter], Tensor], copy: tuple[int, int]) -> list[Piece]:
    """What a model has beside trained parameters: frozen ones, and buffers that are part of its weights."""
    tensors = {name: whole(one) for name, one in model.named_parameters() if not one.requires_grad}
    for path, module in model.named_modules():
        for name, buffer in module.named_buffers(recurse=False):
            if name not in module._non_persistent_buffers_set:
                tensors[f"{path}.{name}" if path else name] = buffer
    return [
        Piece(name, Region.whole(tensor.shape), 0, {WEIGHT: tensor.detach().reshape(-1)}, copy=copy)
        for name, tensor in tensors.items()
    ]


def multiplied(copy: tuple[int, int], other: tuple[int, int]) -> tuple[int, int]:
    """Which copy it is where every copy of one kind has copies of another kind."""
    return copy[0] * other[1] + other[0], copy[1] * other[1]


def resume_schedule(schedule: LRScheduler, steps: int) -> None:
    """Has a schedule, whose rates are functions of the step, stand where it stood after `steps` steps."""
    schedule.last_epoch = steps
    schedule._step_count = steps + 1  # what torch counts to warn of a wrong order
    rates = [base * rate(steps) for base, rate in zip(schedule.base_lrs, schedule.lr_lambdas, strict=True)]  # type: ignore[attr-defined]
    for group, rate in zip(schedule.optimizer.param_groups, rates, strict=True):
        group["lr"] = rate
    schedule._last_lr = rates


class Source:
    """The pieces of a checkpoint, from which any range of any region is put together.

    A rank that goes on under the same plan reads its own files and no others.
    """

    def __init__(self, folder: Path, rank: int | None = None) -> None:
        """rank: whose files to look into first; None for all files."""
        self.folder = folder
        self._own = _by_name(state_file.read_index(folder, rank)) if rank is not None else {}
        self._all: dict[str, list[Stored]] | None = None
        self._whole: tuple[str, str, Tensor] | None = None
        self._files = Files()

    @property
    def all(self) -> dict[str, list[Stored]]:
        """By name, the pieces of all ranks."""
        if self._all is None:
            self._all = _by_name(state_file.read_index(self.folder))
        return self._all

    def fill(self, piece: Piece) -> None:
        """Writes what was saved into the tensors of a piece. Raises CheckpointError where it is not there."""
        for kind, tensor in piece.tensors.items():
            tensor.copy_(self._range(piece, kind))
        if piece.steps is not None:
            counted = max((one.steps or 0.0 for one in self._own.get(piece.name) or self.all[piece.name]), default=0.0)
            piece.steps.fill_(max(piece.steps.item(), counted))

    def whole(self, name: str, kind: str = WEIGHT) -> Tensor:
        """All of a weight, or of what an optimizer keeps for it, flat, on the CPU. Raises CheckpointError."""
        if self._whole is not None and self._whole[:2] == (name, kind):
            return self._whole[2]
        self._whole = None  # not two at a time
        by_region: dict[Region, list[Stored]] = {}
        for one in self.all.get(name, []):
            by_region.setdefault(one.region, []).append(one)
        result, missing = torch.empty(0), 1
        for region, stored in by_region.items():
            part = self._joined(stored, kind, 0, region.numel)
            if part is None:
                raise self._lacks(name, kind)
            if not result.numel():
                missing = torch.Size(region.shape).numel()
                result = torch.empty(missing, dtype=part.dtype)
            region.put(part, result)
            missing -= region.numel
        if missing:
            raise self._lacks(name, kind)
        self._whole = (name, kind, result)
        return result

    def _range(self, piece: Piece, kind: str) -> Tensor:
        last = piece.start + piece.numel
        found = self._joined(_alike(self._own, piece), kind, piece.start, last)
        if found is None:
            found = self._joined(_alike(self.all, piece), kind, piece.start, last)
        if found is None:
            found = piece.region.take(self.whole(piece.name, kind))[piece.start : last]
        return found

    def _joined(self, stored: list[Stored], kind: str, first: int, last: int) -> Tensor | None:
        """Elements `first` to `last` of a region, from pieces of it; None where they do not hold all of them."""
        parts, at = [torch.empty(0)], first
        for one in sorted(stored, key=lambda one: one.start):
            end = min(one.start + one.numel, last)
            if kind in one.kinds and one.start <= at < end:
                parts.append(self._files.read(one, kind, at, end))
                at = end
        return torch.cat(parts[1:] or parts) if at >= last else None

    def _lacks(self, name: str, kind: str) -> CheckpointError:
        what = "the weight" if kind == WEIGHT else f"'{kind}' of the optimizer"
        return CheckpointError(Problem("checkpoint.pieces", str(self.folder), f"does not hold {what} for '{name}'"))


def _alike(stored: dict[str, list[Stored]], piece: Piece) -> list[Stored]:
    """Stored pieces of the very same region."""
    return [one for one in stored.get(piece.name, []) if one.region == piece.region]


def _by_name(stored: Iterable[Stored]) -> dict[str, list[Stored]]:
    found: dict[str, list[Stored]] = {}
    for one in stored:
        found.setdefault(one.name, []).append(one)
    return found
