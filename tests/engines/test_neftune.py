"""The noise on embeddings is that of the paper, and the same under every strategy."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from llmtrain.data import EmbeddingNoise, MicroBatch, StepBatch
from llmtrain.data.loader import rows_of
from llmtrain.errors import RecipeError
from llmtrain.models.noise import embedding_noise
from llmtrain.recipe import Recipe
from tests.helpers.batches import T, step_batch, tiny_recipe
from tests.helpers.harness import run_ranks
from tests.helpers.traces import engine_of, plan_of, worst

STEPS = 3
ALPHA = {"train.neftune_alpha": 500.0}  # so that the loss of an untrained model shows it
STRATEGIES: dict[str, dict[str, Any]] = {
    "zero1": {"parallel.zero_stage": 1},
    "zero3": {"parallel.zero_stage": 3},
    "pipeline": {"parallel.pipeline": 2, "parallel.zero_stage": 1},
    "ddp": {"parallel.backend": "accelerate"},
    "fsdp2": {"parallel.backend": "accelerate", "parallel.accelerate": "fsdp2", "parallel.zero_stage": 3},
}


def noisy(batch: StepBatch, recipe: Recipe, rank: int, ranks: int) -> StepBatch:
    """A step whose samples are numbered as in a run."""
    rows = len(batch.micro_batches[0].input_ids)
    found = []
    for number, micro in enumerate(batch.micro_batches):
        mine = rows_of(number, rank, ranks, rows)
        seeds = tuple(batch.first_sample + row for row in range(mine.start, mine.stop))
        found.append(replace(micro, noise=EmbeddingNoise(recipe.train.neftune_alpha, seeds, T)))
    return replace(batch, micro_batches=found)


def losses(rank: int, recipes: list[Recipe], ranks: int) -> list[list[float]]:
    runs = []
    for recipe in recipes:
        plan = plan_of(recipe, ranks)
        engine, size = engine_of(plan), plan.data_parallel_size
        shape = plan.batch.micro_batch_size, plan.batch.gradient_accumulation_steps
        replica = engine.data_parallel_rank
        steps = (replace(step_batch(step, *shape, replica, size), first_sample=step * 100) for step in range(STEPS))
        found = [engine.train_step(noisy(step, recipe, replica, size)) for step in steps]
        runs.append([float(step.loss) for step in found] + [float(found[-1].grad_norm)])
    return runs


@pytest.mark.slow
def test_every_strategy_adds_the_same_noise():
    [expected], [silent] = (run_ranks(1, losses, [tiny_recipe(**alpha)], 1)[0] for alpha in (ALPHA, {}))
    assert abs(expected[0] / silent[0] - 1) > 1e-4  # ten times what may differ
    recipes = [tiny_recipe(**ALPHA, **fields) for fields in STRATEGIES.values()]
    for runs in run_ranks(2, losses, recipes, 2):
        for name, run in zip(STRATEGIES, runs, strict=True):
            assert worst(run, expected) < 1e-5, name


def test_noise_is_uniform_and_scaled_by_the_length_of_each_document():
    positions = torch.cat([torch.arange(6), torch.arange(10)])[None]
    batch = MicroBatch(torch.zeros_like(positions), positions, positions)
    made = [
        embedding_noise(replace(batch, noise=EmbeddingNoise(5.0, (seed,), 32)), 64, torch.device("cpu"))
        for seed in (1, 1, 2)
    ]
    assert torch.equal(made[0], made[1])
    assert not torch.equal(made[0], made[2])
    for part, length in ((made[0][:, :6], 6), (made[0][:, 6:], 10)):
        bound = 5.0 / (length * 64) ** 0.5
        assert 0.95 * bound < part.abs().max() <= bound
        assert abs(part.mean()) < 0.1 * bound
    shorter = MicroBatch(*(tensor[:, :6] for tensor in (batch.input_ids, batch.position_ids, batch.labels)))
    shorter = replace(shorter, noise=EmbeddingNoise(5.0, (1,), 32))
    assert torch.equal(embedding_noise(shorter, 64, torch.device("cpu")), made[0][:, :6])


def test_noise_is_refused_where_ranks_have_slices():
    for fields in ({"parallel.tensor": 2}, {"parallel.sequence": 2}):
        with pytest.raises(RecipeError, match=r"train.neftune_alpha: noise cannot be added(.|\n)*neftune_alpha=0"):
            plan_of(tiny_recipe(**ALPHA, **fields), 2)
