"""Saving, by all ranks together."""

from __future__ import annotations

import socket
import uuid
from collections.abc import Callable
from datetime import UTC, datetime
from functools import partial
from pathlib import Path

from llmtrain.checkpoint.agree import attempt, broadcast, failed, gather, raise_together, world_size
from llmtrain.checkpoint.folder import Building, find, newest, point_latest
from llmtrain.checkpoint.manifest import File, Manifest
from llmtrain.checkpoint.retention import superfluous
from llmtrain.checkpoint.state import PLAN_FILE, TrainerState, layout_of, save_random_state
from llmtrain.checkpoint.storage import Storage, probe
from llmtrain.engines import Engine
from llmtrain.engines.writer import Writer
from llmtrain.errors import CheckpointError, Problem
from llmtrain.plan import Plan
from llmtrain.run_dir import identity_of, versions

Files = dict[str, File]


class Saver:
    """Writes checkpoints of one run."""

    def __init__(
        self, checkpoints: Path, plan: Plan, engine: Engine, run: str = "", storage: Storage | None = None
    ) -> None:
        """run: identity of the run. storage: who sees whose files; found out by all ranks where it is not given."""
        self.checkpoints = checkpoints
        self.plan = plan
        self.engine = engine
        self.run = run
        self.storage = storage or probe(checkpoints)

    def save(self, state: TrainerState) -> None:
        """Saves the run at `state`; when it returns on any rank, the checkpoint is whole and `latest` names it.

        Raises CheckpointError on every rank where any of them cannot write. What was written is removed
        then, and `latest` names the checkpoint that it named before.
        """
        building = Building(self.checkpoints, state.step, self.run)
        try:
            self._leaders(building.start, "begin a checkpoint")
            files = self._write(building.folder, state)
            self._leaders(partial(building.seal, self._manifest(state, files)), "finish a checkpoint")
            # Every part is whole and on its disk before the first one gets its name.
            self._leaders(building.publish, "rename a checkpoint")
            self._leaders(partial(point_latest, self.checkpoints, building.final.name), "write latest")
        except CheckpointError as error:
            if self.storage.is_leader:
                building.abandon()
            raise CheckpointError([self._with_hint(problem) for problem in error.problems]) from None
        self._prune(building)

    def _leaders(self, action: Callable[[], object], what: str) -> None:
        """Has one rank of each filesystem do something, and the others wait for it."""
        raise_together(attempt(action, what) if self.storage.is_leader else [])

    def _write(self, folder: Path, state: TrainerState) -> Files:
        """Has every rank write what it holds; returns the files that lie on this rank's filesystem."""
        writer = Writer(folder)
        self.engine.save(writer)
        save_random_state(writer)
        if self.storage.is_leader:
            state.write(writer)
            writer.text(PLAN_FILE, self.plan.model_dump_json(indent=1))
        raise_together([failed(writer.error, "write a checkpoint")] if writer.error else [])
        written = gather(writer.files)
        return {
            name: File(**vars(file.fingerprint), rank=rank, private=file.private)
            for rank in self.storage.ranks
            for name, file in written[rank].items()
        }

    def _manifest(self, state: TrainerState, files: Files) -> Manifest:
        save, written = broadcast((uuid.uuid4().hex, datetime.now(UTC).isoformat(timespec="microseconds")))
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
        names = broadcast(names)
        if names and self.storage.is_leader:
            for problem in attempt(partial(building.prune, names), "delete an old checkpoint"):
                print(f"{socket.gethostname()}: {problem}")

    def _with_hint(self, problem: Problem) -> Problem:
        last = newest(self.checkpoints)
        kept = f"; {last.name} is the last whole checkpoint" if last else ""
        fix = f"make room, or mend the filesystem, and run the same command again{kept}"
        return Problem(problem.rule, problem.field, problem.message, fix)
