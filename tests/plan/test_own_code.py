"""A recipe names functions and classes of its own; what workers could not import is refused with file and line."""

import sys
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest

from llmtrain import Cluster, OptimConfig
from llmtrain.errors import RecipeError
from llmtrain.plan.facts import own_code
from llmtrain.plan.facts.own_code import OwnCode, changed_files, examined
from llmtrain.plan.load import load_recipe
from llmtrain.plan.load.python_file import reported_errors
from llmtrain.plan.rules import resolve
from llmtrain.recipe.own_code import import_object, import_path
from llmtrain.run_dir import forbidden_changes, identity_of
from tests.helpers.forked_helpers import fork_helpers

RECIPE = """
from dataclasses import dataclass
from schedules import halves
from recipe_of_tiny import base

def unchanging(step, recipe):
    return 1.0

def recipe():
    return base().with_(**{"optim.schedule": SCHEDULE})
"""
BASE = f"""
import importlib.util
spec = importlib.util.spec_from_file_location("tiny_of_tests", {str(Path(__file__).parents[2] / "recipes/tiny.py")!r})
tiny = importlib.util.module_from_spec(spec)
spec.loader.exec_module(tiny)
base = tiny.recipe
"""
SCHEDULES = """
from numbers_of_mine import HALF

print("this line must not reach the plan on standard output")


def halves(step, recipe):
    return HALF ** (step // recipe.optim.warmup_steps)


def negative(step, recipe):
    return -1.0 * (step > 100)


def fails(step, recipe):
    return 1 / (step - step)


NUMBER = 7
"""


@pytest.fixture
def folder(own_folder, monkeypatch):
    """The folder; helper processes are forks of this one."""
    fork_helpers(monkeypatch)
    return own_folder


