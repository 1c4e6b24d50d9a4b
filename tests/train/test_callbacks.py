"""Callbacks add metrics, ask for saves, evaluations and the end, and change nothing else."""

from __future__ import annotations

import importlib
import json
import math
import re
import sys
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from rich.console import Console

from llmtrain.checkpoint.contents import CallbacksState, TrainerState, read_state
from llmtrain.checkpoint.folder import STATE_FILE
from llmtrain.engines import StepResult
from llmtrain.engines.guard import Skipped
from llmtrain.errors import OwnCodeError, RecipeError
from llmtrain.run_dir import RunDir
from llmtrain.train.callbacks import Callbacks, names_of
from llmtrain.train.loop import Run, fit
from llmtrain.train.metrics import MetricsLogger, TrainingProgress
from tests.helpers.commands import events, llmtrain, losses, metrics
from tests.helpers.harness import run_ranks
from tests.helpers.small_plan import small_plan

MODULE = """
import time

import torch
from llmtrain import Callback, CallbackResult

CALLS = []


class Recorder(Callback):
    def _note(self, name, context):
        CALLS.append((name, context.step, sorted(context.metrics)[:1]))

    def on_train_begin(self, context):
        self._note("begin", context)

    def on_step_end(self, context):
        self._note("step", context)

    def on_evaluate(self, context):
        self._note("evaluate", context)

    def on_save(self, context):
        self._note("save", context)

    def on_train_end(self, context):
        self._note("end", context)


class Every(Callback):
    # Asks for all that a callback can ask for, and counts its calls.
    def __init__(self, steps, stop=None, rank=0):
        self.steps, self.stop, self.rank, self.calls = steps, stop, rank, 0

    def on_step_end(self, context):
        self.calls += 1
        torch.rand(3)
        if context.rank != self.rank:
            return None
        due = context.step % self.steps == 0
        stop = "enough" if context.step == self.stop else ""
        return CallbackResult({"calls": self.calls}, save=due, evaluate=due, stop=stop)

    def on_evaluate(self, context):
        return CallbackResult({"score": float(100 - context.step)}) if context.rank == 0 else None

    def state_dict(self):
        return {"calls": self.calls}

    def load_state_dict(self, state):
        self.calls = state["calls"]


class Sees(Callback):
    def on_step_end(self, context):
        return CallbackResult(stop=",".join(context.metrics)) if context.rank == 1 and context.metrics else None


class Unlogged(Callback):
    def on_step_end(self, context):
        return CallbackResult(metrics={"loss": 7.0}) if not context.metrics else None


class Fails(Callback):
    def __init__(self, step=3, rank=0):
        self.step, self.rank = step, rank

    def on_step_end(self, context):
        if context.step == self.step and context.rank == self.rank:
            {}["missing"]


class Returns:
    def __init__(self, hook="on_step_end", value=None, **fields):
        self.value = CallbackResult(**fields) if fields else value
        setattr(self, hook, lambda context: self.value)

    def on_train_end(self, context):
        return None


WEIGHT = torch.nn.Parameter(torch.ones(4))


class ChangesWeights(Callback):
    def __init__(self, how, step=3):
        self.how, self.step = how, step

    def on_step_end(self, context):
        if context.step == self.step:
            with torch.no_grad():
                WEIGHT.mul_(2) if self.how == "in place" else WEIGHT.data.mul_(2)


class NotJson(Every):
    def __init__(self):
        super().__init__(100)

    def state_dict(self):
        return {"calls": {1, 2}}
"""
SUBJECT = "callbacks_of_tests"
RECIPE = small_plan().recipe


@pytest.fixture
def folder(tmp_path, monkeypatch):
    (tmp_path / f"{SUBJECT}.py").write_text(MODULE)
    monkeypatch.setattr(sys, "path", [*sys.path])
    yield tmp_path
    sys.modules.pop(SUBJECT, None)


