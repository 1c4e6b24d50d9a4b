"""Compiled layers and a compiled loss match the plain loop under every engine."""

from __future__ import annotations

from functools import partialmethod

import pytest
import torch
from torch._dynamo import lookup_backend
from torch._dynamo.backends.distributed import DDPOptimizer

from llmtrain.engines import forward
from llmtrain.errors import RecipeError
from llmtrain.models import compiled
from llmtrain.plan import Plan
from tests.helpers.batches import step_batch, tiny_recipe
from tests.helpers.harness import run_ranks
from tests.helpers.traces import Trace, assert_same, engine_of, plain_run, plan_of, trace, worst

STEPS = 4
CHUNK = 24
"""Tokens of a chunk, which does not divide those of a micro-batch."""
COMPILED = {"kernels.blocks": "compiled", "kernels.loss": "compiled", "batch.micro_batch_size": 2}
LAYERS = COMPILED | {"kernels.loss": "whole"}
CHECKPOINTS = {"parallel.activation_checkpointing": "full"}
SELECTIVE = {"parallel.activation_checkpointing": "selective"}
VARLEN = {"model.attention": "varlen"}
WINDOW = {"model.architecture": "mistral", "model.config.sliding_window": 5}
STAGES = {"parallel.pipeline": 2, "parallel.zero_stage": 1}
ADAPTER = {"model.adapter": {"rank": 4, "alpha": 16.0}, "optim.name": "sgd", "optim.lr": 0.3}
FSDP2 = {"parallel.backend": "accelerate", "parallel.accelerate": "fsdp2", "parallel.zero_stage": 3}
SLOW = {"ZeRO-1, varlen": COMPILED | VARLEN | {"parallel.zero_stage": 1}}
BREADTH = {
    "stages": COMPILED | STAGES,
    "ZeRO-0, checkpointing": COMPILED | CHECKPOINTS,
    "ZeRO-3": COMPILED | {"parallel.zero_stage": 3},
    "tensor": COMPILED | {"parallel.tensor": 2},
    "sequence": COMPILED | {"parallel.sequence": 2, "parallel.zero_stage": 2},
    "FSDP2": LAYERS | FSDP2,
    "ZeRO-2, offload": COMPILED | {"parallel.zero_stage": 2, "parallel.offload_optimizer": "cpu"},
    "ZeRO-3, offload": COMPILED | {"parallel.zero_stage": 3, "parallel.offload_param": "cpu"},
    "ZeRO-3, checkpointing": COMPILED | {"parallel.zero_stage": 3} | CHECKPOINTS,
    "stages, checkpointing": COMPILED | STAGES | CHECKPOINTS,
    "tensor, ZeRO-3": COMPILED | {"parallel.tensor": 2, "parallel.zero_stage": 3},
    "tensor, checkpointing": COMPILED | {"parallel.tensor": 2, "parallel.zero_stage": 1} | CHECKPOINTS,
    "sequence, checkpointing": COMPILED | {"parallel.sequence": 2, "parallel.zero_stage": 3} | CHECKPOINTS,
    "DDP": COMPILED | {"parallel.backend": "accelerate", "parallel.accelerate": "ddp"},
    "FSDP2, ZeRO-2": LAYERS | FSDP2 | {"parallel.zero_stage": 2},
    "FSDP2, checkpointing": LAYERS | FSDP2 | CHECKPOINTS,
    "DeepSpeed under accelerate": COMPILED
    | {"parallel.backend": "accelerate", "parallel.accelerate": "deepspeed", "parallel.zero_stage": 1},
    "adapters": COMPILED | ADAPTER | {"parallel.zero_stage": 2},
    "adapters, stages": COMPILED | ADAPTER | STAGES,
    "eager attention": COMPILED | {"model.attention": "eager"},
    "varlen, windows": COMPILED | VARLEN | WINDOW,
    "varlen, ZeRO-3, selective": COMPILED | VARLEN | SELECTIVE | {"parallel.zero_stage": 3},
    "varlen, adapters, ZeRO-3": COMPILED | VARLEN | ADAPTER | {"parallel.zero_stage": 3},
    "varlen, sequence, checkpointing": COMPILED | VARLEN | CHECKPOINTS | {"parallel.sequence": 2},
    "ring, checkpointing": COMPILED | VARLEN | CHECKPOINTS | {"parallel.sequence": 2, "parallel.sequence_ring": 2},
    "varlen, stages, selective": COMPILED | VARLEN | SELECTIVE | STAGES,
    "varlen, FSDP2, selective": LAYERS | VARLEN | SELECTIVE | FSDP2,
    "GPT-2": COMPILED
    | {
        "model.architecture": "gpt2",
        "model.config": {"vocab_size": 256, "n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 32}
        | dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0),
    },
}
FOUR_RANKS = {
    "stages of tensor ranks": COMPILED | STAGES | {"parallel.tensor": 2},
    "stages of sequence ranks": COMPILED | STAGES | {"parallel.sequence": 2},
    "stages of replicas": COMPILED | STAGES,
}


def _train(rank: int, recipes: dict, ranks: int) -> dict[str, Trace]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(forward, "CHUNK_TOKENS", CHUNK)
        return {name: _trace(plan_of(recipe, ranks)) for name, recipe in recipes.items()}


