"""Recomputation in the backward pass changes no number, under every strategy."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import distributed as dist
from torch._dynamo import lookup_backend

from llmtrain.engines.deepspeed import engine
from llmtrain.models import compiled, model_configuration
from llmtrain.models.liger import use_liger_layers
from llmtrain.models.recompute.checkpoints import gathers_whole_layers, use_recomputation
from llmtrain.models.tiny.compare import deviation, loss_outcome
from llmtrain.models.tiny.model import build_tiny_model
from llmtrain.plan import Plan
from llmtrain.recipe import Recipe
from tests.helpers import triton_on_cpu
from tests.helpers.batches import MIXTRAL, step_batch, tiny_recipe
from tests.helpers.harness import run_ranks
from tests.helpers.moe import moe_recipe
from tests.helpers.traces import Trace, assert_same, engine_of, plan_of, trace
from tests.helpers.triton_on_cpu import needs_liger

STEPS = 3
ACCELERATE = {"parallel.backend": "accelerate"}
FSDP2 = {**ACCELERATE, "parallel.accelerate": "fsdp2"}
STAGES = {"parallel.pipeline": 2, "parallel.zero_stage": 1}
LORA = {"model.adapter": {"rank": 4}}
GPT2 = {
    "model.architecture": "gpt2",
    "model.config": {"vocab_size": 256, "n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 32},
}
"""With dropout, whose random numbers are drawn again."""


def zero(stage: int, precision: str = "fp32", **fields: Any) -> dict[str, Any]:
    return {"parallel.zero_stage": stage, "parallel.precision": precision, **fields}


TWO = {
    "ZeRO-0": zero(0),
    "ZeRO-0, autocast": zero(0, "autocast_bf16"),
    "ZeRO-1, bf16": zero(1, "bf16"),
    "ZeRO-2": zero(2),
    "ZeRO-2, GPT-2": zero(2, **GPT2),
    "ZeRO-2, varlen": zero(2, **{"model.attention": "varlen"}),
    "ZeRO-2, eager": zero(2, **{"model.attention": "eager"}),
    "ZeRO-3": zero(3),
    "ZeRO-3, bf16": zero(3, "bf16", **{"parallel.offload_optimizer": "cpu", "parallel.offload_param": "cpu"}),
    "DDP": ACCELERATE,
    "FSDP2": {**FSDP2, **zero(3, "bf16")},
    "FSDP2, gathered once": {**FSDP2, **zero(2)},
    "DeepSpeed under accelerate": {**ACCELERATE, "parallel.accelerate": "deepspeed", **zero(3)},
    "stages": STAGES,
    "tensor": zero(1, **{"parallel.tensor": 2}),
    "tensor, ZeRO-3": zero(3, "bf16", **{"parallel.tensor": 2}),
    "sequence": zero(2, **{"parallel.sequence": 2}),
    "LoRA": zero(2, **LORA),
    "LoRA, ZeRO-3": zero(3, **LORA),
    "LoRA, stages": {**STAGES, **LORA},
    "LoRA in a tensor": zero(1, **LORA, **{"parallel.tensor": 2}),
    "mixture": zero(1, **MIXTRAL),
    "chunked loss": zero(3, **{"kernels.loss": "chunked"}),
}
FOUR = {
    "stages of tensor ranks": {**STAGES, "parallel.tensor": 2},
    "stages of sequence ranks": {**STAGES, "parallel.sequence": 2},
    "replicas of tensor ranks": zero(2, **{"parallel.tensor": 2}),
}
EXPERTS = {
    "experts": (2, "mixtral", {"parallel.expert": 2, **zero(2)}),
    "experts of tensor ranks": (4, "qwen3_moe", {"parallel.expert": 2, "parallel.tensor": 2, **zero(1)}),
}
AGAIN = {
    "selective": {"parallel.activation_checkpointing": "selective"},
    "selective, every second": {"parallel.activation_checkpointing": "selective", "parallel.checkpoint_every": 2},
    "full, every second": {"parallel.activation_checkpointing": "full", "parallel.checkpoint_every": 2},
}
FEW = ("LoRA, ZeRO-3", "FSDP2", "stages")
"""Those that run with every test."""


Train = Callable[[int, list[Recipe], int], list[Trace]]
"""What a rank does with recipes."""


def _train(rank: int, recipes: list[Recipe], ranks: int) -> list[Trace]:
    """In every run, ZeRO-3 gathers whole layers: it sums gradients in another order if it gathers module by module."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            engine, "gathers_whole_layers", lambda recipe: gathers_whole_layers(recipe) or not _is_selective(recipe)
        )
        return [_run(plan_of(recipe, ranks)) for recipe in recipes]


def _is_selective(recipe: Recipe) -> bool:
    return recipe.parallel.activation_checkpointing == "selective"


def _run(plan: Plan) -> Trace:
    own, batch = engine_of(plan), plan.batch
    place = own.data_parallel_rank, plan.data_parallel_size
    torch.manual_seed(5)  # of dropout
    return trace(own, range(STEPS), batch.micro_batch_size, batch.gradient_accumulation_steps, *place)


