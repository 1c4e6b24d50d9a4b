"""The host must not wait for a GPU in a step that is not logged, or while a background save starts."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest
import torch

from llmtrain.checkpoint.contents import TrainerState
from llmtrain.checkpoint.folder import newest
from llmtrain.checkpoint.save import Saver
from llmtrain.checkpoint.state import load
from llmtrain.engines import build_engine
from llmtrain.plan.ds_config import render
from llmtrain.plan.rules import resolve
from llmtrain.recipe import Recipe
from llmtrain.recipe.cluster import Cluster
from tests.helpers.batches import step_batch, tiny_recipe

pytestmark = pytest.mark.slow


def waits_in(rank: int, recipes: list[Recipe], ranks: int, folder: Path) -> list[tuple[Counter, Counter, float, float]]:
    """Of each recipe: waits in a step, waits in `Saver.start`, the loss after it, and that loss after a resume."""
    from _cuda_on_host import waits

    found = []
    for number, recipe in enumerate(recipes):
        plan = resolve(recipe, Cluster(devices_per_node=ranks, device="h100"))
        accumulation, replicas = plan.batch.gradient_accumulation_steps, plan.data_parallel_size

        def batch(step: int, engine, accumulation=accumulation, replicas=replicas):
            return step_batch(step, 1, accumulation, engine.data_parallel_rank, replicas)

        engine = build_engine(plan, render(plan), torch.device("cuda", rank))
        for step in range(2):
            engine.train_step(batch(step, engine))
        before = Counter(waits())
        engine.train_step(batch(2, engine))
        of_step = Counter(waits()) - before

        checkpoints = folder / str(number)
        saver = Saver(checkpoints, plan, engine, "run")
        before = Counter(waits())
        saver.start(TrainerState(step=3, data="data"))
        of_save = Counter(waits()) - before
        saver.wait()
        after = engine.train_step(batch(3, engine)).loss.item()

        resumed = build_engine(plan, render(plan), torch.device("cuda", rank))
        load(newest(checkpoints), resumed, plan, "data")
        found.append((of_step, of_save, after, resumed.train_step(batch(3, resumed)).loss.item()))
    return found


CASES = {
    "ZeRO-0": {"parallel.zero_stage": 0},
    "ZeRO-1, bf16": {"parallel.zero_stage": 1, "parallel.precision": "bf16"},
    "ZeRO-2": {"parallel.zero_stage": 2},
    "ZeRO-3": {"parallel.zero_stage": 3},
    "tensor": {"parallel.tensor": 2, "parallel.zero_stage": 1},
    "sequence": {"parallel.sequence": 2, "parallel.zero_stage": 1},
    "pipeline": {"parallel.pipeline": 2, "parallel.zero_stage": 1},
    "DDP": {"parallel.backend": "accelerate"},
    "FSDP2": {"parallel.backend": "accelerate", "parallel.accelerate": "fsdp2", "parallel.zero_stage": 3},
}

LEFT = {"ZeRO-3": Counter({"device": 1}), "tensor": Counter({"blocking copy to the device": 1})}
"""Waits of a step that are left. After the update of ZeRO-3, DeepSpeed waits for the small parameters that it keeps
whole. Ranks of a tensor parallel group but the first count no replicated weights in the norm, and copy a zero."""


def test_a_step_has_only_the_known_waits_and_starting_a_save_has_none(gpus, tmp_path):
    recipes = [tiny_recipe(**fields) for fields in CASES.values()]
    for rank, found in enumerate(gpus(2, waits_in, recipes, 2, tmp_path, timeout=300)):
        for name, (of_step, of_save, after, resumed) in zip(CASES, found, strict=True):
            assert not of_save, (rank, name, of_save)
            assert of_step <= LEFT.get(name, Counter()), (rank, name, of_step)
            assert resumed == after, (rank, name)
