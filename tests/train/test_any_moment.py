"""Signals at random moments of a run, alone and in pairs: a documented exit code, a message, and no process left."""

import os
import random
import re
import signal
import subprocess
import sys
import threading
import time
import uuid
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import pytest

from llmtrain.system.stops import QUIT, STOP_SIGNALS, caught_signals

MARK = "LLMTRAIN_TEST_MARK"
"""Every process of a run inherits it."""
RUN = (
    *("--nproc", "2", "--set", "parallel.zero_stage=1", "--set", "train.max_steps=60"),
    *("--set", "checkpoint.every_steps=20", "--set", "evaluation.every_steps=30"),
)
SECONDS = 14.0
"""Most moments lie in the first seconds, in which all begins."""
END_S = 300.0
"""Seconds; a machine may be many times slower than ours."""


@dataclass(frozen=True)
class Strike:
    """One signal or two."""

    program: str
    after_s: float
    """After the handlers of signals are installed."""
    first: signal.Signals
    second: signal.Signals | None
    gap_s: float

    @classmethod
    def drawn(cls, draw: random.Random, programs: tuple[str, ...]) -> "Strike":
        second = draw.choice([None, *STOP_SIGNALS, QUIT, signal.SIGPIPE])
        after_s = SECONDS * draw.random() ** 2
        first = draw.choice([*STOP_SIGNALS, *STOP_SIGNALS, QUIT, signal.SIGPIPE])
        return cls(draw.choice(programs), after_s, first, second, draw.choice([0.0, 0.005, 0.02, 0.3, 2.0]))

    @property
    def promised(self) -> set[int]:
        """Exit codes; a run may have ended before it is struck, or between the two."""
        sent = self.stops
        impatient = QUIT in sent or sent.count(signal.SIGINT) == 2
        return {0} | ({75} if sent[:1] != [QUIT] else set()) | ({130} if impatient else set())

    @property
    def stops(self) -> list[signal.Signals]:
        """Those that end a run; SIGPIPE does not."""
        return [one for one in (self.first, self.second) if one not in (None, signal.SIGPIPE)]


def marked(mark: str) -> dict[int, str]:
    """What runs with a mark in its environment."""
    found = {}
    for folder in Path("/proc").iterdir():
        with suppress(OSError, ValueError):
            if f"{MARK}={mark}".encode() in (folder / "environ").read_bytes():
                found[int(folder.name)] = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode()
    return found


def listens(pid: int) -> bool:
    """Whether a process has a handler for SIGTERM."""
    with suppress(OSError):
        caught = re.search(r"^SigCgt:\s*(\w+)", Path(f"/proc/{pid}/status").read_text(), re.MULTILINE)
        return bool(int(caught[1], 16) >> (signal.SIGTERM - 1) & 1)
    return False


def command(program: str, recipe: Path, run_dir: Path) -> list[str]:
    train = {
        "module": [sys.executable, "-m", "llmtrain", "train", str(recipe)],
        "script": [sys.executable, str(recipe)],
        "torchrun": [sys.executable, "-m", "llmtrain", "train", str(recipe), "--launcher", "torchrun"],
    }
    return [*train[program], "--run-dir", str(run_dir), *RUN]