def compare(ranks: int, recipe: Recipe, again: list[dict[str, Any]], train: Train = _train) -> None:
    """Every bit of losses, norms and weights is the one without recomputation."""
    recipes = [recipe, *(recipe.with_(**fields) for fields in again)]
    for plain, *others in run_ranks(ranks, train, recipes, ranks):
        for fields, run in zip(again, others, strict=True):
            assert run.losses == plain.losses, fields
            assert run.grad_norms == plain.grad_norms, fields
            assert run.evaluation == plain.evaluation, fields
            off = [name for name, value in plain.weights.items() if (run.weights[name] != value).any()]
            assert not off, f"{fields}: {off}"


@pytest.mark.parametrize("name", FEW)
def test_selective_recomputation_changes_no_bit(name):
    compare(2, tiny_recipe(**TWO[name]), [AGAIN["selective"]])


@pytest.mark.breadth
@pytest.mark.parametrize("name", TWO)
def test_recomputation_changes_no_bit(name):
    compare(2, tiny_recipe(**TWO[name]), [*AGAIN.values()])


@pytest.mark.breadth
@pytest.mark.parametrize("name", FOUR)
def test_recomputation_on_four_ranks_changes_no_bit(name):
    compare(4, tiny_recipe(**FOUR[name]), [*AGAIN.values()])


@pytest.mark.breadth
@pytest.mark.parametrize("name", EXPERTS)
def test_recomputation_with_distributed_experts_changes_no_bit(name):
    ranks, family, fields = EXPERTS[name]
    compare(ranks, moe_recipe(family, **fields), [*AGAIN.values()])


def _exchanges(rank: int, recipes: list[Recipe]) -> list[int]:
    exchanges, exchange = [], dist.all_to_all_single
    counts = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dist, "all_to_all_single", lambda *args, **named: exchanges.append(exchange(*args, **named)))
        for recipe in recipes:
            plan = plan_of(recipe, 2)
            engine, batch = engine_of(plan), plan.batch
            exchanges.clear()
            engine.train_step(step_batch(0, batch.micro_batch_size, batch.gradient_accumulation_steps, rank, 2))
            counts.append(len(exchanges) // batch.gradient_accumulation_steps)
    return counts


@pytest.mark.slow
def test_a_selective_checkpoint_repeats_no_exchange_of_tokens():
    """Of two layers: numbers and rows to the experts, and rows back; the backward pass exchanges both rows."""
    kinds = ("none", "selective", "full")
    recipes = [moe_recipe(**zero(1), **{"parallel.activation_checkpointing": kind}) for kind in kinds]
    for found in run_ranks(2, _exchanges, recipes):
        assert found == [2 * 5, 2 * 5, 2 * 8]


@needs_liger
@pytest.mark.breadth
def test_results_that_liger_rotates_in_place_are_not_kept():
    """It is why `recompute.selective` refuses Liger's layers."""
    triton_on_cpu.complete()
    model = build_tiny_model(model_configuration(tiny_recipe()), "eager").train()
    use_liger_layers(model)
    expected = loss_outcome(model)
    assert deviation(loss_outcome(model), expected)[:2] == (0, 0)
    use_recomputation(model, tiny_recipe(**AGAIN["selective"]).parallel)
    assert deviation(loss_outcome(model), expected).gradient > 0.01


@pytest.mark.breadth
def test_compiled_layers_keep_less_and_compute_the_same():
    """The checkpoint is a part of the graph; the first pass of all layers compiles one."""
    fields = {"kernels.blocks": "compiled"}
    recipes = [tiny_recipe(), tiny_recipe(**fields, **AGAIN["selective"])]
    plain, again = run_ranks(1, _train, recipes, 1)[0]
    assert_same(again, plain, "compiled")


VARLEN = {"kernels.blocks": "compiled", "model.attention": "varlen"}
WINDOW = {"model.architecture": "mistral", "model.config.sliding_window": 5}
COMPILED = {
    "ZeRO-3, sequence, windows": zero(3, **VARLEN, **WINDOW, **{"parallel.sequence": 2}),
    "ZeRO-2": zero(2, **VARLEN),
    "ZeRO-3, bf16": zero(3, "bf16", **VARLEN),
    "stages": {**STAGES, **VARLEN},
    "FSDP2": {**FSDP2, **zero(3), **VARLEN},
}


def _traced(rank: int, recipes: list[Recipe], ranks: int) -> list[Trace]:
    """Runs the graphs of compiled layers as they are: compiled, they would round in other places."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(compiled, "_inductor", lookup_backend("aot_eager"))
        return _train(rank, recipes, ranks)


@pytest.mark.breadth
@pytest.mark.parametrize("name", COMPILED)
def test_selective_recomputation_in_a_graph_with_varlen_changes_no_bit(name):
    compare(2, tiny_recipe(**COMPILED[name]), [AGAIN["selective"]], _traced)
