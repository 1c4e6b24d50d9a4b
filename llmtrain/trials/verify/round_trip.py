"""Checks that the trained state of a plan can be saved, loaded again and exported."""

from __future__ import annotations

import shutil
from pathlib import Path

import torch
from torch import distributed as dist

from llmtrain.checkpoint.base import base_of, export_reader
from llmtrain.checkpoint.contents import TrainerState
from llmtrain.checkpoint.export import stored_names
from llmtrain.checkpoint.folder import newest
from llmtrain.checkpoint.save import Saver
from llmtrain.checkpoint.state import load
from llmtrain.engines import Engine
from llmtrain.engines.runtime.distributed import barrier
from llmtrain.errors import CheckpointError, Problem
from llmtrain.models import model_configuration
from llmtrain.models.adapter_files import is_adapter
from llmtrain.models.hub_names import empty_model
from llmtrain.models.precision import weight_dtype
from llmtrain.plan import Plan
from llmtrain.trials.verify.compare import Weights

DATA_KEY = "verify"
"""Key of the data, which no checkpoint of a real run has."""


def check_checkpoint_round_trip(engine: Engine, plan: Plan, weights: Weights, folder: Path) -> None:
    """Saves an engine, gathers each weight as an export does, and makes the engine continue from the checkpoint.

    weights: those of the engine. folder: for the checkpoint, removed afterwards. Called by all ranks. Raises
    CheckpointError if a weight is missing, or has other values than in the engine.
    """
    Saver(folder, plan, engine).save(TrainerState(step=1, data=DATA_KEY, base=base_of(plan)))
    checkpoint = newest(folder)
    assert checkpoint is not None, "a save leaves a checkpoint or raises"
    if dist.get_rank() == 0:
        _check_export(checkpoint, plan, weights)
    load(checkpoint, engine, plan, DATA_KEY)
    for name, weight in engine.named_weights():
        _check_equal(name, weight, weights, checkpoint, "after loading")
    barrier()
    if dist.get_rank() == 0:
        shutil.rmtree(folder)


def _check_export(checkpoint: Path, plan: Plan, weights: Weights) -> None:
    recipe = plan.recipe
    dtype = weight_dtype(recipe.parallel.precision)
    source = export_reader(checkpoint, plan)
    stored = stored_names(checkpoint, source, empty_model(model_configuration(recipe), dtype))
    names = [name for name in stored if name in weights]  # buffers are not trained
    for name in [*names, *filter(is_adapter, weights)]:
        whole = source.whole(name).to(dtype).view(weights[name].shape)
        _check_equal(name, whole, weights, checkpoint, "in the checkpoint")


def _check_equal(name: str, weight: torch.Tensor, weights: Weights, checkpoint: Path, where: str) -> None:
    if not torch.equal(weight.to("cpu", torch.float32), weights[name]):
        message = f"'{name}' has other values {where} than in the engine that was saved"
        raise CheckpointError(Problem("checkpoint.pieces", str(checkpoint), message))
