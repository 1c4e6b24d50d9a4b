"""A worker's terminal: our own lines reach the user, and all other output goes to the rank's log."""

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

from llmtrain.errors import Exit
from llmtrain.launch import Failure, Rank
from llmtrain.run_dir import RunDir
from llmtrain.system.durable import open_log
from llmtrain.system.streams import ERASE_LINE, is_terminal, lossy, open_closed_streams, print_as_is


@dataclass(frozen=True)
class WorkerOutput:
    """The outputs of a worker."""

    console: Console
    """The user's terminal on rank 0; silent on the others."""
    stderr: TextIO
    """The process's standard error before it was redirected."""
    run_dir: RunDir
    rank: Rank
    started: float
    """Time of the redirection, in seconds since the epoch."""

    def warn(self, text: str) -> None:
        """Prints a warning for the user and in the rank's log, about a problem that the run survives."""
        print_as_is(self.console, [f"warning: {text}"])
        print(f"warning: {text}", flush=True)

    def report_failure(self, error: BaseException) -> int:
        """Writes `error` to the rank's log and error file; returns the exit code of the worker.

        Our own launcher prints the content of the error file. Under any other launcher the message goes to the original
        standard error, unless another rank has failed with the same message.
        """
        if isinstance(error, KeyboardInterrupt):
            return Exit.INTERRUPTED
        failure = Failure.of(self.rank.rank, error)
        print(failure.traceback, file=sys.stderr, flush=True)
        must_tell = self.rank.launcher != "local" and not self._reported_by_another(failure)
        try:
            failure.write(self.run_dir.error_file(failure.rank))
        except OSError:  # the disk may be full, which may be the error itself
            must_tell = True
        if must_tell:
            message = failure.summary if failure.problems else f"rank {failure.rank}: {failure.summary}"
            line = f"{message}\n    see {self.run_dir.log_file(failure.rank)}"
            # Rank 0 may show a spinner on this line.
            print(f"{ERASE_LINE}{line}" if is_terminal(self.stderr) else line, file=self.stderr, flush=True)
        return failure.exit_code

    def _reported_by_another(self, failure: Failure) -> bool:
        others = (Failure.read(path) for path in self.run_dir.logs.glob("rank_*.error.json"))
        return any(other and other.time >= self.started and other.message == failure.message for other in others)


def redirect_output(run_dir: RunDir, rank: Rank) -> WorkerOutput:
    """Redirects file descriptors 1 and 2 of this process to its rank's log, and keeps the terminal for our own lines.

    Must be called before torch and other libraries are imported, so that everything they print, warn or log, from
    Python or from C++, ends in `logs/rank_N.log` under every launcher.
    """
    run_dir.logs.mkdir(parents=True, exist_ok=True)
    run_dir.error_file(rank.rank).unlink(missing_ok=True)
    open_closed_streams()
    sys.stdout.flush()
    sys.stderr.flush()
    stdout, stderr = lossy(os.dup(1)), lossy(os.dup(2))
    _redirect(run_dir.log_file(rank.rank))
    faulthandler.enable(file=2)
    now = f"{datetime.now().astimezone():%Y-%m-%d %H:%M:%S %z}"
    print(f"--- {now}: rank {rank.rank} of {rank.world_size}, process {os.getpid()} on {socket.gethostname()}")
    console = _Terminal(file=stdout, force_terminal=is_terminal(stdout)) if rank.is_main else Console(quiet=True)
    return WorkerOutput(console, stderr, run_dir, rank, time.time())


def _redirect(log: Path) -> None:
    descriptor = open_log(log)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    os.close(descriptor)
    # The log's disk may be full for a while.
    sys.stdout, sys.stderr = (lossy(number, owned=False, encoding="utf-8") for number in (1, 2))


class _Terminal(Console):
    """A console on the saved standard output."""

    @property  # type: ignore[misc]  # in rich it can be assigned to, which nobody does
    def size(self) -> ConsoleDimensions:
        """Columns and rows of our terminal; rich would ask the standard streams, which are now a log."""
        try:
            columns, rows = os.get_terminal_size(self.file.fileno())
        except OSError:
            return super().size
        return ConsoleDimensions(columns or 80, rows or 25)

    def set_live(self, live: Live) -> bool:
        """Shows a bar or a spinner without redirecting sys.stdout and sys.stderr to it, as rich would.

        Output of libraries belongs in the log, and a logging handler created meanwhile would keep the terminal forever.
        """
        live._redirect_stdout = live._redirect_stderr = False
        return super().set_live(live)

    def show_cursor(self, show: bool = True) -> bool:
        """Never hides the cursor: a worker that is killed could not show it again."""
        return False
