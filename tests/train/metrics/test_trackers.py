"""TensorBoard, Weights & Biases and MLflow show the numbers of a run, and continue with it."""

import json
import os
import subprocess
import sys
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest

from llmtrain.errors import RecipeError
from llmtrain.train.metrics.trackers import Trackers, check_trackers

REPOSITORY = Path(__file__).parents[3]


def with_trackers(plan, *names):
    return plan.recipe.with_(**{"logging.trackers": list(names)})


@pytest.fixture(scope="module")
def event_accumulator():
    from tensorboard.backend.event_processing import event_accumulator

    return event_accumulator


def scalars(event_accumulator, run_dir, tag):
    reader = event_accumulator.EventAccumulator(str(run_dir.tensorboard)).Reload()
    return [(event.step, event.value) for event in reader.Scalars(tag)]


def test_tensorboard_is_installed(plan):
    check_trackers(with_trackers(plan, "tensorboard"))


def test_a_missing_package_is_named(plan, monkeypatch, tmp_path):
    """A folder of that name, which the tracker itself leaves behind, is not the package."""
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    for name in ("tensorboard", "wandb", "mlflow"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    (tmp_path / "wandb").mkdir()
    with pytest.raises(RecipeError) as error:
        check_trackers(with_trackers(plan, "tensorboard", "wandb", "mlflow"))
    fixes = [problem.fix for problem in error.value.problems]
    assert fixes == ["pip install 'tensorboard'", "pip install 'llmtrain[wandb]'", "pip install 'llmtrain[mlflow]'"]
    assert {problem.field for problem in error.value.problems} == {"logging.trackers"}


def test_the_check_imports_no_tracker():
    program = """
import sys
from llmtrain.train.metrics import check_trackers
print([name for name in ("torch", "accelerate", "tensorboard", "wandb", "mlflow") if name in sys.modules])
"""
    env = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
    done = subprocess.run([sys.executable, "-c", program], env=env, capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


def test_tensorboard_shows_the_numbers_and_the_recipe(plan, run_dir, event_accumulator):
    trackers = Trackers(run_dir, with_trackers(plan, "tensorboard"), 0)
    trackers.log({"train/loss": 2.5, "train/mfu": None}, step=10)
    trackers.log({"train/loss": 2.0, "train/mfu": None}, step=20)
    trackers.close()
    assert scalars(event_accumulator, run_dir, "train/loss") == [(10, 2.5), (20, 2.0)]
    reader = event_accumulator.EventAccumulator(str(run_dir.tensorboard)).Reload()
    assert reader.Tags()["scalars"] == ["train/loss"]
    text = reader.Tensors("recipe/text_summary")[0].tensor_proto.string_val[0].decode()
    assert '"name": "small"' in text


def test_texts_are_logged_verbatim_but_not_to_mlflow(plan, run_dir, event_accumulator, monkeypatch):
    trackers = Trackers(run_dir, with_trackers(plan, "tensorboard"), 0)
    others = {name: SimpleNamespace(name=name, logged=[], finish=lambda: None) for name in ("wandb", "mlflow")}
    for tracker in others.values():
        tracker.log = lambda values, step, logged=tracker.logged: logged.append((values, step))
    monkeypatch.setattr(trackers, "_trackers", trackers._trackers | others)
    trackers.log_text("samples/0", "a\n\n# b", step=3)
    trackers.close()
    assert others["wandb"].logged == [({"samples/0": "a\n\n# b"}, 3)]
    assert others["mlflow"].logged == []
    reader = event_accumulator.EventAccumulator(str(run_dir.tensorboard)).Reload()
    assert reader.Tensors("samples/0/text_summary")[0].tensor_proto.string_val[0] == b"    a\n    \n    # b"


def test_tensorboard_drops_the_steps_of_a_lost_attempt(plan, run_dir, event_accumulator):
    recipe = with_trackers(plan, "tensorboard")
    for start, steps in ((0, (10, 20, 30)), (20, (30, 40))):
        trackers = Trackers(run_dir, recipe, start)
        for step in steps:
            trackers.log({"train/loss": float(step + start)}, step=step)
        trackers.close()
    assert scalars(event_accumulator, run_dir, "train/loss") == [(10, 10.0), (20, 20.0), (30, 50.0), (40, 60.0)]


def test_trackers_need_no_process_group_and_no_state_of_accelerate(plan, run_dir):
    """Under a launcher's variables, accelerate would join or make a process group of its own."""
    program = f"""
from pathlib import Path
import torch
from accelerate.state import PartialState
from llmtrain.train.metrics.trackers import Trackers
from llmtrain.recipe import Recipe
from llmtrain.run_dir import RunDir
recipe = Recipe.model_validate_json({with_trackers(plan, "tensorboard").model_dump_json()!r})
threads = torch.get_num_threads()
trackers = Trackers(RunDir(Path({str(run_dir.path)!r})), recipe, 0)
trackers.log({{"train/loss": 1.0}}, step=1)
trackers.close()
assert not torch.distributed.is_initialized()
assert PartialState._shared_state == {{}}
assert torch.get_num_threads() == threads
"""
    group = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
    env = {**os.environ, **group, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1", "ACCELERATE_USE_CPU": "true"}
    env |= {"PYTHONPATH": str(REPOSITORY)}
    done = subprocess.run([sys.executable, "-c", program], env=env, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr


OWN = """
class Lines:
    def __init__(self, run_dir, recipe, start_step):
        self.file = run_dir / "own.csv"
        self.name, self.start_step = recipe.name, start_step

    def log(self, values, step):
        if step > 30:
            raise OSError("no room")
        with self.file.open("a") as file:
            file.writelines(f"{step},{name},{value}\\n" for name, value in values.items())


class Complete(Lines):
    def start(self):
        self.file.write_text("started\\n")

    def store_init_configuration(self, fields):
        with self.file.open("a") as file:
            file.write(f"seed {fields['train.seed']}\\n")

    def finish(self):
        with self.file.open("a") as file:
            file.write("finished\\n")


class CannotStart(Lines):
    def start(self):
        raise PermissionError("no account")
"""


@pytest.fixture
def own_tracker(plan, tmp_path, monkeypatch):
    """Returns the recipe with a tracker of a module of its own."""
    monkeypatch.setattr(sys, "path", [*sys.path])
    (tmp_path / "trackers_of_tests.py").write_text(OWN)
    yield lambda name: with_trackers(plan, f"trackers_of_tests:{name}").with_(code_dir=str(tmp_path))
    sys.modules.pop("trackers_of_tests", None)


@pytest.mark.parametrize(
    ("name", "lines"),
    [("Lines", "10,loss,2.5\n"), ("Complete", "started\nseed 1\n10,loss,2.5\nfinished\n")],
)
def test_a_tracker_of_ones_own_needs_only_a_method_for_values(own_tracker, run_dir, name, lines):
    trackers = Trackers(run_dir, own_tracker(name), 0)
    trackers.log({"loss": 2.5, "mfu": None}, step=10)
    trackers.log_text("samples/0", "text", step=10)
    trackers.close()
    assert (run_dir.path / "own.csv").read_text() == lines


def test_an_own_tracker_that_cannot_start_is_reported_with_its_line(own_tracker, run_dir, tmp_path):
    with pytest.raises(RecipeError) as error:
        Trackers(run_dir, own_tracker("CannotStart"), 0)
    (problem,) = error.value.problems
    assert problem.field == "logging.trackers"
    assert problem.message.startswith(f"{tmp_path}/trackers_of_tests.py, line ")
    assert "trackers_of_tests:CannotStart cannot start: PermissionError: no account" in problem.message


def test_an_own_tracker_that_fails_is_disabled(own_tracker, run_dir, tmp_path, capsys):
    trackers = Trackers(run_dir, own_tracker("Lines"), 0)
    for step in (10, 40, 20):
        trackers.log({"loss": 2.5}, step=step)
    trackers.close()
    assert (run_dir.path / "own.csv").read_text() == "10,loss,2.5\n"
    message = capsys.readouterr().err
    assert message.startswith(f"{tmp_path}/trackers_of_tests.py, line ")
    assert "tracker trackers_of_tests:Lines failed at step 40, and is disabled from now on" in message


def test_the_package_of_an_own_tracker_is_not_asked_for(plan):
    check_trackers(with_trackers(plan, "mine:Tracker"))


def test_wandb_continues_its_run_after_a_resume(plan, run_dir, monkeypatch):
    pytest.importorskip("wandb", reason="needs wandb: pip install -e '.[wandb]'")
    monkeypatch.setenv("WANDB_MODE", "offline")
    recipe = with_trackers(plan, "wandb")
    identities = []
    for start in (0, 20):
        trackers = Trackers(run_dir, recipe, start)
        trackers.log({"train/loss": 2.0, "train/mfu": None}, step=start + 10)
        trackers.close()
        identities.append(json.loads(run_dir.trackers_file.read_text())["wandb"])
    assert identities[0] == identities[1]
    runs = [run.name for run in (run_dir.path / "wandb").glob("offline-run-*")]
    assert runs
    assert all(f"-{identities[0]}" in run for run in runs)


def test_mlflow_continues_its_run_after_a_resume(plan, run_dir, monkeypatch, tmp_path):
    mlflow = pytest.importorskip("mlflow", reason="needs mlflow: pip install -e '.[mlflow]'")
    mlflow.set_tracking_uri(f"sqlite:///{tmp_path}/mlflow.db")
    recipe = with_trackers(plan, "mlflow").with_(**{"export.sample_prompt": "long " * 2000})
    for start in (0, 20):
        trackers = Trackers(run_dir, recipe, start)
        trackers.log({"train/loss": 2.0 - start, "train/mfu": None}, step=start + 10)
        trackers.close()
    run = mlflow.get_run(json.loads(run_dir.trackers_file.read_text())["mlflow"])
    history = mlflow.MlflowClient().get_metric_history(run.info.run_id, "train/loss")
    assert [(metric.step, metric.value) for metric in history] == [(10, 2.0), (30, -18.0)]
    assert run.data.params["optim.lr"] == "0.001"
    assert run.data.params["export.sample_prompt"].startswith("long long")


def test_training_neither_waits_for_a_tracker_nor_fails_with_it(plan, run_dir, monkeypatch, capfd):
    asked, go_on = threading.Event(), threading.Event()

    def log(self, values, step):
        if step == 1:
            asked.set()
            assert go_on.wait(30)
        elif step == 2:
            raise ConnectionError("no server")
        seen.append(step)

    seen = []
    trackers = Trackers(run_dir, with_trackers(plan, "tensorboard"), start_step=1)
    monkeypatch.setattr("accelerate.tracking.TensorBoardTracker.log", log)
    trackers.log({"loss": 1.0}, 1)
    assert asked.wait(30)  # it is at work, and this thread is here
    trackers.log({"loss": 1.0}, 2)
    trackers.log({"loss": 1.0}, 3)
    assert seen == []
    go_on.set()
    trackers.close()
    assert seen == [1]
    assert "tracker tensorboard failed at step 2" in capfd.readouterr().err
