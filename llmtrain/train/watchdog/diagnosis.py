"""Decides whether a run hangs, and which ranks did not arrive."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from llmtrain.errors import Problem
from llmtrain.launch.failure import CUT_OFF, HANG
from llmtrain.recipe import WatchdogConfig
from llmtrain.system.heartbeat import Phase

GONE = "worker.gone"
"""The rule for a rank that ended while it was still needed."""
ENDING = (Phase.FINISHING, Phase.DONE)
"""Phases in which a rank may end. If rank 0 is in one of them, all ranks may end."""
TIMED_PHASES = (Phase.FIRST_STEPS, Phase.EVALUATING, Phase.SAVING, Phase.CALLBACKS, Phase.FINISHING)
"""Phases with their own time limit; up to that limit, the other ranks wait for a rank in such a phase."""
STOPPED_STATES = {"T": "stopped by a signal (SIGSTOP)", "t": "held by a debugger"}
"""States of a process that only continues if another process lets it."""
BLOCKED_STATES = {**STOPPED_STATES, "D": "waiting for a disk or a driver"}
"""States in which a process can do nothing, not even write its stack."""
WAITS_IN_C = ("in _engine_run_backward", "in synchronize")
"""Source lines where a rank may wait in C: in a backward pass that reduces gradients (DDP), and in Horovod."""
LOG_HINT = "its log is in logs/; the same command continues from the last checkpoint"
MAX_NAMED = 16
"""Largest number of ranks that a message describes one by one."""


@dataclass(frozen=True)
class Status:
    """The state of a rank, as its watcher sees it."""

    host: str
    pid: int
    step: int
    phase: Phase
    idle_s: float
    """Seconds since its last heartbeat."""
    limit_s: float | None
    """Largest allowed value of `idle_s`; None for no limit."""
    waiting: bool
    """Whether it waits for other ranks or for its device."""
    state: str
    """The process state, a letter as in `/proc/PID/stat`; empty if there is no such process."""
    work_s: float = 0.0
    measured_steps: int = 0
    """As in `HeartbeatPage`."""
    frame: str = ""
    """The innermost frame of its stack, once the stack is written."""

    @property
    def late(self) -> bool:
        """Whether it has exceeded its time limit."""
        return self.limit_s is not None and self.idle_s > self.limit_s

    @property
    def waits(self) -> bool:
        """Whether it waits for other ranks, or is at a source line where it may wait."""
        return self.waiting or self.frame.endswith(WAITS_IN_C)

    @property
    def is_blocked(self) -> bool:
        """Whether its process can do nothing."""
        return self.state in BLOCKED_STATES


def time_limit(phase: Phase, p99_s: float, state: str, config: WatchdogConfig) -> float | None:
    """Returns the seconds that a rank may spend without a heartbeat; None for no limit.

    p99_s: the 99th percentile of its step times. state: of its process.
    """
    if phase == Phase.DONE or not config.min_seconds:
        return None
    step_s = max(config.min_seconds, config.factor * p99_s)
    if phase in (Phase.TRAINING, Phase.BETWEEN) or state in STOPPED_STATES:
        return step_s  # a stopped process cannot finish any phase
    if phase == Phase.LOADING or not config.phase_seconds:
        return None
    return max(config.phase_seconds, step_s)


def is_hung(statuses: Mapping[int, Status]) -> bool:
    """Whether some rank is late, and does not wait for a rank in a phase that may take longer."""
    late = [status for status in statuses.values() if status.late]
    if any(status.state in STOPPED_STATES for status in late):
        return True  # a stopped process waits for no rank
    working = [status for status in statuses.values() if status.phase in TIMED_PHASES and status.state]
    return bool(late) and all(status.late for status in working)


def lost_ranks(statuses: Mapping[int, Status]) -> list[int]:
    """Returns the ranks that have ended although rank 0, and thus the run, has not."""
    if 0 in statuses and statuses[0].phase in ENDING:
        return []
    return [rank for rank, status in statuses.items() if not status.state and status.phase not in ENDING]


def loss_problem(statuses: Mapping[int, Status], lost: list[int]) -> Problem:
    """Returns the problem to report if ranks are gone."""
    lines = [_described(rank, statuses[rank]) for rank in lost[:MAX_NAMED]]
    return Problem(GONE, _ranks(lost), "ended, or its machine does not answer", "\n    ".join([*lines, LOG_HINT]))


def cut_off_problem(rank: int, host: str) -> Problem:
    """Returns the problem to report if a rank has lost contact with rank 0's watcher."""
    message = "lost contact with rank 0: it has ended or hangs, or the connection to its machine is lost"
    return Problem(CUT_OFF, f"rank {rank} on {host}", message, LOG_HINT)


def missing_ranks(statuses: Mapping[int, Status]) -> list[int]:
    """Returns the ranks that the others wait for, as far as their hosts know."""
    present = {rank: status for rank, status in statuses.items() if status.phase != Phase.DONE}
    blocked = [rank for rank, status in present.items() if status.is_blocked or not status.state]
    if blocked:
        return blocked
    busy = [
        rank for rank, status in present.items() if not status.waits and not (status.phase == Phase.BETWEEN and rank)
    ]
    behind = [rank for rank in busy if present[rank].step == min(present[other].step for other in busy)]
    return behind if len(behind) < len(present) or len(present) == 1 else []


def hang_problem(statuses: Mapping[int, Status], world_size: int) -> Problem:
    """Returns the problem to report if a run hangs."""
    missing = missing_ranks(statuses)
    silent = [rank for rank in range(world_size) if rank not in statuses]
    late = max((status for status in statuses.values() if status.late), key=lambda status: status.idle_s)
    doing = f"{late.phase}" if late.phase in TIMED_PHASES else "no step"
    message = f"{doing} for {late.idle_s:.0f} s, but only {late.limit_s or 0:.0f} s are allowed"
    lines = [_described(rank, statuses[rank]) for rank in missing[:MAX_NAMED]]
    others = [rank for rank in statuses if rank not in missing]
    if missing:
        message = f"did not arrive: {message}"
        lines += [f"the others wait: {_ranks(others)}"] if others else []
    elif not silent:
        message += "; it is unknown which of them the others wait for"
        lines += [_described(rank, statuses[rank]) for rank in others[:MAX_NAMED]]
    lines += [f"no contact with {_ranks(silent)}"] if silent else []
    lines.append("the stacks of all ranks are in logs/rank_*.log; the same command continues from the last checkpoint")
    return Problem(HANG, _ranks(missing or silent or list(statuses)), message, "\n    ".join(lines))


def _described(rank: int, status: Status) -> str:
    doing = "loading" if status.phase == Phase.LOADING else f"step {status.step:,}, {status.phase}"
    state = BLOCKED_STATES.get(status.state, "waiting" if status.waits else "" if status.state else "no contact")
    where = f"in {status.frame}" if status.frame else ""
    parts = (f"{doing} for {status.idle_s:.0f} s", state, where)
    return f"rank {rank} on {status.host} (process {status.pid}): {', '.join(part for part in parts if part)}"


def _ranks(ranks: list[int]) -> str:
    """Formats ranks: `ranks 0-3, 7`."""
    runs: list[list[int]] = []
    for rank in ranks:
        if runs and rank == runs[-1][-1] + 1:
            runs[-1].append(rank)
        else:
            runs.append([rank])
    spans = (f"{run[0]}" if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(spans)}"
