"""Saves checkpoints with all ranks together, while training continues.

What a rank saves is copied to host memory first, and written by a thread.
"""

from __future__ import annotations

import socket
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from threading import Thread

import torch
from torch import Tensor

from llmtrain.checkpoint.contents import TrainerState
from llmtrain.checkpoint.folder import (
    PLAN_FILE,
    STATE_FILE,
    CheckpointBuilder,
    FoundCheckpoint,
    best_first,
    find,
    newest,
    point_latest,
)
from llmtrain.checkpoint.manifest import File, Manifest
from llmtrain.checkpoint.state import layout_of, save_random_state
from llmtrain.checkpoint.storage import Storage, probe
from llmtrain.engines import Engine
from llmtrain.engines.runtime.agree import (
    attempt,
    broadcast,
    gather,
    new_thread_group,
    raise_together,
    world_size,
    write_problem,
)
from llmtrain.engines.state.writer import DeferredBytes, DiskWriter, Part, Writer, tensor_bytes
from llmtrain.errors import CheckpointError, Problem
from llmtrain.plan import Plan
from llmtrain.recipe import CheckpointConfig
from llmtrain.run_dir import identity_of, versions

CHUNK = 2**26
"""Bytes of host memory that are allocated at once. Torch rounds pinned allocations up to powers of two, which would
nearly double a large one."""