def recipe_of(folder: Path, *callbacks: dict, **fields):
    """A recipe with callbacks of the module, which the helper process has not checked."""
    own = [{**one, "object": f"{SUBJECT}:{one['object']}"} for one in callbacks]
    usual = {"evaluation.every_steps": 4, "logging.every_steps": 2, "train.max_steps": 8}
    return RECIPE.with_(**{**usual, **fields}, callbacks=own, code_dir=str(folder))


class Engine:
    """Its loss falls until a step, and is random in its last digits."""

    objective = own_metrics = model = None

    def __init__(self, best: int = 1000) -> None:
        self.step, self.best, self.drawn = 0, best, []
        self.guard = SimpleNamespace(read=lambda: Skipped(0, ()))

    def metric_sums(self) -> None:
        """Has none."""

    def train_step(self, batch, change_gradients=None):
        self.step += 1
        self.drawn.append(torch.rand(1).item())
        return StepResult(loss=torch.tensor(1.0), grad_norm=torch.tensor(1.0), lr=1e-3)

    def eval_step(self, batch):
        return torch.tensor(10.0 + abs(self.best - self.step))

    def averaged(self):
        return nullcontext()


class Saver:
    """Notes the states that it is asked to save."""

    is_writing = False

    def __init__(self) -> None:
        self.states: list[dict] = []
        self.written = None

    def start(self, state):
        self.states.append(json.loads(state.text()))
        self.written = Path(f"step_{state.step:08d}")

    def settle(self):
        pass

    def wait(self):
        pass


def train(
    folder: Path, recipe, engine=None, state=None, stop_step=None, saver=None
) -> tuple[list[dict], TrainerState, Saver]:
    """Runs the loop in this process; returns the lines of its metrics, its last state, and its saves."""
    torch.manual_seed(1)
    run_dir = RunDir(folder / "run")
    run_dir.path.mkdir(exist_ok=True)
    plan = small_plan().model_copy(update={"recipe": recipe.with_(**{"logging.trackers": []})})
    state, saver = state or TrainerState(), saver or Saver()
    batches = [SimpleNamespace(eval_source="a", num_items=10)]
    data = SimpleNamespace(
        train_batches=lambda _: (SimpleNamespace(samples=8, target_tokens=512, num_items=512) for _ in iter(int, 1)),
        eval_sets=[""],
        eval_batches=lambda most, name: iter(batches),
        eval_bytes=lambda most, name: 40,
    )
    stop = SimpleNamespace(should_stop=lambda step: False, stopped_by=None)
    engine = engine or Engine()
    engine.step = state.step
    with (
        TrainingProgress(Console(quiet=True), 100) as progress,
        MetricsLogger(run_dir, plan, state.step) as logger,
    ):
        callbacks = Callbacks(recipe, run_dir.path, model=engine.model)
        step = stop_step or recipe.train.steps
        fit(Run(recipe, engine, data, saver, state, step, progress, stop, logger, callbacks=callbacks))
    return metrics(run_dir.path), state, saver


def test_hooks_are_called_in_order_with_what_is_logged(folder):
    train(folder, recipe_of(folder, {"object": "Recorder"}, **{"checkpoint.every_steps": 4, "train.max_steps": 4}))
    first, evaluated = ["data_wait_s"], ["bits_per_byte"]
    assert [
        *(("begin", 0, []), ("step", 1, []), ("step", 2, first), ("step", 3, []), ("step", 4, first)),
        *(("evaluate", 4, evaluated), ("save", 4, []), ("end", 4, [])),
    ] == sys.modules[SUBJECT].CALLS


def test_metrics_are_in_the_line_of_their_step_or_evaluation(folder):
    lines, _, saver = train(folder, recipe_of(folder, {"object": "Every", "options": {"steps": 3}}))
    steps = {line["step"]: line for line in lines if "loss" in line}
    assert {step: line["calls"] for step, line in steps.items()} == {2: 2, 4: 4, 6: 6, 8: 8}
    assert all(line["callbacks_s"] >= 0 for line in steps.values())
    evaluations = {line["step"]: line["score"] for line in lines if "eval_loss" in line}
    assert evaluations == {3: 97, 4: 96, 6: 94, 8: 92}
    assert [state["step"] for state in saver.states] == [3, 6, 8]
    assert saver.states[0]["callbacks"] == {
        "states": {f"{SUBJECT}:Every": {"calls": 3}},
        "metrics": {"calls": 3.0},
        "errors": 0,
    }
    assert saver.states[0]["eval_metrics"]["score"] == 97


