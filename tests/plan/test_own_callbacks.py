"""Callbacks and trackers that a run could not call are refused before workers start."""

from __future__ import annotations

import sys

import jsonschema
import pytest

import llmtrain
from llmtrain.errors import RecipeError
from llmtrain.plan.facts import own_code
from llmtrain.plan.facts.own_code import answer, examined
from llmtrain.plan.load import load_recipe
from llmtrain.plan.rules import resolve
from llmtrain.recipe.callback import HOOKS, hooks_of
from llmtrain.recipe.cluster import Cluster
from llmtrain.recipe.parts import described_schema
from llmtrain.run_dir import MAY_CHANGE, forbidden_changes, identity_of
from tests.helpers.small_plan import small_plan

MODULE = """
from llmtrain import Callback

class Every(Callback):
    def __init__(self, steps, name="a"):
        pass
    def on_step_end(self, context):
        pass

class Duck:
    def on_save(self, context):
        pass

duck = Duck()

class Misspelt(Callback):
    def on_step_ends(self, context):
        pass

class Nothing(Callback):
    pass

class NoContext:
    def on_step_end(self):
        pass

class Asynchronous:
    async def on_save(self, context):
        pass

class HalfState(Duck):
    def state_dict(self):
        return {}

def function(context):
    pass

class Changes:
    def on_gradients(self, context):
        pass

class Tracker:
    def __init__(self, run_dir, recipe, start_step):
        pass
    def log(self, values, step):
        pass

class NoLog:
    pass

class NoArguments:
    def log(self, values, step):
        pass
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A folder with a module, which is imported in this process instead of a helper process."""
    (tmp_path / "hooks.py").write_text(MODULE)
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setenv("LLMTRAIN_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(own_code, "run_helper", lambda module, request, what: answer(request))
    yield tmp_path
    sys.modules.pop("hooks", None)


def refusals(folder, **fields) -> list[tuple[str, str, str]]:
    """What is said of the objects in the fields of a recipe."""
    try:
        examined(small_plan().recipe.with_(**fields, code_dir=str(folder)))
    except RecipeError as error:
        return [(problem.rule, problem.field, problem.message) for problem in error.problems]
    return []


FIELD = "callbacks.0.object"


@pytest.mark.parametrize(("name", "options"), [("Every", {"steps": 3}), ("Duck", {}), ("duck", {})])
def test_classes_and_objects_with_hooks_are_accepted(folder, name, options):
    assert refusals(folder, callbacks=[{"object": f"hooks:{name}", "options": options}]) == []


@pytest.mark.parametrize(
    ("name", "options", "rule", "message"),
    [
        ("Misspelt", {}, "callback.hook", "defines on_step_ends, which no run calls; did you mean 'on_step_end'?"),
        ("Nothing", {}, "callback.none", "hooks:Nothing defines no hook"),
        ("NoContext", {}, "callback.hook", "must take one argument, the context"),
        ("Asynchronous", {}, "callback.hook", "is asynchronous, and would never run"),
        ("HalfState", {}, "callback.state", "defines state_dict alone"),
        ("function", {}, "callback.kind", "is a function, but a callback is a class or an object"),
        ("Every", {}, "callback.options", "missing a required argument: 'steps'"),
        ("Every", {"steps": 1, "nam": "b"}, "callback.options", "did you mean 'name'?"),
        ("duck", {"steps": 1}, "callback.options", "is an object; only a class takes options"),
        ("Changes", {}, "callback.gradients", "must be true: hooks:Changes defines on_gradients"),
    ],
)
def test_what_a_run_could_not_call_is_refused(folder, name, options, rule, message):
    ((found, field, text),) = refusals(folder, callbacks=[{"object": f"hooks:{name}", "options": options}])
    assert found == rule
    of_rule = {"callback.options": "callbacks.0.options", "callback.gradients": "callbacks.0.changes_gradients"}
    assert field == of_rule.get(rule, FIELD)
    assert message in text


def test_a_callback_that_changes_gradients_says_so(folder):
    declared = {"ranks": "all", "changes_gradients": True}
    assert refusals(folder, callbacks=[{"object": "hooks:Changes", **declared}]) == []
    ((rule, field, text),) = refusals(folder, callbacks=[{"object": "hooks:Duck", **declared}])
    assert (rule, field) == ("callback.gradients", "callbacks.0.changes_gradients")
    assert "defines no on_gradients" in text


def test_trackers_are_checked(folder):
    def found(name: str) -> list[tuple[str, str]]:
        return [one[:2] for one in refusals(folder, **{"logging.trackers": ["tensorboard", f"hooks:{name}"]})]

    assert found("Tracker") == []
    for name, rule in (("NoLog", "tracker.kind"), ("function", "tracker.kind"), ("NoArguments", "tracker.arguments")):
        assert found(name) == [(rule, "logging.trackers.1")]


RECIPE = """
import sys
sys.path.insert(0, {tests!r})
from hooks import Every
from tests.helpers.small_plan import small_plan

def recipe():
    return small_plan().recipe.with_(callbacks=CALLBACKS)
"""


def test_a_path_a_class_and_a_configuration_are_the_same_recipe(folder):
    def loaded(callbacks: str):
        root = str(llmtrain.__file__).removesuffix("llmtrain/__init__.py")
        (folder / "run.py").write_text(RECIPE.format(tests=root).replace("CALLBACKS", callbacks))
        return load_recipe(str(folder / "run.py"), [])[0]

    by_class = loaded("[Every]")
    assert by_class == loaded("['hooks:Every']") == loaded("[{'object': 'hooks:Every'}]")
    assert by_class.own_objects == {FIELD: "hooks:Every"}
    assert by_class.callbacks[0] == llmtrain.CallbackConfig(object="hooks:Every")
    with pytest.raises(RecipeError, match="missing a required argument"):
        resolve(by_class, Cluster(devices_per_node=2))


def test_a_run_may_be_continued_with_other_callbacks():
    recipe = small_plan().recipe
    other = recipe.with_(callbacks=["mine:A"])
    assert forbidden_changes(recipe, other, "the run") == []
    assert identity_of(recipe) == identity_of(other)
    assert MAY_CHANGE.fullmatch("callbacks.0.options.every")


def test_the_base_class_defines_every_hook_and_counts_as_none():
    assert hooks_of(llmtrain.Callback) == hooks_of(llmtrain.Callback()) == ()
    assert {name for name in vars(llmtrain.Callback) if name.startswith("on_")} == set(HOOKS)


@pytest.mark.parametrize(
    "fields",
    [
        {"callbacks": ["mine:A", {"object": "mine:B", "options": {"a": 1}}]},
        {"logging": {"trackers": ["tensorboard", "mine:T"]}},
        {"optim": {"lr": 1e-3, "schedule": "cosine"}},
        {"optim": {"lr": 1e-3, "schedule": "mine:f"}},
    ],
)
def test_an_editor_accepts_names_and_paths(fields):
    schema = described_schema(llmtrain.Recipe)
    jsonschema.validate({**small_plan().recipe.model_dump(mode="json"), **fields}, schema)