def struck(strike: Strike, recipe: Path, run_dir: Path) -> None:
    mark = uuid.uuid4().hex
    process = subprocess.Popen(
        command(strike.program, recipe, run_dir),
        env={**os.environ, MARK: mark},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    while not listens(process.pid):
        assert process.poll() is None
        time.sleep(0.001)
    time.sleep(strike.after_s)
    process.send_signal(strike.first)
    if strike.second is not None:
        time.sleep(strike.gap_s)
        process.send_signal(strike.second)
    if not strike.stops:
        time.sleep(1)
        process.terminate()
    try:
        output, _ = process.communicate(timeout=END_S)
    except subprocess.TimeoutExpired:
        left = marked(mark)
        for pid in left:
            os.kill(pid, signal.SIGKILL)
        pytest.fail(f"{strike} does not end: {left}\n{process.communicate()[0]}")
    assert process.returncode in strike.promised, f"{strike}\n{output}"
    assert "Traceback" not in output, f"{strike}\n{output}"
    if process.returncode == 75:
        assert re.search(r"stopped on SIG\w+ (after step|before the first step)", output), f"{strike}\n{output}"
    deadline = time.monotonic() + END_S
    while left := marked(mark):
        assert time.monotonic() < deadline, f"{strike} leaves {left}"
        time.sleep(0.05)


HEARD = {
    (signal.SIGINT, signal.SIGHUP): {signal.SIGINT, signal.SIGHUP},  # in whatever order, this is no impatience
    (signal.SIGUSR1, signal.SIGINT): {signal.SIGUSR1, signal.SIGINT},
    (QUIT, signal.SIGHUP): {QUIT},
    (signal.SIGINT, QUIT): {QUIT},
}
"""Signals that come together → those that may be heard first."""


@pytest.mark.parametrize("both", HEARD)
@pytest.mark.parametrize("wait", [False, True])
def test_the_order_of_signals_does_not_matter(both, wait):
    """wait: whether they arrive while this process is busy, so that their order is lost."""
    with caught_signals() as events:
        if wait:
            signal.pthread_sigmask(signal.SIG_BLOCK, both)
        for number in both:
            signal.pthread_kill(threading.get_ident(), number)  # another thread would be handed it at once
        signal.pthread_sigmask(signal.SIG_UNBLOCK, both)
        heard = [events.get_nowait() for _ in both]
    assert set(heard) == set(both)
    assert not wait or heard[0] in HEARD[both]


def test_a_second_interrupt_is_handled_as_a_quit():
    with caught_signals() as events:
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGINT):
            signal.raise_signal(number)
        assert [events.get_nowait() for _ in range(3)] == [signal.SIGINT, signal.SIGTERM, QUIT]


LOST = """
import os, signal, sys, time, weakref
from llmtrain.system.stops import Stopped, stop_by_exception
class Object:
    pass
def ended(_):
    signal.raise_signal(int(sys.argv[1]))
stop_by_exception()
thing = Object()
watched = weakref.ref(thing, ended)
del thing
try:
    time.sleep(60)
except Stopped as stop:
    print(stop.number)
"""
"""A signal arrives in a callback of the interpreter, which ignores exceptions."""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_stop_that_the_interpreter_ignores_is_raised_again(number):
    done = subprocess.run([sys.executable, "-c", LOST, str(int(number))], capture_output=True, text=True, timeout=50)
    assert (done.stdout, done.stderr, done.returncode) == (f"{int(number)}\n", "", 0)


WRAPPED = """
import os, signal, sys, typer
import llmtrain.cli
from llmtrain.cli import main
from llmtrain.errors import UserError
from llmtrain.system.stops import stop_by_exception
class Part:
    def __set_name__(self, owner, name):
        signal.raise_signal(signal.SIGTERM)
program = typer.Typer(pretty_exceptions_enable=False)
@program.command()
def train(kind: str):
    stop_by_exception()
    if kind == "class":
        type("Whole", (), {"part": Part()})
    try:
        Part().__set_name__(None, "")
    except BaseException:
        raise UserError("a file cannot be read") from None
llmtrain.cli.app = program
main(sys.argv[1:])
"""
"""A signal arrives where another error is raised in place of its own."""


@pytest.mark.parametrize("kind", ["class", "user's error"])
def test_a_stop_that_became_another_error_is_a_stop(kind):
    """Python 3.11 wraps what `__set_name__` raises, in a RuntimeError."""
    done = subprocess.run([sys.executable, "-c", WRAPPED, kind], capture_output=True, text=True, timeout=50)
    assert done.returncode == 75, done.stderr
    assert done.stderr == "stopped on SIGTERM before the first step; the same command starts the run again\n"


@pytest.mark.parametrize(
    "number", [pytest.param(0, marks=pytest.mark.slow), pytest.param(1, marks=pytest.mark.breadth)]
)
def test_a_run_survives_signals_at_any_moment(small_recipe, tmp_path, number):
    struck(Strike.drawn(random.Random(number), ("module", "script")), small_recipe, tmp_path / "run")


@pytest.mark.breadth
@pytest.mark.parametrize("number", range(2, 100))
def test_a_run_survives_signals_at_many_moments(small_recipe, tmp_path, number):
    struck(Strike.drawn(random.Random(number), ("module", "script", "torchrun")), small_recipe, tmp_path / "run")
