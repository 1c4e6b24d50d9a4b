"""The conditions for restarting a job that died, and where it restarts."""

import io
import itertools
import os
import signal
import sys
import threading
import time

import pytest
from rich.console import Console

from llmtrain.errors import WorkerError
from llmtrain.run_dir import RunDir
from llmtrain.train import restart
from llmtrain.train.restart import Death, next_resume, pause_after, reason_to_give_up, train_with_restarts
from tests.helpers.commands import events

WORKER = """
import os, sys
from pathlib import Path
from llmtrain.system.heartbeat import Heartbeat
rank = int(os.environ["RANK"])
log = Path(sys.argv[1])
heartbeat = Heartbeat.of_worker(rank)
if rank == 0:
    log.open("a").write(sys.argv[3] + "\\n")
attempt = len(log.read_text().splitlines())
outcome = sys.argv[4:][0].split(",")[attempt - 1]
if outcome.startswith("@"):
    heartbeat.begin_step(int(outcome[1:]))
    os.kill(os.getpid(), 9)
sys.exit(int(outcome))
"""


@pytest.fixture
def folder(tmp_path):
    folder = RunDir(tmp_path / "run")
    folder.logs.mkdir(parents=True)
    return folder


@pytest.fixture
def quick(monkeypatch):
    monkeypatch.setattr(restart, "FIRST_PAUSE_S", 0.01)


def train(folder, outcomes, max_restarts, resume="auto"):
    """A job of one worker whose attempts die in a step (`@7`), or end with an exit code."""
    script = folder.path / "worker.py"
    script.write_text(WORKER.replace("sys.argv[4:][0]", repr(outcomes)))
    command = [sys.executable, str(script), str(folder.path / "attempts")]
    output = io.StringIO()
    try:
        arguments = {"resume": resume, "max_restarts": max_restarts, "console": Console(file=output)}
        return train_with_restarts(command, 1, folder, **arguments), output.getvalue()
    except WorkerError as error:
        return error, output.getvalue()


def attempts(folder):
    return (folder.path / "attempts").read_text().split()


def test_a_job_that_died_is_restarted_and_finishes(folder, quick):
    code, told = train(folder, "@7,@9,0", max_restarts=3)
    assert code == 0
    assert attempts(folder) == ["auto"] * 3
    assert "died in step 7, with no checkpoint; restart 1 of 3" in told
    assert "died in step 9, with no checkpoint; restart 2 of 3" in told
    assert [(one["event"], one["step"]) for one in events(folder.path)] == [("died", 7), ("died", 9)]


def test_a_job_that_dies_twice_in_one_step_is_not_restarted(folder, quick):
    error, _ = train(folder, "@7,@9,@9,0", max_restarts=9)
    assert "died twice in step 9, with no checkpoint" in str(error)
    assert "killed by signal 9" in str(error)
    assert error.exit_code == 5
    assert len(attempts(folder)) == 3


def test_restarts_are_counted(folder, quick):
    error, _ = train(folder, "@1,@2,@3,0", max_restarts=2)
    assert "after 2 restarts" in str(error)
    assert len(attempts(folder)) == 3


def test_without_the_option_nothing_is_restarted(folder):
    error, told = train(folder, "@1,0", max_restarts=0)
    assert "restart" not in str(error) + told
    assert len(attempts(folder)) == 1


@pytest.mark.parametrize("code", [0, 75])
def test_a_run_that_ended_by_its_own_exit_code_is_not_restarted(folder, code):
    assert train(folder, f"{code},0", max_restarts=3)[0] == code
    assert len(attempts(folder)) == 1


def test_a_signal_ends_the_pause(folder, monkeypatch):
    monkeypatch.setattr(restart, "FIRST_PAUSE_S", 60.0)

    def interrupt():
        while not list(folder.logs.parent.glob("attempts")) or not list(folder.logs.glob("told")):
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGINT)

    keep = folder.keep_failures
    monkeypatch.setattr(RunDir, "keep_failures", lambda self, attempt: (keep(attempt), (self.logs / "told").touch()))
    # Within the pause, before which the marker is made; an instant earlier it would end the test, as it should a job.
    waited = restart.wait_for_signal
    monkeypatch.setattr(restart, "wait_for_signal", lambda seconds: (thread.start(), waited(seconds))[1])
    thread = threading.Timer(0.2, interrupt)
    assert train(folder, "@1,0", max_restarts=3)[0] == 75
    assert len(attempts(folder)) == 1


def test_errors_of_earlier_attempts_are_kept(folder):
    folder.error_file(1).write_text("x")
    folder.keep_failures(2)
    assert [path.name for path in folder.logs.iterdir()] == ["attempt_2.rank_1.error.json"]


def test_pauses_between_restarts_grow():
    assert [pause_after([Death(7, None)] * restart) for restart in range(1, 9)] == [1, 2, 4, 8, 16, 32, 60, 60]
    assert pause_after([Death(7, None), Death(7, None), Death(9, "step_00000008")]) == 1


@pytest.mark.parametrize(
    ("resume", "death", "following"),
    [
        ("auto", Death(0, None), "auto"),
        ("never", Death(9, None), "never"),
        ("never", Death(9, "step_00000004"), "auto"),
        ("/other/step_00000004", Death(9, None), "/other/step_00000004"),  # else it would begin anew
        ("/other/step_00000004", Death(9, "step_00000008"), "auto"),
        ("checkpoints/step_00000004", Death(0, "step_00000008"), "checkpoints/step_00000004"),  # it never went back
        ("checkpoints/step_00000004", Death(5, "step_00000004"), "auto"),
    ],
)
def test_the_next_attempt_continues_from_the_newest_checkpoint(resume, death, following):
    assert next_resume(resume, death) == following


def test_a_later_checkpoint_is_progress():
    deaths = [Death(9, "step_00000004"), Death(9, "step_00000008")]
    assert reason_to_give_up(deaths, 5) is None
    assert "died twice" in (reason_to_give_up([*deaths, deaths[-1]], 5) or "")
    assert all(reason_to_give_up(deaths[:count], 0) for count in range(1, 3))
    assert list(itertools.accumulate(reason_to_give_up(deaths[:count], 2) is None for count in (1, 2))) == [1, 2]
