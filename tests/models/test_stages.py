"""Stages of a pipeline, cut anywhere, together equal the whole model."""

from __future__ import annotations

import itertools

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from llmtrain.data import NO_TARGET
from llmtrain.errors import FamilyError, RecipeError
from llmtrain.models import ChunkedLoss, target_loss_sum
from llmtrain.models.initial import draw_all_weights
from llmtrain.models.loss import freeze_unused
from llmtrain.models.stages import StageEntry, build_stage
from llmtrain.models.tiny.configuration import SIZES, shrink_configuration
from llmtrain.models.tiny.model import build_tiny_model, packed_input, relative_deviation
from llmtrain.models.tiny.stages_check import build_chain, check_cut, find_cut, run_chain
from llmtrain.plan.stages import StageBounds, balance
from tools import families

HALVES = (StageBounds(0, 2), StageBounds(2, 4))
UNEVEN = (StageBounds(0, 1), StageBounds(1, 3), StageBounds(3, 4))
CLASSICS = "llama gpt2 bloom qwen3 gemma2 gemma3_text mixtral gpt_neox opt phi gemma4_text deepseek_v3"
CPU = torch.device("cpu")


class TestBalance:
    def test_equal_layers_are_divided_equally(self):
        assert balance([1.0] * 8, 4) == [StageBounds(first, first + 2) for first in (0, 2, 4, 6)]

    def test_stages_with_a_large_head_or_embedding_have_fewer_layers(self):
        assert balance([3.0, 1, 1, 1, 1, 1, 1, 5], 3) == [StageBounds(0, 2), StageBounds(2, 7), StageBounds(7, 8)]

    def test_the_division_minimizes_the_most_expensive_stage(self):
        costs = [7.0, 2, 5, 1, 8, 2, 4, 6, 3]
        for stages in range(1, 10):
            bounds = balance(costs, stages)
            ends = [0, *(bound.end for bound in bounds)]
            assert ends[:-1] == [bound.first for bound in bounds]
            assert ends[-1] == len(costs)
            best = min(
                max(sum(costs[a:b]) for a, b in itertools.pairwise((0, *cuts, len(costs))))
                for cuts in itertools.combinations(range(1, len(costs)), stages - 1)
            )
            assert max(sum(costs[bound.first : bound.end]) for bound in bounds) == best

    def test_layers_that_cost_nothing_still_fill_a_stage_each(self):
        assert balance([0.0, 0.0, 5.0], 3) == [StageBounds(layer, layer + 1) for layer in range(3)]

    def test_more_stages_than_layers_are_refused(self):
        with pytest.raises(RecipeError, match="cannot cut 3 layers into 4 stages"):
            balance([1.0] * 3, 4)


@pytest.mark.parametrize(
    "family",
    ["llama", "gpt2", "bloom", "qwen3", "gemma2", "gemma3_text", "mixtral", "gpt_neox", "opt", "phi", "gemma4_text"],
)
def test_two_stages_have_the_logits_and_gradients_of_the_whole_model(family):
    verdict = families.PIPELINE.judge(family)
    assert verdict.kind == "works", verdict


@pytest.mark.parametrize(
    ("family", "attention"),
    [("llama", "sdpa"), ("gpt2", "eager"), ("mixtral", "sdpa"), ("gemma4_text", "eager"), ("qwen3_next", "sdpa")],
)
def test_stages_of_unequal_length_match_the_whole_model(family, attention):
    config = families.tiny_config(family)
    whole, inputs = build_tiny_model(config, attention), packed_input(config)
    cut = find_cut(config, UNEVEN, attention)
    assert families.wrong_gradients(whole, cut, inputs) == []


def test_one_stage_equals_the_whole_model():
    config = families.tiny_config("gpt2")
    whole, cut = build_tiny_model(config, "eager"), find_cut(config, [StageBounds(0, 4)])
    assert families.wrong_gradients(whole, cut, packed_input(config)) == []


