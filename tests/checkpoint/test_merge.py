"""A merged folder equals PEFT's own merge, without ever holding the whole model."""

from __future__ import annotations

import json
import os

import peft
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, models
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast

from llmtrain.checkpoint.contents import TrainerState
from llmtrain.checkpoint.folder import newest
from llmtrain.checkpoint.merge import merge, merge_checkpoint
from llmtrain.checkpoint.save import Saver
from llmtrain.errors import CheckpointError, UserError
from llmtrain.models import build_model
from tests.helpers.batches import step_batch, tiny_recipe
from tests.helpers.harness import run_ranks
from tests.helpers.moe import CONFIGS, GPT_OSS
from tests.helpers.quantized import FORMATS, quantize_folder
from tests.helpers.traces import engine_of, plan_of

CPU = torch.device("cpu")
UNTIED = {"model.config.tie_word_embeddings": False}
GPT2 = {"model.architecture": "gpt2", "model.config": {"n_embd": 32, "n_layer": 2, "n_head": 4, "vocab_size": 256}}
MOE = {"model": {"architecture": "mixtral", "config": CONFIGS["mixtral"]}}
EXPERTS = {"target_parameters": ["experts.gate_up_proj", "experts.down_proj", "mlp.gate.weight", "router.weight"]}
LINEAR = {"target_modules": ["q_proj", "o_proj", "down_proj"]}
CASES = {
    "plain": ({}, {**LINEAR, "r": 4, "lora_alpha": 10}),
    "rslora": ({}, {**LINEAR, "r": 4, "use_rslora": True}),
    "dora": ({}, {**LINEAR, "r": 4, "use_dora": True}),
    "patterns": ({}, {**LINEAR, "r": 4, "rank_pattern": {"0.self_attn.q_proj": 2}, "alpha_pattern": {"o_proj": 3}}),
    "saved": (UNTIED, {**LINEAR, "r": 4, "modules_to_save": ["lm_head", "norm"]}),
    "tied tables": ({}, {**LINEAR, "r": 4, "modules_to_save": ["embed_tokens", "lm_head"]}),
    "transposed": (GPT2, {"target_modules": ["c_attn", "mlp.c_proj"], "r": 4}),
    "experts": (MOE, {**EXPERTS, "target_modules": ["q_proj"], "r": 4, "alpha_pattern": {"experts.down_proj": 3}}),
    "one product of experts": (MOE, {"target_modules": [], "target_parameters": ["experts.down_proj"], "r": 4}),
    "transposed experts": ({"model": GPT_OSS}, {**EXPERTS, "target_modules": ["q_proj"], "r": 3, "use_rslora": True}),
    "transposed dora": (GPT2, {"target_modules": ["c_attn", "c_fc"], "r": 4, "use_dora": True}),
}


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tokenizer")
    inner = Tokenizer(models.WordLevel({"<|endoftext|>": 0, "a": 1}, unk_token="a"))
    made = PreTrainedTokenizerFast(tokenizer_object=inner, eos_token="<|endoftext|>")
    made.chat_template = "{{ messages[0]['content'] }}"
    made.save_pretrained(folder)
    return folder


def _base(folder, dtype=torch.float32, **fields) -> None:
    build_model(tiny_recipe(**fields), dtype, CPU).save_pretrained(folder)


def _adapter(base, folder, **options) -> None:
    """An adapter of random numbers."""
    model = peft.get_peft_model(AutoModelForCausalLM.from_pretrained(base), peft.LoraConfig(**options))
    with torch.no_grad():
        for weight in model.parameters():
            if weight.requires_grad:
                weight += 0.1 * torch.randn_like(weight)
    model.save_pretrained(folder)


