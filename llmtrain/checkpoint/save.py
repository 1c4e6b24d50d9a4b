"""Saving, by all ranks together."""

from __future__ import annotations

import shutil
from pathlib import Path

from torch import distributed as dist

from llmtrain.checkpoint.folder import prune, publish, temporary_folder
from llmtrain.checkpoint.state import TrainerState, save_random_state
from llmtrain.engines import Engine
from llmtrain.engines.distributed import barrier
from llmtrain.plan import Plan


class Saver:
    """Writes checkpoints of one run."""

    def __init__(self, checkpoints: Path, plan: Plan, engine: Engine) -> None:
        self.checkpoints = checkpoints
        self.plan = plan
        self.engine = engine

    def save(self, state: TrainerState) -> None:
        """Saves the run at `state`; when it returns on any rank, the checkpoint is whole and `latest` names it."""
        temporary = temporary_folder(self.checkpoints, state.step)
        is_main = dist.get_rank() == 0
        if is_main:
            shutil.rmtree(temporary, ignore_errors=True)
            temporary.mkdir(parents=True)
        barrier()
        self.engine.save(temporary)
        save_random_state(temporary, dist.get_rank())
        barrier()
        if is_main:
            state.write(temporary)
            (temporary / "plan.json").write_text(self.plan.model_dump_json(indent=1))
            publish(temporary, state.step)
            prune(self.checkpoints, self.plan.recipe.checkpoint.keep_last)
        barrier()
