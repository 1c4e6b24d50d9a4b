"""Every recipe, shrunk by `--set` alone, trains for some steps, and learns."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

LLAMA = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
SIZES = {
    "tiny": LLAMA,
    "gpt2_124m": {"n_embd": 64, "n_layer": 2, "n_head": 4},
    "llama_1b": LLAMA,
    "llama_3b": LLAMA | {"head_dim": 16},
    "llama3_8b": LLAMA,
    "llama3_70b": LLAMA,
    "llama3_8b_long": LLAMA,
    "qwen3_30b_a3b": {
        **LLAMA,
        "head_dim": 16,
        "moe_intermediate_size": 32,
        "num_experts": 8,
        "num_experts_per_tok": 2,
    },
}
CONTINUED = ("continue_pretrained", "yarn_128k")
OWN_FAMILIES = {
    "sft_gemma4": "gemma4_text",
    "sft_gpt_oss_20b_lora": "gpt_oss",
    "sft_qwen3_5_moe_lora": "qwen3_5_moe_text",
}
FINE_TUNING = ("dpo_llama3_8b_lora", "sft_chat", "sft_llama3_8b_lora", *OWN_FAMILIES)
WITH_IMAGES = ("sft_qwen3_vl_4b_lora",)
SHRUNK = {
    "data.tokenizer": {"vocab_size": 512},
    "data.sequence_length": 64,
    "data.eval_fraction": 0.1,
    "batch.global_batch_size": 8,
    "batch.micro_batch_size": 4,
    "kernels": "auto",  # the compiler takes longer than these steps
    "parallel.pipeline": 1,
    "parallel.sequence": 1,
    "parallel.expert": 1,
    "optim.lr": 0.01,
    "optim.warmup_steps": 1,
    "train.max_steps": 6,
    "evaluation.every_steps": 3,
    "evaluation.max_sequences": 8,
    "logging.every_steps": 1,
    "logging.trackers": [],
    "export.sample_prompt": "def ",
    "export.sample_tokens": 4,
}


@pytest.fixture(scope="module")
def corpus(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("corpus") / "corpus.jsonl"
    modules = sorted(Path(sysconfig.get_path("stdlib")).glob("[a-d]*.py"))
    path.write_text("".join(json.dumps({"text": module.read_text("utf-8")[:3000]}) + "\n" for module in modules))
    return path


@pytest.fixture(scope="module")
def pretrained(corpus, tmp_path_factory) -> Path:
    """A folder as the hub has it: safetensors, configuration and tokenizer of a small Qwen3."""
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

    from llmtrain.data import prepare
    from llmtrain.plan.load import load_recipe

    fields = {**SHRUNK, "data.sources": [{"name": str(corpus)}], "data.cache_dir": str(corpus.parent)}
    recipe, _ = load_recipe(str(ROOT / "recipes/tiny.py"), [])
    folder = tmp_path_factory.mktemp("pretrained")
    AutoTokenizer.from_pretrained(prepare(recipe.with_(**fields)).tokenizer_dir).save_pretrained(folder)
    config = AutoConfig.for_model("qwen3", vocab_size=512, head_dim=16, max_position_embeddings=64, **LLAMA)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    return folder


def _train(name: str, fields: dict[str, object], run_dir: Path) -> list[dict]:
    assignments = [part for key, value in fields.items() for part in ("--set", f"{key}={json.dumps(value)}")]
    command = [sys.executable, "-m", "llmtrain", "train", f"recipes/{name}.py", "--run-dir", run_dir, *assignments]
    result = subprocess.run(command, capture_output=True, text=True, timeout=300, cwd=ROOT, env=os.environ)
    assert result.returncode == 0, result.stderr + result.stdout
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


def _fields(name: str, corpus: Path) -> dict[str, object]:
    sizes = {f"model.config.{key}": value for key, value in SIZES.get(name, {}).items()}
    if sizes:
        sizes["model.config.vocab_size"] = 512
    local = {"data.sources": [{"name": str(corpus)}], "data.cache_dir": str(corpus.parent)}
    return {**SHRUNK, **sizes, **local}


def _assert_learned(lines: list[dict], evaluations: int = 2) -> None:
    losses = [line["eval_loss"] for line in lines if "eval_loss" in line]
    assert len(losses) == evaluations
    assert losses[-1] < losses[0]


def test_every_recipe_is_tested():
    tested = {*SIZES, *CONTINUED, *FINE_TUNING, *WITH_IMAGES}
    assert tested == {path.stem for path in (ROOT / "recipes").glob("*.py")}


QUICK = ("qwen3_30b_a3b",)


def _marks(name: str):
    return () if name in QUICK else pytest.mark.breadth  # `.ci/run` trains recipes/tiny.py whole


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=_marks(name)) for name in SIZES],
)
def test_shrunk_recipe_trains(name, corpus, tmp_path):
    _assert_learned(_train(name, _fields(name, corpus), tmp_path / "run"))
    assert (tmp_path / "run" / "export" / "model.safetensors").is_file()


@pytest.mark.parametrize(
    "zero_stage", [pytest.param(1, marks=pytest.mark.breadth), pytest.param(3, marks=pytest.mark.slow)]
)
def test_training_continues_from_pretrained_weights(zero_stage, corpus, pretrained, tmp_path):
    """Read whole, or a tensor at a time into a partitioned model: the first loss is that of the folder."""
    fields = _fields("continue_pretrained", corpus)
    fields |= {"model.pretrained": str(pretrained), "data.tokenizer": str(pretrained)}
    fields |= {"parallel.zero_stage": zero_stage, "parallel.precision": "fp32"}
    lines = _train("continue_pretrained", fields, tmp_path / "run")
    _assert_learned(lines, evaluations=3)  # pretrained weights are evaluated before the first step
    assert lines[1]["loss"] == pytest.approx(_loss_of(pretrained, fields), rel=1e-5)


@pytest.mark.slow
def test_the_context_is_extended_and_the_export_says_so(corpus, pretrained, tmp_path):
    """The shrunk weights were trained for 64 positions, and sequences have 128."""
    yarn = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 2.0, "original_max_position_embeddings": 64}
    fields = _fields("yarn_128k", corpus) | {"model.pretrained": str(pretrained), "data.tokenizer": str(pretrained)}
    fields |= {"model.config": {"rope_parameters": yarn, "max_position_embeddings": 128}, "data.sequence_length": 128}
    fields |= {"parallel.precision": "fp32", "model.attention": "auto"}
    _assert_learned(_train("yarn_128k", fields, tmp_path / "run"), evaluations=3)
    config = json.loads((tmp_path / "run" / "export" / "config.json").read_text())
    assert config["rope_parameters"] == yarn
    assert config["max_position_embeddings"] == 128


def _of_family(family: str, pretrained: Path, folder: Path) -> Path:
    """A tiny model of a family, with the vocabulary of another one."""
    from transformers import AutoConfig, AutoModelForCausalLM

    from tools.families import tiny_config

    config = tiny_config(family)
    config.vocab_size = config.vocab_size_per_layer_input = AutoConfig.from_pretrained(pretrained).vocab_size
    shutil.copytree(pretrained, folder, ignore=shutil.ignore_patterns("*.safetensors", "*config.json"))
    shutil.copy(pretrained / "tokenizer_config.json", folder)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    return folder


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=pytest.mark.slow if "dpo" in name else pytest.mark.breadth) for name in FINE_TUNING],
)
def test_shrunk_fine_tuning_trains(name, pretrained, tmp_path):
    rows = tmp_path / "rows.jsonl"
    row = _pair if "dpo" in name else _conversation
    rows.write_text("".join(json.dumps(row(number)) + "\n" for number in range(200)))
    folder = _of_family(OWN_FAMILIES[name], pretrained, tmp_path / "tiny") if name in OWN_FAMILIES else pretrained
    fields = SHRUNK | {
        "model.pretrained": str(folder),
        "data.sources": [{"name": str(rows)}],
        "data.cache_dir": str(tmp_path),
        "data.tokenizer": str(pretrained),
        "data.chat_template": "plain",
        "parallel.precision": "fp32",
        "train.epochs": None,
        "export.sample_prompt": None,
    }
    _assert_learned(_train(name, fields, tmp_path / "run"), evaluations=3)
    exported = "adapter_model" if "lora" in name else "model"
    assert (tmp_path / "run" / "export" / f"{exported}.safetensors").is_file()


@pytest.mark.slow
@pytest.mark.parametrize("name", WITH_IMAGES)
def test_shrunk_fine_tuning_on_images_trains(name, tmp_path):
    from tests.helpers.image_chats import image_rows, save_image_model

    model, rows = save_image_model(tmp_path / "model", "qwen3_vl"), tmp_path / "rows.jsonl"
    rows.write_text("".join(json.dumps(row) + "\n" for row in image_rows(tmp_path, 60)))
    fields = SHRUNK | {
        "model.pretrained": str(model),
        "data.sources": [{"name": str(rows)}],
        "data.cache_dir": str(tmp_path),
        "data.tokenizer": str(model),
        "data.sequence_length": 96,
        "data.faulty_rows": "refuse",
        "parallel.precision": "fp32",
        "train.epochs": None,
        "export.sample_prompt": None,
    }
    _assert_learned(_train(name, fields, tmp_path / "run"), evaluations=3)
    assert (tmp_path / "run" / "export" / "adapter_model.safetensors").is_file()


def _conversation(number: int) -> dict[str, object]:
    pair = _pair(number)
    return {"messages": [{"role": "user", "content": pair["prompt"]}, {"role": "assistant", "content": pair["chosen"]}]}


def _pair(number: int) -> dict[str, str]:
    return {"prompt": f"{number}?", "chosen": f"It is {number}.", "rejected": f"No {number} here."}


def _loss_of(folder: Path, fields: dict[str, object]) -> float:
    """Loss of the folder's own model on the first global batch."""
    from transformers import AutoModelForCausalLM

    from llmtrain.data import BatchLoader, prepare
    from llmtrain.engines.plain import PlainLoop
    from llmtrain.plan.load import load_recipe

    recipe, _ = load_recipe(str(ROOT / "recipes/continue_pretrained.py"), [])
    recipe = recipe.with_(**fields)
    sizes = {"global_batch_size": 8, "micro_batch_size": 8, "gradient_accumulation_steps": 1}
    data = BatchLoader(prepare(recipe), seed=recipe.train.seed, dp_rank=0, dp_size=1, **sizes)
    engine = PlainLoop(AutoModelForCausalLM.from_pretrained(folder), recipe)
    return engine.eval_step(data.train_batch(0)).item()