def test_the_auxiliary_loss_is_that_of_all_layers():
    config = families.tiny_config("mixtral")
    whole, inputs = build_tiny_model(config, "eager"), packed_input(config)
    results = run_chain(build_chain(whole, find_cut(config, UNEVEN), "eager"), inputs)
    expected = whole(input_ids=inputs[0], position_ids=inputs[1], use_cache=False)
    assert [len(result) for result in results] == [3, 3, 2]
    torch.testing.assert_close(results[-1][1], expected.aux_loss)
    assert results[-1][1] > 0


def test_without_an_auxiliary_loss_only_hidden_states_cross_stages_as_floats():
    config = shrink_configuration(AutoConfig.for_model("mixtral"), 4)
    whole = build_tiny_model(config, "eager")
    (hidden, positions), (logits,) = run_chain(
        build_chain(whole, find_cut(config, HALVES), "eager"), packed_input(config)
    )
    assert hidden.shape == (2, 16, 64)
    assert positions.dtype == torch.int64
    assert logits.shape == (2, 16, config.vocab_size)


@pytest.mark.parametrize("checkpointing", [False, True])
def test_several_micro_batches_may_be_in_flight(checkpointing):
    """1F1B: a stage goes forward with the next micro-batch before it goes back with the first."""
    config = families.tiny_config("llama")
    whole = build_tiny_model(config, "eager").train()
    one = packed_input(config)
    other = (one[0].flip(0), one[1])
    for inputs in (one, other):
        whole(input_ids=inputs[0], position_ids=inputs[1], use_cache=False).logits.square().mean().backward()
    stages = build_chain(whole, find_cut(config, HALVES), "eager")
    for stage in stages:
        if checkpointing:
            stage.model.gradient_checkpointing_enable({"use_reentrant": False})
    outputs = [run_chain(stages, inputs)[-1][0] for inputs in (one, other)]
    for output in outputs:
        output.square().mean().backward()
    for stage in stages:
        for own, name in stage.hf_names.items():
            torch.testing.assert_close(stage.get_parameter(own).grad, whole.get_parameter(name).grad)


@pytest.mark.parametrize(
    ("family", "recomputed"),
    [("llama", True), ("gpt2", False), ("gemma2", True), ("cohere", False), ("opt", False), ("mixtral", True)],
)
def test_a_last_stage_computes_the_loss_in_chunks(family, recomputed):
    """Tied heads, scaled and capped logits, a projection between layers and head, a router's loss."""
    config = families.tiny_config(family)
    whole, inputs = build_tiny_model(config, "eager").train(), packed_input(config)
    labels = inputs[0].roll(-1, dims=1)
    labels[0, 3:9] = NO_TARGET
    output = whole(input_ids=inputs[0], position_ids=inputs[1], use_cache=False)
    expected = [target_loss_sum(output.logits, labels), *([output.aux_loss] if "aux_loss" in output else [])]
    stages = build_chain(whole, find_cut(config, HALVES), "eager")
    ChunkedLoss(stages[-1].model, tokens=5, recomputed=recomputed)
    *_, hidden = run_chain(stages[:-1], inputs)
    losses = stages[-1](hidden, targets=labels)
    losses = losses if isinstance(losses, tuple) else (losses,)
    torch.testing.assert_close(losses, tuple(expected))
    for sums in (losses, expected):
        sum(sums).backward()
    for name, gradient in _over_stages(stages).items():
        # As `models.chunked.TOLERANCE`, of sums in another order.
        assert (gradient - whole.get_parameter(name).grad).abs().max() <= 1e-5 * _largest(whole), name


def _over_stages(stages) -> dict[str, torch.Tensor]:
    """Gradients by name in the whole model, those of tied weights summed."""
    found: dict[str, torch.Tensor] = {}
    for stage in stages:
        for own, name in stage.hf_names.items():
            if (gradient := stage.get_parameter(own).grad) is not None:
                found[name] = found.get(name, 0) + gradient
    return found


