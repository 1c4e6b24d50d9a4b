"""Liger's layers and loss match the plain loop under every engine."""

from __future__ import annotations

import pytest
from transformers import PreTrainedModel

from llmtrain.models import chunked_loss, liger
from llmtrain.plan import Plan
from tests.helpers import triton_on_cpu
from tests.helpers.batches import MIXTRAL, tiny_recipe
from tests.helpers.harness import run_ranks
from tests.helpers.traces import Trace, assert_same, engine_of, plain_run, plan_of, trace, worst
from tests.helpers.triton_on_cpu import needs_liger

STEPS = 2
LIGER = {"kernels.blocks": "liger", "kernels.loss": "liger"}
BLOCKS = {"kernels.blocks": "liger"}
STAGES = {"parallel.pipeline": 2, "parallel.zero_stage": 1, "batch.micro_batch_size": 2}
CASES = {
    "ZeRO-2, checkpointing": {"parallel.zero_stage": 2, "parallel.activation_checkpointing": "full"} | LIGER,
    "ZeRO-3": {"parallel.zero_stage": 3} | BLOCKS,
    "stages": STAGES | LIGER,
    "ZeRO-0": LIGER,
    "ZeRO-1": {"parallel.zero_stage": 1} | LIGER,
    "ZeRO-3, checkpointing": {"parallel.zero_stage": 3, "parallel.activation_checkpointing": "full"} | BLOCKS,
    "stages, checkpointing": STAGES | {"parallel.activation_checkpointing": "full"} | LIGER,
    "tensor": {"parallel.tensor": 2} | BLOCKS,
    "sequence": {"parallel.sequence": 2, "parallel.zero_stage": 1} | LIGER,
    "DDP": {"parallel.backend": "accelerate", "parallel.accelerate": "ddp"} | LIGER,
    "FSDP2": {"parallel.backend": "accelerate", "parallel.accelerate": "fsdp2", "parallel.zero_stage": 3} | BLOCKS,
}


def _plan(recipe, ranks: int) -> Plan:
    """Made for the plain kernels: the rules refuse Liger's on CPUs, where nothing but an interpreter runs them."""
    plain = plan_of(recipe.with_(**{"kernels.blocks": "eager", "kernels.loss": "whole"}), ranks)
    return plain.model_copy(update={"recipe": recipe})


def _train(rank: int, recipes: dict, ranks: int) -> dict[str, Trace]:
    triton_on_cpu.complete()
    return {name: _trace(_plan(recipe, ranks)) for name, recipe in recipes.items()}


def _trace(plan: Plan) -> Trace:
    engine, batch = engine_of(plan), plan.batch
    _look(engine.model, plan)
    own = engine.data_parallel_rank, plan.data_parallel_size
    return trace(engine, range(STEPS), batch.micro_batch_size, batch.gradient_accumulation_steps, *own)


def _look(model: PreTrainedModel, plan: Plan) -> None:
    """Whether the kernels are Liger's."""
    modules = [one for one in model.modules() if one.forward.__module__.startswith("liger_kernel")]
    own = {type(one).__name__.removeprefix("FSDP") for one in modules}  # FSDP2 derives a class for each unit
    family = {"llama": {"LlamaRMSNorm", "LlamaMLP"}, "mixtral": {"MixtralRMSNorm"}}[plan.model.model_type]
    assert own == (family if plan.recipe.kernels.blocks == "liger" else set())
    loss = chunked_loss(model)
    assert loss is None or isinstance(loss, liger.LigerLoss)
    assert loss or plan.recipe.kernels.loss != "liger" or plan.parallel.pipeline > 1


def _compare(ranks: int, cases: dict, fields: dict) -> None:
    expected = plain_run(tiny_recipe(**fields), STEPS)
    recipes = {name: tiny_recipe(**fields | {"batch.micro_batch_size": 4} | case) for name, case in cases.items()}
    for runs in run_ranks(ranks, _train, recipes, ranks):
        for name, run in runs.items():
            assert_same(run, expected, name)


@needs_liger
@pytest.mark.breadth
@pytest.mark.parametrize("cases", [{name: case} for name, case in CASES.items()], ids=lambda one: [*one][-1])
def test_ligers_kernels_match_the_plain_loop(cases):
    _compare(2, cases, {"model.config.tie_word_embeddings": "stages" not in cases})


@needs_liger
@pytest.mark.breadth
def test_stages_that_ranks_share_match_the_plain_loop():
    _compare(4, {"stages of tensor ranks": STAGES | {"parallel.tensor": 2} | BLOCKS}, {})


@needs_liger
@pytest.mark.breadth
@pytest.mark.parametrize("parallel", [{"parallel.expert": 2}, STAGES], ids=["experts", "stages"])
def test_the_router_loss_is_kept(parallel):
    """Its norms and rotations are Liger's; the engine's experts are the engine's."""
    expected = plain_run(tiny_recipe(**MIXTRAL), STEPS, 4)
    recipes = {"experts": tiny_recipe(**MIXTRAL | LIGER | parallel | {"batch.micro_batch_size": 4})}
    for runs in run_ranks(2, _train, recipes, 2):
        assert_same(runs["experts"], expected, "experts")


@needs_liger
@pytest.mark.slow
def test_the_loss_in_bf16_stays_near_the_fp32_loop():
    """Weights in bf16, and autocast; the bounds are those of `test_parity`.

    The interpreter (3.7.1) adds bf16 numbers as integers: the loss adds none, the layers' kernels do.
    """
    expected = plain_run(tiny_recipe(), STEPS)
    fields = {"kernels.loss": "liger", "parallel.zero_stage": 1, "batch.micro_batch_size": 4}
    recipes = {one: tiny_recipe(**fields | {"parallel.precision": one}) for one in ("bf16", "autocast_bf16")}
    for runs in run_ranks(2, _train, recipes, 2):
        for name, run in runs.items():
            assert worst(run.losses, expected.losses) < 2**-8, name
            assert worst(run.grad_norms, expected.grad_norms) < 2**-6, name
