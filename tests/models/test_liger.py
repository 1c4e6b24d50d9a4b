"""Liger's kernels in one model equal its own modules, and other models do not change."""

from __future__ import annotations

import sys
from dataclasses import replace

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.initialization import no_init_weights

from llmtrain.errors import RecipeError
from llmtrain.models import Stage, chunked_loss, liger
from llmtrain.models.initial import draw_all_weights
from llmtrain.models.stages import build_stage
from llmtrain.models.tiny.compare import deviation, loss_outcome
from llmtrain.models.tiny.configuration import shrink_configuration
from llmtrain.models.tiny.model import build_tiny_model
from llmtrain.models.tiny.stages_check import check_cut
from llmtrain.plan.stages import StageBounds
from tests.helpers import triton_on_cpu
from tests.helpers.harness import run_ranks
from tests.helpers.triton_on_cpu import needs_liger

CPU = torch.device("cpu")
VOCABULARY = 97
FIELDS = {"vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
FIELDS |= {"num_attention_heads": 4, "num_key_value_heads": 2}


@pytest.fixture(autouse=True, scope="module")
def _interpreter():
    if not needs_liger.args[0]:
        triton_on_cpu.complete()


def _model(family: str = "llama", dtype: torch.dtype = torch.float32, **fields: object):
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **FIELDS | fields), dtype=dtype)


def _batch() -> tuple[torch.Tensor, torch.Tensor]:
    tokens = torch.randint(0, VOCABULARY, (2, 9), generator=torch.Generator().manual_seed(1))
    labels = tokens.roll(-1, dims=1)
    labels[0, 3:6] = -100
    return tokens, labels


BREADTH = (
    *("gemma2", "qwen3", "mistral", "mixtral", "nemotron", "granite", "phi3", "olmo2", "glm4", "gpt_oss", "gemma"),
    *("gemma3_text", "gemma4_text", "llama4_text", "smollm3", "qwen2", "qwen3_moe", "qwen3_next", "qwen3_5_text"),
    *("deepseek_v3", "falcon_h1", "hunyuan_v1_dense", "exaone4", "ministral", "olmo3", "deepseek_v2"),
)


@needs_liger
@pytest.mark.parametrize("family", ["llama", *(pytest.param(one, marks=pytest.mark.breadth) for one in BREADTH)])
def test_liger_layers_equal_the_plain_ones(family):
    """Norms, rotations and gated activations, forward and backward."""
    liger.check_blocks(AutoConfig.for_model(family), CPU)


@needs_liger
def test_norms_rotations_and_activations_are_those_of_liger():
    from liger_kernel.transformers import LigerRMSNorm, LigerSwiGLUMLP, liger_rotary_pos_emb
    from transformers.models.llama import modeling_llama

    model, plain, seen = _model(), modeling_llama.apply_rotary_pos_emb, []
    liger.use_liger_layers(model)
    layer = model.model.layers[1]
    for norm in (layer.input_layernorm, layer.post_attention_layernorm, model.model.norm):
        assert norm.forward.__func__ is LigerRMSNorm.forward
    assert layer.mlp.forward.__func__ is LigerSwiGLUMLP.forward
    layer.self_attn.o_proj.register_forward_pre_hook(lambda *_: seen.append(modeling_llama.apply_rotary_pos_emb))
    model(_batch()[0])
    assert seen == [liger_rotary_pos_emb]
    assert modeling_llama.apply_rotary_pos_emb is plain


@needs_liger
@pytest.mark.parametrize(
    "family",
    [one if one == "llama" else pytest.param(one, marks=pytest.mark.breadth) for one in sorted(liger.FAMILIES)],
)
def test_kernels_are_those_that_liger_would_choose(family):
    """In a process of its own, since Liger changes the family for all of it."""
    theirs, rotation = run_ranks(1, _by_liger, family)[0]
    model = _empty(family)
    liger.use_liger_layers(model)
    ours, named = _bound(model), liger.FAMILIES[family].rotation
    assert ours.keys() == theirs.keys()
    for name, (forward, read) in ours.items():
        # A norm whose gradient Liger writes in place may keep it too.
        kept = theirs[name][1] | ({"in_place": False} if read.get("in_place") is False else {})
        assert (forward, read) == (theirs[name][0], kept), name
    assert rotation == ({named[0]: named[1].partition(":")[2]} if named else {})


