"""The state of a run, apart from the engine's own."""

from __future__ import annotations

from pathlib import Path

import torch

from llmtrain.checkpoint.base import base_of, check_base
from llmtrain.checkpoint.before import check_data
from llmtrain.checkpoint.check import verify_together
from llmtrain.checkpoint.contents import TrainerState, forget_other_metric, why_ended, with_plan
from llmtrain.checkpoint.exchange import complete
from llmtrain.checkpoint.manifest import Manifest
from llmtrain.checkpoint.storage import Storage, probe
from llmtrain.engines import Engine
from llmtrain.engines.runtime.agree import world_size
from llmtrain.engines.runtime.distributed import rank
from llmtrain.engines.state.files import read_tensors
from llmtrain.engines.state.writer import Writer
from llmtrain.errors import CheckpointError, Problem
from llmtrain.plan import Plan


def save_random_state(writer: Writer) -> None:
    """Writes the random states of this rank to `rng/rank_NNNNN.safetensors`."""
    states = {"cpu": torch.get_rng_state()}
    if torch.cuda.is_available():
        states["cuda"] = torch.cuda.get_rng_state()
    writer.tensors(_random_state_file(), states, private=True)


def begin(plan: Plan, data: str) -> TrainerState:
    """Returns the state of a new run, and seeds the random generators of this rank.

    data: key of the prepared data. Tensor parallel ranks, which are adjacent, get the same seed, so that they apply the
    same dropout to what they all hold. All other ranks get different seeds.
    """
    _seed(plan, 0)
    return TrainerState(data=data, base=base_of(plan), history=with_plan([], 0, 0, plan))


def _seed(plan: Plan, samples: int) -> None:
    """Seeds by the number of samples, so that a run which continues does not repeat its random numbers."""
    torch.manual_seed(plan.recipe.train.seed + rank() // plan.parallel.tensor + (samples << 20))


def load(folder: Path, engine: Engine, plan: Plan, data: str) -> TrainerState:
    """Verifies a checkpoint and continues from it; called by all ranks.

    Raises CheckpointError as `verify_checkpoint` and `restore` do.
    """
    storage = probe(folder.parent)
    manifests, problems = verify_together(folder, storage)
    if problems:
        raise CheckpointError(problems)
    return restore(folder, manifests, storage, engine, plan, data)


def restore(
    folder: Path, manifests: list[Manifest], storage: Storage, engine: Engine, plan: Plan, data: str
) -> TrainerState:
    """Continues from a verified checkpoint; called by all ranks.

    data: key of the prepared data. The plan may differ from the one that it was written under; its ranks then draw
    other random numbers. Raises CheckpointError if the data or the frozen weights differ, before anything is loaded.
    """
    state = check_data(folder, data, plan.recipe)
    if plan.recipe.model.omits_base_weights:  # otherwise it has all weights that are trained
        check_base(folder, state.base, base_of(plan))
    is_same = manifests[0].layout == layout_of(plan) and manifests[0].world_size == world_size()
    with complete(folder, manifests, storage, privately=is_same) as files:
        engine.load(files)
        if is_same and (files / _random_state_file()).exists():  # a converted checkpoint has none
            _load_random_state(files)
        else:
            _seed(plan, state.samples)
    state.ended = why_ended(folder, state.ended, plan.recipe)
    forget_other_metric(state, folder, plan.recipe)
    state.history = with_plan(state.history, state.step, state.samples, plan)
    return state


def layout_of(plan: Plan) -> dict[str, int | str | bool]:
    """Returns what determines the shards that each rank of a plan holds, and its random numbers."""
    parallel = plan.recipe.parallel
    return {
        **plan.layout(),
        "strategy": parallel.strategy,
        "precision": parallel.precision,
        "offload_optimizer": parallel.offload_optimizer,
        "offload_param": parallel.offload_param,
    }


def _random_state_file() -> str:
    return f"rng/rank_{rank():05d}.safetensors"


def _load_random_state(folder: Path) -> None:
    file = folder / _random_state_file()
    states = read_tensors(file, {"cpu": torch.get_rng_state()})
    try:
        torch.set_rng_state(states["cpu"])
        if "cuda" in states and torch.cuda.is_available():
            torch.cuda.set_rng_state(states["cuda"])
    except (RuntimeError, TypeError) as error:
        raise CheckpointError(
            Problem("checkpoint.random", str(file), f"contains no state of a random generator: {error}")
        ) from None
