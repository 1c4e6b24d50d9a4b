"""Feed-forward layers in tiles along the sequence equal the plain ones, up to the order of sums over tokens."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from llmtrain.engines import forward
from llmtrain.errors import FamilyError
from llmtrain.models import build_model, model_configuration
from llmtrain.models.recompute.tiles import check_tiles, use_tiles
from llmtrain.recipe import Recipe
from tests.helpers.batches import tiny_recipe
from tests.helpers.harness import run_ranks
from tests.helpers.traces import Trace, assert_same, engine_of, plain_run, plan_of, trace

STEPS, TILE = 3, 5
"""The last tile of a sequence of 32 tokens has 2."""
TILES = {"parallel.tiled_mlp": True}
FULL = {"parallel.activation_checkpointing": "full"}
FSDP2 = {"parallel.backend": "accelerate", "parallel.accelerate": "fsdp2"}
CASES = {
    "ZeRO-0": {"parallel.zero_stage": 0},
    "ZeRO-2": {"parallel.zero_stage": 2, **FULL},
    "ZeRO-3": {"parallel.zero_stage": 3, **FULL},
    "DDP": {"parallel.backend": "accelerate"},
    "FSDP2": {**FSDP2, "parallel.zero_stage": 3, **FULL},
    "stages": {"parallel.pipeline": 2, "parallel.zero_stage": 1, **FULL},
    "tensor": {"parallel.tensor": 2, "parallel.zero_stage": 1, **FULL},
    "tensor, ZeRO-3": {"parallel.tensor": 2, "parallel.zero_stage": 3},
    "sequence": {"parallel.sequence": 2, "parallel.zero_stage": 3, **FULL},
}
FEW = ("ZeRO-3", "stages")
MODELS = {
    "gemma": {"model.architecture": "gemma", "model.config.head_dim": 16},
    "gpt2": {
        "model.architecture": "gpt2",
        "model.config": {"vocab_size": 256, "n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 32}
        | dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0),
    },
    "olmo2": {"model.architecture": "olmo2"},
    "qwen3": {"model.architecture": "qwen3", "model.config.head_dim": 16},
}


def _train(rank: int, recipe: Recipe, ranks: int) -> Trace:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(forward, "use_tiles", lambda model, tile: use_tiles(model, TILE))
        plan = plan_of(recipe, ranks)
        engine, batch = engine_of(plan), plan.batch
    place = engine.data_parallel_rank, plan.data_parallel_size
    return trace(engine, range(STEPS), batch.micro_batch_size, batch.gradient_accumulation_steps, *place)


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow if name in FEW else pytest.mark.breadth) for name in CASES]
)
def test_tiles_match_the_plain_loop(name):
    """The bound is that of every strategy in fp32."""
    expected = plain_run(tiny_recipe(), STEPS)
    for run in run_ranks(2, _train, tiny_recipe(**CASES[name], **TILES), 2):
        assert_same(run, expected, name)


@pytest.mark.parametrize("family", MODELS)
def test_families_with_token_wise_feed_forward_layers_can_be_tiled(family):
    check_tiles(model_configuration(tiny_recipe(**MODELS[family])))


def test_families_without_a_feed_forward_part_are_refused():
    opt = {"vocab_size": 256, "hidden_size": 64, "ffn_dim": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    recipe = tiny_recipe(**{"model.architecture": "opt", "model.config": opt | {"max_position_embeddings": 32}})
    with pytest.raises(FamilyError, match=r"recompute\.tiles"):
        check_tiles(model_configuration(recipe))


def test_a_part_that_mixes_tokens_is_refused(monkeypatch):
    """What the comparison on a tiny copy is for."""
    from transformers.models.llama.modeling_llama import LlamaMLP

    def mixing(module: LlamaMLP, hidden: Tensor, plain: Any = LlamaMLP.forward) -> Any:
        return plain(module, hidden - hidden.mean(1, keepdim=True))

    monkeypatch.setattr(LlamaMLP, "forward", mixing)
    with pytest.raises(FamilyError, match="deviate"):
        check_tiles(model_configuration(tiny_recipe()))


def test_dropout_is_refused():
    """A tiny copy has none, so the model itself is looked at."""
    recipe = tiny_recipe(**MODELS["gpt2"], **{"model.config.resid_pdrop": 0.1})
    with pytest.raises(FamilyError, match="dropout"):
        use_tiles(build_model(recipe, torch.float32, torch.device("cpu")), TILE)