def test_a_continued_run_repeats_the_rest(folder):
    recipe = recipe_of(folder, {"object": "Every", "options": {"steps": 3}})
    whole, _, _ = train(folder, recipe)
    _, state, _ = train(folder, recipe, stop_step=5)
    (folder / STATE_FILE).write_text(state.text())
    parts, _, _ = train(folder, recipe, state=read_state(folder))
    assert _numbers(parts) == _numbers(whole)


def _numbers(lines: list[dict]) -> list[tuple]:
    return [tuple(line.get(name) for name in ("step", "loss", "eval_loss", "calls", "score")) for line in lines]


def test_training_draws_the_same_random_numbers_as_without_callbacks(folder):
    drawn = []
    for callbacks in ([], [{"object": "Every", "options": {"steps": 3}}]):
        engine = Engine()
        train(folder, recipe_of(folder, *callbacks), engine)
        drawn.append(engine.drawn)
    assert drawn[0] == drawn[1]


def test_a_run_that_a_callback_ends_logs_evaluates_and_saves_its_last_step(folder):
    recipe = recipe_of(folder, {"object": "Every", "options": {"steps": 100, "stop": 5}})
    lines, state, saver = train(folder, recipe)
    assert (state.step, state.ended) == (5, "enough")
    assert [line["step"] for line in lines] == [2, 4, 4, 5, 5]
    assert [saved["ended"] for saved in saver.states] == ["enough"]
    recipe = recipe_of(folder, {"object": "Recorder"})
    train(folder, recipe, state=state, saver=saver)
    assert (state.step, len(saver.states), sys.modules[SUBJECT].CALLS) == (5, 1, [])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"value": {"a": 1}}, "it returns {'a': 1}, which is neither None nor a llmtrain.CallbackResult"),
        ({"metrics": {"a b": 1}}, "a metric is named 'a b'"),
        ({"metrics": {"loss": 1}}, "the run itself logs loss"),
        ({"metrics": {"a": "x"}}, "its metric a is 'x', which is not a number"),
        ({"metrics": {"a": True}}, "its metric a is True"),
        ({"stop": True}, "its stop is True, which is not a text"),
        ({"hook": "on_evaluate", "evaluate": True}, "it asks for evaluate, which on_evaluate cannot"),
        ({"hook": "on_save", "save": True}, "it asks for save, which on_save cannot; it may set nothing"),
    ],
)
def test_results_that_a_hook_may_not_return_are_refused(folder, options, message):
    with pytest.raises(OwnCodeError) as error:
        train(folder, recipe_of(folder, {"object": "Returns", "options": options}))
    (problem,) = error.value.problems
    assert problem.field == "callbacks.0"
    assert message in problem.message


def test_an_evaluation_without_data_is_refused(folder):
    callback = {"object": "Returns", "options": {"evaluate": True}}
    with pytest.raises(OwnCodeError, match=r"evaluation.every_steps is 0"):
        train(folder, recipe_of(folder, callback, **{"evaluation.every_steps": 0}))


def test_numbers_of_torch_and_infinities_are_logged(folder):
    numbers = {"a": torch.tensor(2.5), "b": math.inf}
    recipe = recipe_of(folder)
    sys.path.insert(0, str(folder))
    callbacks = Callbacks(recipe.with_(callbacks=[f"{SUBJECT}:Returns"]), folder)
    callbacks._callbacks[0].value.value = sys.modules[SUBJECT].CallbackResult(metrics=numbers)
    assert callbacks.call("on_step_end", 1).metrics == {"a": 2.5, "b": None}


