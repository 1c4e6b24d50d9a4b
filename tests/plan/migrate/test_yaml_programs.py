"""Settings of axolotl, LLaMA-Factory, ms-swift and torchtitan become recipes that plan and train."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

import llmtrain as lt
from llmtrain.errors import RecipeError
from llmtrain.plan.migrate.axolotl.model import patterns
from llmtrain.plan.migrate.programs import translate
from llmtrain.plan.migrate.translation import Translation
from llmtrain.recipe.cluster import Cluster
from tests.helpers.originals import write_inputs
from tests.helpers.trained_recipes import losses_of

CASES = yaml.safe_load(Path(__file__).with_name("yaml_examples.yaml").read_text())
NAMES = [(program, name) for program, cases in CASES.items() for name in cases]
PLAIN = "{% for message in messages %}{{ message.content }}{% endfor %}"
DEVICES = 4
TRAINED = (
    *("qlora", "dpo_lora", "kto", "orpo", "reward", "pretrain", "unfrozen", "tuned"),
    *("lora_sft", "freeze", "packed"),
)
"""Cases that train two steps: one of each objective, adapter and form of rows."""


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("inputs")
    write_inputs(folder)
    zero = {"stage": 3, "overlap_comm": True, "contiguous_gradients": True, "reduce_bucket_size": "auto"}
    sizes = {
        "train_batch_size": "auto",
        "train_micro_batch_size_per_gpu": "auto",
        "gradient_accumulation_steps": "auto",
    }
    (folder / "ds_z3.json").write_text(json.dumps({**sizes, "bf16": {"enabled": "auto"}, "zero_optimization": zero}))
    return folder


def translated(settings: dict[str, Any], folder: Path, name: str = "case") -> Translation:
    known = {"LLAMA3": "llama3", "CHATML": "chatml", "FOLDER": "", "CACHE": "cache", "DS_Z3": "ds_z3.json"}
    known |= {f"{one.upper()}": f"{one}.jsonl" for one in ("chats", "questions", "asked", "labelled", "texts")}
    known |= {"TALKS": "talks.json"}
    paths = {f'"{word}"': json.dumps(str(folder / path)) for word, path in known.items()} | {
        '"PLAIN"': json.dumps(PLAIN)
    }
    text = re.sub(r'"[A-Z_0-9]+"', lambda found: paths.get(found[0], found[0]), json.dumps(settings))
    path = folder / f"{name}.yaml"
    path.write_text(text)
    return translate([path], devices=DEVICES)


@pytest.mark.parametrize(("program", "name"), NAMES)
def test_examples_translate_and_plan(program: str, name: str, inputs: Path) -> None:
    settings = CASES[program][name]
    made = translated(settings, inputs)
    recipe = made.check().with_(**{"data.sequence_length": 512})
    said = {word.partition(".")[0] for line in made.lines for word in (line.key, *line.text.split(" ", 1)[:1])}
    assert {key for key, value in settings.items() if value is not None} - said == set(), "a setting has no line"
    assert not [line for line in made.lines if "known here" in line.text or "of the usual kind" in line.text]
    batch = lt.plan(recipe, Cluster(devices_per_node=DEVICES, device="h100")).plan.batch
    values = {**settings, **settings.get("training", {})}
    names = ("micro_batch_size", "per_device_train_batch_size", "local_batch_size")
    micro = next((values[key] for key in names if key in values), 1)
    accumulated = values.get("gradient_accumulation_steps", 1)
    split = values.get("context_parallel_size", 1)
    total = values.get("global_batch_size", micro * accumulated * DEVICES // split)
    assert (batch.micro_batch_size, batch.global_batch_size) == (micro, total)


def test_values_of_an_example(inputs: Path) -> None:
    made = translated(CASES["axolotl"]["lora_8b"], inputs)
    shown = {
        "model.adapter.rank": 32, "model.adapter.alpha": 16, "model.adapter.targets": "all-linear",
        "data.packing": "best_fit",
        "optim.name": "adamw_8bit", "optim.betas": [0.9, 0.999], "optim.warmup_ratio": 0.1, "optim.weight_decay": 0.0,
        "batch.global_batch_size": 32, "parallel.precision": "bf16", "parallel.activation_checkpointing": "full",
        "train.epochs": 4, "train.seed": 42, "data.eval_fraction": 0.05,
    }  # fmt: skip
    assert {field: made.fields[field] for field in shown} == shown
    assert {line.key for line in made.of("unsupported")} == {"load_in_8bit"}
    assert {line.key for line in made.of("missing")} == {"evals_per_epoch", "saves_per_epoch"}
    assert {"optimizer", "val_set_size", "datasets.0.type", "sample_packing", ""} <= {
        line.key for line in made.of("different")
    }


def test_patterns_match_as_regular_expressions_do() -> None:
    assert patterns(r"model.layers.[\d]+.(mlp|self_attn).(up|q)_proj") == [
        "model.layers.*.up_proj",
        "model.layers.*.q_proj",
    ]
    assert patterns(r"layers\.\d+\.mlp\.(a|b)(_proj)?") == ["layers.*.mlp.*_proj", "layers.*.mlp.*"]
    for faulty in ("model.embed_tokens.weight[:32000]", r"(?!lm_head).*", "a{3}"):
        with pytest.raises(ValueError, match=r"pattern of names|rows"):
            patterns(faulty)


@pytest.mark.parametrize(
    ("settings", "field", "message"),
    [
        ({"base_model": "m", "rl": "grpo"}, "rl", "no reinforcement learning"),
        ({"model_name_or_path": "m", "stage": "ppo", "cutoff_len": 8}, "stage", "no reinforcement learning"),
        ({"model": "m", "train_dataset": "d", "cutoff_len": 8}, "train_dataset", "v1"),
        ({"model": "m", "rlhf_type": "grpo", "dataset": ["d"]}, "rlhf_type", "generates"),
        ({"model": "m", "dataset": ["d"], "tuner_type": "lora", "adapters": ["a", "b"]}, "adapters", "merge"),
        ({"base_model": "m", "datasets": ["d"], "learning_rate": 1}, "datasets.0", "not a data set"),
        (
            {"base_model": "m", "learning_rate": "fast", "datasets": [{"path": "d"}]},
            "optim.lr",
            "fast",
        ),
    ],
)
def test_what_cannot_be_translated_is_an_error(
    settings: dict[str, Any], field: str, message: str, inputs: Path
) -> None:
    with pytest.raises(RecipeError) as raised:
        translated(settings, inputs, "faulty").check()
    assert any(field in problem.field and re.search(message, str(problem)) for problem in raised.value.problems)


@pytest.mark.slow
def test_examples_train(inputs: Path) -> None:
    own = {
        **{"data.sequence_length": 512, "batch.global_batch_size": 1, "batch.micro_batch_size": 1},
        **{"train.max_steps": 2, "train.epochs": None, "data.eval_fraction": 0.0, "optim.decay_steps": 1},
        **{"optim.warmup_steps": 0, "optim.warmup_ratio": 0.0, "model.attention": "sdpa", "kernels.blocks": "eager"},
        **{"kernels.loss": "auto", "data.cache_dir": str(inputs / "cache")},
    }
    recipes = {
        name: translated(CASES[program][name], inputs).check().with_(**own)
        for program, name in NAMES
        if name in TRAINED
    }
    losses = losses_of(recipes, 2)
    assert losses.keys() == set(TRAINED)
    for name, (first, second) in losses.items():
        assert 0 < first < 10, name
        assert 0 < second < 10, name
        assert first != second, name


def test_a_command_line_of_swift(tmp_path: Path) -> None:
    path = tmp_path / "sft.sh"
    path.write_text(
        "swift sft --model m --tuner_type lora --dataset a.jsonl#500 b.jsonl --max_length 64  # a comment\n"
    )
    made = translate([path], devices=2)
    assert [source["name"] for source in made.fields["data.sources"]] == ["a.jsonl", "b.jsonl"]
    assert [(line.key, line.value) for line in made.of("unsupported")] == [("--dataset", "a.jsonl#500")]
    assert made.fields["batch.global_batch_size"] == 16


def test_the_workers_of_a_command_count_in_the_batch_of_swift(tmp_path: Path) -> None:
    path = tmp_path / "sft.sh"
    path.write_text("NPROC_PER_NODE=8 swift sft --model m --dataset a.jsonl --per_device_train_batch_size 4\n")
    made = translate([path])
    assert made.fields["batch.global_batch_size"] == 32
    assert any((line.key, line.value) == ("sft.sh: nproc_per_node", 8) for line in made.of("same"))


def test_the_settings_of_fsdp_in_axolotl_are_those_of_accelerate(inputs: Path) -> None:
    settings = {"base_model": "m", "datasets": [{"path": "d"}], "sequence_len": 64, "learning_rate": 1e-4}
    fsdp = {"fsdp_sharding_strategy": "HYBRID_SHARD", "offload_params": True, "invented": 3}
    made = translated(settings | {"fsdp_config": fsdp}, inputs, "sharded")
    said = {line.key: line for line in made.lines}
    assert made.fields["parallel.zero_stage"] == 3
    assert said["fsdp_config.sharding_strategy"].kind == "different"
    assert {said[f"fsdp_config.{name}"].kind for name in ("offload_params", "invented")} == {"unsupported"}


@pytest.mark.parametrize("program", CASES)
def test_no_line_says_that_an_absent_setting_was_taken_over(program: str, inputs: Path) -> None:
    for name, settings in CASES[program].items():
        made = translated(settings, inputs)
        for line in (line for line in made.of("same") if line.key and not line.key.startswith("--")):
            first = re.split(r"[.:]", line.key)[0]
            assert first in settings or first == name or ":" in line.key, (name, str(line))