def _by_liger(rank: int, family: str) -> tuple[dict, dict[str, str]]:
    triton_on_cpu.complete()
    from liger_kernel.transformers.monkey_patch import MODEL_TYPE_TO_APPLY_LIGER_FN

    model = _empty(family)
    attentions = [type(module) for module in model.modules() if type(module).__name__.endswith("Attention")]
    called = {(name, sys.modules[one.__module__]) for one in attentions for name in one.forward.__code__.co_names}
    MODEL_TYPE_TO_APPLY_LIGER_FN[family](model=model, cross_entropy=False, fused_linear_cross_entropy=False)
    replaced = {name: getattr(space, name, None) for name, space in called if name.startswith("apply_rotary")}
    return _bound(model), {name: new.__name__ for name, new in replaced.items() if new.__module__.startswith("liger")}


def _empty(family: str):
    with torch.device("meta"), no_init_weights():
        return AutoModelForCausalLM.from_config(shrink_configuration(AutoConfig.for_model(family), 4))


READ = ("offset", "casting_mode", "variance_epsilon", "in_place", "row_mode")


def _bound(model) -> dict[str, tuple[str, dict]]:
    """Module → the forward pass of Liger's that it has, but for experts, and what a norm's reads."""
    found = {}
    for name, module in model.named_modules():
        forward = getattr(vars(module).get("forward"), "__func__", type(module).forward)
        if forward.__module__.startswith("liger") and forward.__qualname__ != "LigerExperts.forward":
            found[name] = (forward.__qualname__, {key: vars(module)[key] for key in READ if key in vars(module)})
    return found


@needs_liger
def test_other_models_stay_plain():
    """Of the same process and family, built before and after."""
    from transformers.models.llama import modeling_llama

    names = dict(vars(modeling_llama))
    before, changed = _model(), _model()
    liger.use_liger_layers(changed)
    assert vars(modeling_llama) == names
    for plain in (before, _model()):
        assert not [name for name, module in plain.named_modules() if "forward" in vars(module)]
    tokens, _ = _batch()
    assert torch.equal(before(tokens).logits, _model()(tokens).logits)


@needs_liger
def test_parameters_keep_their_names():
    model = _model()
    names = [name for name, _ in model.named_parameters()]
    liger.use_liger_layers(model)
    assert [name for name, _ in model.named_parameters()] == names == [*_model().state_dict()]


@needs_liger
def test_experts_are_not_replaced():
    from transformers.models.mixtral.modeling_mixtral import MixtralExperts

    model = _model("mixtral", num_local_experts=4)
    liger.use_liger_layers(model)
    experts = [module for module in model.modules() if isinstance(module, MixtralExperts)]
    assert experts
    assert not [module for module in experts if "forward" in vars(module)]


@needs_liger
def test_modules_with_other_computations_are_not_replaced():
    model = _model()
    norm = model.model.norm
    norm.forward = lambda states: states
    liger.use_liger_layers(model)
    assert norm.forward.__name__ == "<lambda>"
    assert "forward" in vars(model.model.layers[0].input_layernorm)


@needs_liger
def test_only_the_layers_of_a_stage_are_replaced():
    """Placeholders stay, and the chain computes what it did."""
    config, bounds = shrink_configuration(AutoConfig.for_model("llama"), 2), (StageBounds(0, 1), StageBounds(1, 2))
    cut = check_cut(config, bounds)
    inputs = torch.arange(12)[None] % 90, torch.arange(12)[None]

    def chain(changed: bool) -> torch.Tensor:
        stages = [build_stage(config, index, cut, "eager", torch.float32, CPU) for index in (0, 1)]
        states: tuple[torch.Tensor, ...] = inputs
        for stage in stages:
            draw_all_weights(stage.model, 0)
            if changed:
                liger.use_liger_layers(stage.model)
                assert len(_changed(stage)) == 4 + stage.is_last
            states = stage(states)
        return states

    torch.testing.assert_close(chain(True), chain(False), rtol=1e-4, atol=1e-5)


def _changed(stage: Stage) -> list[str]:
    return [name for name, module in stage.named_modules() if "forward" in vars(module)]