def test_an_error_names_the_users_line(folder):
    with pytest.raises(OwnCodeError) as error:
        train(folder, recipe_of(folder, {"object": "Fails"}))
    line = 1 + MODULE[: MODULE.index('{}["missing"]')].count("\n")
    assert error.value.exit_code == 5
    (problem,) = error.value.problems
    assert problem.message == (
        f"{folder}/{SUBJECT}.py, line {line}: {SUBJECT}:Fails fails in on_step_end after step 3: KeyError: 'missing'"
    )


@pytest.mark.parametrize(("how", "step"), [("in place", 3), ("data", 4)])
def test_a_hook_that_changes_weights_is_detected(folder, how, step):
    """Whatever its errors do. A module of a user's own may be in a variable of the user's code."""
    one = {"object": "ChangesWeights", "options": {"how": how, "step": step}, "on_error": "count"}
    recipe = recipe_of(folder, one)
    engine = Engine()
    sys.path.insert(0, str(folder))
    engine.model = torch.nn.Module()
    engine.model.weight = importlib.import_module(SUBJECT).WEIGHT
    with pytest.raises(OwnCodeError) as error:
        train(folder, recipe, engine)
    (problem,) = error.value.problems
    line = 1 + MODULE[: MODULE.index("    def on_step_end", MODULE.index("class ChangesWeights"))].count("\n")
    assert problem.message.startswith(
        f"{folder}/{SUBJECT}.py, line {line}: {SUBJECT}:ChangesWeights changes weights in on_step_end after step {step}"
    )
    assert engine.step == step


def test_errors_can_be_counted(folder, capsys):
    lines, state, _ = train(folder, recipe_of(folder, {"object": "Fails", "on_error": "count"}))
    assert state.step == 8
    assert [line["callback_errors"] for line in lines if "loss" in line] == [0, 1, 1, 1]
    assert "fails in on_step_end after step 3" in capsys.readouterr().out


def test_a_state_that_is_not_json_is_refused(folder):
    with pytest.raises(OwnCodeError, match="state_dict, which must return JSON data"):
        train(folder, recipe_of(folder, {"object": "NotJson"}))


def test_several_callbacks_of_a_class_keep_their_own_state(folder):
    options = ({"steps": 3}, {"steps": 50})
    recipe = recipe_of(folder, *({"object": "Every", "options": one} for one in options))
    assert names_of(recipe.callbacks) == [f"{SUBJECT}:Every", f"{SUBJECT}:Every 2"]
    _, _, saver = train(folder, recipe)
    assert set(saver.states[0]["callbacks"]["states"]) == set(names_of(recipe.callbacks))


def _asked(rank: int, folder: str, callbacks: list[dict]) -> list:
    """What the ranks learn after each of six steps; the last entry is an error, if there is one."""
    recipe, found = recipe_of(Path(folder), *callbacks), []
    try:
        called = Callbacks(recipe, Path(folder))
        for step in range(1, 7):
            asked = called.call("on_step_end", step)
            found.append((asked.save, asked.evaluate, asked.stop, dict(asked.metrics)))
        found.append(called.state(6))
    except OwnCodeError as error:
        found.append(error.problems[0].message)
    return found


def test_all_ranks_act_on_what_one_of_them_asks(folder):
    """Of callbacks on all ranks, that of rank 1 asks; of a callback on rank 0 alone, that one."""
    everywhere = {"object": "Every", "options": {"steps": 3, "stop": 5, "rank": 1}, "ranks": "all"}
    alone = {"object": "Every", "options": {"steps": 4}}
    first, second = run_ranks(2, _asked, str(folder), [everywhere, alone])
    due, none = (True, True), (False, False)
    expected = [(*none, ""), (*none, ""), (*due, ""), (*due, ""), (*none, "enough"), (*due, "")]
    for found in (first, second):
        assert [tuple(one[:3]) for one in found[:6]] == expected
    assert [one[3] for one in first[:6]] == [{"calls": step} for step in range(1, 7)]
    assert (
        first[6]
        == second[6]
        == CallbacksState({f"{SUBJECT}:Every": {"calls": 6}, f"{SUBJECT}:Every 2": {"calls": 6}}, {}, 0)
    )


