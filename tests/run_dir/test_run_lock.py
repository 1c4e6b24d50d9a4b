"""One run at a time in a run directory: with real processes on this host, and owners that claim to be on another."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from contextlib import suppress

import pytest

from llmtrain.errors import Exit, RecipeError
from llmtrain.run_dir import lock as run_lock
from llmtrain.run_dir.lock import Owner, RunLock

HOLD = """
import sys, time
from pathlib import Path
from llmtrain.run_dir import lock as run_lock
run_lock.BEAT_S = 0.05
lock = run_lock.RunLock.take(Path(sys.argv[1]), print)
print("held", flush=True)
sys.stdin.read()
lock.release()
"""
COMPETE = """
import sys, time
from pathlib import Path
from llmtrain.errors import RecipeError
from llmtrain.run_dir.lock import RunLock
folder = Path(sys.argv[1])
print("ready", flush=True)
sys.stdin.readline()
try:
    RunLock.take(folder, lambda line: None)
    print("held", flush=True)
except RecipeError:
    print("refused", flush=True)
sys.stdin.read()
"""


def _process(script, folder):
    return subprocess.Popen(
        [sys.executable, "-c", script, str(folder)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )


@pytest.fixture
def holder(tmp_path):
    """A process that holds the lock of `tmp_path / "run"`."""
    process = _process(HOLD, tmp_path / "run")
    assert process.stdout.readline() == "held\n"
    yield process
    process.kill()
    process.wait()


@pytest.fixture
def hasty(monkeypatch):
    """Owners elsewhere are gone sooner."""
    monkeypatch.setattr(run_lock, "STALE_S", 0.4)
    monkeypatch.setattr(run_lock, "LOOK_S", 0.02)


def _owner(folder):
    """The file of the owner."""
    (file,) = (folder / ".lock").iterdir()
    return file


def _move_elsewhere(folder):
    """Makes the owner one of another machine."""
    file = _owner(folder)
    # In place: its time must not change by a rename.
    file.write_text(json.dumps({**json.loads(file.read_text()), "machine": "other", "host": "node7"}))


def test_a_second_run_is_refused_and_the_owner_is_named(holder, tmp_path):
    with pytest.raises(
        RecipeError, match=rf"in use: process {holder.pid} on .* since 20.*\[run_dir.locked\]"
    ) as refused:
        RunLock.take(tmp_path / "run", pytest.fail)
    assert refused.value.exit_code == Exit.USAGE
    assert [entry.name for entry in (tmp_path / "run").iterdir()] == [".lock"]


def test_the_lock_is_free_after_its_release(holder, tmp_path):
    holder.communicate()
    assert not (tmp_path / "run").exists()  # nothing was written to it
    with RunLock.take(tmp_path / "run", pytest.fail):
        (tmp_path / "run" / "file").touch()
    assert [entry.name for entry in (tmp_path / "run").iterdir()] == ["file"]


def test_a_killed_owner_is_replaced_at_once_and_reported(holder, tmp_path):
    holder.kill()  # and not reaped
    os.waitid(os.P_PID, holder.pid, os.WEXITED | os.WNOWAIT)
    said = []
    with RunLock.take(tmp_path / "run", said.append):
        assert said[0].endswith(f"taking over from process {holder.pid} on {os.uname().nodename}, which has ended")


def test_a_stopped_owner_is_alive(holder, tmp_path):
    os.kill(holder.pid, signal.SIGSTOP)
    with pytest.raises(RecipeError, match="in use"):
        RunLock.take(tmp_path / "run", pytest.fail)


def test_a_reused_process_id_does_not_own_the_lock(holder, tmp_path):
    file = _owner(tmp_path / "run")
    file.write_text(json.dumps({**json.loads(file.read_text()), "start": 1}))
    said = []
    with RunLock.take(tmp_path / "run", said.append):
        assert "which has ended" in said[0]


def test_an_owner_on_another_host_that_touches_its_file_is_alive(holder, hasty, tmp_path):
    _move_elsewhere(tmp_path / "run")
    said = []
    with pytest.raises(RecipeError, match=rf"process {holder.pid} on node7"):
        RunLock.take(tmp_path / "run", said.append)
    assert "waiting" in said[0]


def test_an_owner_on_another_host_that_does_not_touch_its_file_is_dead(holder, hasty, tmp_path):
    _move_elsewhere(tmp_path / "run")
    os.kill(holder.pid, signal.SIGSTOP)
    said = []
    with RunLock.take(tmp_path / "run", said.append):
        assert "has not touched its lock for 0 s" in said[1]
        os.kill(holder.pid, signal.SIGCONT)
        # It finds that it was replaced, and ends before it can write much.
        assert holder.wait(timeout=30) == Exit.WORKER


def test_a_lock_released_on_another_host_is_acquired_without_waiting(holder, hasty, monkeypatch, tmp_path):
    monkeypatch.setattr(run_lock, "STALE_S", 600)
    _move_elsewhere(tmp_path / "run")
    os.kill(holder.pid, signal.SIGSTOP)
    file = _owner(tmp_path / "run")
    with RunLock.take(tmp_path / "run", lambda line: file.unlink()):
        assert _owner(tmp_path / "run") != file


@pytest.mark.parametrize("content", ["", "nonsense", "[" * 3000, '{"pid": -1}', "\0" * 5000])
def test_an_unreadable_owner_without_activity_is_dead(hasty, tmp_path, content):
    (tmp_path / ".lock").mkdir()
    (tmp_path / ".lock" / ("0" * 32)).write_text(content)
    said = []
    with RunLock.take(tmp_path, said.append):
        assert "another run" in said[1]


@pytest.mark.parametrize(
    ("name", "make"),
    [
        (".lock/notes.txt", lambda path: path.write_text("")),
        (".lock/" + "0" * 32, os.mkfifo),
        (".lock", os.mkfifo),
        (".lock", lambda path: path.write_text("")),
        (".lock", lambda path: path.symlink_to("nowhere")),
    ],
)
def test_a_folder_that_is_not_a_lock_is_named(hasty, tmp_path, name, make):
    (tmp_path / name).parent.mkdir(exist_ok=True)
    make(tmp_path / name)
    with pytest.raises(RecipeError, match=rf"{tmp_path / name}\b(?!-)"):
        RunLock.take(tmp_path, lambda line: None)
    assert [entry.name for entry in tmp_path.iterdir()] == [".lock"]


def test_a_folder_that_cannot_be_written_is_named(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(RecipeError, match=rf"cannot write {tmp_path}/file/run: Not a directory"):
        RunLock.take(tmp_path / "file" / "run", pytest.fail)


def test_one_of_several_simultaneous_processes_gets_the_lock(tmp_path):
    folder = tmp_path / "run"
    processes = [_process(COMPETE, folder) for _ in range(3)]
    for process in processes:
        assert process.stdout.readline() == "ready\n"
    for process in processes:
        process.stdin.write("\n")
        process.stdin.flush()
    answers = [process.stdout.readline() for process in processes]
    for process in processes:
        process.communicate()
    assert sorted(answers) == ["held\n", *["refused\n"] * 2]


def test_one_of_several_processes_takes_over_a_dead_lock(tmp_path):
    """In threads, many times, as the steps of a few lines meet in every order."""
    for round_ in range(40):
        folder = tmp_path / str(round_)
        (folder / ".lock").mkdir(parents=True)
        dead = Owner.here().model_copy(update={"start": 1})
        (folder / ".lock" / ("0" * 32)).write_text(dead.model_dump_json())
        held, start = [], threading.Barrier(4)

        def take(folder=folder, held=held, start=start):
            start.wait()
            with suppress(RecipeError):
                held.append(RunLock.take(folder, lambda line: None))

        threads = [threading.Thread(target=take) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(held) == 1
        held[0].release()


def test_the_owner_touches_its_file(monkeypatch, tmp_path):
    monkeypatch.setattr(run_lock, "BEAT_S", 0.01)
    with RunLock.take(tmp_path, pytest.fail):
        file = _owner(tmp_path)
        os.utime(file, ns=(0, 0))
        deadline = time.monotonic() + 30
        while file.stat().st_mtime_ns == 0 and time.monotonic() < deadline:
            time.sleep(0.01)
        assert file.stat().st_mtime_ns > 0
