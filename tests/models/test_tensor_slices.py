"""A model split by its own plan has the logits, gradients and initial weights of the whole model."""

from __future__ import annotations

import re

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from llmtrain.errors import FamilyError
from llmtrain.models import build_model
from llmtrain.models.build import stage_builder
from llmtrain.models.tensor import collectives, sequence_parallel, split
from llmtrain.models.tensor.collectives import Shard, TorchCommunicator, shard_of
from llmtrain.models.tensor.split import TensorParallel, plan_split
from llmtrain.models.tiny import tensor_check
from llmtrain.models.tiny.configuration import shrink_configuration
from llmtrain.models.tiny.model import build_tiny_model, packed_input
from llmtrain.models.tiny.tensor_check import ThreadCommunicator, check_tensor_split, compare_tensor_split, whole_part
from llmtrain.plan.facts.families import MEGATRON_SP_FAMILIES, SLICED_FAMILIES
from tests.helpers.batches import tiny_recipe
from tests.helpers.harness import run_ranks

CPU = torch.device("cpu")
DENSE = ("llama", "qwen2", "qwen3", "gemma2", "gpt_neox", "phi3", "olmo2", "starcoder2", "cohere")
SUMS = {
    **dict.fromkeys(DENSE, 4),
    "mixtral": 4,
    "deepseek_v2": 5,  # routed and shared experts have separate sums
    "nemotron_h": 0,  # of its four layers one is split
    **dict.fromkeys(("apertus", "opt", "stablelm"), 4),  # by the usual names of matrices
    "llama4_text": 6,  # its routed experts get inputs with weights, and are summed apart from the shared one
    "gpt_oss": 5,  # one is of a gradient: that of the bias which all ranks add to the outputs of experts
    **dict.fromkeys(("gpt2", "bloom", "mpt", "bitnet"), 4),
    "inkling_text": 4,  # routed and shared experts
}
"""Biases, norms of heads, scaled and tied embeddings, fused projections, norms of all heads, attention beside
feed-forward, experts, latent attention, other mixers, transposed matrices, queries, keys and values in one matrix,
ALiBi, norms within attention; and the sums of activations over the ranks in a layer."""


def tiny(family: str, **fields):
    return shrink_configuration(AutoConfig.for_model(family), 4, **{"vocab_size": 100, **fields})


@pytest.mark.parametrize("family", SUMS)
def test_two_ranks_have_the_logits_and_gradients_of_the_whole_model(family, monkeypatch):
    own, sums = ThreadCommunicator.all_reduce, []
    monkeypatch.setattr(
        ThreadCommunicator, "all_reduce", lambda group, value: sums.append(value.shape) or own(group, value)
    )
    compare_tensor_split(config := tiny(family))
    activations = [shape for shape in sums if shape[-1] == config.get_text_config().hidden_size and len(shape) > 1]
    assert len(activations) // 2 // 4 == SUMS[family]


