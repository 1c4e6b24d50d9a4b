"""The process of a rank, from outside: its state, its stack, its end. None of this needs the rank's GIL."""

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
from llmtrain.system.host import process_state

DUMP_SIGNAL = signal.SIGRTMIN + 8
"""Makes a rank write its stacks to its log. Only we send it: SIGUSR1 and SIGUSR2 mean stop (`train/signals.py`)."""
EXIT_SIGNAL = signal.Signals(int(Exit.WORKER))
"""Ends a rank with exit code 5, the number of this signal: SIGTRAP."""
DUMP_S = 2.0
"""Seconds within which a rank writes its stacks, if it can."""
END_S = 3.0
"""Seconds after which a rank that does not end is killed."""
_POLL_S = 0.05
_tgkill: Callable[[int, int, int], int] | None = getattr(ctypes.CDLL(None), "tgkill", None)
"""Available since glibc 2.30."""
_FRAME = re.compile(r'File "(.*)", line (\d+) in (.*)')


def install_signal_handlers() -> None:
    """Installs the handlers in this rank by which its watchdog dumps stacks and ends it.

    Stacks are written to standard error, which is the rank's log.
    The kernel passes the number of a signal to its handler, so `_exit` itself, as the handler of signal 5, ends the
    process with code 5. This runs no Python code, so a thread that holds the GIL forever cannot prevent it.
    """
    faulthandler.register(DUMP_SIGNAL, file=2, all_threads=True)
    libc = ctypes.CDLL(None)
    libc.signal.argtypes, libc.signal.restype = [ctypes.c_int, ctypes.c_void_p], ctypes.c_void_p
    libc.signal(EXIT_SIGNAL, ctypes.cast(libc._exit, ctypes.c_void_p))


class RankProcess:
    """A rank that is watched by its child."""

    def __init__(self, pid: int, log: Path) -> None:
        self.pid = pid
        self.log = log

    @property
    def state(self) -> str:
        """The state of the process as a letter of `/proc/PID/stat`; empty if it has ended."""
        return process_state(self.pid)

    def dump_stacks(self) -> str:
        """Makes the rank write the stacks of all threads to its log; returns the innermost frame of its main thread."""
        start = self.log.stat().st_size
        if self.state in ("T", "t"):
            return ""
        self._send(DUMP_SIGNAL)
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
            return innermost_frame(file.read().decode(errors="replace"))

    def end(self) -> None:
        """Ends the rank with exit code 5. It is this process's parent, so this does not return."""
        if self.state in ("T", "t"):
            self._send(DUMP_SIGNAL)  # both are pending when it continues, and its main thread writes its stacks first
        self._send(EXIT_SIGNAL)
        self._send(signal.SIGCONT)
        time.sleep(END_S)
        self._send(signal.SIGKILL)

    def _send(self, number: int) -> None:
        """Signals the main thread: otherwise one thread could handle the end while another one writes."""
        with suppress(ProcessLookupError):
            if _tgkill is None or number in (signal.SIGCONT, signal.SIGKILL):
                os.kill(self.pid, number)
            else:
                _tgkill(self.pid, self.pid, number)


def innermost_frame(dump: str) -> str:
    """Returns the innermost frame of the main thread, the last one in faulthandler's output, or an empty string."""
    threads = re.split(r"^(?:Current thread|Thread) 0x.*$", dump, flags=re.MULTILINE)
    frames = _FRAME.search(threads[-1]) if len(threads) > 1 else None
    return f"{frames[1]}:{frames[2]} in {frames[3]}" if frames else ""
