"""A Hugging Face folder starts every strategy: its weights are the engine's, bit for bit."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from llmtrain.errors import RecipeError
from llmtrain.models import build_model, stage_builder
from llmtrain.overrides.torch import persistent_buffers
from tests.helpers.batches import GLOBAL_BATCH, MIXTRAL, tiny_recipe
from tests.helpers.harness import run_ranks
from tests.helpers.quantized import FORMATS, quantize_folder
from tests.helpers.traces import engine_of, plan_of

CPU = torch.device("cpu")
DENSE = {
    "zero0": {},
    "zero2": {"parallel.zero_stage": 2},
    "zero3": {"parallel.zero_stage": 3},
    "pipeline": {"parallel.pipeline": 2, "parallel.zero_stage": 1},
    "pipeline-tensor": {"parallel.pipeline": 2, "parallel.tensor": 2, "parallel.zero_stage": 1},
    "tensor": {"parallel.tensor": 2, "parallel.zero_stage": 1},
    "tensor-zero3": {"parallel.tensor": 2, "parallel.zero_stage": 3},
    "sequence": {"parallel.sequence": 2, "parallel.zero_stage": 3},
    "ddp": {"parallel.backend": "accelerate"},
    "fsdp2": {"parallel.backend": "accelerate", "parallel.accelerate": "fsdp2", "parallel.zero_stage": 3},
}
MOE = {
    "zero1": {"parallel.zero_stage": 1},
    "zero3": {"parallel.zero_stage": 3},
    "pipeline": {"parallel.pipeline": 2, "parallel.zero_stage": 1},
    "expert": {"parallel.expert": 2, "parallel.zero_stage": 2},
    "expert-zero3": {"parallel.expert": 2, "parallel.zero_stage": 3},
}
UNTIED = {"model.config.tie_word_embeddings": False}
RANKS = 4


def _from(folder, **fields):
    shared = RANKS // (
        fields.get("parallel.pipeline", 1) * fields.get("parallel.tensor", 1) * fields.get("parallel.sequence", 1)
    )
    start = {"model.architecture": None, "model.config": {}, "model.pretrained": str(folder)}
    return tiny_recipe(**start, **{"batch.micro_batch_size": GLOBAL_BATCH // (2 * shared)}, **fields)


def _initial(rank: int, folder, cases: list[dict]) -> list[dict]:
    engines = (engine_of(plan_of(_from(folder, **fields), RANKS)) for fields in cases)
    return [
        {name: value.detach().float().numpy().copy() for name, value in engine.named_weights()} for engine in engines
    ]


def _assert_all_start_from(folder, saved, cases: dict[str, dict]) -> None:
    expected = {name: value.detach() for name, value in saved.named_parameters()}
    for found in run_ranks(RANKS, _initial, folder, list(cases.values())):
        for name, weights in zip(cases, found, strict=True):
            assert weights.keys() == expected.keys(), name
            for weight, value in weights.items():
                assert torch.equal(torch.from_numpy(value), expected[weight]), (name, weight)


@pytest.mark.parametrize(
    "names", [["zero3", "pipeline-tensor"], pytest.param(list(DENSE), marks=pytest.mark.breadth)], ids=["some", "all"]
)
def test_every_strategy_starts_from_the_weights_of_a_sharded_folder(names, tmp_path):
    saved = build_model(tiny_recipe(**UNTIED, **{"train.seed": 3}), torch.float32, CPU)
    saved.save_pretrained(tmp_path, max_shard_size=60_000)
    assert len(list(tmp_path.glob("*.safetensors"))) > 3
    _assert_all_start_from(tmp_path, saved, {name: DENSE[name] for name in names})


@pytest.mark.parametrize(
    "names",
    [
        pytest.param(["pipeline", "expert-zero3"], marks=pytest.mark.slow),
        pytest.param(list(MOE), marks=pytest.mark.breadth),
    ],
    ids=["some", "all"],
)
def test_separate_experts_in_the_files_are_joined(names, tmp_path):
    saved = build_model(tiny_recipe(**MIXTRAL, **UNTIED, **{"train.seed": 3}), torch.float32, CPU)
    saved.save_pretrained(tmp_path)
    assert any("experts.3.w2" in name for name in load_file(tmp_path / "model.safetensors"))
    _assert_all_start_from(tmp_path, saved, {name: MOE[name] for name in names})


DEEPSEEK = {
    "model.architecture": "deepseek_v3",
    "model.config": {
        **{"vocab_size": 256, "hidden_size": 64, "intermediate_size": 128, "moe_intermediate_size": 32},
        **{"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 4, "first_k_dense_replace": 1},
        **{
            "n_routed_experts": 4,
            "n_group": 1,
            "topk_group": 1,
            "num_experts_per_tok": 2,
            "max_position_embeddings": 64,
        },
        **{"q_lora_rank": 16, "kv_lora_rank": 16, "qk_nope_head_dim": 16, "qk_rope_head_dim": 16, "v_head_dim": 16},
    },
}


def _buffers(rank: int, folder) -> dict:
    """The buffers of a model that ZeRO-3 has partitioned."""
    from llmtrain.engines.deepspeed import partitioned
    from llmtrain.plan.ds_config import render

    plan = plan_of(_from(folder, **{"parallel.zero_stage": 3}), RANKS)
    model = partitioned.build_partitioned(plan.recipe, torch.float32, render(plan), CPU)
    return {name: buffer.numpy().copy() for name, buffer in persistent_buffers(model).items()}


def test_buffers_that_are_weights_are_read_too(tmp_path):
    """DeepSeek's router is corrected by a buffer, without which other experts are chosen."""
    saved = build_model(tiny_recipe(**DEEPSEEK), torch.float32, CPU)
    buffers = persistent_buffers(saved)
    assert buffers
    for buffer in buffers.values():
        buffer.normal_()
    saved.save_pretrained(tmp_path)
    for found in run_ranks(RANKS, _buffers, tmp_path):
        assert found.keys() == buffers.keys()
        assert all(torch.equal(torch.from_numpy(value), buffers[name]) for name, value in found.items())


