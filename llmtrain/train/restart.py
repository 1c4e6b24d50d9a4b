"""Restarts a job that died from its last checkpoint."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from signal import Signals

from rich.console import Console

from llmtrain.errors import Exit, Problem, UserError, WorkerError
from llmtrain.launch import run_workers
from llmtrain.launch.fork_server import ForkServer
from llmtrain.report.page import write_report_at_end
from llmtrain.run_dir import RunDir
from llmtrain.system.heartbeat import HeartbeatPages
from llmtrain.system.stops import QUIT, say, wait_for_signal
from llmtrain.system.streams import print_as_is
from llmtrain.train.metrics import note_event

FIRST_PAUSE_S, MAX_PAUSE_S = 1.0, 60.0
"""Seconds before the first restart; doubled for each further one, until there is a new checkpoint."""


@dataclass(frozen=True)
class Death:
    """The place where an attempt died."""

    step: int
    """The last step that all workers had begun; 0 before the first."""
    checkpoint: str | None
    """The newest checkpoint."""

    def __str__(self) -> str:
        where = f"in step {self.step:,}" if self.step else "before its first step"
        return f"{where}, with {self.checkpoint or 'no checkpoint'}"


def train_with_restarts(
    command: list[str],
    workers: int,
    folder: RunDir,
    *,
    resume: str,
    max_restarts: int,
    console: Console,
    fork_server: ForkServer | None = None,
) -> int:
    """Runs workers until the job is finished; restarts a job that died, at most `max_restarts` times.

    command: that of a worker, without its --resume. fork_server: as for `run_workers`. A job is not
    restarted if a user's mistake or a signal ended it, or if it dies twice in the same step without a checkpoint in
    between. Returns as `run_workers` does, and raises its error in the last attempt.
    """
    deaths: list[Death] = []
    while True:
        heartbeats = HeartbeatPages(workers)
        try:
            return run_workers([*command, "--resume", resume], workers, folder, None, heartbeats, fork_server)
        except UserError as error:
            deaths.append(_death(heartbeats, folder))
            note_event(folder, "died", deaths[-1].step, str(error))
            write_report_at_end(folder, lambda text: print_as_is(console, [f"warning: {text}"]))
            if not max_restarts or not isinstance(error, WorkerError):
                raise
            if reason := reason_to_give_up(deaths, max_restarts):
                raise WorkerError([*error.problems, Problem("restart.end", "--max-restarts", reason)]) from None
            print(error.report(), file=sys.stderr, flush=True)
        finally:
            heartbeats.close()
        folder.keep_failures(len(deaths))
        resume = next_resume(resume, deaths[-1])
        pause_s = pause_after(deaths)
        line = f"died {deaths[-1]}; restart {len(deaths)} of {max_restarts} in {pause_s:.0f} s"
        print_as_is(console, [line])
        if (stopped_by := wait_for_signal(pause_s)) is not None:
            if stopped_by == QUIT:
                return Exit.INTERRUPTED
            say(f"stopped on {Signals(stopped_by).name}; the same command continues the run")
            return Exit.RESUME


def reason_to_give_up(deaths: Sequence[Death], max_restarts: int) -> str | None:
    """Returns why a job is not restarted after these deaths, or None if it is."""
    if len(deaths) > 1 and deaths[-1] == deaths[-2]:
        return f"died twice {deaths[-1]}: another attempt would fail, too"
    if len(deaths) > max_restarts:
        return f"died {deaths[-1]}, after {max_restarts} restarts"
    return None


def next_resume(resume: str, death: Death) -> str:
    """Returns where the next attempt starts.

    It is the newest checkpoint, or where this attempt should have started if it did not begin a step.
    """
    if death.checkpoint is None or (resume not in ("auto", "never") and death.step == 0):
        return resume
    return "auto"


def pause_after(deaths: Sequence[Death]) -> float:
    """Returns the seconds before the next restart: doubled each time, unless a checkpoint was added since."""
    alike = 1
    while alike < len(deaths) and deaths[-alike - 1].checkpoint == deaths[-1].checkpoint:
        alike += 1
    return min(MAX_PAUSE_S, FIRST_PAUSE_S * 2.0 ** (alike - 1))


def _death(heartbeats: HeartbeatPages, folder: RunDir) -> Death:
    from llmtrain.checkpoint.folder import newest

    checkpoint = newest(folder.checkpoints)
    return Death(heartbeats.step(), checkpoint.name if checkpoint else None)