def _seen(rank: int, folder: str) -> list[str]:
    """What rank 1 is told of a step that rank 0 does not log, and of one that it logs."""
    called = Callbacks(recipe_of(Path(folder), {"object": "Sees", "ranks": "all"}), Path(folder))
    record = {"loss": 1.0} if rank == 0 else None
    return [called.call("on_step_end", 1).stop, called.call("on_step_end", 2, record, is_logged=True).stop]


def test_callbacks_on_all_ranks_see_what_rank_0_logs(folder):
    assert run_ranks(2, _seen, str(folder)) == [["", "loss"], ["", "loss"]]


def test_a_callback_cannot_replace_a_metric_of_the_run(folder):
    """Not even in a step that is not logged, whose metrics are in the next line."""
    callback = {"object": "Unlogged"}
    lines, _, _ = train(folder, recipe_of(folder, callback, **{"logging.every_steps": 4}))
    assert [line["loss"] for line in lines if "loss" in line] == [1.0, 1.0]


@pytest.mark.parametrize("on_error", ["stop", "count"])
def test_an_error_of_one_rank_reaches_all(folder, on_error):
    callback = {"object": "Fails", "options": {"rank": 1}, "ranks": "all", "on_error": on_error}
    first, second = run_ranks(2, _asked, str(folder), [callback])
    assert first == second
    if on_error == "stop":
        assert len(first) == 3
        assert "fails in on_step_end after step 3: KeyError" in first[2]
    else:
        assert first[6].errors == 1


STOPPING = {"evaluation.every_steps": 2, "train.max_steps": 40}


@pytest.mark.parametrize(
    ("best", "options", "steps", "reason"),
    [
        (6, {"patience": 3}, 12, "eval_loss did not improve in 3 evaluations; the best one is 10"),
        (6, {"patience": 2, "mode": "max", "metric": "perplexity"}, 6, "the best one is "),
        (40, {"patience": 3}, 40, ""),
        (40, {"patience": 3, "min_improvement": 6.0}, 8, "the best one is 48"),
        (40, {"patience": 3, "min_improvement": 5.9}, 40, ""),
    ],
)
def test_a_run_whose_evaluations_do_not_improve_ends(folder, best, options, steps, reason):
    recipe = recipe_of(folder, **{**STOPPING, "train.early_stopping": options})
    _, state, saver = train(folder, recipe, Engine(best))
    assert state.step == steps
    assert reason in state.ended
    assert bool(state.ended) == bool(reason)
    assert saver.states[-1]["ended"] == state.ended


def test_a_continued_run_keeps_the_count_of_evaluations_without_improvement(folder):
    recipe = recipe_of(folder, **{**STOPPING, "train.early_stopping": {"patience": 3}})
    _, state, _ = train(folder, recipe, Engine(6), stop_step=10)
    assert (state.best, state.without_improvement, state.ended) == (10.0, 2, "")
    _, state, _ = train(folder, recipe, Engine(6), state=state)
    assert state.step == 12


def test_a_metric_of_a_callback_can_end_a_run(folder):
    callback = {"object": "Every", "options": {"steps": 100}}
    stopping = {"metric": "score", "mode": "max", "patience": 2}
    _, state, _ = train(folder, recipe_of(folder, callback, **{**STOPPING, "train.early_stopping": stopping}))
    assert (state.step, state.best) == (6, 98.0)


def test_a_metric_that_no_callback_adds_is_reported_after_the_first_evaluation(folder):
    callback = {"object": "Every", "options": {"steps": 100}}
    recipe = recipe_of(folder, callback, **STOPPING).with_(
        **{"train.early_stopping": {"patience": 2, "metric": "scor"}}
    )
    with pytest.raises(RecipeError, match="after step 2 has no metric scor; did you mean 'score'"):
        train(folder, recipe)


