"""The process of a rank, from outside: its state, its stack, its end. Nothing of it needs the rank's GIL."""

from __future__ import annotations

import ctypes
import faulthandler
import os
import re
import signal
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from llmtrain.errors import Exit
from llmtrain.launch.standstill import process_state

DUMP = signal.SIGRTMIN + 8
"""Has a rank write its stacks to its log. Nobody sends it but us: SIGUSR1 and 2 mean stop (`llmtrain.signals`)."""
END = signal.Signals(int(Exit.WORKER))
"""Ends a rank with exit code 5, which is its number: SIGTRAP."""
DUMP_S = 2.0
"""A rank that does not write its stacks so soon does not write them."""
END_S = 3.0
"""A rank that does not end so soon is killed."""
_POLL_S = 0.05
_tgkill: Callable[[int, int, int], int] | None = getattr(ctypes.CDLL(None), "tgkill", None)
"""Since glibc 2.30."""
_FRAME = re.compile(r'File "(.*)", line (\d+) in (.*)')


def prepare_end() -> None:
    """Prepares this process, whose log is its standard error, for `Target`.

    The kernel gives the number of a signal to its handler, so `_exit` itself, as the handler of signal 5, ends
    the process with code 5. No Python is run for that: a thread that holds the GIL for ever cannot prevent it.
    """
    faulthandler.register(DUMP, file=2, all_threads=True)
    libc = ctypes.CDLL(None)
    libc.signal.argtypes, libc.signal.restype = [ctypes.c_int, ctypes.c_void_p], ctypes.c_void_p
    libc.signal(END, ctypes.cast(libc._exit, ctypes.c_void_p))


class Target:
    """A rank that is watched by its child."""

    def __init__(self, pid: int, log: Path) -> None:
        self.pid = pid
        self.log = log

    @property
    def state(self) -> str:
        """Of the process, a letter as in `/proc/PID/stat`; empty once it is over."""
        return process_state(self.pid)

    def dump(self) -> str:
        """Has the stacks of all threads written to the log; where the main thread is, as `FILE:LINE in FUNCTION`."""
        start = self.log.stat().st_size
        if self.state in ("T", "t"):
            return ""
        self._send(DUMP)
        written = start
        deadline = time.monotonic() + DUMP_S
        while time.monotonic() < deadline:
            time.sleep(_POLL_S)
            size = self.log.stat().st_size
            if size > start and size == written:
                break
            written = size
        with self.log.open("rb") as file:
            file.seek(start)
            return innermost(file.read().decode(errors="replace"))

    def end(self) -> None:
        """Ends it with exit code 5. It is this process's parent, so this does not return."""
        if self.state in ("T", "t"):
            self._send(DUMP)  # both are waiting when it goes on, and its main thread writes its stacks first
        self._send(END)
        self._send(signal.SIGCONT)
        time.sleep(END_S)
        self._send(signal.SIGKILL)

    def _send(self, number: int) -> None:
        """To the main thread: of two that wait for any thread, one could take the end while another writes."""
        with suppress(ProcessLookupError):
            if _tgkill is None or number in (signal.SIGCONT, signal.SIGKILL):
                os.kill(self.pid, number)
            else:
                _tgkill(self.pid, self.pid, number)


def innermost(dump: str) -> str:
    """The innermost frame of the main thread, the last one in what faulthandler writes; empty where there is none."""
    threads = re.split(r"^(?:Current thread|Thread) 0x.*$", dump, flags=re.MULTILINE)
    frames = _FRAME.search(threads[-1]) if len(threads) > 1 else None
    return f"{frames[1]}:{frames[2]} in {frames[3]}" if frames else ""