def _trace(plan: Plan) -> Trace:
    engine, batch = engine_of(plan), plan.batch
    own = engine.data_parallel_rank, plan.data_parallel_size
    return trace(engine, range(STEPS), batch.micro_batch_size, batch.gradient_accumulation_steps, *own)


def _compare(ranks: int, cases: dict) -> None:
    recipes = {name: tiny_recipe(**case) for name, case in cases.items()}
    everyone = run_ranks(ranks, _train, recipes, ranks)
    for name, recipe in recipes.items():
        expected = plain_run(recipe, STEPS)
        for runs in everyone:
            assert_same(runs[name], expected, name)


@pytest.mark.parametrize(
    "name",
    [
        *(pytest.param(name, marks=pytest.mark.slow) for name in SLOW),
        *(pytest.param(name, marks=pytest.mark.breadth) for name in BREADTH),
    ],
)
def test_compiled_layers_and_loss_match_the_plain_loop(name):
    _compare(2, {name: (SLOW | BREADTH)[name]})


@pytest.mark.breadth
@pytest.mark.parametrize("name", FOUR_RANKS)
def test_compiled_layers_on_four_ranks_match_the_plain_loop(name):
    _compare(4, {name: FOUR_RANKS[name]})


@pytest.mark.breadth
@pytest.mark.parametrize("precision", ["bf16", "autocast_bf16"])
def test_bf16_stays_near_the_fp32_loop(precision):
    """The bounds are those of `test_parity`."""
    expected = plain_run(tiny_recipe(), STEPS)
    recipe = tiny_recipe(**COMPILED, **{"parallel.zero_stage": 1, "parallel.precision": precision})
    for runs in run_ranks(2, _train, {precision: recipe}, 2):
        assert worst(runs[precision].losses, expected.losses) < 2**-8
        assert worst(runs[precision].grad_norms, expected.grad_norms) < 2**-6


def _compiled_functions(rank: int, recipe, ranks: int) -> int:
    made = []
    with pytest.MonkeyPatch.context() as patch:

        def backend(graph, inputs):
            made.append(graph)
            return lookup_backend("aot_eager")(graph, inputs)

        patch.setattr(compiled, "_inductor", backend)
        patch.setattr(DDPOptimizer, "__init__", partialmethod(DDPOptimizer.__init__, first_bucket_cap=1))
        _train(rank, {"": recipe}, ranks)
    return len(made)


@pytest.mark.parametrize(
    "fields",
    [
        pytest.param({"parallel.zero_stage": 3}, marks=pytest.mark.slow),
        pytest.param({"parallel.zero_stage": 3, "model.attention": "varlen"}, marks=pytest.mark.breadth),
        pytest.param({"parallel.backend": "accelerate", "parallel.accelerate": "ddp"}, marks=pytest.mark.breadth),
    ],
    ids=["ZeRO-3", "varlen", "DDP"],
)
def test_a_layer_is_compiled_for_training_and_for_evaluation(fields):
    """Once for all layers, whatever the number of steps and of documents, and of buckets of gradients."""
    recipe = tiny_recipe(**LAYERS, **fields, **{"model.config.num_hidden_layers": 10})
    assert run_ranks(2, _compiled_functions, recipe, 2) == [2] * 2


def _refusal(rank: int, recipe) -> str:
    with torch._inductor.config.patch({"cpp.cxx": ("no-such-compiler",)}):
        try:
            engine_of(plan_of(recipe, 2))
        except RecipeError as error:
            return str(error)
    return ""


def test_every_rank_refuses_a_missing_compiler():
    for told in run_ranks(2, _refusal, tiny_recipe(**COMPILED | STAGES)):
        assert "kernels.blocks: 'compiled' cannot be used: torch needs a C++ compiler for CPUs" in told
        assert "kernels.loss: 'compiled' cannot be used" in told


def _kept(rank: int, recipe, ranks: int) -> tuple[int, int]:
    """Of the gathered matrices of compiled layers: how many there were, and how many a forward pass has kept."""
    from torch.multiprocessing.reductions import StorageWeakRef

    plan = plan_of(recipe, ranks)
    engine = engine_of(plan)
    matrices = [
        weight for layer in engine.model.model.layers for weight in layer.parameters() if len(weight.ds_shape) > 1
    ]
    gathered: list[StorageWeakRef] = []
    for layer in engine.model.model.layers:
        own = layer.forward

        def observed(*args, own=own, layer=layer, **kwargs):
            gathered.extend(
                StorageWeakRef(weight.untyped_storage()) for weight in layer.parameters() if weight.dim() > 1
            )
            return own(*args, **kwargs)

        layer.forward = observed
    batch = step_batch(0, 2, 2, rank, ranks).micro_batches[0]
    output = engine.engine(input_ids=batch.input_ids, position_ids=batch.position_ids, use_cache=False)
    assert output.logits.requires_grad
    assert len(gathered) == len(matrices)
    return len(gathered), sum(not one.expired() for one in gathered)


@pytest.mark.breadth
def test_zero3_frees_the_weights_of_compiled_layers():
    for found, kept in run_ranks(2, _kept, tiny_recipe(**LAYERS, **{"parallel.zero_stage": 3}), 2):
        assert found
        assert kept == 0