def _example(name: str) -> str:
    """The code of a class in the guide."""
    page = (Path(__file__).parents[2] / "docs/guides/callbacks.md").read_text(encoding="utf-8")
    (found,) = [code for code in re.findall(r"```python\n(.*?)```", page, re.DOTALL) if f"class {name}(" in code]
    return found


def test_the_example_of_the_guide_runs(folder):
    (folder / f"{SUBJECT}.py").write_text(_example("Milestones"))
    callback = {"object": "Milestones", "options": {"steps": [1, 3], "target": 12.5}}
    lines, state, saver = train(folder, recipe_of(folder, callback), Engine(5))
    assert [saved["step"] for saved in saver.states] == [1, 3]
    assert saver.states[1]["callbacks"]["states"] == {f"{SUBJECT}:Milestones": {"reached": 2}}
    assert (state.step, state.ended) == (3, "eval_loss is 12.00")
    assert [line["distance"] for line in lines if "eval_loss" in line] == [1.5, -0.5]


def _train_command(small_recipe, folder: Path, *callbacks: dict, run_dir: Path | None = None, more: tuple = ()):
    own = [{**one, "object": f"{SUBJECT}:{one['object']}"} for one in callbacks]
    fields = ("--set", f"callbacks={json.dumps(own)}", "--set", f"code_dir={folder}", "--nproc", "2")
    return llmtrain("train", small_recipe, "--run-dir", run_dir or folder / "run", *fields, *more)


@pytest.mark.slow
def test_an_error_in_a_callback_ends_the_run_on_all_ranks(small_recipe, folder):
    result = _train_command(small_recipe, folder, {"object": "Fails", "options": {"rank": 1}, "ranks": "all"})
    assert result.returncode == 5
    assert f"{folder}/{SUBJECT}.py, line " in result.stderr
    assert "fails in on_step_end after step 3: KeyError: 'missing' [code.raises]" in result.stderr
    assert "Traceback" not in result.stderr
    found = [json.loads((folder / f"run/logs/rank_{rank}.error.json").read_text()) for rank in (0, 1)]
    assert {one["type"] for one in found} == {"OwnCodeError"}


@pytest.mark.slow
def test_a_continued_run_changes_gradients_as_an_uninterrupted_one(small_recipe, folder):
    """With the example of the guide; before the run, a helper process imports it."""
    (folder / f"{SUBJECT}.py").write_text(_example("Noise"))
    noise = {"object": "Noise", "options": {"dropped_rows": 4}, "ranks": "all", "changes_gradients": True}
    for run_dir, more in ((folder / "whole", ()), (folder / "run", ("--max-steps", "5")), (folder / "run", ())):
        result = _train_command(small_recipe, folder, noise, run_dir=run_dir, more=more)
        assert result.returncode == 0, result.stderr
    assert losses(folder / "run") == losses(folder / "whole")


@pytest.mark.slow
def test_a_run_that_a_callback_ends_is_finished_until_the_recipe_changes(small_recipe, folder, tmp_path):
    """Continued without the callback, it is the run that never had one, bit for bit."""
    ending = {"object": "Every", "options": {"steps": 3, "stop": 5, "rank": 1}, "ranks": "all"}
    ended = _train_command(small_recipe, folder, ending)
    assert ended.returncode == 0, ended.stderr
    assert "ended after step 5: enough" in ended.stdout
    assert (folder / "run/export").is_dir()
    assert [(one["event"], one["step"], one["text"]) for one in events(folder / "run")][-1] == ("finished", 5, "enough")
    again = _train_command(small_recipe, folder, ending)
    assert "is finished: 5 steps (enough)" in again.stdout
    assert _train_command(small_recipe, folder).returncode == 0
    whole = llmtrain("train", small_recipe, "--run-dir", tmp_path / "whole", "--nproc", "2")
    assert whole.returncode == 0, whole.stderr
    asked = {3, 5}  # evaluations that the callback asked for, and the one at its end
    kept = [line for line in losses(folder / "run") if len(line) > 2 or line[0] not in asked]
    assert kept == losses(tmp_path / "whole")