@pytest.mark.parametrize("case", CASES)
def test_a_merge_equals_that_of_peft(case, tokenizer, tmp_path):
    fields, options = CASES[case]
    _base(tmp_path / "base", **fields)
    _adapter(tmp_path / "base", tmp_path / "adapter", **options)
    merge(tmp_path / "adapter", tmp_path / "out", tokenizer, most_bytes=40_000)
    assert len(list((tmp_path / "out").glob("*.safetensors"))) > 1
    whole = AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    expected = peft.PeftModel.from_pretrained(whole, tmp_path / "adapter").merge_and_unload().state_dict()
    found = AutoModelForCausalLM.from_pretrained(tmp_path / "out").state_dict()
    before = AutoModelForCausalLM.from_pretrained(tmp_path / "base").state_dict()
    assert found.keys() == expected.keys()
    assert sum(not torch.equal(found[name], before[name]) for name in found) >= 2
    for name, weight in expected.items():
        # The same operations in another order at most: a unit or two in the last place of numbers below 1.
        torch.testing.assert_close(found[name], weight, rtol=2**-22, atol=2**-23)
    assert AutoTokenizer.from_pretrained(tmp_path / "out").chat_template


def test_a_lower_base_is_rounded_once(tokenizer, tmp_path):
    _base(tmp_path / "base", torch.bfloat16)
    _adapter(tmp_path / "base", tmp_path / "adapter", r=4, **LINEAR)
    merge(tmp_path / "adapter", tmp_path / "out", tokenizer)
    whole = AutoModelForCausalLM.from_pretrained(tmp_path / "base", dtype=torch.float32)
    expected = peft.PeftModel.from_pretrained(whole, tmp_path / "adapter").merge_and_unload().state_dict()
    with safe_open(tmp_path / "out" / "model.safetensors", framework="pt") as file:
        for name in file.keys():  # noqa: SIM118
            assert torch.equal(file.get_tensor(name), expected[name].bfloat16()), name
    merge(tmp_path / "adapter", tmp_path / "wide", tokenizer, dtype="float32")
    assert json.loads((tmp_path / "wide" / "config.json").read_text())["dtype"] == "float32"


def _damaged(folder, tokenizer, change) -> str:
    file = folder / "adapter" / "adapter_model.safetensors"
    tensors = load_file(file)
    change(tensors)
    save_file(tensors, file)
    with pytest.raises(CheckpointError) as error:
        merge(folder / "adapter", folder / "out", tokenizer)
    assert not (folder / "out").exists()
    return error.value.report()


def test_an_adapter_of_another_model_is_refused(tokenizer, tmp_path):
    _base(tmp_path / "base")
    _adapter(tmp_path / "base", tmp_path / "adapter", r=4, **LINEAR)
    name = "base_model.model.model.layers.1.self_attn.q_proj.lora_A.weight"

    def change(tensors) -> None:
        tensors["base_model.model.model.layers.9.mlp.up_proj.lora_A.weight"] = torch.ones(4, 64)
        tensors[name] = torch.ones(4, 63)
        tensors["base_model.model.lm_head.weight"] = torch.ones(256, 64)
        del tensors["base_model.model.model.layers.0.self_attn.o_proj.lora_B.weight"]

    told = _damaged(tmp_path, tokenizer, change)
    assert "lacks weights that its configuration names: model.layers.0.self_attn.o_proj.lora_B.weight" in told
    assert "model.layers.9.mlp.up_proj.lora_A.weight" in told
    assert "model.layers.1.self_attn.q_proj.lora_A.weight is [4, 63], not [4, 64]" in told
    assert "ties to each other" in told


NAME = "base_model.model.model.layers.1.self_attn.q_proj.lora_B.weight"


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda tensors: tensors.clear(), "lacks weights that its configuration names: model.layers.0.self_attn"),
        (lambda tensors: tensors.update({NAME: torch.ones(64, 4, dtype=torch.int32)}), "contains integers"),
        (lambda tensors: tensors[NAME].fill_(torch.nan), "q_proj.lora_B.weight' of the adapter contains NaN"),
        (
            lambda tensors: [one.fill_(1e20) for one in tensors.values()],
            "q_proj.weight' is not finite in float32 after the merge",
        ),
    ],
    ids=["empty", "integers", "nan", "overflow"],
)
def test_weights_that_are_no_adapter_are_refused(change, words, tokenizer, tmp_path):
    _base(tmp_path / "base")
    _adapter(tmp_path / "base", tmp_path / "adapter", r=4, **LINEAR)
    assert words in _damaged(tmp_path, tokenizer, change)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"lora_alpha": float("nan")}, "lora_alpha = nan (Input should be a finite number)"),
        ({"r": 0, "target_modules": 3}, "r = 0 (Input should be greater than 0); target_modules = 3"),
        ({"rank_pattern": {"q_proj": 2}}, "lora_A.weight is [4, 64], not [2, 64]"),
        ({"target_modules": ["nothing"]}, "its configuration adapts no layer of llama"),
    ],
)
def test_configurations_that_are_none_of_an_adapter_are_refused(fields, words, tokenizer, tmp_path):
    _base(tmp_path / "base")
    _adapter(tmp_path / "base", tmp_path / "adapter", r=4, **LINEAR)
    file = tmp_path / "adapter/adapter_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | fields))
    with pytest.raises(UserError) as error:
        merge(tmp_path / "adapter", tmp_path / "out", tokenizer)
    assert words in error.value.report()