def _largest(model) -> float:
    return max(float(parameter.grad.abs().max()) for parameter in model.parameters() if parameter.grad is not None)


@pytest.mark.parametrize("family", ["llama", "gpt2", "gemma2", "mixtral", "modernbert-decoder"])
def test_a_stage_has_its_own_parameters_and_starts_from_the_whole_models_weights(family):
    config = families.tiny_config(family)
    whole = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    draw_all_weights(whole, 7)
    whole.tie_weights()
    cut = find_cut(config, HALVES)
    weights = dict(whole.named_parameters())
    held = []
    for index in range(2):
        stage = build_stage(config, index, cut, "eager", torch.float32, CPU)
        draw_all_weights(stage.model, 7)
        stage.model.tie_weights()
        names = stage.hf_names
        assert names.keys() == dict(stage.named_parameters()).keys()
        for own, name in names.items():
            assert torch.equal(stage.get_parameter(own), weights[name]), name
        held.append(set(names.values()))
    assert held[0] | held[1] == weights.keys()
    tied = {name for name in weights if whole.get_input_embeddings().weight is weights[name]}
    assert held[0] & held[1] == (tied if config.tie_word_embeddings else set())


def test_a_stage_takes_no_memory_for_other_stages(monkeypatch):
    devices = set()

    def whole(model):
        devices.update(parameter.device.type for parameter in model.parameters())
        return freeze_unused(model)

    monkeypatch.setattr("llmtrain.models.stages.freeze_unused", whole)
    config = families.tiny_config("llama")
    stage = build_stage(config, 0, check_cut(config, HALVES), "eager", torch.bfloat16, CPU)
    layer = 2 * (64 * 64 + 64 * 32) + 3 * 64 * 96 + 2 * 64
    assert sum(p.numel() for p in stage.parameters()) == 99 * 64 + 2 * layer
    assert {p.dtype for p in stage.parameters()} == {torch.bfloat16}
    assert not any(value.is_meta for value in (*stage.parameters(), *stage.buffers()))
    assert devices == {"meta"}


def test_rotary_frequencies_are_those_of_the_whole_model():
    config = families.tiny_config("llama")
    stage = build_stage(config, 1, check_cut(config, HALVES), "eager", torch.bfloat16, CPU)
    whole = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    assert torch.equal(stage.model.model.rotary_emb.inv_freq, whole.model.rotary_emb.inv_freq)


class TestRefusal:
    def test_two_lists_of_layers_are_refused(self):
        with pytest.raises(FamilyError, match=r"hrm_text cannot be cut .* one list of 4 decoder layers"):
            find_cut(families.tiny_config("hrm_text"), HALVES)

    def test_layers_that_pass_on_more_than_a_hidden_state_are_refused(self):
        with pytest.raises(FamilyError, match="deviate from the whole model's"):
            find_cut(families.tiny_config("zaya"), HALVES)

    def test_layers_that_share_state_across_the_cut_are_refused(self):
        config = families.tiny_config("gemma3n_text")
        with pytest.raises(FamilyError, match="its forward pass fails on a part of the layers"):
            find_cut(config, HALVES)
        find_cut(config, [StageBounds(0, 4)])

    def test_a_wrong_cut_is_detected(self, monkeypatch):
        monkeypatch.setattr(StageEntry, "exchange", lambda self, hidden: self.received * 1.001)
        with pytest.raises(FamilyError, match=r"deviate from the whole model's by"):
            find_cut(families.tiny_config("llama"), HALVES)

    def test_a_lost_gradient_is_detected(self, monkeypatch):
        config = families.tiny_config("llama")
        whole, cut = build_tiny_model(config, "eager"), find_cut(config, HALVES)
        monkeypatch.setattr(StageEntry, "exchange", lambda self, hidden: self.received.detach())
        assert "model.layers.0.mlp.up_proj.weight" in families.wrong_gradients(whole, cut, packed_input(config))

    def test_layers_skipped_at_random_are_refused(self):
        with pytest.raises(FamilyError, match=r"layerdrop = 0\.1"):
            check_cut(AutoConfig.for_model("opt", layerdrop=0.1), HALVES)