class HostCopies(Writer):
    """Receives the files of successive saves into the same memory.

    The memory is kept, since fresh pages are slow to touch, and pinned pages, to which a device copies at full speed,
    are slower still to allocate (PyTorch's DCP keeps its staging buffers for the same reason).
    """

    def __init__(self) -> None:
        self._memory: dict[str, list[Tensor]] = {}
        self._files: list[tuple[str, list[Part], bool]] = []
        """Name, bytes and tensors in host memory, and whether the file is private."""
        self._copied: torch.cuda.Event | None = None
        self._device: torch.device | None = None

    def file(self, name: str, parts: Sequence[Part], private: bool = False) -> None:
        """Copies a file; from a device in the order of its stream, without waiting."""
        tensors = [part for part in parts if isinstance(part, Tensor)]
        device = next((tensor.device for tensor in tensors if tensor.is_cuda), None)
        memory, offset = self._chunks(name, sum(map(tensor_bytes, tensors)), pinned=device is not None), 0
        copied: list[Part] = []
        for part in parts:
            if isinstance(part, Tensor):
                copied += _copy(part.detach().view(torch.uint8), memory, offset)
                offset += tensor_bytes(part)
            elif isinstance(part, DeferredBytes):
                copied.append(replace(part, numbers=part.numbers.to("cpu", non_blocking=True, copy=True)))
            else:
                copied.append(part)
        if device is not None:
            self._device, self._copied = device, torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._copied.record()
        self._files.append((name, copied, private))

    def clear(self) -> None:
        """Forgets the files of the previous save; their memory is reused."""
        self._files = []

    def write(self, writer: Writer) -> None:
        """Passes the copies on; waits for the device that they come from, if any."""
        if self._copied is not None:
            # A thread begins with device 0, and would open a context on another rank's GPU.
            torch.cuda.set_device(self._device)
            self._copied.synchronize()
        for file in self._files:
            writer.file(*file)

    def _chunks(self, name: str, size: int, pinned: bool) -> list[Tensor]:
        """Returns the memory of a file: chunks of `CHUNK` bytes, and what is left."""
        chunks = self._memory.get(name, [])
        if sum(chunk.numel() for chunk in chunks) < size or any(chunk.is_pinned() < pinned for chunk in chunks[:1]):
            sizes = [CHUNK] * (size // CHUNK) + [size % CHUNK]
            chunks = [torch.empty(length, dtype=torch.uint8, pin_memory=pinned) for length in sizes]
            self._memory[name] = chunks
        return chunks


def _copy(content: Tensor, memory: Sequence[Tensor], offset: int) -> Iterator[Tensor]:
    """Copies bytes to an offset of some chunks; yields the parts of the copy."""
    while content.numel():
        index, first = divmod(offset, CHUNK)
        target = memory[index][first : first + content.numel()]
        target.copy_(content[: target.numel()], non_blocking=True)
        yield target
        content, offset = content[target.numel() :], offset + target.numel()


PAUSES_S = (1.0, 5.0, 15.0)
"""Seconds before each retry of a failed save: a network file system has often recovered by then."""


class Saver:
    """Writes the checkpoints of one run, one at a time. Created by all ranks; all of them call each method."""

    def __init__(
        self,
        checkpoints: Path,
        plan: Plan,
        engine: Engine,
        run: str = "",
        storage: Storage | None = None,
        warn: Callable[[str], None] = print,
        pauses: Sequence[float] = PAUSES_S,
    ) -> None:
        """run: the run's id. storage: which ranks share files; by default all ranks determine it together.

        warn: receives a message about each failed try. pauses: seconds before each retry.
        """
        self.checkpoints = checkpoints
        self.plan = plan
        self.engine = engine
        self.run = run
        self.storage = storage or probe(checkpoints)
        self.warn = warn
        self.pauses = pauses
        self.written: Path | None = None
        """The checkpoint that the last save has written; None if it failed or is not complete yet."""
        self._group = new_thread_group()
        self._copies = HostCopies() if plan.recipe.checkpoint.background else None
        self._thread: Thread | None = None
        self._error: Exception | None = None

    def start(self, state: TrainerState) -> None:
        """Starts saving the run at `state`, which may change after this returns; a thread writes the files.

        Waits for the previous save. If that one failed, `warn` has been called, and this one replaces it.
        """
        self.settle()
        if self._error is not None and not isinstance(self._error, CheckpointError):
            raise self._error
        self._error = self.written = None
        state = replace(state)
        contents: Callable[[Writer], None] = partial(self._contents, state)
        if self._copies is None:
            self._save(state, contents)
            return
        self._copies.clear()
        contents(self._copies)
        self._thread = Thread(target=self._save, args=(state, self._copies.write), name="save", daemon=True)
        self._thread.start()

    def wait(self) -> None:
        """Waits for the last save; afterwards `latest` names a complete checkpoint of it.

        Raises CheckpointError on every rank if any of them still could not write after all retries. What was written is
        then removed, and `latest` names the same checkpoint as before.
        """
        self.settle()
        if self._error is not None:
            raise self._error

    def save(self, state: TrainerState) -> None:
        """Calls `start` and `wait`."""
        self.start(state)
        self.wait()

    @property
    def is_writing(self) -> bool:
        """Whether a save is in progress on this rank."""
        return self._thread is not None and self._thread.is_alive()

    def settle(self) -> None:
        """Waits until nothing is being written, whether it succeeded or not."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def _contents(self, state: TrainerState, writer: Writer) -> None:
        """Writes this rank's files."""
        self.engine.save(writer)
        save_random_state(writer)
        if self.storage.is_leader:
            writer.text(STATE_FILE, state.text())
            writer.text(PLAN_FILE, self.plan.model_dump_json(indent=1))

    def _save(self, state: TrainerState, contents: Callable[[Writer], None]) -> None:
        """Saves. An error is stored for the caller of `wait`, since it may occur in a thread."""
        builder = CheckpointBuilder(self.checkpoints, state.step, self.run)
        try:
            self._persist(builder, state, contents)
            self.written = builder.final
            self._prune(builder)
        except Exception as error:
            self._error = error
            if isinstance(error, CheckpointError):
                self.warn(f"the checkpoint of step {state.step} was not written: {error}")

    def _persist(self, builder: CheckpointBuilder, state: TrainerState, contents: Callable[[Writer], None]) -> None:
        """Writes the checkpoint, with retries."""
        for pause in self.pauses:
            try:
                return self._write(builder, state, contents)
            except CheckpointError as error:
                self.warn(f"{error}; trying again in {pause:g} s")
                time.sleep(pause)
        self._write(builder, state, contents)

    def _write(self, builder: CheckpointBuilder, state: TrainerState, contents: Callable[[Writer], None]) -> None:
        """Tries once. Raises CheckpointError on every rank."""
        try:
            self._on_leaders(builder.start, "begin a checkpoint")
            files = self._write_files(builder.folder, contents)
            self._on_leaders(partial(builder.finish, self._manifest(state, files)), "finish a checkpoint")
            # All parts are complete and on disk before the first one is renamed.
            self._on_leaders(builder.publish, "rename a checkpoint")
            self._on_leaders(partial(point_latest, self.checkpoints, builder.final.name), "write latest")
        except CheckpointError as error:
            if self.storage.is_leader:
                builder.abandon()
            raise CheckpointError([self._with_hint(problem) for problem in error.problems]) from None

    def _on_leaders(self, action: Callable[[], object], what: str) -> None:
        """Runs an action on one rank of each file system, while the others wait."""
        raise_together(attempt(action, what) if self.storage.is_leader else [], self._group)

    def _write_files(self, folder: Path, contents: Callable[[Writer], None]) -> dict[str, File]:
        """Makes every rank write its files; returns the files on this rank's file system."""
        writer = DiskWriter(folder)
        contents(writer)
        raise_together([write_problem(writer.error, "write a checkpoint")] if writer.error else [], self._group)
        written = gather(writer.files, self._group)
        return {
            name: File(**vars(file.fingerprint), rank=rank, private=file.private)
            for rank in self.storage.ranks
            for name, file in written[rank].items()
        }

    def _manifest(self, state: TrainerState, files: dict[str, File]) -> Manifest:
        now = datetime.now(UTC).isoformat(timespec="microseconds")
        save, written = broadcast((uuid.uuid4().hex, now), group=self._group)
        return Manifest(
            save=save,
            part=self.storage.part,
            hosts=list(self.storage.hosts),
            run=self.run,
            recipe=identity_of(self.plan.recipe),
            step=state.step,
            samples=state.samples,
            eval_loss=state.eval_loss if state.eval_step == state.step else None,
            metrics={name: value for name, value in state.eval_metrics.items() if value is not None}
            if state.eval_step == state.step
            else {},
            ended=state.ended,
            written=written,
            world_size=world_size(),
            layout=layout_of(self.plan),
            versions=versions(),
            files=files,
        )

    def _prune(self, builder: CheckpointBuilder) -> None:
        """Deletes the checkpoints that the recipe does not keep.

        A failure is reported, and the next save tries again.
        """
        names: list[str] = []
        if self.storage.rank == 0:  # rank 0 decides for all nodes
            policy = self.plan.recipe.checkpoint
            names = checkpoints_to_delete(find(self.checkpoints), policy, self.run, builder.final.name)
        names = broadcast(names, group=self._group)
        if names and self.storage.is_leader:
            for problem in attempt(partial(builder.prune, names), "delete an old checkpoint"):
                print(f"{socket.gethostname()}: {problem}")

    def _with_hint(self, problem: Problem) -> Problem:
        last = newest(self.checkpoints)
        kept = f"; {last.name} is the last complete checkpoint" if last else ""
        fix = f"free some space or repair the file system, and run the same command again{kept}"
        return Problem(problem.rule, problem.field, problem.message, fix)


def checkpoints_to_delete(
    found: Sequence[FoundCheckpoint], policy: CheckpointConfig, run: str, newest: str
) -> list[str]:
    """Returns the names of a run's checkpoints that `policy` does not keep.

    found: in the order they were written. newest: the one that was just published; it is always kept, so that one
    complete checkpoint exists whatever happened to the others. A folder without a manifest of this run is not ours, and
    neither counted nor deleted.
    """
    if policy.keep_last is None:
        return []
    ours = [checkpoint for checkpoint in found if checkpoint.manifests and checkpoint.manifests[0].run == run]
    kept = ours[-policy.keep_last :]
    if policy.keep_every_steps is not None:
        kept += [checkpoint for checkpoint in ours if checkpoint.manifests[0].step % policy.keep_every_steps == 0]
    if policy.keep_best is not None:
        kept += best_first(ours, policy)[: policy.keep_best]
    names = {newest, *(checkpoint.folder.name for checkpoint in kept)}
    return [checkpoint.folder.name for checkpoint in ours if checkpoint.folder.name not in names]