def test_a_base_is_checked_as_its_adapter(tokenizer, tmp_path):
    _base(tmp_path / "base")
    _adapter(tmp_path / "base", tmp_path / "adapter", r=4, **LINEAR)
    file = tmp_path / "base/model.safetensors"
    tensors = load_file(file)
    for changed, words in (
        (torch.ones(64, dtype=torch.int64), "integers"),
        (torch.full((64,), torch.inf), "NaN or inf"),
    ):
        save_file(tensors | {"model.norm.weight": changed}, file)
        with pytest.raises(UserError, match=words):
            merge(tmp_path / "adapter", tmp_path / "out", tokenizer)


@pytest.mark.parametrize("name", ["adapter_model.safetensors", "adapter_config.json"])
def test_a_fifo_is_not_waited_for(name, tokenizer, tmp_path):
    _base(tmp_path / "base")
    _adapter(tmp_path / "base", tmp_path / "adapter", r=4, **LINEAR)
    (tmp_path / "adapter" / name).unlink()
    os.mkfifo(tmp_path / "adapter" / name)
    with pytest.raises(CheckpointError, match=f"{name}: is not a regular file"):
        merge(tmp_path / "adapter", tmp_path / "out", tokenizer)


def _train(rank: int, recipes, folder) -> dict:
    found = {}
    for name, recipe in recipes.items():
        plan = plan_of(recipe, 1)
        engine = engine_of(plan)
        for step in range(2):
            engine.train_step(step_batch(step, 1, 8))
        Saver(folder / name, plan, engine).save(TrainerState(step=2))
        found[name] = engine.eval_step(step_batch(9, 1, 8)).item()
    return found


@pytest.mark.parametrize(
    ("quantized", "positions"), [("", {}), ("gptq", {}), ("", {"rope_scaling": {"rope_type": "linear", "factor": 4.0}})]
)
def test_a_checkpoint_is_merged_into_the_model_that_was_trained(quantized, positions, tokenizer, tmp_path):
    _base(tmp_path / "base", **UNTIED)
    if quantized:
        quantize_folder(tmp_path / "base", *FORMATS[quantized])
    adapter = {"rank": 4, "alpha": 20.0, "modules_to_save": ["lm_head"]}
    start = {"model.architecture": None, "model.config": positions, "model.pretrained": str(tmp_path / "base")}
    recipes = {"lora": tiny_recipe(**start, **{"model.adapter": adapter, "optim.lr": 0.1, "optim.warmup_steps": 0})}
    losses = run_ranks(1, _train, recipes | {"whole": tiny_recipe(**start)}, tmp_path / "runs")[0]
    merge_checkpoint(newest(tmp_path / "runs" / "lora"), tokenizer, tmp_path / "out")
    merged = {**start, "model.config": {}, "model.pretrained": str(tmp_path / "out")}
    engine = engine_of(plan_of(tiny_recipe(**merged, **{"parallel.backend": "data_parallel"}), 1))
    assert engine.eval_step(step_batch(9, 1, 8)).item() == pytest.approx(losses["lora"], rel=1e-6)
    assert not list(tmp_path.glob(".out*"))
    assert "quantization_config" not in json.loads((tmp_path / "out" / "config.json").read_text())
    with pytest.raises(CheckpointError, match="no adapter to merge"):
        merge_checkpoint(newest(tmp_path / "runs" / "whole"), tokenizer, tmp_path / "none")
