"""A worker's terminal: our own lines reach the user, everything else goes to the log of the rank."""

from __future__ import annotations

import faulthandler
import os
import socket
import sys
import time
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import TextIO

from rich.console import Console, ConsoleDimensions
from rich.live import Live

from llmtrain.durable import open_log
from llmtrain.errors import Exit
from llmtrain.launch.failure import Failure
from llmtrain.launch.rank import Rank
from llmtrain.run_dir import RunDir
from llmtrain.streams import lossy, open_closed

ERASE_LINE = "\r\x1b[2K"


@dataclass(frozen=True)
class WorkerOutput:
    """Where a worker speaks."""

    console: Console
    """The user's terminal on rank 0; silent on the others."""
    stderr: TextIO
    """The process's standard error as it was before the take-over."""
    run_dir: RunDir
    rank: Rank
    started: float
    """Time of the take-over, seconds since the epoch."""

    def warn(self, text: str) -> None:
        """Tells the user, and the log of the rank, of something that the run survives."""
        self.console.print(f"warning: {text}", highlight=False, markup=False, soft_wrap=True)
        print(f"warning: {text}", flush=True)

    def report_failure(self, error: BaseException) -> int:
        """Leaves `error` in the log and in the error file of the rank; returns the exit code of the worker.

        Our own launcher prints what the error file says. Under any other launcher the message goes
        to the original standard error, unless another rank has failed with the same one.
        """
        if isinstance(error, KeyboardInterrupt):
            return Exit.INTERRUPTED
        failure = Failure.of(self.rank.rank, error)
        print(failure.traceback, file=sys.stderr, flush=True)
        must_tell = self.rank.launcher != "local" and not self._told_by_another(failure)
        try:
            failure.write(self.run_dir.error_file(failure.rank))
        except OSError:  # the disk may be full, which may be what the error says
            must_tell = True
        if must_tell:
            message = failure.summary if failure.problems else f"rank {failure.rank}: {failure.summary}"
            told = f"{message}\n    see {self.run_dir.log_file(failure.rank)}"
            # Rank 0 may show a spinner on this line.
            print(f"{ERASE_LINE}{told}" if self.stderr.isatty() else told, file=self.stderr, flush=True)
        return failure.exit_code

    def _told_by_another(self, failure: Failure) -> bool:
        others = (Failure.read(path) for path in self.run_dir.logs.glob("rank_*.error.json"))
        return any(other and other.time >= self.started and other.message == failure.message for other in others)


def take_over_output(run_dir: RunDir, rank: Rank) -> WorkerOutput:
    """Sends file descriptors 1 and 2 of this process to the log of its rank and keeps the terminal for us.

    To be called before torch and the other libraries are imported, so that whatever they print,
    warn or log, from Python or from C++, ends in `logs/rank_N.log` under every launcher.
    """
    run_dir.logs.mkdir(parents=True, exist_ok=True)
    run_dir.error_file(rank.rank).unlink(missing_ok=True)
    open_closed()
    sys.stdout.flush()
    sys.stderr.flush()
    stdout, stderr = lossy(os.dup(1)), lossy(os.dup(2))
    _redirect(run_dir.log_file(rank.rank))
    faulthandler.enable(file=2)
    now = f"{datetime.now().astimezone():%Y-%m-%d %H:%M:%S %z}"
    print(f"--- {now}: rank {rank.rank} of {rank.world_size}, process {os.getpid()} on {socket.gethostname()}")
    console = _Terminal(file=stdout) if rank.is_main else Console(quiet=True)
    return WorkerOutput(console, stderr, run_dir, rank, time.time())


def _redirect(log: Path) -> None:
    descriptor = open_log(log)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    os.close(descriptor)
    # The disk that the log is on may be full for a while.
    sys.stdout, sys.stderr = (lossy(number, owned=False, encoding="utf-8") for number in (1, 2))


class _Terminal(Console):
    """A console on the saved standard output."""

    @property  # type: ignore[misc]  # in rich it can be assigned to, which nobody does
    def size(self) -> ConsoleDimensions:
        """Columns and rows of our terminal; rich would ask the standard streams, which are a log now."""
        try:
            columns, rows = os.get_terminal_size(self.file.fileno())
        except OSError:
            return super().size
        return ConsoleDimensions(columns or 80, rows or 25)

    def set_live(self, live: Live) -> bool:
        """Shows a bar or a spinner, which else would send sys.stdout and sys.stderr here while it turns.

        What libraries print meanwhile belongs in the log, and a logging handler that is made meanwhile
        would keep the terminal for good.
        """
        live._redirect_stdout = live._redirect_stderr = False
        return super().set_live(live)

    def show_cursor(self, show: bool = True) -> bool:
        """Never hides it: a worker that is killed could not show it again."""
        return False
