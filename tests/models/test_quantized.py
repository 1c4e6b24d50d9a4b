"""Quantized folders are read as the values that their formats define."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from llmtrain.errors import RecipeError
from llmtrain.models import build_model, check_weights
from llmtrain.models.pretrained import WeightFiles
from llmtrain.models.quantized import QuantizedFiles, Stored
from llmtrain.plan.facts.quantization import quantization_in
from llmtrain.recipe import ModelConfig
from tests.helpers.batches import tiny_recipe
from tests.helpers.quantized import FORMATS, declare, fp8, mxfp4, packed, quantize_folder
from tests.helpers.traces import plan_of

CPU = torch.device("cpu")
FROM = {"model.architecture": None, "model.config": {}}


@pytest.fixture
def folder(tmp_path):
    """A saved model with a head of its own."""
    made = tmp_path / "plain"
    build_model(tiny_recipe(**{"model.config.tie_word_embeddings": False}), torch.float32, CPU).save_pretrained(made)
    return made


def _from(folder, **fields):
    return tiny_recipe(**FROM, **{"model.pretrained": str(folder)}, **fields)


@pytest.mark.parametrize("name", FORMATS)
def test_each_format_is_read_as_the_values_that_it_defines(name, folder):
    values = quantize_folder(folder, *FORMATS[name])
    files = WeightFiles(ModelConfig(pretrained=str(folder)))
    assert files.like.keys() == values.keys()
    for key, value in values.items():
        read = files.tensor(key)
        assert files.like[key].shape == read.shape == value.shape
        if name == "bnb int8":  # bitsandbytes multiplies with a rounded 1/127; the definition here divides
            torch.testing.assert_close(read, value, rtol=2**-22, atol=0)
        else:
            assert torch.equal(read, value), key
    model = build_model(_from(folder), torch.float32, CPU)
    assert all(torch.equal(weight, files.tensor(key)) for key, weight in model.named_parameters())
    assert not hasattr(model.config, "quantization_config")


def test_the_values_of_fp8_are_those_of_transformers(folder):
    """Of blocks that divide the weights: others it refuses."""
    quantize_folder(
        folder, {"quant_method": "fp8", "weight_block_size": [32, 32]}, lambda weight, name: fp8(weight, name, (32, 32))
    )
    read = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    ours = build_model(_from(folder), torch.float32, CPU)
    assert all(torch.equal(weight, ours.get_parameter(name)) for name, weight in read.named_parameters())


EAGER = {"model.attention": "eager"}
GPT_OSS = {
    "model.architecture": "gpt_oss",
    "model.config": {
        **{"vocab_size": 256, "hidden_size": 64, "intermediate_size": 32, "num_hidden_layers": 2, "head_dim": 16},
        **{"num_attention_heads": 4, "num_key_value_heads": 2, "num_local_experts": 4, "num_experts_per_tok": 2},
        **{"max_position_embeddings": 64, "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}},
    },
}


def _mxfp4_folder(folder):
    """Returns a folder like those of gpt-oss, and the values of its weights."""
    build_model(tiny_recipe(**GPT_OSS, **EAGER), torch.float32, CPU).bfloat16().save_pretrained(folder)
    tensors = load_file(folder / "model.safetensors")
    values = dict(tensors)
    for name in [name for name in tensors if name.endswith(("gate_up_proj", "down_proj"))]:
        made, values[name] = mxfp4(tensors.pop(name), name)
        tensors |= made
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    declare(folder, {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn"]})
    return values


def test_mxfp4_is_read_bit_for_bit(tmp_path):
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    values = _mxfp4_folder(tmp_path)
    stored = load_file(tmp_path / "model.safetensors")
    model = build_model(_from(tmp_path, **EAGER), torch.bfloat16, CPU)
    for name, weight in model.named_parameters():
        assert torch.equal(weight.float(), values[name].float()), name
        if f"{name}_blocks" in stored:
            theirs = convert_moe_packed_tensors(stored[f"{name}_blocks"], stored[f"{name}_scales"])
            assert torch.equal(weight, theirs)


def test_integers_of_compressed_tensors_are_those_of_the_package(tmp_path):
    quantization = pytest.importorskip("compressed_tensors.quantization")
    from compressed_tensors.compressors import BaseCompressor

    settings, _ = FORMATS["compressed int4"]
    tensors, _ = packed(torch.randn(64, 96), "layer.weight", 32)
    scheme = quantization.QuantizationScheme(
        targets=["Linear"], weights=settings["config_groups"]["group_0"]["weights"]
    )
    own = {name.removeprefix("layer."): tensor for name, tensor in tensors.items()}
    theirs = BaseCompressor.get_value_from_registry("pack-quantized").decompress(own, scheme)["weight"]
    assert torch.equal(_read(tensors, settings), theirs)


@pytest.mark.parametrize("double", [False, True])
def test_values_of_bitsandbytes_are_those_of_the_package(double):
    functional = pytest.importorskip("bitsandbytes.functional")
    weight = torch.randn(96, 128)
    words, state = functional.quantize_4bit(weight, quant_type="nf4", compress_statistics=double)
    tensors = {"layer.weight": words} | {
        f"layer.weight.{name}": tensor for name, tensor in state.as_dict(packed=True).items()
    }
    read = _read(tensors, {"quant_method": "bitsandbytes", "load_in_4bit": True})
    assert torch.equal(read, functional.dequantize_4bit(words, state))
    elements, scales, _ = functional.int8_vectorwise_quant(weight.half())
    tensors = {"layer.weight": elements, "layer.SCB": scales}
    read = _read(tensors, {"quant_method": "bitsandbytes", "load_in_8bit": True})
    assert torch.equal(read, functional.int8_vectorwise_dequant(elements, scales))


def _read(tensors, settings):
    """Returns the one weight that tensors stand for."""
    dtypes = {torch.int32: "I32", torch.int64: "I64", torch.uint8: "U8", torch.int8: "I8", torch.float32: "F32"}
    stored = {name: Stored(dtypes[tensor.dtype], tuple(tensor.shape)) for name, tensor in tensors.items()}
    found = QuantizedFiles(stored, quantization_in({"quantization_config": settings}), tensors.get)
    assert not found.faults
    assert found.plain == []
    [weight] = found.weights.values()
    return weight.value({role: tensors[name] for role, name in weight.parts.items()})


LAYER = "model.layers.0.self_attn.q_proj"


@pytest.mark.parametrize(
    ("name", "gone", "told"),
    [
        ("fp8 blocks", "weight_scale_inv", f"{LAYER}.weight has no scale"),
        ("fp8 blocks", "weight", f"has 1 tensors that the model does not have: {LAYER}.weight_scale_inv"),
        ("gptq", "scales", f"{LAYER}.qweight lacks {LAYER}.scales"),
        ("awq", "qweight", f"{LAYER}.qzeros"),
        ("compressed int4", "weight_shape", f"{LAYER}.weight_packed lacks {LAYER}.weight_shape"),
        ("bnb nf4", "weight.absmax", f"{LAYER}.weight lacks {LAYER}.weight.absmax"),
        ("bnb int8", "SCB", f"{LAYER}.weight lacks {LAYER}.SCB"),
    ],
)
def test_what_is_missing_is_named(name, gone, told, folder):
    quantize_folder(folder, *FORMATS[name])
    tensors = load_file(folder / "model.safetensors")
    del tensors[f"{LAYER}.{gone}"]
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(RecipeError) as caught:
        check_weights(_from(folder))
    assert told in str(caught.value)


def test_scales_of_another_block_are_refused(folder):
    quantize_folder(folder, *FORMATS["fp8 blocks"])
    declare(folder, {"quant_method": "fp8", "weight_block_size": [16, 16]})
    with pytest.raises(RecipeError, match=r"weight_scale_inv is \[3, 2\], which is no grid of scales"):
        check_weights(_from(folder))


def _compressed(**changes):
    settings = json.loads(json.dumps(FORMATS["compressed int4"][0]))
    settings["config_groups"]["group_0"]["weights"] |= changes.pop("weights", {})
    return settings | changes


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({"quant_method": "hqq"}, "of the methods, only fp8"),
        ({"quant_method": "gptq", "bits": 3}, "elements of 3 bits are not read"),
        ({"quant_method": "gptq", "bits": 4, "checkpoint_format": "marlin"}, "the layout 'marlin'"),
        ({"quant_method": "gptq"}, "cannot be understood"),
        ({"quant_method": "awq", "bits": 4, "version": "gemv"}, "the layout 'gemv'"),
        (_compressed(format="nvfp4-pack-quantized"), "the format 'nvfp4-pack-quantized' of int4"),
        (_compressed(weights={"num_bits": 3}), "of int3"),
        (_compressed(quantization_status="frozen"), "quantization_status is 'frozen'"),
        (_compressed(sparsity_config={"format": "sparse-24-bitmask"}), "leave out zeros"),
        ("int4", "not a set of fields"),
    ],
)
def test_other_kinds_are_refused_by_the_plan(settings, told, folder):
    declare(folder, settings)
    with pytest.raises(RecipeError, match=told) as caught:
        plan_of(_from(folder), 1)
    [problem] = caught.value.problems
    assert (problem.rule, problem.field) == ("model.quantized", "model.pretrained")
    assert "base_model" in problem.fix


def test_a_plan_says_that_weights_are_dequantized(folder):
    declare(folder, FORMATS["gptq"][0])
    [note] = [note for note in plan_of(_from(folder), 4).notes if note["rule"] == "model.dequantized"]
    assert "gptq (4 bits, groups of 32)" in note["message"]
    assert "in fp32" in note["message"]
    lora = {"model.adapter": {"rank": 4}, "model.quantize": "nf4"}
    [note] = [note for note in plan_of(_from(folder, **lora), 4).notes if note["rule"] == "model.dequantized"]
    assert "quantized to nf4; the export of the adapter names the quantized base" in note["message"]
