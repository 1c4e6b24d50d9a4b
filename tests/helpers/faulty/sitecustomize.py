"""On the path of a run's processes, breaks ranks as FAULT says: `KIND:RANK:WHEN[:FILE]`, with FILE once.

WHEN is a step, or the name of a phase. Several of them have commas between them.
"""

from __future__ import annotations

import ctypes
import os
import signal
import time
from contextlib import contextmanager
from pathlib import Path


def _fail() -> None:
    raise RuntimeError("injected")


def _hold_the_gil() -> None:
    """Holds the GIL in a call that no signal ends; unlike CDLL, PyDLL keeps the GIL."""
    libc, mutex = ctypes.PyDLL(None), ctypes.create_string_buffer(64)
    libc.pthread_mutex_lock(mutex)
    libc.pthread_mutex_lock(mutex)


def _be_killed_later() -> None:
    """Kills this rank once the other ranks wait where the test expects them."""
    time.sleep(3)
    os.kill(os.getpid(), signal.SIGKILL)


def _stop_with_the_watcher() -> None:
    me = os.getpid()
    for child in Path(f"/proc/{me}/task/{me}/children").read_text().split():
        os.kill(int(child), signal.SIGSTOP)
    os.kill(me, signal.SIGSTOP)


FAULTS = {
    "stop": lambda: os.kill(os.getpid(), signal.SIGSTOP),
    "stop_both": _stop_with_the_watcher,
    "kill": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "late_kill": _be_killed_later,
    "segv": lambda: ctypes.string_at(0),
    "abort": os.abort,
    "exception": _fail,
    "gil": _hold_the_gil,
    "sleep": lambda: time.sleep(600),
    "pause": lambda: time.sleep(12),
}
SLOW_S = 0.2

if os.environ.get("FAULT"):
    from llmtrain.system.heartbeat import Heartbeat

    def _ours() -> list[list[str]]:
        """Faults of this rank, which a process that ranks are forked from does not know yet."""
        rank = os.environ.get("RANK", os.environ.get("SLURM_PROCID"))
        return [fault for one in os.environ["FAULT"].split(",") if (fault := one.split(":"))[1] == rank]

    begin_step, phase = Heartbeat.begin_step, Heartbeat.phase

    def _strike(now: str) -> None:
        for kind, _, when, *once in _ours():
            if kind == "slow" or when != now or (once and Path(once[0]).exists()):
                continue
            if once:
                Path(once[0]).touch()
            FAULTS[kind]()

    def _begin_step(self, step):
        begin_step(self, step)
        if any(kind == "slow" for kind, *_ in _ours()):
            time.sleep(SLOW_S)
        _strike(str(step))

    @contextmanager
    def _phase(self, entered):
        with phase(self, entered):
            _strike(str(entered))
            yield

    Heartbeat.begin_step, Heartbeat.phase = _begin_step, _phase