def _change(folder, change) -> None:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})


def _damaged(folder, change) -> str:
    """What is said of a folder whose tensors were changed, by a whole model and by a partitioned one."""
    _change(folder, change)
    with pytest.raises(RecipeError) as error:
        build_model(_from(folder), torch.float32, CPU)
    return error.value.report()


def test_a_missing_weight_is_refused_and_not_drawn(tmp_path):
    build_model(tiny_recipe(), torch.float32, CPU).save_pretrained(tmp_path)
    told = _damaged(tmp_path, lambda tensors: tensors.pop("model.layers.1.mlp.up_proj.weight"))
    assert "lacks 1 of 20 weights of the model: model.layers.1.mlp.up_proj.weight" in told


def test_another_shape_is_refused(tmp_path):
    build_model(tiny_recipe(), torch.float32, CPU).save_pretrained(tmp_path)
    told = _damaged(tmp_path, lambda tensors: tensors.update({"model.norm.weight": torch.ones(1)}))
    assert "'model.norm.weight': [1], not [64]" in told


def test_truncated_files_are_refused(tmp_path):
    saved = build_model(tiny_recipe(), torch.float32, CPU)
    saved.save_pretrained(tmp_path, max_shard_size=60_000)
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    last = sorted(set(index["weight_map"].values()))[-1]
    (tmp_path / last).write_bytes(b"cut off")
    with pytest.raises(RecipeError, match=f"{last} cannot be read"):
        build_model(_from(tmp_path), torch.float32, CPU)
    (tmp_path / last).unlink()
    with pytest.raises(RecipeError, match=f"lacks 1 of the files that its index names: {last}"):
        build_model(_from(tmp_path), torch.float32, CPU)


