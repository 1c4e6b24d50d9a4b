"""A chunked loss matches the plain loop under every engine."""

from __future__ import annotations

import pytest
import torch

from llmtrain import Custom
from llmtrain.engines import forward
from llmtrain.plan import Plan
from llmtrain.plan.kernels import CHUNK_TOKENS, recomputes_loss
from tests.helpers.batches import MIXTRAL, tiny_recipe
from tests.helpers.harness import run_ranks
from tests.helpers.traces import Trace, assert_same, engine_of, plain_run, plan_of, trace, worst

STEPS = 6
CHUNK = 24
"""Tokens of a chunk, which does not divide those of a micro-batch."""
RARE_SIZE = 263
"""Of a vocabulary: nothing else has this size."""
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
STAGES = {"parallel.pipeline": 2, "parallel.zero_stage": 1}
PIPELINES = {"stages": STAGES, "stages, checkpointing": STAGES | {"parallel.activation_checkpointing": "full"}}
MORE_RANKS = {
    "stages of tensor ranks": STAGES | {"parallel.tensor": 2},
    "stages of sequence ranks": STAGES | {"parallel.sequence": 2},
    "stages of replicas": STAGES,
}


def _train(
    rank: int, recipes: dict, ranks: int, recomputed: bool = False, steps: int = STEPS, chunk: int = CHUNK
) -> dict[str, Trace]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(forward, "CHUNK_TOKENS", chunk)
        if recomputed:
            patch.setattr(forward, "recomputes_loss", lambda recipe: True)
        return {name: _trace(plan_of(recipe, ranks), steps) for name, recipe in recipes.items()}


def _trace(plan: Plan, steps: int) -> Trace:
    engine, batch = engine_of(plan), plan.batch
    own = engine.data_parallel_rank, plan.data_parallel_size
    return trace(engine, range(steps), batch.micro_batch_size, batch.gradient_accumulation_steps, *own)


@pytest.mark.parametrize("tied", [True, pytest.param(False, marks=pytest.mark.breadth)])
@pytest.mark.parametrize(
    "cases", [ZERO, PIPELINES, pytest.param(OTHERS, marks=pytest.mark.breadth)], ids=["ZeRO", "stages", "others"]
)
def test_chunks_match_the_plain_loop(cases, tied):
    _compare(2, cases, {"model.config.tie_word_embeddings": tied})


@pytest.mark.slow
@pytest.mark.parametrize("chunk", [CHUNK, CHUNK_TOKENS])
def test_chunks_of_a_loss_of_ones_own_match_the_plain_loop(chunk):
    cases = {name: ZERO[name] for name in ("ZeRO-0", "ZeRO-3")} | PIPELINES | OTHERS
    _compare(2, cases, {"objective": Custom("llmtrain.objectives:z_loss", weight=0.01)}, chunk=chunk)


@pytest.mark.slow
def test_one_chunk_matches_the_plain_loop():
    of_all = {name: ZERO[name] for name in ("ZeRO-0", "ZeRO-3")} | {"stages": STAGES, "DDP": OTHERS["DDP"]}
    _compare(2, of_all, {}, chunk=CHUNK_TOKENS)


def _compare(ranks: int, cases: dict, fields: dict, recomputed: bool = False, chunk: int = CHUNK) -> None:
    expected = plain_run(tiny_recipe(**fields), STEPS)
    recipes = {name: tiny_recipe(**fields, **CHUNKED, **case) for name, case in cases.items()}
    for runs in run_ranks(ranks, _train, recipes, ranks, recomputed, STEPS, chunk):
        for name, run in runs.items():
            assert_same(run, expected, name)


@pytest.mark.parametrize(
    ("tied", "recomputed"),
    [
        pytest.param(False, False, marks=pytest.mark.slow),
        *(pytest.param(*case, marks=pytest.mark.breadth) for case in ((False, True), (True, False), (True, True))),
    ],
)
def test_chunks_on_stages_that_ranks_share_match_the_plain_loop(tied, recomputed):
    _compare(4, MORE_RANKS, {"model.config.tie_word_embeddings": tied}, recomputed)


@pytest.mark.breadth
def test_chunks_on_stages_without_zero_match_the_plain_loop():
    without = {"stages, ZeRO-0": STAGES | {"parallel.zero_stage": 0}}
    _compare(2, without, {"optim.clip_grad_norm": 0.0})  # ZeRO-0 would clip by the first stage's norm


@pytest.mark.parametrize("parallel", [{"parallel.expert": 2}, STAGES], ids=["experts", "stages"])
def test_the_router_loss_is_kept(parallel):
    expected = plain_run(tiny_recipe(**MIXTRAL), STEPS, 4)
    recipes = {"experts": tiny_recipe(**MIXTRAL, **CHUNKED | {"batch.micro_batch_size": 4}, **parallel)}
    for runs in run_ranks(2, _train, recipes, 2):
        assert_same(runs["experts"], expected, "experts")


def _rows(rank: int, recipe) -> set[int]:
    """Of the tensors of a step whose last dimension is the vocabulary: how many rows they have."""
    seen: set[int] = set()

    class Shapes(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            result = function(*args, **(kwargs or {}))
            for one in result if isinstance(result, tuple | list) else [result]:
                if isinstance(one, torch.Tensor) and one.dim() and one.size(-1) == RARE_SIZE:
                    seen.add(one.numel() // RARE_SIZE)
            return result

    with Shapes():
        _train(rank, {"": recipe}, 2, steps=1)
    return seen - {recipe.model.config["hidden_size"]}


def test_no_stage_holds_all_logits():
    more = {"batch.micro_batch_size": 4, "model.config.vocab_size": RARE_SIZE}
    recipe = tiny_recipe(**CHUNKED | STAGES | more)
    first, last = run_ranks(2, _rows, recipe)
    assert not first
    assert max(last) == CHUNK


@pytest.mark.breadth
def test_bf16_stages_stay_near_the_fp32_loop():
    """With tied weights, and under autocast; the bounds are those of `test_parity`."""
    expected = plain_run(tiny_recipe(), STEPS)
    precisions = ("bf16", "autocast_bf16")
    recipes = {one: tiny_recipe(**CHUNKED, **STAGES, **{"parallel.precision": one}) for one in precisions}
    for runs in run_ranks(2, _train, recipes, 2):
        for name, run in runs.items():
            assert worst(run.losses, expected.losses) < 2**-8, name
            assert worst(run.grad_norms, expected.grad_norms) < 2**-6, name


def test_plans_with_and_without_recomputed_logits_are_tested():
    recipes = [tiny_recipe(**CHUNKED, **case) for case in (ZERO | OTHERS).values()]
    assert {recomputes_loss(recipe) for recipe in recipes} == {True, False}
