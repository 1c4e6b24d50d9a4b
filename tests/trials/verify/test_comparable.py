"""The changes to a recipe for a comparison."""

from __future__ import annotations

import json

import pytest

from llmtrain.errors import RecipeError
from llmtrain.trials.verify.job import comparable
from tests.helpers.small_verify import STEPS, small

OPT = {"hidden_size": 32, "ffn_dim": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "word_embed_proj_dim": 32}


@pytest.mark.parametrize(
    ("architecture", "config", "off"),
    [
        ("gpt2", {"n_embd": 32, "resid_pdrop": 0.3}, {"resid_pdrop", "embd_pdrop", "attn_pdrop"}),
        ("llama", {"attention_dropout": 0.1}, {"attention_dropout"}),
        ("llama", {}, set()),
        ("mixtral", {"router_jitter_noise": 0.1}, {"router_jitter_noise"}),
        # A family that the plan's arithmetic does not know, and that drops out by default.
        ("opt", OPT, {"dropout"}),
    ],
)
def test_dropout_is_off(architecture, config, off, verify_corpus):
    recipe = small(verify_corpus, **{"model.architecture": architecture, "model.config": config})
    assert recipe.model.config == {**config, **dict.fromkeys(off, 0.0)}


def test_the_schedule_is_compressed_into_the_steps(verify_corpus):
    declared = small(verify_corpus).with_(**{"train.max_steps": 1000, "optim.warmup_steps": 100})
    recipe = comparable(declared, STEPS)
    assert recipe.train.max_steps == STEPS
    assert recipe.optim.warmup_steps == STEPS // 4


def test_products_in_fp8_are_not_compared(verify_corpus):
    with pytest.raises(RecipeError, match=r"verify\.fp8.*\n.*--set kernels\.fp8=off"):
        small(verify_corpus, **{"kernels.fp8": "rowwise"})


@pytest.mark.parametrize("precision", ["fp16", "autocast_fp16"])
def test_a_loss_scale_is_not_compared(precision, verify_corpus):
    with pytest.raises(RecipeError, match=r"verify\.precision"):
        small(verify_corpus, **{"parallel.precision": precision, "parallel.zero_stage": 1})


def test_quantized_weights_that_the_reference_does_not_read_are_not_compared(verify_corpus, tmp_path):
    config = {"model_type": "llama", "quantization_config": {"quant_method": "gptq", "bits": 4}}
    (tmp_path / "config.json").write_text(json.dumps(config), encoding="utf-8")
    with pytest.raises(RecipeError, match=r"the reference dequantizes fp8 and mxfp4, not gptq"):
        small(verify_corpus, model={"pretrained": str(tmp_path)})