@needs_liger
@pytest.mark.parametrize(
    "family", ["llama", "gpt2", *(pytest.param(one, marks=pytest.mark.breadth) for one in BREADTH)]
)
def test_the_fused_loss_equals_the_plain_loss(family):
    """Tied and untied heads, capped logits."""
    liger.check_loss(AutoConfig.for_model(family), CPU)


@needs_liger
@pytest.mark.parametrize("tied", [False, True])
def test_labels_without_a_target_do_not_count(tied):
    tokens, labels = _batch()
    model = _model(tie_word_embeddings=tied)
    plain = _gradients(model(tokens, labels=None).logits, labels, model)
    loss = liger.LigerLoss(model)
    assert chunked_loss(model) is loss
    model.zero_grad()
    fused = model(tokens, targets=labels).loss_sum
    (3 * fused).backward()
    assert fused.item() == pytest.approx(plain[0], rel=1e-6)
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.grad, 3 * plain[1][name], rtol=1e-4, atol=1e-5, msg=name)


def _gradients(logits, labels, model) -> tuple[float, dict[str, torch.Tensor]]:
    loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")
    loss.backward()
    return loss.item(), {name: parameter.grad.clone() for name, parameter in model.named_parameters()}


@needs_liger
def test_the_loss_without_gradients_is_the_same():
    tokens, labels = _batch()
    model = _model()
    with torch.no_grad():
        logits = model(tokens).logits
        liger.LigerLoss(model)
        fused = model(tokens, targets=labels).loss_sum
    whole = torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")
    assert fused.item() == pytest.approx(whole.item(), rel=1e-6)


@needs_liger
def test_families_unknown_to_liger_are_refused():
    with pytest.raises(
        RecipeError, match=r"kernels\.blocks.*cohere does not run with its kernels.*no kernels.*\n.*blocks=eager"
    ):
        liger.check_blocks(AutoConfig.for_model("cohere"), CPU)


@needs_liger
def test_a_loss_of_other_logits_is_refused():
    """Cohere scales its logits, which Liger's loss knows nothing of."""
    with pytest.raises(RecipeError, match=r"the loss or gradients of cohere would deviate.*\n.*kernels\.loss=chunked"):
        liger.check_loss(AutoConfig.for_model("cohere"), CPU)


@needs_liger
def test_a_kernel_with_deviating_results_is_refused(monkeypatch):
    wrong = replace(liger.FAMILIES["llama"], norm=liger.AS_IS | {"offset": 0.01})
    monkeypatch.setitem(liger.FAMILIES, "llama", wrong)
    with pytest.raises(RecipeError, match="gradients of llama would deviate"):
        liger.check_blocks(AutoConfig.for_model("llama"), CPU)


def test_a_nan_gradient_deviates():
    config = shrink_configuration(AutoConfig.for_model("llama"), 2)
    model = build_tiny_model(config, "eager")
    expected = loss_outcome(model)
    assert deviation(loss_outcome(model), expected)[:2] == (0, 0)
    model.model.norm.weight.register_hook(lambda gradient: gradient * float("nan"))
    assert deviation(loss_outcome(model), expected).gradient == float("inf")


@pytest.mark.parametrize(
    ("installed", "interpreted", "device", "why"),
    [
        ((), "1", "cuda", "it needs liger_kernel and triton (pip install llmtrain[liger])"),
        (("triton",), "1", "cuda", "it needs liger_kernel (pip install llmtrain[liger])"),
        (("triton", "liger_kernel"), "0", "cpu", "its kernels are written in Triton, which compiles for GPUs"),
        (("triton", "liger_kernel"), "0", "cuda", ""),
        (("triton", "liger_kernel"), "1", "cpu", ""),
    ],
)
def test_unmet_requirements_are_named(monkeypatch, installed, interpreted, device, why):
    monkeypatch.setattr(liger, "find_spec", lambda name: object() if name in installed else None)
    monkeypatch.setenv("TRITON_INTERPRET", interpreted)
    found = liger.liger_unavailable(torch.device(device))
    assert found.startswith(why)
    assert bool(found) is bool(why)


def test_missing_requirements_are_refused(monkeypatch):
    monkeypatch.setattr(liger, "liger_unavailable", lambda device: "no such thing here")
    with pytest.raises(RecipeError, match=r"kernels\.loss: 'liger' cannot be used: no such thing"):
        liger.check_loss(AutoConfig.for_model("llama"), CPU)
