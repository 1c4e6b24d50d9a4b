"""What a launcher shows of its workers: their own lines once, on terminals and in pipes, and no output of libraries."""

import os
import pty
import re
import select
import subprocess
import sys
import time

import pytest

from llmtrain.launch.failure import Failure

# Every way in which a library may talk.
NOISE = """
import ctypes, logging, os, subprocess, sys, warnings
import numpy
def chatter():
    print("noise from print")
    print("noise on stderr", file=sys.stderr)
    os.write(1, b"noise from a descriptor\\n")
    libc = ctypes.CDLL(None)
    libc.puts(b"noise from C")
    libc.fflush(None)
    warnings.warn("noise from warnings")
    logging.getLogger("library").warning("noise from logging")
    early.warning("noise from an early handler")
    subprocess.run([sys.executable, "-c", "print('noise from a child')"])
    print("noise that is no text \\udcff")
"""
WORKER = """
import logging, sys, time
from pathlib import Path
# A handler that was made before the take-over holds the old sys.stderr.
early = logging.getLogger("early")
early.addHandler(logging.StreamHandler())
from llmtrain.train.console import redirect_output
from llmtrain.errors import DataError, Problem
from llmtrain.launch import Rank
from llmtrain.train.metrics import TrainingProgress
from llmtrain.run_dir import RunDir
rank, launcher = int(sys.argv[2]), sys.argv[3]
output = redirect_output(RunDir(Path(sys.argv[1])), Rank(rank, rank, 2, 2, "127.0.0.1", 1, launcher))
"""
NOISES = ("print", "stderr", "a descriptor", "C", "warnings", "logging", "an early handler", "a child", "is no text")


def run(script, run_dir, body, rank=0, launcher="local"):
    path = script(WORKER + NOISE + body)
    command = [sys.executable, str(path), str(run_dir.path), str(rank), launcher]
    return subprocess.run(command, capture_output=True, text=True, timeout=60)


def on_terminal(script, run_dir, body, columns=120):
    """What a user sees: the worker runs on a pseudo terminal, which is read until the worker ends."""
    path = script(WORKER + NOISE + body)
    main, other = pty.openpty()
    import fcntl
    import struct
    import termios

    fcntl.ioctl(other, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
    command = [sys.executable, str(path), str(run_dir.path), "0", "local"]
    env = {**os.environ, "TERM": "xterm-256color"}
    process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=other, stderr=other, env=env)
    os.close(other)
    seen: list[tuple[float, str]] = []
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline and select.select([main], [], [], 60)[0]:
        try:
            data = os.read(main, 65536)
        except OSError:  # the last user of the terminal is gone
            break
        seen.append((time.monotonic(), data.decode()))
    os.close(main)
    assert process.wait() == 0, run_dir.log_file(0).read_text()
    return seen


def test_only_our_own_lines_reach_the_user(script, run_dir):
    done = run(script, run_dir, "chatter()\noutput.console.print('a line of ours')\nchatter()")
    assert (done.returncode, done.stdout, done.stderr) == (0, "a line of ours\n", "")
    log = run_dir.log_file(0).read_text()
    for noise in NOISES:
        assert len(re.findall(f"noise .*{noise}", log)) >= 2 or noise == "warnings", noise
    assert "noise from warnings" in log
    assert "a line of ours" not in log
    assert log.startswith("--- ")
    assert "rank 0 of 2" in log.splitlines()[0]


def test_the_other_ranks_are_silent(script, run_dir):
    done = run(script, run_dir, "chatter()\noutput.console.print('a line of ours')", rank=1)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    assert "noise from C" in run_dir.log_file(1).read_text()


@pytest.mark.parametrize("signalled_first", [True, False])
def test_a_signal_after_the_last_save_is_reported_to_the_user(script, run_dir, signalled_first):
    """While the run is exported: nothing is lost, but the exit code is that of a run that was stopped."""
    steps = ["raise_signal(SIGHUP)", "signals.exit_on_signal(60, output.stderr)"]
    body = """
from signal import SIGHUP, raise_signal
from llmtrain.train.signals import StopSignals
signals = StopSignals()
"""
    done = run(script, run_dir, body + "\n".join(steps if signalled_first else reversed(steps)))
    message = "stopped on SIGHUP after step 60; the same command continues the run\n"
    assert (done.returncode, done.stdout, done.stderr) == (75, "", message)


def test_a_second_attempt_appends(script, run_dir):
    run(script, run_dir, "print('first')")
    run(script, run_dir, "print('second')")
    log = run_dir.log_file(0).read_text()
    assert log.index("first") < log.index("second")
    assert log.count("--- ") == 2


