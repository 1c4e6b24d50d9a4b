"""Settings of the Trainer, TRL, DeepSpeed and Accelerate become recipes that plan and train."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml

from llmtrain import library
from llmtrain.plan.load.write import nested
from llmtrain.plan.migrate.files import read_foreign
from llmtrain.plan.migrate.programs import translate
from llmtrain.plan.migrate.translation import Translation
from llmtrain.recipe import parse_recipe
from llmtrain.recipe.cluster import Cluster
from tests.helpers.chat_tokenizers import case as chat_tokenizer
from tests.helpers.harness import run_ranks

CASES = {case["name"]: case for case in yaml.safe_load(Path(__file__).with_name("hugging_face.yaml").read_text())}
TRAINED = [name for name, case in CASES.items() if case.get("trains")]
STEPS, LENGTH = 2, 96


@pytest.fixture(scope="module")
def tiny(tmp_path_factory) -> Path:
    """A folder with a tiny model and its tokenizer, and rows of each kind, in place of the hub's."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    folder = tmp_path_factory.mktemp("tiny")
    chat_tokenizer("chatml_generation", folder / "model")
    torch.manual_seed(1)
    config = LlamaConfig(
        vocab_size=400, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        max_position_embeddings=16_384, eos_token_id=2, pad_token_id=2,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(folder / "model")
    draw = random.Random(1)

    def text(most: int = 12) -> str:
        return " ".join("".join(draw.choices("abcde", k=draw.randrange(1, 5))) for _ in range(draw.randrange(2, most)))

    rows: dict[str, list[Any]] = {name: [] for name in ("text", "messages", "completions", "pairs", "labelled")}
    for number in range(64):
        prompt, answer = text(6), text(6)
        rows["text"].append({"text": text(60)})
        turns = [{"role": "user", "content": prompt}, {"role": "assistant", "content": answer}]
        rows["messages"].append({"messages": turns})
        rows["completions"].append({"prompt": prompt, "completion": answer})
        rows["pairs"].append({"prompt": prompt, "chosen": f"yes {text(4)}", "rejected": f"no {text(4)}"})
        rows["labelled"].append({"prompt": prompt, "completion": answer, "label": number % 2 == 0})
    for name, made in rows.items():
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in made))
    return folder


def translated(case: Mapping[str, Any], folder: Path) -> Translation:
    for name, text in case["files"].items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    given = case.get("given", [next(iter(case["files"]))])
    return translate([folder / name for name in given], case.get("devices"))


def local(translation: Translation, rows: str, tiny: Path) -> dict[str, Any]:
    """The fields, with the tiny model and local rows in place of the hub's."""
    data = [{"name": str(tiny / f"{rows}.jsonl")}]
    fields = translation.fields | {"model.pretrained": str(tiny / "model"), "data.tokenizer": str(tiny / "model")}
    fields |= {"data.sources": data, "data.cache_dir": str(tiny / "cache")}
    fields.pop("model.revision", None)
    if "evaluation.sources" in fields:
        fields["evaluation.sources"] = data
    return fields


def keys_of(values: Mapping[str, Any]) -> Iterator[str]:
    """Yields the settings of a file, and those within its mappings."""
    for key, value in values.items():
        if isinstance(value, Mapping) and value:
            yield from keys_of(value)
        elif value is not None:
            yield key


@pytest.mark.parametrize("name", CASES)
def test_settings_become_a_plan(name, tiny, tmp_path):
    case = CASES[name]
    translation = translated(case, tmp_path)
    dotted = translation.check().dotted()
    assert {field: flat(dotted, field) for field in case["fields"]} == case["fields"]
    lines = "\n".join(map(str, translation.lines))
    assert [text for text in case.get("says", ()) if text not in lines] == []
    files = [read_foreign(tmp_path / name) for name in case.get("given", [next(iter(case["files"]))])]
    named = {file.written.get(key, key) for file in files for key in keys_of(file.values)}
    assert [key for key in named if key not in lines] == []

    devices = case.get("devices", 1)
    cluster = Cluster(nodes=max(1, devices // 8), devices_per_node=min(devices, 8), device="h100")
    library.plan(parse_recipe(nested(local(translation, case["rows"], tiny))), cluster)


def flat(dotted: Mapping[str, Any], field: str) -> Any:
    """The value of a field, also of one with items."""
    if field in dotted:
        return dotted[field]
    items = {name.removeprefix(f"{field}."): value for name, value in dotted.items() if name.startswith(f"{field}.")}
    return list(items.values()) if all(name.isdigit() for name in items) else items


@pytest.mark.slow
def test_translated_settings_train(tiny, tmp_path):
    recipes = {}
    for name in TRAINED:
        case = CASES[name]
        fields = local(translated(case, tmp_path / name), case["rows"], tiny)
        fields |= {"train.max_steps": STEPS, "data.sequence_length": LENGTH, "data.eval_fraction": 0.0}
        fields |= {"batch.global_batch_size": 4, "batch.micro_batch_size": 2, "optim.decay_steps": 1}
        # What only GPUs have, or the emulation of one rank
        fields |= {"model.attention": "sdpa", "kernels.blocks": "eager", "parallel.offload_activations": False}
        if fields.get("parallel.precision", "").endswith("fp16"):
            fields["parallel.precision"] = "fp32"
        for field in (
            *("train.epochs", "optim.warmup_steps", "optim.warmup_ratio"),
            *[name for name in fields if name.startswith("evaluation.")],
        ):
            fields.pop(field, None)
        recipes[name] = json.dumps(nested(fields))
    (losses,) = run_ranks(1, train_two_steps, recipes)
    assert losses.keys() == recipes.keys()
    for name, (first, second) in losses.items():
        assert 0 < first < 30, name
        assert 0 < second < 30, name
        assert first != second, name


def train_two_steps(rank: int, recipes: dict[str, str]) -> dict[str, list[float]]:
    """Trains each recipe with its own engine; returns the losses of its steps."""
    import gc

    import torch

    from llmtrain.data import prepare
    from llmtrain.engines import build_engine
    from llmtrain.plan.ds_config import render
    from llmtrain.trials.verify.batches import Batches

    losses = {}
    for name, text in recipes.items():
        recipe = parse_recipe(json.loads(text))
        plan = library.plan(recipe, Cluster(nodes=1, devices_per_node=1, device="cpu")).plan
        prepared = prepare(plan.recipe)
        engine = build_engine(plan, render(plan), torch.device("cpu"))
        batches = Batches(plan.recipe, prepared, STEPS).referenced(engine, plan)
        losses[name] = [engine.train_step(batch).loss.item() for batch in batches.part(plan, 0)]
        del engine
        gc.collect()
    return losses
