"""An axis of parallelism that is made up here: what the engine asks of one is enough to add another."""

from __future__ import annotations

import torch
from batches import GLOBAL_BATCH, tiny_recipe
from harness import run_ranks
from torch import distributed as dist
from traces import Trace, assert_same, plan_of, reference_of, trace

from llmtrain.data import MicroBatch
from llmtrain.ds_config import render
from llmtrain.engines.deepspeed.axis import Axis
from llmtrain.engines.deepspeed.engine import DeepSpeedEngine
from llmtrain.recipe import Recipe

STEPS = 4


class RowsAxis(Axis):
    """All ranks read the same samples, and each takes its rows of every micro-batch."""

    def slice(self, batch: MicroBatch) -> MicroBatch:
        rank, ranks = dist.get_rank(), dist.get_world_size()
        whole = (batch.input_ids, batch.position_ids, batch.labels)
        return MicroBatch(*(rows[rank::ranks].contiguous() for rows in whole))


def _train(rank: int, recipes: list[Recipe]) -> list[Trace]:
    found = []
    for recipe in recipes:
        plan, device = plan_of(recipe, 2), torch.device("cpu")
        engine = DeepSpeedEngine(plan, render(plan), device, [RowsAxis(plan, device)])
        accumulation = plan.batch.gradient_accumulation_steps
        found.append(trace(engine, range(STEPS), GLOBAL_BATCH // accumulation, accumulation))
    return found


def test_a_new_axis_is_the_plain_loop():
    recipe = tiny_recipe(**{"batch.micro_batch_size": 2, "optim.name": "sgd", "optim.lr": 0.1})
    recipes = [recipe.with_(**{"parallel.zero_stage": stage}) for stage in (0, 1, 3)]
    expected = trace(reference_of(recipe), range(STEPS), 1, GLOBAL_BATCH)
    for runs in run_ranks(2, _train, recipes):
        for stage, run in zip((0, 1, 3), runs, strict=True):
            assert_same(run, expected, f"zero{stage}")