def test_a_full_size_configuration_is_checked_on_a_tiny_copy_without_random_numbers():
    config = AutoConfig.for_model("gemma2", num_hidden_layers=6, layer_types=None)
    before = torch.get_rng_state()
    cut = check_cut(config, [StageBounds(0, 3), StageBounds(3, 6)], "flash_attention_2")
    assert torch.equal(torch.get_rng_state(), before)
    assert cut.outside[1] == {"model.embed_tokens.weight", "model.norm.weight"}
    assert config.hidden_size == 2304


ROPE = {
    "phi3": {
        **{"rope_type": "longrope", "rope_theta": 10000.0, "partial_rotary_factor": 0.75},
        **{"short_factor": [1.0] * 36, "long_factor": [1.5] * 36, "original_max_position_embeddings": 4096},
    },
    "llama": {
        **{"rope_type": "llama3", "rope_theta": 500000.0, "factor": 8.0, "low_freq_factor": 1.0},
        **{"high_freq_factor": 4.0, "original_max_position_embeddings": 8192},
    },
    "qwen3": {"rope_type": "yarn", "rope_theta": 1e6, "factor": 4.0, "original_max_position_embeddings": 32768},
}


@pytest.mark.parametrize("family", ROPE)
def test_scaled_rotary_positions_are_kept_in_the_tiny_copy(family):
    config = AutoConfig.for_model(family, num_hidden_layers=4, rope_parameters=ROPE[family])
    assert shrink_configuration(config).rope_parameters["rope_type"] == ROPE[family]["rope_type"]
    check_cut(config, HALVES, "sdpa")


def test_a_tiny_copy_keeps_the_kinds_of_layers():
    config = AutoConfig.for_model("gemma3_text")
    assert shrink_configuration(config).layer_types == config.layer_types
    few = shrink_configuration(config, 4)
    assert few.layer_types == ["sliding_attention", "full_attention"] * 2
    assert (few.hidden_size, few.num_attention_heads * few.head_dim) == (64, 64)
    assert SIZES["vocab_size"] == few.vocab_size


def test_opt_with_projections_around_its_layers_is_cut_unchanged():
    """`facebook/opt-350m`: the embedding is narrower than the layers, and norms come after them."""
    sizes = {"hidden_size": 96, "word_embed_proj_dim": 48, "ffn_dim": 128, "num_attention_heads": 4}
    fields = {"num_hidden_layers": 4, "vocab_size": 99, "max_position_embeddings": 64, "do_layer_norm_before": False}
    config = AutoConfig.for_model("opt", **sizes, **fields, dropout=0.0)
    whole, inputs = build_tiny_model(config, "eager"), packed_input(config)
    cut = check_cut(config, HALVES)
    with torch.no_grad():
        expected = whole(input_ids=inputs[0], position_ids=inputs[1], use_cache=False).logits
        (found,) = run_chain(build_chain(whole, cut, "eager"), inputs)[-1]
    torch.testing.assert_close(found, expected)


def test_a_deviation_is_relative_and_infinite_for_a_nan():
    expected = torch.tensor([2.0, -4.0])
    assert relative_deviation(torch.tensor([2.0, -3.0]), expected) == 0.25
    assert relative_deviation(torch.tensor([2.0, -3.0]), expected, least=10.0) == 0.1
    assert relative_deviation(torch.tensor([2.0, torch.nan]), expected) == torch.inf
    assert relative_deviation(torch.tensor([2.0]), expected) == torch.inf
