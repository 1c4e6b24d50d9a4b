"""The commands and recipes of README and the tutorials work as they are printed."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from tokenizers import Tokenizer
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

from tests.helpers.chat_tokenizers import base_tokenizer
from tests.helpers.launching_doc import TEXT, shell_lines

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
FIRST_RUN = (ROOT / "docs/tutorials/first_run.md").read_text(encoding="utf-8")
SHORT = ["--set", "train.max_steps=4", "--set", "optim.warmup_steps=1"]
"""Added to each command that trains."""
LONGER = ["--set", "train.max_steps=6", "--set", "optim.warmup_steps=1"]
"""Added to the command that continues, so that it has steps to train."""


def _tutorial(name: str) -> str:
    return (ROOT / f"docs/tutorials/{name}.md").read_text(encoding="utf-8")


def _write_recipe(text: str, folder: Path) -> None:
    """Saves the recipe of a page under the name that the page gives it."""
    [(name, code)] = re.findall(
        r"Save this as `(\w+\.py)`[^\n]*\n\n```python\n(.*?)^```", text, re.DOTALL | re.MULTILINE
    )
    (folder / name).write_text(code, encoding="utf-8")


def _run(line: str, folder: Path, *more: str) -> str:
    words = shlex.split(line)
    assert words[0] == "llmtrain"
    command = [sys.executable, "-m", *words, *(more if words[1] == "train" else ())]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "LLMTRAIN_CACHE": str(folder / "cache")}
    result = subprocess.run(command, capture_output=True, text=True, cwd=folder, env=environment, check=False)
    assert result.returncode == 0, line + result.stdout + result.stderr
    return result.stdout


def _own_commands() -> list[str]:
    return [line for line in re.findall(r"`(llmtrain [^`]+)`", FIRST_RUN) if "mine" in line]


@pytest.fixture
def own_folder(tmp_path) -> Path:
    """A folder with the recipe of README and a corpus."""
    _write_recipe(README, tmp_path)
    (tmp_path / "corpus").mkdir()
    for page in sorted((ROOT / "docs/guides").glob("*.md")):
        (tmp_path / "corpus" / f"{page.stem}.txt").write_text(page.read_text(encoding="utf-8"), encoding="utf-8")
    return tmp_path


@pytest.mark.slow
def test_the_recipe_of_the_readme_trains_continues_and_generates(own_folder):
    lines = [line for line in _own_commands() if "runs/" not in line or "export" in line]
    assert len(lines) == 4
    for line in lines:
        _run(line, own_folder, *(LONGER if "pipeline" in line else SHORT))


@pytest.mark.breadth
def test_the_other_commands_of_the_first_run_work(own_folder):
    lines = [line for line in _own_commands() if "--run-dir" in line]
    assert len(lines) == 3
    for line in lines:
        _run(line, own_folder, *SHORT)


def test_the_readme_recipe_is_short_and_legal(tmp_path):
    _write_recipe(README, tmp_path)
    assert len((tmp_path / "mine.py").read_text().splitlines()) <= 15
    assert "mine: llama" in _run("llmtrain plan mine.py", tmp_path)


@pytest.mark.breadth
def test_the_tutorials_of_a_corpus_and_of_pretrained_weights_run(tmp_path):
    """One after the other, in one folder, as they are meant to be read."""
    shutil.copytree(ROOT / "docs/guides", tmp_path / "docs/guides")
    shutil.copytree(ROOT / "recipes", tmp_path / "recipes")
    text = _tutorial("corpus")
    code = re.search(r"^```python\n(.*?)^```", text, re.DOTALL | re.MULTILINE)[1]
    subprocess.run([sys.executable, "-c", code], cwd=tmp_path, check=True)
    _write_recipe(text, tmp_path)
    for line in shell_lines(text):
        _run(line, tmp_path, *SHORT)

    small = [
        part for field in ("hidden_size=64", "intermediate_size=128") for part in ("--set", f"model.config.{field}")
    ]
    _run("llmtrain train recipes/tiny.py", tmp_path, *SHORT, *small, "--set", "data.tokenizer.vocab_size=512")
    text = _tutorial("pretrained")
    _write_recipe(text, tmp_path)
    for line in shell_lines(text):
        if "MODEL" not in line:
            _run(line, tmp_path, *SHORT)


def _write_export(folder: Path) -> None:
    """Writes a model and a tokenizer as an export of `recipes/tiny.py`, which another test runs, but untrained."""
    tokenizer = Tokenizer.from_str(base_tokenizer())
    tokenizer.add_special_tokens(["<|endoftext|>"])
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|endoftext|>")
    fast.save_pretrained(folder)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = AutoConfig.for_model(
        "llama", **sizes, vocab_size=len(fast), max_position_embeddings=256, eos_token_id=fast.eos_token_id
    )
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)


@pytest.mark.slow
def test_the_tutorial_of_a_chat_runs(tmp_path):
    _write_export(tmp_path / "runs/tiny/export")
    text = _tutorial("chat")
    code = re.search(r"^```python\n(.*?)^```", text, re.DOTALL | re.MULTILINE)[1]
    subprocess.run([sys.executable, "-c", code], cwd=tmp_path, check=True)
    _write_recipe(text, tmp_path)
    said = [_run(line, tmp_path, "--set", "train.epochs=1") for line in shell_lines(text)]
    assert len(said) == 4
    assert re.search(r"User: What is (\d+) \+ (\d+)\?↵\s*Assistant:\[\[ \1 \+ \2 is \d+\.<\|endoftext\|>\]\]", said[0])
    page = re.sub("<[^>]*>", "", (tmp_path / "sums.html").read_text(encoding="utf-8"))
    assert re.search(r"User: What is \d+ \+ \d+\?", page)
    assert (tmp_path / "runs/sums/first_batch.html").exists()
    exported = json.loads((tmp_path / "runs/sums/export/generation_config.json").read_text())
    tokens = Tokenizer.from_file(str(tmp_path / "runs/sums/export/tokenizer.json"))
    assert exported["eos_token_id"] == tokens.token_to_id("<|endoftext|>")
    assert (tmp_path / "runs/sums/export/chat_template.jinja").exists()


@pytest.mark.parametrize("name", ["two_nodes", "slurm"])
def test_commands_of_the_cluster_tutorials_are_covered_by_other_tests(name):
    """Those of docs/guides/launching.md, and plans and dry runs."""
    tested = {line.removesuffix(" | sbatch") for line in shell_lines(TEXT)} | {
        "llmtrain doctor --hostfile hostfile",  # tests/launch/test_doctor_on_two_hosts.py
        "llmtrain plan recipes/llama3_8b.py --nodes 2 --gpus-per-node 8 --device h100",
        "llmtrain train recipes/llama3_8b.py --nodes 2 --gpus-per-node 8 --device h100 --dry-run",
    }
    lines = shell_lines(_tutorial(name))
    assert len(lines) > 3
    assert [line for line in lines if line not in tested] == []


def test_the_plan_of_the_tutorial_of_two_nodes_is_legal():
    [line] = [line for line in shell_lines(_tutorial("two_nodes")) if line.startswith("llmtrain plan")]
    assert "2 × 8 h100 = 16 workers" in _run(line, ROOT)


@pytest.mark.breadth
def test_the_dry_run_of_the_tutorial_of_two_nodes_works(tmp_path):
    [line] = [
        line for line in shell_lines(_tutorial("two_nodes")) if line.startswith("llmtrain") and "--dry-run" in line
    ][:1]
    _run(line.replace("recipes/", f"{ROOT}/recipes/"), tmp_path)


LIBRARY_GUIDE = (ROOT / "docs/guides/library.md").read_text(encoding="utf-8")


def _run_blocks(wanted: Callable[[str], bool], folder: Path) -> str:
    """Runs the Python of the guide to the library as one program, for the recipe of README with fewer steps."""
    _write_recipe(README, folder)
    recipe = (folder / "mine.py").read_text().replace("max_steps=100", "max_steps=4").replace("steps=20", "steps=1")
    (folder / "mine.py").write_text(recipe)
    shutil.copy(ROOT / "ds_configs/tiny.json", folder / "ds_config.json")
    blocks = re.findall(r"^```python\n(.*?)^```", LIBRARY_GUIDE, re.DOTALL | re.MULTILINE)
    code = "import llmtrain as lt\n" + "\n".join(filter(wanted, blocks))
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "LLMTRAIN_CACHE": str(folder / "cache")}
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, cwd=folder, env=environment, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_plan_and_lint_examples_of_the_library_guide_run(own_folder):
    said = _run_blocks(lambda block: "run" not in block and "verify" not in block, own_folder)
    assert "{'dp': 4, 'pp': 1, 'tp': 1, 'sp': 1, 'ep': 1, 'zero_stage': 0} 1" in said
    assert "batch.divides batch.global_batch_size" in said
    assert "error lint.unknown_key zero_optimisation" in said


@pytest.mark.breadth
def test_all_examples_of_the_library_guide_run(own_folder):
    said = _run_blocks(lambda block: True, own_folder)
    assert "trained 4 steps" in said
    assert "all plans train as plain PyTorch does" in said


def test_the_commands_of_the_guide_to_lint_run():
    lines = shell_lines((ROOT / "docs/guides/lint.md").read_text(encoding="utf-8"))
    assert len(lines) == 3
    for line in lines:
        _run(line, ROOT)
