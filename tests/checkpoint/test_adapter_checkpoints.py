"""Checkpoints of adapters: their content, continued runs, and loading with PEFT and `transformers`."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import peft
import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, models
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast
from typer.testing import CliRunner

from llmtrain.checkpoint.base import base_of, check_base
from llmtrain.checkpoint.contents import TrainerState, read_state
from llmtrain.checkpoint.export import export
from llmtrain.checkpoint.folder import newest
from llmtrain.checkpoint.merge import merge
from llmtrain.checkpoint.save import Saver
from llmtrain.checkpoint.state import load
from llmtrain.cli import app
from llmtrain.errors import CheckpointError, RecipeError, UserError
from llmtrain.models import build_model
from llmtrain.models.inference.generate import generate
from llmtrain.models.inference.load import load_causal_lm
from llmtrain.plan.facts.model_facts import model_facts
from llmtrain.plan.predict.model_state import checkpoint_bytes
from llmtrain.recipe import Recipe
from tests.helpers.batches import global_batch, tiny_recipe
from tests.helpers.harness import run_ranks
from tests.helpers.layouts import take_steps
from tests.helpers.moe import CONFIGS
from tests.helpers.traces import engine_of, plain_run, plan_of, worst

CPU = torch.device("cpu")
STOP, STEPS = 3, 6
FP32 = 1e-5  # as in test_parity.py
LORA = {"rank": 4, "alpha": 8.0, "targets": ["q_proj", "down_proj"]}
UNTIED = {"model.config.tie_word_embeddings": False}
SAVED_UNDER = {"parallel.zero_stage": 2}
CONTINUED_UNDER: dict[str, dict[str, Any]] = {
    "zero3": {"parallel.zero_stage": 3},
    "pipeline": {"parallel.pipeline": 2, "parallel.zero_stage": 1},
    "tensor": {"parallel.tensor": 2, "parallel.zero_stage": 1},
    "ddp": {"parallel.backend": "accelerate"},
}
IN_NF4 = {"model.quantize": "nf4"}


@pytest.fixture(scope="module")
def base(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("base")
    build_model(tiny_recipe(**UNTIED, **{"train.seed": 3}), torch.float32, CPU).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("tokenizer")
    inner = Tokenizer(models.WordLevel({"<|endoftext|>": 0, "a": 1}, unk_token="a"))
    PreTrainedTokenizerFast(tokenizer_object=inner, eos_token="<|endoftext|>").save_pretrained(folder)
    return folder


def recipe_on(base: Path, **fields: Any) -> Recipe:
    start = {"model.architecture": None, "model.config": {}, "model.pretrained": str(base), "optim.lr": 1e-2}
    adapter = {} if "model.trainable" in fields else {"model.adapter": LORA}
    return tiny_recipe(**{**start, **adapter, **fields})


def _save(rank: int, recipe: Recipe, folder: Path, ranks: int) -> dict[str, Any]:
    plan = plan_of(recipe, ranks)
    engine = engine_of(plan)
    take_steps(engine, plan, range(STOP))
    Saver(folder, plan, engine).save(TrainerState(step=STOP, data="key", base=base_of(plan)))
    return {name: weight.float().numpy().copy() for name, weight in engine.named_weights()}


def _continue(rank: int, recipe: Recipe, folder: Path, ranks: int) -> tuple[list[float], dict[str, Any]]:
    """The next losses, and the weights before, of an engine of another seed."""
    plan = plan_of(recipe.with_(**{"train.seed": 99}), ranks)
    engine = engine_of(plan)
    load(newest(folder), engine, plan, "key")
    weights = {name: weight.float().numpy().copy() for name, weight in engine.named_weights()}
    return take_steps(engine, plan, range(STOP, STEPS)).losses, weights


@pytest.fixture(scope="module")
def saved(base, tmp_path_factory) -> tuple[Path, dict[str, Any]]:
    folder = tmp_path_factory.mktemp("saved")
    return folder, run_ranks(2, _save, recipe_on(base, **SAVED_UNDER), folder, 2)[0]


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks={"pipeline": (), "zero3": pytest.mark.slow}.get(name, pytest.mark.breadth))
        for name in CONTINUED_UNDER
    ],
)
def test_a_run_continues_under_another_plan(base, saved, name):
    folder, weights = saved
    whole = plain_run(recipe_on(base), STEPS).losses
    recipe = recipe_on(base, **CONTINUED_UNDER[name])
    for losses, loaded in run_ranks(2, _continue, recipe, folder, 2):
        assert loaded.keys() == weights.keys()
        assert all(np.array_equal(loaded[one], weights[one]) for one in weights)
        assert worst(losses, whole[STOP:]) < FP32


def test_a_checkpoint_holds_the_adapter_and_not_its_base(base, saved):
    folder, weights = saved
    adapter = sum(one.nbytes for name, one in weights.items() if ".lora_" in name)
    files = list((newest(folder) / "engine").glob("rank_*"))
    heads = sum(int.from_bytes(one.read_bytes()[:8], "little") + 8 for one in files)
    steps = 3 * adapter  # the weight and two moments
    assert sum(one.stat().st_size for one in files) == heads + steps
    assert steps < (base / "model.safetensors").stat().st_size / 4


@pytest.mark.slow
def test_a_checkpoint_of_a_new_base_has_the_size_of_the_plan(tmp_path):
    recipe = tiny_recipe(**SAVED_UNDER, **{"model.adapter": LORA})
    run_ranks(2, _save, recipe, tmp_path, 2)
    plan = plan_of(recipe, 2)
    files = list((newest(tmp_path) / "engine").glob("rank_*"))
    found = sum(one.stat().st_size - int.from_bytes(one.read_bytes()[:8], "little") - 8 for one in files)
    assert found == 2 * checkpoint_bytes(plan, plan.model.weights, 0)


def test_a_run_does_not_continue_on_another_base(base, saved, tmp_path):
    for file in base.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    tensors = load_file(base / "model.safetensors")
    tensors["model.norm.weight"][0] += 1e-3
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(AssertionError, match=r"CheckpointError.*checkpoint.base"):
        run_ranks(2, _continue, recipe_on(tmp_path, **SAVED_UNDER), saved[0], 2)


@pytest.mark.slow
def test_a_run_with_4_bit_weights_continues_under_another_plan(base, tmp_path):
    """Its checkpoint holds the adapter, and says how the base was held."""
    weights = run_ranks(2, _save, recipe_on(base, **SAVED_UNDER, **IN_NF4), tmp_path, 2)[0]
    size = sum(one.stat().st_size for one in (newest(tmp_path) / "engine").glob("rank_*"))
    assert size < (base / "model.safetensors").stat().st_size / 4
    assert read_state(newest(tmp_path)).base.endswith(" in nf4")
    with pytest.raises(CheckpointError, match="frozen weights"):
        check_base(newest(tmp_path), read_state(newest(tmp_path)).base, base_of(plan_of(recipe_on(base), 2)))
    recipe = recipe_on(base, **CONTINUED_UNDER["pipeline"], **IN_NF4)
    whole = run_ranks(1, _losses, recipe_on(base, **PLAIN, **IN_NF4))[0]
    for losses, loaded in run_ranks(2, _continue, recipe, tmp_path, 2):
        assert all(np.array_equal(loaded[one], weights[one]) for one in weights)
        assert worst(losses, whole[STOP:]) < FP32


def _losses(rank: int, recipe: Recipe) -> list[float]:
    plan = plan_of(recipe, 1)
    return take_steps(engine_of(plan), plan, range(STEPS)).losses


def _logits(model) -> torch.Tensor:
    with torch.no_grad():
        return model(input_ids=global_batch(0)[0].input_ids).logits


def _trained_here(rank: int, recipe: Recipe, folder: Path) -> np.ndarray:
    plan = plan_of(recipe, 1)
    engine = engine_of(plan)
    take_steps(engine, plan, range(STOP))
    Saver(folder, plan, engine).save(TrainerState(step=STOP, data="key", base=base_of(plan)))
    return _logits(engine.model.eval()).numpy()


PLAIN = {"parallel.backend": "data_parallel"}
EXPORTED: dict[str, dict[str, Any]] = {
    "lora": {},
    "scaled by rank": {"model.adapter.rslora": True},
    "dora": {"model.adapter.dora": True},
    "head": {"model.adapter.modules_to_save": ["lm_head"], "model.adapter.targets": "all-linear"},
}


@pytest.mark.parametrize("name", EXPORTED)
def test_peft_loads_an_exported_adapter(base, tokenizer, tmp_path, name):
    recipe = recipe_on(base, **PLAIN, **EXPORTED[name])
    expected = run_ranks(1, _trained_here, recipe, tmp_path / "run")[0]
    export(newest(tmp_path / "run"), tokenizer, tmp_path / "out")
    assert not (tmp_path / "out/config.json").exists()
    loaded = peft.PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), tmp_path / "out").eval()
    assert np.array_equal(_logits(loaded).numpy(), expected)
    assert not np.array_equal(_logits(AutoModelForCausalLM.from_pretrained(base).eval()).numpy(), expected)
    settings = json.loads((tmp_path / "out/adapter_config.json").read_text())
    assert settings["base_model_name_or_path"] == str(base)
    if name == "lora":
        with torch.no_grad():
            tokens = loaded.generate(input_ids=torch.tensor([[1]]), max_new_tokens=3, do_sample=False)
        written = AutoTokenizer.from_pretrained(tokenizer).decode(tokens[0, 1:], skip_special_tokens=True)
        assert generate(tmp_path / "out", "a", 3, temperature=0.0) == written
        continued = recipe_on(base, **{"model.adapter": {"pretrained": str(tmp_path / "out")}})
        model = build_model(continued, torch.float32, CPU).eval()
        assert np.array_equal(_logits(model).numpy(), expected)


@pytest.mark.parametrize("targets", [["q_proj"], []], ids=["beside layers", "alone"])
def test_adapters_of_experts_pass_between_a_run_and_peft(tokenizer, tmp_path, targets):
    folder, out, theirs = (tmp_path / name for name in ("base", "out", "theirs"))
    model = {"architecture": "mixtral", "config": CONFIGS["mixtral"]}
    build_model(tiny_recipe(model=model), torch.float32, CPU).save_pretrained(folder)
    adapted = {"target_parameters": ["experts.*_proj", "mlp.gate.weight"], "targets": targets}
    recipe = recipe_on(folder, **PLAIN, **{"model.adapter": {"rank": 3, "alpha": 8.0, "rslora": True, **adapted}})
    expected = run_ranks(1, _trained_here, recipe, tmp_path / "run")[0]
    export(newest(tmp_path / "run"), tokenizer, out)
    merge(out, tmp_path / "merged")
    merged = load_causal_lm(tmp_path / "merged", trust_remote_code=False)
    base = AutoModelForCausalLM.from_pretrained(folder).eval()
    assert np.abs(_logits(base).numpy() - expected).max() > 1e-2
    loaded = peft.PeftModel.from_pretrained(base, out)
    for one in (merged, loaded, load_causal_lm(out, trust_remote_code=False)):
        np.testing.assert_allclose(_logits(one.eval()).numpy(), expected, rtol=0, atol=FP32)
    loaded.save_pretrained(theirs)
    files = [load_file(one / "adapter_model.safetensors") for one in (out, theirs)]
    assert files[0].keys() == files[1].keys()
    continued = recipe_on(folder, **{"model.adapter": {"pretrained": str(theirs)}})
    assert np.array_equal(_logits(build_model(continued, torch.float32, CPU).eval()).numpy(), expected)
    trained = sum(one.numel() for one in files[1].values())
    assert model_facts(continued.model, None).trained_parameters == trained
    in_4_bit = recipe_on(folder, **PLAIN, **IN_NF4, **{"model.adapter": recipe.model.adapter})
    expected = run_ranks(1, _trained_here, in_4_bit, tmp_path / "packed")[0]
    export(newest(tmp_path / "packed"), tokenizer, tmp_path / "adapter")
    merge(tmp_path / "adapter", tmp_path / "values")
    found = _logits(load_causal_lm(tmp_path / "values", trust_remote_code=False).eval()).numpy()
    np.testing.assert_allclose(found, expected, rtol=0, atol=FP32)


def test_an_adapter_with_the_table_that_embedding_and_head_share(tokenizer, tmp_path):
    folder, out = tmp_path / "base", tmp_path / "out"
    build_model(tiny_recipe(), torch.float32, CPU).save_pretrained(folder)
    recipe = recipe_on(folder, **PLAIN, **{"model.adapter.modules_to_save": ["embed_tokens"]})
    expected = run_ranks(1, _trained_here, recipe, tmp_path / "run")[0]
    export(newest(tmp_path / "run"), tokenizer, out)
    loaded = peft.PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(folder), out).eval()
    assert np.array_equal(_logits(loaded).numpy(), expected)
    merge(out, tmp_path / "merged")
    merged = load_causal_lm(tmp_path / "merged", trust_remote_code=False)
    assert merged.lm_head.weight is merged.model.embed_tokens.weight
    np.testing.assert_allclose(_logits(merged.eval()).numpy(), expected, rtol=0, atol=FP32)
    loaded.save_pretrained(tmp_path / "theirs")
    continued = recipe_on(folder, **{"model.adapter": {"pretrained": str(tmp_path / "theirs")}})
    assert np.array_equal(_logits(build_model(continued, torch.float32, CPU).eval()).numpy(), expected)
    advice = rf"adapter of PEFT(.|\n)*--set model.pretrained={folder} --set 'model.adapter="
    with pytest.raises(RecipeError, match=advice):
        model_facts(recipe.model.model_copy(update={"pretrained": str(out)}), None)
    settings = [continued.model, recipe.model]
    assert len({model_facts(model, None).trained_parameters for model in settings}) == 1


def test_an_adapter_of_new_weights_is_exported_with_them(tokenizer, tmp_path):
    recipe = tiny_recipe(**PLAIN, **{"model.adapter": LORA})
    expected = run_ranks(1, _trained_here, recipe, tmp_path / "run")[0]
    export(newest(tmp_path / "run"), tokenizer, tmp_path / "out")
    loaded = peft.AutoPeftModelForCausalLM.from_pretrained(tmp_path / "out").eval()
    assert np.array_equal(_logits(loaded).numpy(), expected)


def test_weights_frozen_by_name_are_exported_too(base, tokenizer, tmp_path):
    recipe = recipe_on(base, **PLAIN, **{"model.trainable": ["model.layers.1.*"]})
    expected = run_ranks(1, _trained_here, recipe, tmp_path / "run")[0]
    size = sum(one.stat().st_size for one in (newest(tmp_path / "run") / "engine").glob("rank_*"))
    assert size < 3 * (base / "model.safetensors").stat().st_size / 2
    export(newest(tmp_path / "run"), tokenizer, tmp_path / "out")
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "out").eval()
    assert np.array_equal(_logits(loaded).numpy(), expected)


def test_an_adapter_of_peft_is_trained_further(base, tmp_path):
    theirs = peft.LoraConfig(r=3, target_modules=["k_proj"], layers_to_transform=[1], task_type="CAUSAL_LM")
    made = peft.get_peft_model(AutoModelForCausalLM.from_pretrained(base), theirs)
    for name, weight in made.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(weight, std=0.1)
    made.save_pretrained(tmp_path)
    model = build_model(recipe_on(base, **{"model.adapter": {"pretrained": str(tmp_path)}}), torch.float32, CPU)
    trained = [name for name, one in model.named_parameters() if one.requires_grad]
    assert [name.split(".")[2:5] for name in trained] == [["1", "self_attn", "k_proj"]] * 2
    assert torch.equal(_logits(model.eval()), _logits(made.eval()))


def _export(*arguments: str) -> Any:
    return CliRunner().invoke(app, ["export", *arguments])


@pytest.mark.parametrize(
    "fields", [pytest.param({}, marks=pytest.mark.slow, id="plain"), pytest.param(IN_NF4, id="nf4")]
)
def test_the_command_line_merges_into_the_weights_of_training(base, tokenizer, tmp_path, fields):
    """From the run whose base has moved, and from its adapter's folder; rounding is all that may differ."""
    origin, moved, adapter, out = (tmp_path / name for name in ("origin", "moved", "adapter", "out"))
    shutil.copytree(base, origin)
    run = tmp_path / "run"
    expected = run_ranks(1, _trained_here, recipe_on(origin, **PLAIN, **fields), run / "checkpoints")[0]
    shutil.copytree(tokenizer, run / "tokenizer")
    checkpoint = newest(run / "checkpoints")
    assert _export(str(checkpoint), str(adapter)).exit_code == 0
    origin.rename(moved)
    named = ["--base", str(moved)]
    for source, name in ((checkpoint, "from run"), (adapter, "from adapter")):
        done = _export(str(source), str(out / name), "--merge", *named)
        assert done.exit_code == 0, done.output
        found = _logits(AutoModelForCausalLM.from_pretrained(out / name).eval()).numpy()
        np.testing.assert_allclose(found, expected, rtol=0, atol=1e-5)
    for source in (checkpoint, adapter):
        for more in ([], ["--base", str(tmp_path / "nowhere")]):
            refused = _export(str(source), str(out / "none"), "--merge", *more).exception
            assert isinstance(refused, UserError)
            assert "there is no folder" in str(refused)
            assert "--base FOLDER" in str(refused)
    if fields:
        _export(str(checkpoint), str(out / "full"), "--merge", "--into", "full", *named)
        full = _logits(AutoModelForCausalLM.from_pretrained(out / "full").eval()).numpy()
        assert np.abs(full - expected).max() > 1e-3
        written = AutoModelForCausalLM.from_pretrained(out / "full").state_dict()
        theirs = peft.PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(moved), adapter).merge_and_unload()
        for name, weight in theirs.state_dict().items():
            torch.testing.assert_close(written[name], weight, rtol=0, atol=1e-6)
    else:
        (moved / "model.safetensors").write_bytes((tmp_path / "out/from run/model.safetensors").read_bytes())
        refused = _export(str(checkpoint), str(out / "other"), "--merge", *named)
        assert "checkpoint.base" in str(refused.exception)


def test_a_checkpoint_error_suggests_a_fix():
    check_base(Path("step"), "one", "one")
    with pytest.raises(CheckpointError, match="frozen weights"):
        check_base(Path("step"), "one", "other")
