"""The text model of a multimodal model is trained, and the export is the whole, with all else byte for byte."""

from __future__ import annotations

import shutil

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForMultimodalLM

from llmtrain.checkpoint.base import base_of
from llmtrain.checkpoint.contents import TrainerState
from llmtrain.checkpoint.export import export
from llmtrain.checkpoint.folder import newest
from llmtrain.checkpoint.merge import merge
from llmtrain.checkpoint.save import Saver
from llmtrain.errors import CheckpointError, RecipeError
from llmtrain.models import build_model, check_weights
from llmtrain.models.inference.load import load_causal_lm
from tests.helpers.batches import GLOBAL_BATCH, step_batch, tiny_recipe
from tests.helpers.harness import run_ranks
from tests.helpers.quantized import FORMATS, quantize_folder
from tests.helpers.traces import engine_of, plan_of
from tests.helpers.wrappers import PROCESSOR, VISION, save_wrapper

WEIGHTS = "model.safetensors"
LORA = {"rank": 2, "targets": ["q_proj", "mlp.*"]}


def recipe_of(folder, **fields):
    return tiny_recipe(**{"model": {"pretrained": str(folder)}, **fields})


def _trained(rank: int, ranks: int, out, cases) -> list[dict]:
    """Trains and saves each case; the weights of the live engine. cases: (name, folder of the model, fields)."""
    found = []
    for name, folder, fields in cases:
        plan = plan_of(recipe_of(folder, **fields, **{"batch.micro_batch_size": GLOBAL_BATCH // ranks}), ranks)
        engine = engine_of(plan)
        shape = (plan.batch.micro_batch_size, plan.batch.gradient_accumulation_steps)
        for step in range(2):
            batch = step_batch(step, *shape, engine.data_parallel_rank, ranks // plan.parallel.pipeline)
            engine.train_step(batch)
        Saver(out / name, plan, engine).save(TrainerState(step=2, base=base_of(plan)))
        found.append({name: weight.float().numpy().copy() for name, weight in engine.named_weights()})
    return found


@pytest.fixture(scope="module")
def wrappers(tmp_path_factory):
    folder = tmp_path_factory.mktemp("wrappers")
    return {family: save_wrapper(folder / family, family) for family in VISION}


@pytest.fixture(scope="module")
def runs(wrappers, tmp_path_factory):
    out = tmp_path_factory.mktemp("runs")
    cases = [(family, folder, {}) for family, folder in wrappers.items()]
    return out, dict(zip(wrappers, run_ranks(1, _trained, 1, out, cases)[0], strict=True))


@pytest.mark.parametrize("family", VISION)
def test_the_export_is_the_whole_with_the_trained_text_model(family, wrappers, runs, tokenizer, tmp_path):
    folder, weights = runs
    export(newest(folder / family), tokenizer, tmp_path / "out", dtype="float32")
    before, after = load_file(wrappers[family] / WEIGHTS), load_file(tmp_path / "out" / WEIGHTS)
    assert {name: w.shape for name, w in after.items()} == {name: w.shape for name, w in before.items()}
    part = plan_of(recipe_of(wrappers[family]), 1).model.part
    beside = tuple(f"{name}." for name, _ in part.untouched)
    for name, value in after.items():
        assert torch.equal(value, before[name]) or not name.removeprefix("model.").startswith(beside), name
    changed = [name for name, value in after.items() if not torch.equal(value, before[name])]
    assert len(changed) >= len(weights[family]) - 4  # a few experts got no token
    whole, report = AutoModelForMultimodalLM.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not any(report[keys] for keys in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    exported = dict(whole.named_parameters())
    assert {part.own(name) for name in exported} - {None} == weights[family].keys()
    for name, value in weights[family].items():
        assert torch.equal(exported[part.whole(name)], torch.from_numpy(value)), name
    now, then = (AutoConfig.from_pretrained(path) for path in (tmp_path / "out", wrappers[family]))
    assert now.vision_config.to_dict() == then.vision_config.to_dict()
    assert (tmp_path / "out" / PROCESSOR).read_bytes() == (wrappers[family] / PROCESSOR).read_bytes()


@pytest.fixture(scope="module")
def quantized(wrappers, tmp_path_factory):
    """A folder in fp8, one layer of the vision tower included, and the values of its tensors."""
    folder = tmp_path_factory.mktemp("quantized") / "gemma3"
    shutil.copytree(wrappers["gemma3"], folder)
    return folder, quantize_folder(folder, *FORMATS["fp8 blocks"], r"layers.0.self_attn.q_proj.weight")


@pytest.fixture(scope="module")
def divided(wrappers, quantized, tmp_path_factory):
    """Runs of two ranks: stages, shards that are read by name, and adapters."""
    out = tmp_path_factory.mktemp("divided")
    cases = [
        ("stages", wrappers["gemma3"], {"parallel.pipeline": 2, "parallel.zero_stage": 1}),
        ("shards", wrappers["gemma3"], {"parallel.zero_stage": 3}),
        ("quantized", quantized[0], {"parallel.zero_stage": 3}),
        ("adapter", wrappers["gemma3"], {"model.adapter": LORA}),
        ("experts", wrappers["qwen3_vl_moe"], {"model.adapter": {"rank": 2, "target_parameters": ["down_proj"]}}),
    ]
    names = [name for name, *_ in cases]
    return out, dict(zip(names, run_ranks(2, _trained, 2, out, cases)[0], strict=True))


@pytest.mark.parametrize("case", ["stages", "shards"])
def test_divided_weights_are_exported_bit_for_bit(case, divided, tokenizer, tmp_path):
    folder, weights = divided
    export(newest(folder / case), tokenizer, tmp_path / "out", dtype="float32")
    whole = dict(AutoModelForMultimodalLM.from_pretrained(tmp_path / "out").named_parameters())
    for name, value in weights[case].items():
        assert torch.equal(whole[name.replace("model.", "model.language_model.", 1)], torch.from_numpy(value)), name


def test_the_export_of_a_quantized_model_is_plain(divided, quantized, tokenizer, tmp_path):
    (folder, weights), (_, values) = divided, quantized
    export(newest(folder / "quantized"), tokenizer, tmp_path / "out", dtype="float32")
    assert not hasattr(AutoConfig.from_pretrained(tmp_path / "out"), "quantization_config")
    whole = dict(AutoModelForMultimodalLM.from_pretrained(tmp_path / "out").named_parameters())
    for name, value in weights["quantized"].items():
        assert torch.equal(whole[name.replace("model.", "model.language_model.", 1)], torch.from_numpy(value)), name
    stored = load_file(tmp_path / "out" / WEIGHTS)
    assert stored.keys() == values.keys()
    tower = [name for name in values if "vision_tower" in name]
    assert any("layers.0.self_attn.q_proj.weight" in name for name in tower)
    assert all(torch.equal(stored[name], values[name]) for name in tower)


def _logits(model, tokens) -> torch.Tensor:
    with torch.no_grad():
        return model.eval()(input_ids=tokens, use_cache=False).logits


@pytest.mark.parametrize(("case", "family"), [("adapter", "gemma3"), ("experts", "qwen3_vl_moe")])
def test_an_adapter_is_one_of_the_whole_and_merges_into_it(case, family, divided, wrappers, tokenizer, tmp_path):
    folder, _ = divided
    export(newest(folder / case), tokenizer, tmp_path / "adapter", dtype="float32")
    tokens = torch.arange(3, 35)[None]
    whole = AutoModelForMultimodalLM.from_pretrained(wrappers[family])
    base = _logits(whole, tokens)
    adapted = _logits(PeftModel.from_pretrained(whole, tmp_path / "adapter"), tokens)
    assert not torch.allclose(adapted, base)
    merge(tmp_path / "adapter", tmp_path / "merged", dtype="float32")
    before, after = load_file(wrappers[family] / WEIGHTS), load_file(tmp_path / "merged" / WEIGHTS)
    assert before.keys() == after.keys()
    merged = _logits(AutoModelForMultimodalLM.from_pretrained(tmp_path / "merged"), tokens)
    torch.testing.assert_close(merged, adapted, rtol=1e-5, atol=1e-5)
    # A run that continues with the adapter begins where it was, whichever names its file has.
    assert load_causal_lm(tmp_path / "adapter", trust_remote_code=False).config.model_type == family
    again = recipe_of(wrappers[family], **{"model.adapter": {"pretrained": str(tmp_path / "adapter")}})
    text = build_model(again, torch.float32, torch.device("cpu"))
    torch.testing.assert_close(_logits(text, tokens), adapted, rtol=1e-5, atol=1e-5)


def test_the_text_model_alone_is_written_by_choice(divided, runs, wrappers, tokenizer, tmp_path):
    folder, _ = runs
    export(newest(folder / "gemma3"), tokenizer, tmp_path / "alone", dtype="float32", text_only=True)
    export(newest(folder / "gemma3"), tokenizer, tmp_path / "whole", dtype="float32")
    alone = AutoModelForCausalLM.from_pretrained(tmp_path / "alone")
    assert alone.config.model_type == "gemma3_text"
    tokens = torch.arange(3, 35)[None]
    whole = AutoModelForMultimodalLM.from_pretrained(tmp_path / "whole")
    assert torch.equal(_logits(alone, tokens), _logits(whole, tokens))
    export(newest(divided[0] / "adapter"), tokenizer, tmp_path / "adapter", dtype="float32", text_only=True)
    assert load_causal_lm(tmp_path / "adapter", trust_remote_code=False).config.model_type == "gemma3_text"
    with pytest.raises(CheckpointError, match="no causal LM of 'qwen3_vl_text'"):
        export(newest(folder / "qwen3_vl"), tokenizer, tmp_path / "other", text_only=True)


def test_the_whole_needs_the_files_that_training_began_with(runs, wrappers, tokenizer, tmp_path):
    folder, _ = runs
    changed = tmp_path / "changed"
    shutil.copytree(wrappers["mistral3"], changed)
    tensors = load_file(changed / WEIGHTS)
    name = next(name for name in tensors if "vision_tower" in name)
    save_file(tensors | {name: tensors[name] + 1}, changed / WEIGHTS, metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match=r"(?s)trained on frozen weights.*--text-only"):
        export(newest(folder / "mistral3"), tokenizer, tmp_path / "out", base=str(changed))
    assert not (tmp_path / "out").exists()


def test_a_folder_that_lacks_text_weights_or_has_others_is_refused(wrappers, tmp_path):
    tensors = load_file(wrappers["qwen3_vl"] / WEIGHTS)
    lacking = next(name for name in tensors if name.endswith("layers.1.self_attn.q_proj.weight"))
    tensors["model.language_model.extra"] = tensors.pop(lacking)
    shutil.copytree(wrappers["qwen3_vl"], tmp_path / "model")
    save_file(tensors, tmp_path / "model" / WEIGHTS, metadata={"format": "pt"})
    with pytest.raises(RecipeError) as caught:
        check_weights(recipe_of(tmp_path / "model"))
    assert "model.layers.1.self_attn.q_proj.weight" in str(caught.value)
    assert "model.language_model.extra" in str(caught.value)


def test_the_plan_says_what_is_trained_and_what_is_not(wrappers):
    plan = plan_of(recipe_of(wrappers["gemma3"]), 1)
    (note,) = [note["message"] for note in plan.notes if note["rule"] == "model.text_part"]
    assert f"the text model model.language_model is trained ({plan.model.parameters:,} parameters)" in note
    assert "vision_tower (" in note
    assert plan.model.model_type == "gemma3_text"
