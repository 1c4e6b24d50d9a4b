"""A multimodal model that was trained on images is exported as a whole, with a tower that is trained or as it was."""

from __future__ import annotations

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file
from transformers import AutoModelForMultimodalLM

from llmtrain.checkpoint.base import base_of
from llmtrain.checkpoint.contents import TrainerState
from llmtrain.checkpoint.export import export
from llmtrain.checkpoint.folder import newest
from llmtrain.checkpoint.merge import merge
from llmtrain.checkpoint.save import Saver
from llmtrain.data import BatchLoader, prepare
from tests.helpers.harness import run_ranks
from tests.helpers.image_chats import image_recipe, image_rows, save_image_model
from tests.helpers.traces import engine_of, plan_of
from tests.helpers.wrappers import PROCESSOR

CASES = {
    "trained": {},
    "frozen": {"model.trainable": ["model.language_model.*", "lm_head.*"]},
    "adapter": {"model.adapter": {"rank": 2}},
}


def _trained(rank: int, out, recipes) -> list[dict]:
    found = []
    for name, recipe in recipes.items():
        plan = plan_of(recipe, 1)
        engine, data = engine_of(plan), BatchLoader.of(plan, prepare(recipe), 0)
        for step in range(2):
            engine.train_step(data.train_batch(4 * step))
        Saver(out / name, plan, engine).save(TrainerState(step=2, base=base_of(plan)))
        found.append({name: weight.numpy().copy() for name, weight in engine.named_weights()})
    return found


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs")
    model, rows = save_image_model(folder / "model", "qwen3_vl"), image_rows(folder, 12)
    recipes = {name: image_recipe(model, folder, rows, **fields) for name, fields in CASES.items()}
    tokenizer = prepare(recipes["trained"]).tokenizer_dir
    return folder, model, tokenizer, dict(zip(CASES, run_ranks(1, _trained, folder / "out", recipes)[0], strict=True))


@pytest.mark.parametrize("case", ["trained", "frozen"])
def test_the_export_has_the_tower_of_the_run(case, runs, tmp_path):
    folder, model, tokenizer, weights = runs
    export(newest(folder / "out" / case), tokenizer, tmp_path / "out", dtype="float32")
    whole, report = AutoModelForMultimodalLM.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not any(report[keys] for keys in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    exported = dict(whole.named_parameters())
    assert exported.keys() == weights[case].keys()
    for name, value in weights[case].items():
        assert torch.equal(exported[name], torch.from_numpy(value)), name
    before, after = (load_file(path / "model.safetensors") for path in (model, tmp_path / "out"))
    assert before.keys() == after.keys()
    for name, value in before.items():
        if ".visual." in name:
            assert torch.equal(after[name], value) == (case == "frozen"), name
    assert (tmp_path / "out" / PROCESSOR).read_bytes() == (model / PROCESSOR).read_bytes()


def test_an_adapter_is_one_of_the_whole(runs, tmp_path):
    folder, model, tokenizer, _ = runs
    export(newest(folder / "out" / "adapter"), tokenizer, tmp_path / "adapter", dtype="float32")
    names = load_file(tmp_path / "adapter" / "adapter_model.safetensors")
    assert all(name.startswith("base_model.model.model.language_model.layers.") for name in names)
    tokens = torch.arange(3, 35)[None]

    def logits(one) -> torch.Tensor:
        with torch.no_grad():
            return one.eval()(input_ids=tokens, use_cache=False).logits

    base = AutoModelForMultimodalLM.from_pretrained(model)
    before = logits(base)
    adapted = logits(PeftModel.from_pretrained(base, tmp_path / "adapter"))
    assert not torch.allclose(adapted, before)
    merge(tmp_path / "adapter", tmp_path / "merged", dtype="float32")
    merged = logits(AutoModelForMultimodalLM.from_pretrained(tmp_path / "merged"))
    torch.testing.assert_close(merged, adapted, rtol=1e-5, atol=1e-5)
