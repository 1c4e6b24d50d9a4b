"""Initial weights depend only on the seed and the module's name."""

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.initialization import no_init_weights

from llmtrain.models.initial import draw_all_weights
from llmtrain.models.stages import build_stage
from llmtrain.models.tiny.stages_check import check_cut
from llmtrain.plan.stages import StageBounds

FAMILIES = {
    "llama": {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4},
    "gpt2": {"n_embd": 64, "n_layer": 2, "n_head": 4},
    # Its truncated normal goes through a uniform draw, which bf16 would make coarse.
    "modernbert-decoder": {
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "pad_token_id": 0,
    },
    "qwen3_moe": {
        "hidden_size": 64,
        "intermediate_size": 96,
        "moe_intermediate_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "num_experts": 4,
    },
}


def _model(family: str, dtype: torch.dtype = torch.float32, seed: int = 1, layers: int | None = None):
    fields = {"vocab_size": 128, **FAMILIES[family]}
    if layers:
        fields["n_layer" if family == "gpt2" else "num_hidden_layers"] = layers
    with no_init_weights():
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **fields), dtype=dtype)
    model.tie_weights()
    for parameter in model.parameters():
        torch.nn.init.constant_(parameter, 7.0)
    draw_all_weights(model, seed)
    return model


@pytest.mark.parametrize("family", FAMILIES)
def test_every_weight_is_drawn(family):
    stale = [name for name, p in _model(family).named_parameters() if (p == 7.0).any()]
    assert stale == []


@pytest.mark.parametrize("family", FAMILIES)
def test_the_spread_of_initial_weights_is_that_of_the_family(family):
    ours = _model(family)
    torch.manual_seed(0)
    theirs = AutoModelForCausalLM.from_config(ours.config)
    for (name, a), (_, b) in zip(ours.named_parameters(), theirs.named_parameters(), strict=True):
        if a.dim() == 1:
            assert torch.equal(a, b), name
        else:
            # Two samples of the same normal distribution: the spread of an estimate of the
            # deviation from n draws is 1/sqrt(2n); six of them would be an accident of 1e-9.
            tolerance = 6 * (2 / (2 * a.numel())) ** 0.5
            assert abs(a.std() / b.std() - 1) < tolerance, name


@pytest.mark.parametrize("family", ["llama", "qwen3_moe"])  # GPT-2 scales its projections by the depth
def test_a_layer_starts_equal_in_a_deeper_model(family):
    shallow, deep = dict(_model(family).named_parameters()), dict(_model(family, layers=3).named_parameters())
    assert all(torch.equal(shallow[name], deep[name]) for name in shallow)


@pytest.mark.parametrize("family", FAMILIES)
def test_bf16_starts_from_the_rounded_fp32_weights(family):
    exact, rounded = _model(family), _model(family, torch.bfloat16)
    for (name, a), (_, b) in zip(exact.named_parameters(), rounded.named_parameters(), strict=True):
        assert torch.equal(a.bfloat16(), b), name


def test_another_seed_gives_other_weights_and_the_generator_does_not_change():
    torch.manual_seed(5)
    before = torch.get_rng_state()
    one, other = _model("llama", seed=1), _model("llama", seed=2)
    assert not torch.equal(one.lm_head.weight, other.lm_head.weight)
    torch.manual_seed(5)
    draw_all_weights(one, 1)
    assert torch.equal(torch.get_rng_state(), before)


LEFT_TO_CONSTRUCTORS = {
    "apertus": {"num_attention_heads": 4},
    "ernie4_5_moe": {
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "moe_num_experts": 4,
        "moe_layer_start_index": 0,
    },
    "openai-gpt": {"n_embd": 64, "n_layer": 4, "n_head": 4},
}
"""Families whose `_init_weights` leaves some weights to the constructors of their modules."""


@pytest.fixture
def no_memory_is_zero_by_chance():
    """Uninitialized memory is NaN."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.usefixtures("no_memory_is_zero_by_chance")
@pytest.mark.parametrize("family", LEFT_TO_CONSTRUCTORS)
def test_weights_that_a_family_does_not_draw_start_as_constructed(family):
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 4, "vocab_size": 128}
    config = AutoConfig.for_model(family, **sizes | LEFT_TO_CONSTRUCTORS[family])
    with no_init_weights():
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model.tie_weights()
    draw_all_weights(model, 1)
    whole = dict(model.named_parameters())
    assert not [name for name, weight in whole.items() if weight.isnan().any()]
    constructed = dict(AutoModelForCausalLM.from_config(config, dtype=torch.float32).named_parameters())
    for name, weight in whole.items():
        assert abs(weight.std(correction=0) - constructed[name].std(correction=0)) < 0.005, name
        assert abs(weight.mean() - constructed[name].mean()) < 0.005, name
    cut = check_cut(config, (StageBounds(0, 2), StageBounds(2, 4)))
    for index in range(2):
        stage = build_stage(config, index, cut, "eager", torch.float32, torch.device("cpu"))
        draw_all_weights(stage.model, 1)
        for own, name in stage.hf_names.items():
            assert torch.equal(stage.get_parameter(own), whole[name]), name