@pytest.mark.parametrize("family", [*DENSE, "mixtral"])
def test_slices_of_the_residual_are_gathered_and_scattered_in_place_of_the_sums(family, monkeypatch):
    width, length = tiny(family).hidden_size, packed_input(tiny(family))[0].size(1)
    seen = []

    class Counted(ThreadCommunicator):
        def all_reduce(self, value):
            seen.append("all_reduce" if value.dim() == 3 and value.shape[-1] == width else "other")
            return torch.stack(super().all_gather(value)).sum(0)

        def reduce_scatter(self, values):
            seen.append("reduce_scatter")
            return torch.stack(super().all_gather(torch.stack(tuple(values)))).sum(0)[self.rank]

        def all_gather(self, value):
            seen.append("all_gather" if value.shape[1:] == (length // 2, width) else "other")
            return super().all_gather(value)

    monkeypatch.setattr(tensor_check, "ThreadCommunicator", Counted)
    compare_tensor_split(tiny(family), sequence_parallel=True)
    # Of four layers four of each; the embedding's sum and its gradient, and what enters the head and its gradient.
    own = {kind: seen.count(kind) // 2 for kind in seen}
    splits_embedding = "embedding_rowwise" in build_tiny_model(tiny(family), "eager").tp_plan.values()
    assert own == own | {"reduce_scatter": 4 * 4 + 1 + splits_embedding, "all_gather": 4 * 4 + 2}
    assert "all_reduce" not in own


def test_other_families_hold_the_whole_residual():
    config = AutoConfig.for_model("minicpm3", num_hidden_layers=2)
    assert not check_tensor_split(config, 2, sequence_parallel=True).sequence_parallel
    assert check_tensor_split(
        AutoConfig.for_model("llama", num_hidden_layers=2), 2, sequence_parallel=True
    ).sequence_parallel


@pytest.mark.parametrize("size", [99, 100])
def test_slices_of_the_residual_fit_a_whole_embedding_and_head(size):
    compare_tensor_split(tiny("llama", vocab_size=size, tie_word_embeddings=True), sequence_parallel=True)


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_the_auxiliary_loss_has_its_gradient_once(sequence_parallel):
    compare_tensor_split(
        tiny("mixtral", output_router_logits=True, router_aux_loss_coef=10.0), sequence_parallel=sequence_parallel
    )


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_padding_rows_get_no_gradient_on_any_rank(attention):
    for row in (7, 60):
        compare_tensor_split(tiny("llama", pad_token_id=row, tie_word_embeddings=False), attention)


class TestRefusal:
    def test_a_family_without_a_plan_is_refused(self):
        with pytest.raises(FamilyError, match=r"mamba cannot be split .* declares no tensor parallel plan"):
            check_tensor_split(AutoConfig.for_model("mamba"), 2)

    def test_an_unknown_style_is_refused(self, monkeypatch):
        monkeypatch.setattr(split, "STYLES", {name: s for name, s in split.STYLES.items() if name != "all_reduce"})
        with pytest.raises(FamilyError, match=r"the styles? '?all_reduce"):
            compare_tensor_split(tiny("inkling_text"))

    def test_a_plan_that_loses_a_gradient_is_refused(self, monkeypatch):
        monkeypatch.setattr(split, "parametric_activations", lambda model: {})
        compare_tensor_split(tiny("llama"))
        with pytest.raises(FamilyError, match=r"its gradients deviate .*act_fn"):
            compare_tensor_split(tiny("apertus"))

    def test_a_forward_pass_that_needs_all_heads_is_refused(self):
        with pytest.raises(FamilyError, match="its forward pass fails when split"):
            compare_tensor_split(tiny("doge"))

    def test_indivisible_sizes_are_refused(self):
        config = AutoConfig.for_model("llama", num_hidden_layers=1, intermediate_size=97)
        with pytest.raises(FamilyError, match=r"dimension 0 of .*mlp\.gate_proj\.weight \[97, 4096\] .* by 2"):
            check_tensor_split(config, 2)


@pytest.mark.parametrize(
    ("family", "part"), [("falcon", "attention"), ("gemma3n_text", "feed-forward"), ("longcat_flash", "")]
)
def test_one_part_of_a_layer_stays_whole_if_only_the_other_can_be_split(family, part):
    assert whole_part(tiny(family)) == part
    split_weights = [name for name in check_tensor_split(tiny(family), 2).shards if re.search(r"\.\d+\.", name)]
    of_attention = {"attn" in name or "attention" in name for name in split_weights}
    assert of_attention == {"attention": {False}, "feed-forward": {True}, "": {False, True}}[part]


def test_the_rule_allows_the_working_families():
    assert SUMS.keys() <= SLICED_FAMILIES
    assert {*DENSE, "mixtral"} <= MEGATRON_SP_FAMILIES <= SLICED_FAMILIES
    assert not SLICED_FAMILIES & {"mamba", "jetmoe", "cpmant"}


class TestMistakes:
    """What the comparison is for: each is found."""

    def test_a_gradient_summed_for_one_of_several_modules_is_detected(self, monkeypatch):
        class First(collectives.TensorParallelBlock):
            def copy_shared_input(self, value):
                return (
                    value if self._shared_input and self._shared_input[0] is value else super().copy_shared_input(value)
                )

        monkeypatch.setattr(split, "TensorParallelBlock", First)
        with pytest.raises(FamilyError, match="its gradients deviate"):
            compare_tensor_split(tiny("llama"))

    def test_a_gradient_not_summed_over_ranks_is_detected(self, monkeypatch):
        monkeypatch.setattr(collectives, "copy_to_tensor_parallel", lambda value, group: value)
        with pytest.raises(FamilyError, match="its gradients deviate"):
            compare_tensor_split(tiny("llama"))

    def test_a_norm_of_heads_updated_by_each_rank_alone_is_detected(self, monkeypatch):
        alone = {**split.STYLES, "replicated_with_grad_allreduce": split.STYLES["replicate"]}
        monkeypatch.setattr(split, "STYLES", alone)
        with pytest.raises(FamilyError, match=r"its gradients deviate .*_norm"):
            compare_tensor_split(tiny("qwen3"))

    def test_a_bias_added_by_each_rank_is_detected(self, monkeypatch):
        def naive(module, forward, block):
            return lambda value: collectives.reduce_from_tensor_parallel(forward(value), block.group)

        row = split.Style(split.STYLES["rowwise"].shard, split._wrap_forward(naive))
        monkeypatch.setattr(split, "STYLES", {**split.STYLES, "rowwise": row})
        with pytest.raises(FamilyError, match="its logits deviate"):
            compare_tensor_split(tiny("starcoder2"))

    def test_heads_with_the_queries_of_others_are_detected(self, monkeypatch):
        monkeypatch.setattr(split, "STYLES", {**split.STYLES, "qkv_colwise": split.STYLES["colwise"]})
        with pytest.raises(FamilyError, match="its logits deviate"):
            compare_tensor_split(tiny("gpt2"))

    def test_slopes_of_other_heads_are_detected(self, monkeypatch):
        monkeypatch.setattr(split, "scatter_to_tensor_parallel", lambda bias, group, shard: shard.part(bias, 0, 2))
        with pytest.raises(FamilyError, match="its logits deviate"):
            compare_tensor_split(tiny("bloom"))

    def test_a_bias_of_experts_added_by_each_rank_is_detected(self, monkeypatch):
        monkeypatch.setattr(split, "_biases", lambda bias, chosen, weights: 0.0)
        with pytest.raises(FamilyError, match="its logits deviate"):
            compare_tensor_split(tiny("gpt_oss"))

    def test_a_norm_updated_by_the_tokens_of_one_rank_is_detected(self, monkeypatch):
        monkeypatch.setattr(sequence_parallel, "all_reduce_gradient", lambda parameter, group: None)
        with pytest.raises(FamilyError, match=r"its gradients deviate .*norm"):
            compare_tensor_split(tiny("llama"), sequence_parallel=True)

    def test_a_bias_updated_by_the_tokens_of_one_rank_is_detected(self, monkeypatch):
        monkeypatch.setattr(
            sequence_parallel.SequenceParallelBlock, "prepare_whole_parameter", lambda block, parameter: None
        )
        with pytest.raises(FamilyError, match=r"its gradients deviate .*o_proj\.bias"):
            compare_tensor_split(tiny("starcoder2"), sequence_parallel=True)

    def test_a_router_loss_counted_by_each_rank_is_detected(self, monkeypatch):
        monkeypatch.setattr(sequence_parallel, "divide_gradient", lambda value, group: value)
        with pytest.raises(FamilyError, match="its gradients deviate"):
            compare_tensor_split(
                tiny("mixtral", output_router_logits=True, router_aux_loss_coef=10.0), sequence_parallel=True
            )

    def test_a_router_updated_by_one_ranks_parts_of_experts_is_detected(self, monkeypatch):
        own = sequence_parallel.all_reduce_gradient
        monkeypatch.setattr(
            sequence_parallel, "all_reduce_gradient", lambda one, group: None if one.shape[0] == 4 else own(one, group)
        )
        with pytest.raises(FamilyError, match=r"its gradients deviate .*gate\.weight"):
            compare_tensor_split(tiny("mixtral"), sequence_parallel=True)

    def test_a_slice_with_the_gradient_of_only_one_rank_is_detected(self, monkeypatch):
        monkeypatch.setattr(sequence_parallel, "gather_to_tensor_parallel", collectives.gather_from_sequence_parallel)
        with pytest.raises(FamilyError, match="its gradients deviate"):
            compare_tensor_split(tiny("llama"), sequence_parallel=True)


def test_joined_slices_equal_the_whole_tensor():
    whole = torch.arange(2 * 12 * 4).view(2, 12, 4)
    for shard in (Shard(1), Shard(1, blocks=2), Shard(2), Shard(0)):
        assert torch.equal(shard.whole([shard.part(whole, rank, 2) for rank in range(2)]), whole)
    # Gate and up lie behind one another; each rank gets half of both.
    assert Shard(0, blocks=2).part(torch.arange(8), 1, 2).tolist() == [2, 3, 6, 7]


@pytest.mark.parametrize("tied", [False, True])
def test_a_vocabulary_that_does_not_divide_stays_whole(tied):
    names = {"model.embed_tokens.weight", "lm_head.weight"}
    for size in (99, 100):
        model = AutoModelForCausalLM.from_config(tiny("llama", vocab_size=size, tie_word_embeddings=tied))
        found = plan_split(model, 2)
        assert names & found.shards.keys() == (set() if size == 99 else names)
        assert ("lm_head" in found.styles) == (size == 100)
    compare_tensor_split(tiny("llama", vocab_size=99, tie_word_embeddings=tied))


def test_a_full_size_configuration_is_checked_on_a_tiny_copy_without_random_numbers():
    config = AutoConfig.for_model("qwen3", num_hidden_layers=2, layer_types=None)
    before = torch.get_rng_state()
    found = check_tensor_split(config, 8, "flash_attention_2")
    assert torch.equal(torch.get_rng_state(), before)
    assert found.shards["model.layers.1.self_attn.o_proj.weight"] == Shard(1)


def _accumulated(family: str):
    """How far gradients of two passes, joined from the ranks, are from the whole model's; the share of it held."""
    config = tiny(family)
    whole, inputs = build_tiny_model(config, "eager"), packed_input(config)
    group = TorchCommunicator(torch.distributed.group.WORLD)
    own = TensorParallel(plan_split(whole, 2), group)
    sliced = AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    sliced.load_state_dict(whole.state_dict())
    for name, parameter in sliced.named_parameters():
        own.shard(name, parameter)
    own.install(sliced, {name: name for name, _ in sliced.named_parameters()})
    for tokens in (inputs[0], inputs[0].flip(0)):
        for model in (whole, sliced):
            logits = model(input_ids=tokens, position_ids=inputs[1], use_cache=False).logits
            logits.square().mean().backward()
    worst, largest = 0.0, max(p.grad.abs().max() for p in whole.parameters())
    for name, parameter in sliced.named_parameters():
        shard = shard_of(parameter)
        gradient = parameter.grad if shard is None else own.all_gather(parameter.grad, shard)
        worst = max(worst, float((gradient - whole.get_parameter(name).grad).abs().max() / largest))
    return worst, sum(p.numel() for p in sliced.parameters()) / sum(p.numel() for p in whole.parameters())


def _in_a_group(rank: int, pretrained: str):
    families = [_accumulated(family) for family in ("qwen3", "mixtral")]
    return families, [_stages(None), _stages(pretrained)]


def _stages(pretrained: str | None):
    """Whether each parameter of two split stages, joined, is the whole model's."""
    fields = {"model.architecture": None, "model.config": {}, "model.pretrained": pretrained} if pretrained else {}
    recipe = tiny_recipe(**fields)
    whole = build_model(recipe, torch.float32, CPU)
    group = TorchCommunicator(torch.distributed.group.WORLD)
    build = stage_builder(recipe, 2, torch.float32, CPU, tensor=2)
    found = {}
    for index in range(2):
        stage = build(index, group)
        for own, name in stage.hf_names.items():
            parameter = stage.get_parameter(own)
            shard = shard_of(parameter)
            joined = parameter if shard is None else shard.whole(group.all_gather(parameter.detach()))
            found[name] = torch.equal(joined, whole.get_parameter(name))
    assert found.keys() == dict(whole.named_parameters()).keys()
    return found


@pytest.fixture(scope="module")
def by_rank(tmp_path_factory):
    folder = tmp_path_factory.mktemp("pretrained") / "model"
    build_model(tiny_recipe(**{"train.seed": 3}), torch.float32, CPU).save_pretrained(folder)
    return run_ranks(2, _in_a_group, str(folder))


def test_gradients_accumulate_in_a_process_group(by_rank):
    for families, _ in by_rank:
        for deviation, held in families:
            assert deviation < 1e-5
            assert held < 0.55


def test_slices_start_from_the_drawn_or_read_weights_of_the_whole_model(by_rank):
    for _, runs in by_rank:
        for found in runs:
            assert all(found.values()), found
