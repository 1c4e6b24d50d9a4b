"""Recipes as YAML files: the same recipe as in Python, and each fault with its line."""

import json
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from llmtrain.cli import main
from llmtrain.commands.train_request import TrainRequest
from llmtrain.errors import RecipeError
from llmtrain.launch.torchrun import split_arguments
from llmtrain.plan.load import load_recipe, open_recipe, with_variant

TINY = Path(__file__).parents[2] / "recipes/tiny.py"
WHOLE = """
name: mine
model:
  architecture: llama
  config: {hidden_size: 64, intermediate_size: 128, num_hidden_layers: 2, num_attention_heads: 4}
data:
  sources: [{name: corpus/*.txt, weight: 0.5}, {name: other.jsonl}]
  tokenizer: {vocab_size: 512}
  sequence_length: 64
optim: {lr: 2e-3}
batch: {global_batch_size: 4, micro_batch_size: 2}
train:
  max_steps: 10
variants:
  short: {train: {max_steps: 2}}
  typo: {train: {max_step: 2}}
cluster: {nodes: 2, devices_per_node: 4, device: h100}
"""


@pytest.fixture
def written(tmp_path):
    def write(text: str, name: str = "mine.yaml") -> Path:
        (tmp_path / name).write_text(text)
        return tmp_path / name

    return write


def faults(path: Path, variant: str = "", *assignments: str) -> dict[str, str]:
    with pytest.raises(RecipeError) as error:
        load_recipe(f"{path}:{variant}", list(assignments))
    assert error.value.exit_code == 2
    return {one.field: one.message for one in error.value.problems}


def test_a_complete_yaml_recipe_is_read(written):
    path = written(WHOLE)
    recipe, cluster = load_recipe(str(path), ["optim.warmup_steps=3"])
    assert (recipe.name, recipe.optim.lr, recipe.optim.warmup_steps, recipe.train.max_steps) == ("mine", 2e-3, 3, 10)
    assert [source.weight for source in recipe.data.sources] == [0.5, 1.0]
    assert cluster
    assert (cluster.nodes, cluster.device) == (2, "h100")
    assert load_recipe(f"{path}:short", [])[0].train.max_steps == 2
    assert open_recipe(path).variants() == ["short", "typo"]
    assert with_variant(str(path), "short") == f"{path}:short"


def test_a_recipe_as_json_is_a_recipe_in_yaml(written):
    """JSON is YAML, so `recipe.json` of a run is a recipe, too."""
    recipe, _ = load_recipe(f"{TINY}:zero3", [])
    assert load_recipe(str(written(recipe.model_dump_json())), [])[0] == recipe


def test_yaml_extends_a_recipe_that_comes_with_llmtrain(written):
    recipe, _ = load_recipe(str(written("extends: tiny:zero3\nname: mine\n")), [])
    assert recipe == load_recipe(f"{TINY}:zero3", [])[0].with_(name="mine")


def test_yaml_extends_python_and_yaml(written):
    written(f"extends: {TINY}:zero3\noptim: {{lr: 1e-3}}\nmodel:\n  config: {{hidden_size: 96}}\n", "base.yml")
    path = written("extends: base.yml\nname: mine\ndata: {tokenizer: some/folder}\nmodel: {config: {}}\n")
    base, cluster = load_recipe(f"{TINY}:zero3", [])
    recipe, same = load_recipe(str(path.with_name("base.yml")), [])
    assert cluster == same
    assert recipe == base.with_(**{"optim.lr": 1e-3, "model.config.hidden_size": 96})
    assert load_recipe(str(path), [])[0].model.config == {}  # an empty object replaces
    assert load_recipe(str(path), [])[0].data.tokenizer == "some/folder"


def test_values_are_those_of_yaml_1_2(written):
    """YAML 1.1, as PyYAML reads it, takes `2e-3` for a text, `on` for true, `010` for 8 and `1:30` for 90."""
    recipe, _ = load_recipe(str(written(f"extends: {TINY}\nname: on\noptim: {{lr: 1E-4, eps: .5e-8}}\n")), [])
    assert (recipe.name, recipe.optim.lr, recipe.optim.eps) == ("on", 1e-4, 0.5e-8)
    text = f"extends: {TINY}\ntrain: {{max_steps: 010}}\nexport: {{at_end: False}}\nmodel: {{revision: ~}}\n"
    recipe, _ = load_recipe(str(written(text)), [])
    assert (recipe.train.max_steps, recipe.export.at_end) == (10, False)
    text = f"extends: {TINY}\nmodel: {{config: {{a: 1:30, b: 2024-01-01, c: .inf, d: 0x10, e: '1', f: no}}}}\n"
    config = load_recipe(str(written(text)), [])[0].model.config
    assert [config[name] for name in "abcdef"] == ["1:30", "2024-01-01", ".inf", "0x10", "1", "no"]


def test_the_recipes_of_the_guide_are_valid(tmp_path, monkeypatch, capsys):
    guide = (TINY.parents[1] / "docs/guides/recipes.md").read_text()
    in_yaml, in_python = (guide.split(f"```{kind}\n")[1].split("```")[0] for kind in ("yaml", "python"))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "recipes").mkdir()
    for folder in (".", "recipes"):
        (tmp_path / folder / "tiny.py").write_text(TINY.read_text())
    Path("mine.py").write_text(in_python)
    assert load_recipe("mine.py:long", [])[0].train.max_steps == 10_000
    Path("mine.yaml").write_text(in_yaml.replace("zero_stage: 1", "zero_stage: 2"))
    assert load_recipe("mine.yaml", [])[0].optim.lr == load_recipe("mine.py", [])[0].optim.lr
    with pytest.raises(SystemExit):
        main(["plan", "mine.yaml:two_stages"])
    shown = guide.split("```text\n")[1].split("```")[0]
    assert capsys.readouterr().err.startswith(shown)


