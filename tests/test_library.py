"""`import llmtrain` in a program: the functions that the commands call."""

from __future__ import annotations

import inspect
import json
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from typer.testing import CliRunner

import llmtrain
from llmtrain.cli import app
from llmtrain.errors import RecipeError, UserError
from llmtrain.plan.load import load_recipe

ROOT = Path(__file__).parents[1]
ANY_ORDER = """
import importlib, random, sys
from types import FunctionType
names = ["plan", "train", "trials.verify"]
for first in ["", *names, "plan.plan", "trials.verify.certify"]:
    for name in [name for name in sys.modules if name.split(".")[0] == "llmtrain"]:
        del sys.modules[name]
    importlib.import_module(f"llmtrain.{first}".rstrip("."))
    for name in random.sample(names, 3):
        importlib.import_module(f"llmtrain.{name}")
    import llmtrain
    from llmtrain import lint, plan, train, verify
    from llmtrain.plan.plan import Plan
    functions = [llmtrain.plan, llmtrain.train, llmtrain.verify, llmtrain.lint, plan, train, verify, lint]
    assert all(isinstance(one, FunctionType) for one in functions), (first, functions)
    assert sys.modules["llmtrain.plan"].Plan is Plan
"""
LIGHT = """
import sys
import llmtrain
loaded = {"torch", "deepspeed", "transformers", "datasets", "accelerate", "typer", "rich"} & set(sys.modules)
assert not loaded, loaded
llmtrain.plan("recipes/llama3_70b.py")
llmtrain.lint("ds_configs/llama3_70b.json")
loaded = {"torch", "deepspeed", "transformers", "datasets", "accelerate"} & set(sys.modules)
assert not loaded, loaded
"""


@pytest.mark.parametrize("program", [ANY_ORDER, LIGHT], ids=["any_order", "light"])
def test_importing_the_package_loads_no_heavy_module(program):
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("name", ["plan", "train", "verify", "lint", "load_run"])
def test_every_function_is_documented_and_typed(name):
    function = getattr(llmtrain, name)
    assert function.__doc__
    signature = inspect.signature(function)
    assert all(one.annotation is not one.empty for one in signature.parameters.values())
    assert signature.return_annotation is not signature.empty


def test_a_plan_is_what_the_command_prints():
    arguments = ["plan", "recipes/llama3_8b.py", "--nodes", "2", "--set", "parallel.zero_stage=2"]
    recipe, cluster = load_recipe("recipes/llama3_8b.py", ["parallel.zero_stage=2"])
    planned = llmtrain.plan(recipe, cluster.resized(nodes=2, devices_per_node=None, device=None))
    assert json.loads(json.dumps(planned.document())) == json.loads(
        CliRunner().invoke(app, [*arguments, "--json"]).stdout
    )
    assert str(planned) == CliRunner().invoke(app, arguments).stdout.rstrip("\n")
    assert planned.plan.batch.tokens_per_step == recipe.batch.global_batch_size * recipe.data.sequence_length


def test_a_recipe_file_provides_its_variant_and_its_cluster():
    planned = llmtrain.plan(Path("recipes/tiny.py:zero3"))
    assert planned.plan.parallel.zero_stage == 3
    assert llmtrain.plan("recipes/llama3_70b.py").plan.cluster.device == "h100"


def test_a_refused_plan_has_all_faults_and_the_nearest_plans():
    recipe, _ = load_recipe("recipes/tiny.py", ["parallel.pipeline=2", "parallel.zero_stage=3"])
    with pytest.raises(RecipeError) as caught:
        llmtrain.plan(recipe, llmtrain.Cluster(devices_per_node=2))
    assert {problem.rule for problem in caught.value.problems} == {"pipeline.zero_stage"}
    assert caught.value.nearest


