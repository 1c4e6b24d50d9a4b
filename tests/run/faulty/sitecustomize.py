"""On the path of a run's processes, breaks one of its ranks as FAULT says: `KIND:RANK:STEP[:FILE]`, with FILE once."""

from __future__ import annotations

import ctypes
import os
import signal
import time
from pathlib import Path


def _fail() -> None:
    raise RuntimeError("injected")


def _hold_the_gil() -> None:
    """In a call that no signal ends; unlike CDLL, PyDLL keeps the GIL."""
    libc, mutex = ctypes.PyDLL(None), ctypes.create_string_buffer(64)
    libc.pthread_mutex_lock(mutex)
    libc.pthread_mutex_lock(mutex)


FAULTS = {
    "stop": lambda: os.kill(os.getpid(), signal.SIGSTOP),
    "kill": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "segv": lambda: ctypes.string_at(0),
    "abort": os.abort,
    "exception": _fail,
    "gil": _hold_the_gil,
    "sleep": lambda: time.sleep(600),
}
SLOW_S = 0.2

if os.environ.get("FAULT") and os.environ.get("RANK"):
    from llmtrain.heartbeat import Heartbeat

    kind, rank, at, *once = os.environ["FAULT"].split(":")
    begin_step = Heartbeat.begin_step

    def _begin_step(self, step):
        begin_step(self, step)
        if os.environ["RANK"] != rank or step < int(at) or (once and Path(once[0]).exists()):
            return
        if kind == "slow":
            time.sleep(SLOW_S)
        elif step == int(at):
            if once:
                Path(once[0]).touch()
            FAULTS[kind]()

    Heartbeat.begin_step = _begin_step