def test_every_fault_has_its_line(written):
    path = written(
        WHOLE.replace("lr: 2e-3", "lrr: 2e-3").replace("weight: 0.5", "weight: x").replace("train:", "trian:")
    )
    found = faults(path)
    assert set(found) == {
        f"{path}:10: optim.lr",
        f"{path}:10: optim.lrr",
        f"{path}:7: data.sources.0.weight",
        f"{path}:12: trian",
        f"{path}: train",
    }
    assert "did you mean 'lr'" in found[f"{path}:10: optim.lrr"]
    assert "the field for that" in faults(written("learning_rate: 1\n"))[f"{path}:1: learning_rate"]
    path = written(WHOLE)
    assert set(faults(path, "typo")) == {f"{path}:16: train.max_step"}
    assert faults(path, "shrot") == {str(path): "has no variant 'shrot'; did you mean 'short'?"}
    assert set(faults(path, "", "optim.lrr=1")) == {"optim.lrr"}
    found = faults(written(WHOLE.replace("h100", "h10")))
    assert "did you mean 'h100'" in found[f"{path}:17: cluster.device"]


def test_a_plan_that_is_refused_names_the_line(written, capsys):
    path = written(WHOLE.replace("\ntrain:", "\nparallel: {zero_stage: 0, precision: bf16}\ntrain:"))
    for assignments, place in (([], f"{path}:12: "), (["--set", "parallel.zero_stage=0"], "error: ")):
        with pytest.raises(SystemExit) as ended:
            main(["plan", str(path), "--nodes", "1", "--gpus-per-node", "1", *assignments])
        assert ended.value.code == 2
        assert f"{place}parallel.zero_stage: 0 is not supported with bf16" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "where", "what"),
    [
        ("name: [", ":1:8", "is not YAML"),
        ("- name\n", "", "is not a mapping"),
        ("a: &x 1\nb: *x\n", ":2:4", "aliases"),
        ("name: !!python/object/apply:os.getcwd []\n", ":1:7", "YAML tag"),
        ("? [a]\n: b\n", ":1:3", "a key that is not a string"),
        ("name: a\nname: b\n", ":2: name", "is already in line 1"),
        ("a: " + "[" * 100, "", "nested deeper"),
        ("optim: {lr: 1" + "0" * 5000 + "}", "", "out of range"),
        ('name: "\\0"\n', "", "NUL"),
        ("extends: 3\n", ":1: extends", "is not the path of a recipe"),
        ("extends: gone.py\n", ":1: extends: ", "does not exist"),
        ("extends: mine.yaml\n", ":1: extends", "itself extends this file"),
        ("variants: [a]\n", ":1: variants", "is not a mapping"),
    ],
)
def test_invalid_recipe_files_are_refused(written, text, where, what):
    ((field, message),) = faults(written(text), "" if "variants" not in text else "a").items()
    assert where in field
    assert what in message


def test_a_binary_file_is_refused(tmp_path):
    (tmp_path / "mine.yaml").write_bytes(b"name: \xff\n")
    assert "is not UTF-8 text" in str(faults(tmp_path / "mine.yaml"))


def test_launchers_run_the_module_not_the_file(written):
    """A YAML file is no script, and a Python file may lack the lines that make it one."""
    path = str(written(WHOLE))
    request = TrainRequest(recipe=f"{path}:short", assignments=["optim.lr=1e-3"])
    script = request.script(request.absolute_path)
    assert script[:4] == ("-m", "llmtrain", "train", f"{path}:short")
    assert split_arguments(["--nnodes", "2", *script]) == (["--nnodes", "2"], list(script))
    assert TrainRequest(recipe="tiny.py:bf16").script("tiny.py")[3] == "tiny.py:bf16"


@pytest.mark.breadth
def test_the_line_for_torchrun_trains(written, tmp_path):
    small = '{"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}'
    (tmp_path / "text.txt").write_text("some words to train on, again and again. " * 500)
    text = f"extends: {TINY}\nname: mine\nmodel: {{config: {small}}}\nevaluation: {{every_steps: 0}}\n"
    text += f"data: {{sources: [{{name: {tmp_path}/text.txt}}], tokenizer: {{vocab_size: 300}}, sequence_length: 32}}\n"
    text += "variants: {short: {train: {max_steps: 1}, optim: {warmup_steps: 0}, export: {at_end: false}}}\n"
    command = [sys.executable, "-m", "llmtrain", "train", f"{written(text)}:short", "--run-dir", str(tmp_path / "run")]
    environment: dict[str, Any] = {"cwd": tmp_path, "capture_output": True, "text": True, "check": False}
    shown = subprocess.run([*command, "--nproc", "1", "--launcher", "torchrun", "--dry-run"], **environment)
    tool, *words = shlex.split(shown.stdout.splitlines()[-1])
    assert (tool, words[3:5]) == ("torchrun", ["-m", "llmtrain"]), shown.stderr
    trained = subprocess.run([sys.executable, "-m", "torch.distributed.run", *words], **environment)
    assert trained.returncode == 0, trained.stdout + trained.stderr
    assert json.loads((tmp_path / "run/metrics.jsonl").read_text().splitlines()[-1])["step"] == 1
