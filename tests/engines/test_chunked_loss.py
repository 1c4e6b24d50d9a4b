"""A loss in chunks is the plain loop's, whoever reduces the gradients."""

from __future__ import annotations

import pytest
from batches import GLOBAL_BATCH, MIXTRAL, tiny_recipe
from harness import run_ranks
from traces import Trace, assert_same, engine_of, plan_of, reference_of, trace

from llmtrain.engines import forward
from llmtrain.plan import Plan
from llmtrain.plan.kernels import recomputes_loss

STEPS = 6
CHUNK = 24
"""Tokens of a chunk, which does not divide those of a micro-batch."""
CHUNKED = {"kernels.loss": "chunked", "batch.micro_batch_size": 2}
ZERO = {
    "ZeRO-0": {},
    "ZeRO-1": {"parallel.zero_stage": 1},
    "ZeRO-2, offload": {"parallel.zero_stage": 2, "parallel.offload_optimizer": "cpu"},
    "ZeRO-3": {"parallel.zero_stage": 3},
    "ZeRO-3, checkpointing": {"parallel.zero_stage": 3, "parallel.activation_checkpointing": "full"},
}
OTHERS = {
    "tensor": {"parallel.tensor": 2},
    "sequence, ZeRO-2": {"parallel.sequence": 2, "parallel.zero_stage": 2},
    "DDP": {"parallel.backend": "accelerate", "parallel.accelerate": "ddp"},
}


def _train(rank: int, recipes: dict, ranks: int) -> dict[str, Trace]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(forward, "CHUNK_TOKENS", CHUNK)
        return {name: _trace(plan_of(recipe, ranks)) for name, recipe in recipes.items()}


def _trace(plan: Plan) -> Trace:
    engine, batch = engine_of(plan), plan.batch
    own = engine.data_parallel_rank, plan.layout.dp
    return trace(engine, range(STEPS), batch.micro_batch_size, batch.gradient_accumulation_steps, *own)


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("cases", [ZERO, *({name: case} for name, case in OTHERS.items())], ids=lambda one: [*one][-1])
def test_chunks_are_the_plain_loop(cases, tied):
    fields = {"model.config.tie_word_embeddings": tied}
    expected = trace(reference_of(tiny_recipe(**fields)), range(STEPS), 1, GLOBAL_BATCH)
    recipes = {name: tiny_recipe(**fields, **CHUNKED, **case) for name, case in cases.items()}
    for runs in run_ranks(2, _train, recipes, 2):
        for name, run in runs.items():
            assert_same(run, expected, name)


def test_a_routers_loss_is_kept():
    expected = trace(reference_of(tiny_recipe(**MIXTRAL)), range(STEPS), 4, 2)
    recipes = {"experts": tiny_recipe(**MIXTRAL, **CHUNKED | {"batch.micro_batch_size": 4, "parallel.expert": 2})}
    for runs in run_ranks(2, _train, recipes, 2):
        assert_same(runs["experts"], expected, "experts")


def test_both_ways_are_tried():
    recipes = [tiny_recipe(**CHUNKED, **case) for case in (ZERO | OTHERS).values()]
    assert {recomputes_loss(recipe) for recipe in recipes} == {True, False}
