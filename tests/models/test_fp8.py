"""Products of the layers in fp8, emulated: the converted layers, the unchanged ones, and the refusals."""

from __future__ import annotations

from dataclasses import replace
from importlib.util import find_spec

import pytest
import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

from llmtrain.errors import RecipeError
from llmtrain.models import precision
from llmtrain.models.stages import build_stage
from llmtrain.models.tiny.configuration import shrink_configuration
from llmtrain.models.tiny.stages_check import check_cut
from llmtrain.plan.stages import StageBounds

CPU = torch.device("cpu")
FIELDS = {"vocab_size": 96, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
FIELDS |= {"num_attention_heads": 4, "num_key_value_heads": 2}
E4M3, E5M2 = 2**-4, 2**-3
"""Largest relative rounding of numbers with 3 and with 2 bits behind the first."""
needs_torchao = pytest.mark.skipif(find_spec("torchao") is None, reason="needs torchao: pip install -e '.[fp8]'")


@pytest.fixture
def emulated(monkeypatch):
    """Operands are rounded to fp8, and multiplied in fp32: a CPU has no products of fp8."""
    plain = precision._config
    monkeypatch.setattr(precision, "_config", lambda kind: replace(plain(kind), emulate=True))


def _model(family: str = "llama", **fields: object):
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **FIELDS | fields), dtype=torch.bfloat16)


def _converted(model: nn.Module) -> set[str]:
    return {name for name, module in model.named_modules() if type(module).__name__ == "Float8Linear"}


@needs_torchao
def test_the_layers_are_converted_and_the_head_is_not(emulated):
    model = _model()
    precision.use_fp8(model, "tensorwise")
    names = _converted(model)
    assert len(names) == 2 * 7
    assert all(name.startswith("model.layers.") for name in names)


@needs_torchao
def test_weights_stay_the_same_objects_by_the_same_names(emulated):
    model = _model()
    before, state = dict(model.named_parameters()), [*model.state_dict()]
    precision.use_fp8(model, "rowwise")
    after = dict(model.named_parameters())
    assert [*after] == [*before]
    assert all(after[name] is before[name] for name in before)
    assert [*model.state_dict()] == state


@needs_torchao
@pytest.mark.parametrize("kind", ["tensorwise", "rowwise"])
def test_a_product_rounds_its_operands_once(emulated, kind):
    """Value and gradients of one layer against fp32, within the roundings of both operands, a term at a time."""
    generator = torch.Generator().manual_seed(0)
    rows, layers = torch.randn(32, 48, generator=generator), nn.ModuleList([nn.Linear(48, 16, bias=False)])
    upstream = torch.randn(32, 16, generator=generator)
    weight = layers[0].weight.detach().clone()
    convert(layers, kind)
    rows.requires_grad_()
    value = layers[0](rows)
    value.backward(upstream)
    gradient_rounding = E5M2 if kind == "tensorwise" else E4M3  # torchao's types of gradients
    for found, one, other, rounding in (
        (value, rows, weight.T, E4M3 + E4M3),
        (rows.grad, upstream, weight, gradient_rounding + E4M3),
        (layers[0].weight.grad, upstream.T, rows, gradient_rounding + E4M3),
    ):
        bound = 1.1 * rounding * (one.abs() @ other.abs()) + 1e-3  # and values below the smallest number
        assert ((found - one @ other).abs() <= bound).all()
        assert (found != one @ other).any()


def convert(layers: nn.Module, kind: str) -> None:
    from torchao.float8 import convert_to_float8_training

    convert_to_float8_training(layers, config=precision._config(kind))


@needs_torchao
@pytest.mark.parametrize("kind", ["tensorwise", "rowwise"])
def test_a_model_stays_near_bf16(emulated, kind):
    tokens = torch.arange(32).reshape(2, 16)
    losses = []
    for changed in (False, True):
        model = _model()
        if changed:
            precision.use_fp8(model, kind)
        loss = model(tokens, labels=tokens).loss
        loss.backward()
        losses.append(loss.item())
        assert all(parameter.grad is not None for parameter in model.parameters())
    assert losses[0] != losses[1]
    assert losses[1] == pytest.approx(losses[0], rel=0.05)


@needs_torchao
def test_only_the_layers_of_a_stage_are_converted(emulated):
    config, bounds = shrink_configuration(AutoConfig.for_model("llama"), 2), (StageBounds(0, 1), StageBounds(1, 2))
    cut = check_cut(config, bounds)
    stage = build_stage(config, 1, cut, "eager", torch.bfloat16, CPU)
    names = stage.hf_names
    precision.use_fp8(stage.model, "tensorwise")
    assert len(_converted(stage)) == 7
    assert all(name.startswith("model.model.layers.1.") for name in _converted(stage))
    assert [*names] == [name for name, _ in stage.named_parameters()]


@needs_torchao
def test_layers_with_indivisible_dimensions_are_not_converted():
    model = _model(intermediate_size=72)
    precision.use_fp8(model, "tensorwise")
    assert len(_converted(model)) == 2 * 4
    assert not [name for name in _converted(model) if ".mlp." in name]


@pytest.mark.parametrize(
    ("installed", "device", "capability", "why"),
    [
        (False, "cuda", (9, 0), "it needs torchao (pip install llmtrain[fp8])"),
        (True, "cpu", None, "products in fp8 need a GPU, and this is a cpu"),
        (True, "cuda", (8, 0), "products in fp8 need compute capability 8.9, and this GPU has 8.0"),
        (True, "cuda", (8, 9), ""),
        (True, "cuda", (10, 0), ""),
    ],
)
def test_unmet_requirements_are_named(monkeypatch, installed, device, capability, why):
    monkeypatch.setattr(precision, "find_spec", lambda name: object() if installed else None)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    assert precision.fp8_unavailable(torch.device(device)) == why


def test_models_without_linear_layers_are_refused():
    """GPT-2's layers are `Conv1D`."""
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model("gpt2", n_layer=2, n_embd=48))
    with pytest.raises(RecipeError, match=r"no linear layer of this gpt2 has dimensions.*\n.*--set kernels\.fp8=off"):
        precision.use_fp8(model, "tensorwise")


def test_a_cpu_is_refused():
    with pytest.raises(RecipeError, match=r"kernels\.fp8: 'rowwise' cannot be used: .*fp8"):
        precision.check_fp8("rowwise", CPU)


def test_slower_fp8_is_refused_with_both_times():
    precision.refuse_slower("tensorwise", bf16=2e-3, fp8=1.5e-3)
    with pytest.raises(
        RecipeError, match=r"through some layers takes 2\.5 ms in fp8, but only 2 ms in bf16.*\n.*kernels\.fp8=off"
    ):
        precision.refuse_slower("tensorwise", bf16=2e-3, fp8=2.5e-3)
