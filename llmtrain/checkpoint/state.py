"""Where a run stands, apart from the engine's own state."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import distributed as dist

from llmtrain.checkpoint.folder import verify
from llmtrain.checkpoint.pickles import check_pickles
from llmtrain.engines import Engine
from llmtrain.errors import CheckpointError, Problem
from llmtrain.plan import Layout, Plan


@dataclass
class TrainerState:
    """Position of a run; what `trainer.json` holds."""

    step: int = 0
    """Optimizer steps taken."""
    samples: int = 0
    """Sequences consumed: the cursor of the data, whatever the batch size was."""
    tokens: int = 0
    """Target tokens consumed."""
    data: str = ""
    """Key of the prepared data that `samples` counts in."""
    eval_loss: float | None = None
    """Last evaluation, in nats per token."""
    eval_step: int | None = None
    """Step of that evaluation."""

    def write(self, folder: Path) -> None:
        """Writes `trainer.json`."""
        (folder / "trainer.json").write_text(json.dumps(asdict(self), indent=1))


def save_random_state(folder: Path, rank: int) -> None:
    """Writes the generators of this rank to `rng/rank_NNNNN.safetensors`."""
    states = {"cpu": torch.get_rng_state()}
    if torch.cuda.is_available():
        states["cuda"] = torch.cuda.get_rng_state()
    (folder / "rng").mkdir(exist_ok=True)
    save_file(states, _random_state_file(folder, rank))


def load(folder: Path, engine: Engine, plan: Plan, data: str) -> TrainerState:
    """Continues from a checkpoint that was written under the same layout; called by all ranks.

    data: key of the prepared data. Raises CheckpointError where a file is missing or damaged, where
    a pickle names anything but tensors and DeepSpeed's own records, or where the layout or the data
    differ.
    """
    check(folder, plan)
    state = read_state(folder)
    if state.data != data:
        problem = Problem(
            "checkpoint.data",
            str(folder),
            "was trained on other data: the corpus, the tokenizer or the packing has changed since",
            "bring the data back, or start anew with another --run-dir",
        )
        raise CheckpointError(problem)
    engine.load(folder)
    _load_random_state(folder, dist.get_rank())
    return state


def check(folder: Path, plan: Plan | None = None) -> None:
    """Everything that is known about a checkpoint before one byte of it is unpickled. Rank 0 reads, all learn."""
    problems: list[Problem] = []
    if not dist.is_initialized() or dist.get_rank() == 0:
        try:
            verify(folder)
            check_pickles(folder)
            if plan is not None:
                _check_layout(folder, plan)
        except CheckpointError as error:
            problems = list(error.problems)
    if dist.is_initialized() and dist.get_world_size() > 1:
        shared = [problems]
        dist.broadcast_object_list(shared, src=0)
        problems = shared[0]
    if problems:
        raise CheckpointError(problems)


def read_state(folder: Path) -> TrainerState:
    """The position that a checkpoint holds."""
    return TrainerState(**json.loads((folder / "trainer.json").read_text()))


def read_plan(folder: Path) -> Plan:
    """The plan that a checkpoint was written under."""
    return Plan.model_validate_json((folder / "plan.json").read_text())


def _check_layout(folder: Path, plan: Plan) -> None:
    saved = read_plan(folder)
    wanted = _layout_of(plan.layout, plan)
    written = _layout_of(saved.layout, saved)
    differences = [f"{name} {written[name]} → {wanted[name]}" for name in wanted if wanted[name] != written[name]]
    if differences:
        raise CheckpointError(
            Problem(
                "checkpoint.layout",
                str(folder),
                f"was written under another layout ({', '.join(differences)}); "
                "this version continues only under the same one",
                "use the same --nproc and parallel fields, or start anew with another --run-dir",
            )
        )


def _layout_of(layout: Layout, plan: Plan) -> dict[str, object]:
    parallel = plan.recipe.parallel
    offload = {
        "strategy": parallel.strategy,
        "precision": parallel.precision,
        "offload_optimizer": parallel.offload_optimizer,
    }
    return {**layout.model_dump(), **offload, "offload_param": parallel.offload_param}


def _random_state_file(folder: Path, rank: int) -> Path:
    return folder / "rng" / f"rank_{rank:05d}.safetensors"


def _load_random_state(folder: Path, rank: int) -> None:
    states = load_file(_random_state_file(folder, rank))
    torch.set_rng_state(states["cpu"])
    if "cuda" in states and torch.cuda.is_available():
        torch.cuda.set_rng_state(states["cuda"])