def test_the_progress_line_lives_on_a_terminal(script, run_dir):
    body = """
with TrainingProgress(output.console, 40) as progress:
    for step in range(1, 41):
        time.sleep(0.05)
        chatter() if step % 20 == 0 else None
        progress.advance(step)
        if step % 5 == 0:
            progress.show({"step": step, "loss": 5 - step / 10, "grad_norm": 1.0, "lr": 1e-3, "tokens": step * 10,
                           "tokens_per_second": 12345.0, "mfu": None, "step_time_s": 0.05, "left_s": 1.0})
    with progress.busy("saving"):
        time.sleep(0.4)
"""
    seen = on_terminal(script, run_dir, body)
    text = "".join(part for _, part in seen)
    assert len(seen) > 5
    steps = [int(step) for step in re.findall(r"(\d+)/40", text)]
    assert len(set(steps)) > 3
    assert steps == sorted(steps)
    assert steps[-1] == 40
    assert "loss" in text
    assert "12.3k" in text
    assert "saving" in text
    assert "noise" not in text
    assert "\x1b[?25l" not in text, "a hidden cursor would stay hidden when the worker is killed"


def test_no_bar_is_drawn_under_mpirun(script, run_dir, monkeypatch):
    """Its ranks write to a pseudo terminal, whose lines are passed on."""
    monkeypatch.setenv("TTY_COMPATIBLE", "0")
    body = "with TrainingProgress(output.console, 40) as progress:\n    time.sleep(0.5)\noutput.console.print('a line')"
    seen = on_terminal(script, run_dir, body)
    assert "".join(part for _, part in seen) == "a line\r\n"


def test_the_width_is_that_of_the_terminal(script, run_dir):
    seen = on_terminal(
        script, run_dir, "output.console.print(output.console.width, style=None, highlight=False)", columns=77
    )
    assert "".join(part for _, part in seen).strip() == "77"


def test_a_spinner_does_not_pass_library_output_through(script, run_dir):
    """Nor does a logging handler that a library makes while it turns."""
    body = """
with output.console.status("starting"):
    chatter()
    late = logging.getLogger("late")
    late.addHandler(logging.StreamHandler(sys.stdout))
    time.sleep(0.3)
from rich.progress import Progress
with Progress(console=output.console) as bar:
    bar.add_task("preparing")
    chatter()
    late.warning("noise from a late handler")
    output.console.print("a line of ours")
"""
    text = "".join(part for _, part in on_terminal(script, run_dir, body))
    assert "starting" in text
    assert "a line of ours" in text
    assert "noise" not in text
    assert "noise from a late handler" in run_dir.log_file(0).read_text()


FAIL = "\ntry:\n    {}\nexcept Exception as error:\n    sys.exit(output.report_failure(error))"


def test_a_failure_is_reported_by_the_launcher(script, run_dir):
    done = run(script, run_dir, FAIL.format("1 / 0"))
    assert (done.returncode, done.stdout, done.stderr) == (5, "", "")
    failure = Failure.read(run_dir.error_file(0))
    assert failure is not None
    assert (failure.rank, failure.type, failure.message) == (0, "ZeroDivisionError", "division by zero")
    assert "worker_0.py" in failure.where
    assert "1 / 0" in failure.traceback
    assert "1 / 0" in run_dir.log_file(0).read_text()


def test_under_other_launchers_the_worker_reports_its_error(script, run_dir):
    done = run(script, run_dir, FAIL.format("1 / 0"), rank=1, launcher="torchrun")
    assert done.stderr.startswith("rank 1: ZeroDivisionError: division by zero")
    assert str(run_dir.log_file(1)) in done.stderr
    assert "Traceback" not in done.stderr


def test_a_message_of_all_ranks_is_printed_once(script, run_dir):
    """Rank 1 has taken over when rank 0 fails, and fails after it."""
    body = """
errors = [output.run_dir.error_file(0), Path(sys.argv[1], "rank_1_is_up")]
if rank == 1:
    errors.pop().touch()
while not errors[-1].exists():
    time.sleep(0.01)
"""
    body += FAIL.format("raise DataError(Problem('data.empty', 'data.sources', 'no text'))")
    path = script(WORKER + body)
    commands = [[sys.executable, str(path), str(run_dir.path), rank, "torchrun"] for rank in "01"]
    workers = [subprocess.Popen(command, stderr=subprocess.PIPE, text=True) for command in commands]
    messages = [worker.communicate(timeout=60)[1] for worker in workers]
    assert [worker.returncode for worker in workers] == [3, 3]
    assert messages[0].startswith("data.sources: no text [data.empty]\n")
    assert messages[1] == ""


def test_an_older_error_file_suppresses_no_error(script, run_dir):
    run(script, run_dir, FAIL.format("1 / 0"), rank=0, launcher="torchrun")
    done = run(script, run_dir, FAIL.format("1 / 0"), rank=1, launcher="torchrun")
    assert "division by zero" in done.stderr


def test_a_crash_in_native_code_leaves_a_trace(script, run_dir):
    done = run(script, run_dir, "def here():\n    ctypes.string_at(0)\nhere()")
    assert done.returncode == -11
    assert "Segmentation fault" in run_dir.log_file(0).read_text()
    assert "in here" in run_dir.log_file(0).read_text()


def test_an_interrupt_is_not_a_failure(script, run_dir):
    done = run(script, run_dir, FAIL.format("raise KeyboardInterrupt").replace("Exception", "KeyboardInterrupt"))
    assert (done.returncode, done.stderr) == (130, "")
    assert not run_dir.error_file(0).exists()