def test_an_error_names_the_line_of_its_own_recipe_only(tmp_path):
    other = load_recipe("recipes/tiny.py", [])[0].with_(**{"parallel.pipeline": 2, "parallel.zero_stage": 2})
    file = tmp_path / "mine.yaml"
    file.write_text(f"extends: {ROOT}/recipes/tiny.py\nparallel:\n  pipeline: 2\n  zero_stage: 3\n")
    two = llmtrain.Cluster(devices_per_node=2)
    with pytest.raises(RecipeError, match=r"mine\.yaml:4: parallel\.zero_stage"):
        llmtrain.plan(file, two)
    with pytest.raises(RecipeError) as caught:
        llmtrain.plan(other, two)
    assert [problem.field for problem in caught.value.problems] == ["parallel.zero_stage"]


def test_lint_takes_files_and_dictionaries():
    assert llmtrain.lint(ROOT / "ds_configs/tiny.json").findings == []
    wrong = {"train_batch_size": 8, "zero_optimisation": {}}
    found = llmtrain.lint(wrong, allow=["clipping_default"])
    assert [(one.rule, one.field) for one in found.findings] == [("lint.unknown_key", "zero_optimisation")]
    assert found.errors == 1
    assert llmtrain.lint({"train_batch_size": 3}, world_size=2).errors == 1
    assert not llmtrain.lint("nowhere.json").readable


def test_the_metrics_of_a_run_are_columns(tmp_path):
    lines = [{"step": 1, "loss": 2.5}, {"step": 2, "loss": 2.25, "mfu": 0.5}, {"step": 2, "eval_loss": 2.0}]
    (tmp_path / "metrics.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    run = llmtrain.load_run(tmp_path)
    assert run.metrics["loss"].tolist() == [2.5, 2.25]
    assert run.evaluations["eval_loss"].tolist() == [2.0]
    frame = run.metrics.to_pandas()
    assert list(frame.columns) == ["step", "loss", "mfu"]
    assert frame["mfu"].isna().tolist() == [True, False]


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: llmtrain.lint({"a": {1}}), "not JSON"),
        (lambda: llmtrain.lint({}, allow=["no_such_rule"]), "is not a rule"),
        (lambda: llmtrain.plan("recipes/nothing.py"), "does not exist"),
        (lambda: llmtrain.load_run("recipes"), "not a run directory"),
        (lambda: llmtrain.train("recipes/tiny.py", nproc=0), "nproc: must be an integer .*, not 0"),
        (lambda: llmtrain.train("recipes/tiny.py", nproc=10**12), "nproc: .* from 1 to 1,024, not 1000000000000"),
        (lambda: llmtrain.train("recipes/tiny.py", max_steps=2.5), "max_steps: must be an integer .*, not 2.5"),
        (lambda: llmtrain.train("recipes/tiny.py", max_steps="5"), "max_steps: .*, not '5'"),
        (lambda: llmtrain.train("recipes/tiny.py", max_restarts=-1), "max_restarts: .* of at least 0, not -1"),
        (lambda: llmtrain.verify("recipes/tiny.py", steps=-1), "steps: .*, not -1"),
    ],
)
def test_invalid_arguments_raise_user_errors(call, words):
    with pytest.raises(UserError, match=words):
        call()


@pytest.mark.parametrize("function", [llmtrain.train, llmtrain.verify])
def test_workers_are_started_from_the_main_thread_only(function, tmp_path):
    caught = []

    def call() -> None:
        with pytest.raises(RecipeError, match="main thread") as error:
            function("recipes/tiny.py", run_dir=tmp_path / "run")
        caught.append(error)

    thread = threading.Thread(target=call)
    thread.start()
    thread.join()
    assert caught
    assert not (tmp_path / "run").exists()


def test_a_worker_starts_no_workers(monkeypatch, tmp_path):
    worker = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
    for name, value in {**worker, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(RecipeError, match="started this process as a worker"):
        llmtrain.train("recipes/tiny.py", run_dir=tmp_path / "run")
