"""Saving, by all ranks together, while training goes on."""

from __future__ import annotations

import socket
import time
import uuid
from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from threading import Thread

from llmtrain.checkpoint.agree import (
    attempt,
    broadcast,
    failed,
    gather,
    group_of_threads,
    raise_together,
    world_size,
)
from llmtrain.checkpoint.contents import TrainerState
from llmtrain.checkpoint.folder import PLAN_FILE, STATE_FILE, Building, find, newest, point_latest
from llmtrain.checkpoint.host_copies import HostCopies
from llmtrain.checkpoint.manifest import File, Manifest
from llmtrain.checkpoint.retention import superfluous
from llmtrain.checkpoint.state import layout_of, save_random_state
from llmtrain.checkpoint.storage import Storage, probe
from llmtrain.engines import Engine
from llmtrain.engines.writer import DiskWriter, Writer
from llmtrain.errors import CheckpointError, Problem
from llmtrain.plan import Plan
from llmtrain.run_dir import identity_of, versions

Files = dict[str, File]

PAUSES_S = (1.0, 5.0, 15.0)
"""Before each further try of a save that failed: a filesystem over a network is often back by then."""


class Saver:
    """Writes checkpoints of one run, one at a time. Made by all ranks, and each method is called by all of them."""

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
        """run: identity of the run. storage: who sees whose files; found out by all ranks where it is not given.

        warn: is told of a try that failed. pauses: seconds before each further try.
        """
        self.checkpoints = checkpoints
        self.plan = plan
        self.engine = engine
        self.run = run
        self.storage = storage or probe(checkpoints)
        self.warn = warn
        self.pauses = pauses
        self._group = group_of_threads()
        self._copies = HostCopies() if plan.recipe.checkpoint.background else None
        self._thread: Thread | None = None
        self._error: Exception | None = None

    def start(self, state: TrainerState) -> None:
        """Begins to save the run at `state`, which may change when this returns; the writing goes on in a thread.

        Waits for the save before. That one may have failed: `warn` was told, and this one takes its place.
        """
        self.settle()
        if self._error is not None and not isinstance(self._error, CheckpointError):
            raise self._error
        self._error = None
        state = replace(state)
        contents: Callable[[Writer], None] = partial(self._contents, state)
        if self._copies is None:
            self._save(state, contents)
            return
        self._copies.start_anew()
        contents(self._copies)
        self._thread = Thread(target=self._save, args=(state, self._copies.write), name="save", daemon=True)
        self._thread.start()

    def wait(self) -> None:
        """Waits for the save that was started last; when it returns, `latest` names a whole checkpoint of it.

        Raises CheckpointError on every rank where any of them could not write, after so many tries. What was
        written is removed then, and `latest` names the checkpoint that it named before.
        """
        self.settle()
        if self._error is not None:
            raise self._error

    def save(self, state: TrainerState) -> None:
        """`start` and `wait`."""
        self.start(state)
        self.wait()

    def settle(self) -> None:
        """Waits until nothing is being written, be it whole or not."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def _contents(self, state: TrainerState, writer: Writer) -> None:
        """What this rank saves."""
        self.engine.save(writer)
        save_random_state(writer)
        if self.storage.is_leader:
            writer.text(STATE_FILE, state.text())
            writer.text(PLAN_FILE, self.plan.model_dump_json(indent=1))

    def _save(self, state: TrainerState, contents: Callable[[Writer], None]) -> None:
        """Saves. An error is kept for the caller of `wait`: it may arise in a thread."""
        building = Building(self.checkpoints, state.step, self.run)
        try:
            self._persist(building, state, contents)
            self._prune(building)
        except Exception as error:
            self._error = error
            if isinstance(error, CheckpointError):
                self.warn(f"the checkpoint of step {state.step} was not written: {error}")

    def _persist(self, building: Building, state: TrainerState, contents: Callable[[Writer], None]) -> None:
        """Tries until it is written, or for so many times."""
        for pause in self.pauses:
            try:
                return self._write(building, state, contents)
            except CheckpointError as error:
                self.warn(f"{error}; trying again in {pause:g} s")
                time.sleep(pause)
        self._write(building, state, contents)

    def _write(self, building: Building, state: TrainerState, contents: Callable[[Writer], None]) -> None:
        """One try. Raises CheckpointError on every rank."""
        try:
            self._leaders(building.start, "begin a checkpoint")
            files = self._write_files(building.folder, contents)
            self._leaders(partial(building.seal, self._manifest(state, files)), "finish a checkpoint")
            # Every part is whole and on its disk before the first one gets its name.
            self._leaders(building.publish, "rename a checkpoint")
            self._leaders(partial(point_latest, self.checkpoints, building.final.name), "write latest")
        except CheckpointError as error:
            if self.storage.is_leader:
                building.abandon()
            raise CheckpointError([self._with_hint(problem) for problem in error.problems]) from None

    def _leaders(self, action: Callable[[], object], what: str) -> None:
        """Has one rank of each filesystem do something, and the others wait for it."""
        raise_together(attempt(action, what) if self.storage.is_leader else [], self._group)

    def _write_files(self, folder: Path, contents: Callable[[Writer], None]) -> Files:
        """Has every rank write what it holds; returns the files that lie on this rank's filesystem."""
        writer = DiskWriter(folder)
        contents(writer)
        raise_together([failed(writer.error, "write a checkpoint")] if writer.error else [], self._group)
        written = gather(writer.files, self._group)
        return {
            name: File(**vars(file.fingerprint), rank=rank, private=file.private)
            for rank in self.storage.ranks
            for name, file in written[rank].items()
        }

    def _manifest(self, state: TrainerState, files: Files) -> Manifest:
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
            written=written,
            world_size=world_size(),
            layout=layout_of(self.plan),
            versions=versions(),
            files=files,
        )

    def _prune(self, building: Building) -> None:
        """Deletes what the recipe does not keep. A failure is noted; the next save tries again."""
        names: list[str] = []
        if self.storage.rank == 0:  # decides for all nodes
            policy = self.plan.recipe.checkpoint
            names = superfluous(find(self.checkpoints), policy, self.run, building.final.name)
        names = broadcast(names, group=self._group)
        if names and self.storage.is_leader:
            for problem in attempt(partial(building.prune, names), "delete an old checkpoint"):
                print(f"{socket.gethostname()}: {problem}")

    def _with_hint(self, problem: Problem) -> Problem:
        last = newest(self.checkpoints)
        kept = f"; {last.name} is the last whole checkpoint" if last else ""
        fix = f"make room, or mend the filesystem, and run the same command again{kept}"
        return Problem(problem.rule, problem.field, problem.message, fix)