def test_tensors_that_the_model_does_not_have_are_refused_unless_the_recipe_names_them(tmp_path):
    build_model(tiny_recipe(), torch.float32, CPU).save_pretrained(tmp_path)
    extra = {"value_head.weight": torch.ones(4), "model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(8)}
    told = _damaged(tmp_path, lambda tensors: tensors.update(extra))
    assert "has 1 tensors that the model does not have: value_head.weight" in told
    build_model(_from(tmp_path, **{"model.unused_weights": ["value_head.*"]}), torch.float32, CPU)


def test_buffers_in_old_checkpoints_are_no_weights(tmp_path):
    """The files of `openai-community/gpt2` hold the causal masks."""
    gpt2 = {"vocab_size": 256, "n_embd": 32, "n_layer": 1, "n_head": 2, "n_positions": 32}
    saved = build_model(tiny_recipe(model={"architecture": "gpt2", "config": gpt2}), torch.float32, CPU)
    saved.save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors") | {"h.0.attn.bias": torch.ones(1, 1, 32, 32)}
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    build_model(_from(tmp_path), torch.float32, CPU)


def test_different_values_of_a_tied_weight_are_refused(tmp_path):
    build_model(tiny_recipe(), torch.float32, CPU).save_pretrained(tmp_path)
    table = "model.embed_tokens.weight"
    told = _damaged(tmp_path, lambda tensors: tensors.update({"lm_head.weight": tensors[table] + 1}))
    assert f"has different values for {table} and lm_head.weight, which its configuration ties" in told
    model = build_model(_from(tmp_path, **UNTIED), torch.float32, CPU)
    assert torch.equal(model.lm_head.weight, model.get_input_embeddings().weight + 1)
    _change(tmp_path, lambda tensors: tensors.update({"lm_head.weight": tensors[table].clone()}))
    build_model(_from(tmp_path), torch.float32, CPU)


def test_a_head_that_is_not_tied_any_more_begins_as_the_embedding(tmp_path):
    saved = build_model(tiny_recipe(), torch.float32, CPU)
    saved.save_pretrained(tmp_path)
    table = saved.get_input_embeddings().weight
    both = {"model.adapter": {"rank": 4, "modules_to_save": ["embed_tokens", "lm_head"]}}
    for fields in (UNTIED, {**UNTIED, **both}):
        model = build_model(_from(tmp_path, **fields), torch.float32, CPU)
        assert model.lm_head.weight is not model.get_input_embeddings().weight
        assert torch.equal(model.lm_head.weight, table)
        assert model.lm_head.weight.requires_grad
    last = stage_builder(_from(tmp_path, **UNTIED), 2, torch.float32, CPU)(1)
    assert torch.equal(last.model.lm_head.weight, table)


def test_a_single_file_is_read_although_there_is_an_index(tmp_path):
    """As by `transformers`; the plan says so."""
    build_model(tiny_recipe(), torch.float32, CPU).save_pretrained(tmp_path, max_shard_size=60_000)
    other = build_model(tiny_recipe(**{"train.seed": 3}), torch.float32, CPU)
    other.save_pretrained(tmp_path / "other")
    (tmp_path / "other" / "model.safetensors").rename(tmp_path / "model.safetensors")
    recipe = _from(tmp_path)
    for model in (build_model(recipe, torch.float32, CPU), AutoModelForCausalLM.from_pretrained(tmp_path)):
        assert all(map(torch.equal, model.parameters(), other.parameters()))
    assert any(note["rule"] == "model.weights_twice" for note in plan_of(recipe, RANKS).notes)


@pytest.mark.parametrize(
    "names", [["pipeline-tensor"], pytest.param(list(DENSE), marks=pytest.mark.breadth)], ids=["some", "all"]
)
def test_every_strategy_starts_from_the_values_of_a_quantized_folder(names, tmp_path):
    saved = build_model(tiny_recipe(**UNTIED, **{"train.seed": 3}), torch.float32, CPU)
    saved.save_pretrained(tmp_path)
    values = quantize_folder(tmp_path, *FORMATS["fp8 blocks"])
    for name, weight in saved.named_parameters():
        weight.data = values[name]
    _assert_all_start_from(tmp_path, saved, {name: DENSE[name] for name in names})