@pytest.fixture
def own_folder(tmp_path, monkeypatch):
    """A folder with a recipe and modules of its own, and an empty cache."""
    monkeypatch.setenv("LLMTRAIN_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(sys, "path", [*sys.path])
    (tmp_path / "recipe_of_tiny.py").write_text(BASE)
    (tmp_path / "numbers_of_mine.py").write_text("HALF = 0.5\n")
    (tmp_path / "schedules.py").write_text(SCHEDULES)
    yield tmp_path
    for name in ("recipe_of_tiny", "numbers_of_mine", "schedules", "run"):
        sys.modules.pop(name, None)


def loaded(folder: Path, schedule: str):
    (folder / "run.py").write_text(RECIPE.replace("SCHEDULE", schedule))
    return load_recipe(str(folder / "run.py"), [])[0]


def refused(folder: Path, schedule: str) -> list:
    with pytest.raises(RecipeError) as error:
        resolve(loaded(folder, schedule), Cluster(nodes=1, devices_per_node=1, device="cpu"))
    return list(error.value.problems)


def test_functions_and_their_paths_are_the_same_recipe(folder):
    by_path, by_function = loaded(folder, "'schedules:halves'"), loaded(folder, "halves")
    assert by_path == by_function
    assert by_path.optim.schedule == "schedules:halves"
    assert by_path.code_dir == str(folder)
    assert by_path.own_objects == {"optim.schedule": "schedules:halves"}
    of_the_recipe_file = loaded(folder, "unchanging")
    assert of_the_recipe_file.optim.schedule == "run:unchanging"
    assert import_object("run:unchanging", str(folder))(3, by_path) == 1


def test_the_plan_identifies_every_imported_file_of_the_folder(own_folder):
    recipe = loaded(own_folder, "'schedules:halves'").with_(**{"optim.warmup_steps": 100})
    code = resolve(recipe, Cluster(nodes=1, devices_per_node=1, device="cpu")).code
    assert set(code.files) == {"schedules.py", "numbers_of_mine.py"}
    assert "schedules" not in sys.modules, "this process must not import what the workers do"
    assert changed_files(code, str(own_folder)) == []
    (own_folder / "numbers_of_mine.py").write_text("HALF = 0.25\n")
    assert changed_files(code, str(own_folder)) == ["numbers_of_mine.py"]
    assert examined(recipe).files["numbers_of_mine.py"] != code.files["numbers_of_mine.py"]


def test_a_cached_answer_starts_no_process(folder, monkeypatch):
    recipe = loaded(folder, "'schedules:halves'").with_(**{"optim.warmup_steps": 100})
    first = examined(recipe)
    monkeypatch.setattr(own_code, "run_helper", None)
    assert examined(recipe) == first
    assert examined(recipe.with_(**{"optim.schedule": "cosine"})) is None


def test_a_run_may_be_continued_from_another_folder(folder):
    recipe = loaded(folder, "halves")
    moved = recipe.model_copy(update={"code_dir": "/elsewhere"})
    assert forbidden_changes(recipe, moved, "the run") == []
    assert identity_of(recipe) == identity_of(moved)


@pytest.mark.parametrize(
    ("schedule", "rule", "message"),
    [
        ("'missing:halves'", "code.module", "there is no module missing in {folder} and the installed packages"),
        ("'schedules:halvs'", "code.name", "{folder}/schedules.py defines no halvs; did you mean 'halves'?"),
        ("'schedules:NUMBER'", "code.kind", "schedules:NUMBER is int, which is neither a function nor a class"),
        ("'schedules:fails'", "code.raises", "{folder}/schedules.py, line 16: schedules:fails fails for step 0: Zero"),
        ("'schedules:negative'", "code.schedule", "schedules:negative returns -1.0 for step 101"),
    ],
)
def test_what_workers_could_not_use_is_refused_before_they_start(folder, schedule, rule, message):
    (problem,) = refused(folder, schedule)
    assert (problem.rule, problem.field) == (rule, "optim.schedule")
    assert message.format(folder=folder) in problem.message


@pytest.mark.parametrize("text", ["def f(:\n", "import os\n\nraise RuntimeError('not today')\n", "import nowhere\n"])
def test_a_module_that_cannot_be_imported_is_named_with_its_line(folder, text):
    (folder / "broken.py").write_text(text)
    (problem,) = refused(folder, "'broken:f'")
    assert problem.rule == "code.import"
    line = 3 if "raise" in text else 1
    assert problem.message.startswith(f"{folder}/broken.py, line {line}: broken:f cannot be imported: ")


def test_a_module_that_ends_its_process_is_reported(folder):
    (folder / "broken.py").write_text("import os, sys\nprint('last words', file=sys.stderr, flush=True)\nos._exit(9)\n")
    (problem,) = refused(folder, "'broken:f'")
    assert problem.rule == "code.helper"
    assert "ended with code 9: last words" in problem.message


def local():
    def inner():
        pass

    return inner


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        (lambda step, recipe: 1.0, f"({__file__}, line "),
        (local(), "is defined within a function"),
        (partial(local), "must be a function, a class or its import path"),
        ("mine.schedule", "must be 'constant', 'linear'"),
        ("mine:", "must have the form package.module:name"),
        ("../mine:f", "must have the form package.module:name"),
    ],
)
def test_what_no_other_process_could_import_is_refused(value, reason):
    with pytest.raises(RecipeError) as error, reported_errors(Path("mine.py"), "failed", "optim."):
        OptimConfig(lr=1e-3, schedule=value)
    (problem,) = error.value.problems
    assert reason in problem.message
    assert "optim.schedule" in problem.field


def test_a_function_of_an_interactive_session_is_refused(monkeypatch):
    def typed():
        pass

    typed.__qualname__, typed.__module__ = "typed", "__main__"
    monkeypatch.delattr(sys.modules["__main__"], "__file__", raising=False)
    with pytest.raises(ValueError, match="interactive session"):
        import_path(typed)


def test_the_versions_of_installed_packages_identify_their_code(folder):
    recipe = loaded(folder, "'math:exp'")
    with pytest.raises(RecipeError):
        examined(recipe)  # it takes one argument
    assert own_code.identified({"pytest"}, None).packages["pytest"] == pytest.__version__
    assert own_code.identified({"math"}, None) == OwnCode(), "built into Python"


def test_files_that_do_not_exist_identify_nothing(folder, monkeypatch):
    """As `_ops.py`, the file of torch.ops, where the working directory is that of the recipe."""
    monkeypatch.chdir(folder)
    monkeypatch.setitem(sys.modules, "made", SimpleNamespace(__file__="_made.py"))
    assert "_made.py" not in own_code.identified(set(), str(folder)).files
