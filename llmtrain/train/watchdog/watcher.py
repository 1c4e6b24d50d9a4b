"""The watcher of a rank: it checks the rank, exchanges statuses, and ends the rank if the run hangs."""

from __future__ import annotations

import socket
import sys
import time
from abc import ABC, abstractmethod
from dataclasses import dataclass, replace
from typing import NoReturn, TextIO

from llmtrain.errors import Problem, WorkerError
from llmtrain.launch.discovery.rank import Rank
from llmtrain.launch.failure import Failure
from llmtrain.plan import Plan
from llmtrain.run_dir import RunDir
from llmtrain.system.heartbeat import HeartbeatReader, Phase
from llmtrain.train.watchdog.diagnosis import (
    ENDING,
    Status,
    cut_off_problem,
    hang_problem,
    is_hung,
    loss_problem,
    lost_ranks,
    time_limit,
)
from llmtrain.train.watchdog.link import Hub, Peer
from llmtrain.train.watchdog.rank_process import DUMP_S, RankProcess
from llmtrain.train.watchdog.stragglers import Stragglers

POLL_S = 1.0
SUSPENDED_S = 5.0
"""Seconds without a check after which a watcher assumes that it and its rank were stopped; this time does not count."""
GONE_S = 4.0
"""Seconds after which a rank that has ended counts as lost: the others are then ended too, on all nodes."""
ALONE_S = 10.0
"""Additional seconds that a watcher waits if it cannot reach rank 0's watcher."""


@dataclass
class WatchedRank:
    """A rank, and the data that its watcher needs."""

    rank: Rank
    run_dir: RunDir
    plan: Plan
    reader: HeartbeatReader
    process: RankProcess
    stderr: TextIO
    """The terminal."""


class Watcher(ABC):
    """The common part of all watchers."""

    def __init__(self, watched: WatchedRank) -> None:
        self.watched = watched
        self.config = watched.plan.recipe.watchdog
        self.host = socket.gethostname()
        # Often enough for short time limits.
        self.poll_s = min(POLL_S, self.config.min_seconds / 4 or POLL_S)
        self._checked_at = self._resumed = time.monotonic()
        self._missing_since: float | None = None

    def run(self) -> NoReturn:
        """Checks the rank until it ends, which ends this process too."""
        while True:
            self.check(self._status())

    @abstractmethod
    def check(self, status: Status) -> None:
        """Runs one round, which takes `poll_s`. status: of this watcher's own rank."""

    def end(self, problem: Problem) -> NoReturn:
        """Ends the rank, with `problem` as its error."""
        rank, run_dir = self.watched.rank.rank, self.watched.run_dir
        error = WorkerError(problem)
        print(error.report(), flush=True, file=sys.stderr)
        Failure.of(rank, error).write(run_dir.error_file(rank))
        self.watched.process.end()
        sys.exit()

    def is_missing_for_long(self, is_missing: bool) -> bool:
        """Whether some rank has been missing for `GONE_S`. Must be called in each round."""
        if not is_missing:
            self._missing_since = None
        elif self._missing_since is None:
            self._missing_since = self._checked_at
        return is_missing and self._checked_at - max(self._missing_since or 0.0, self._resumed) >= GONE_S

    def print_problem(self, problem: Problem) -> None:
        """Prints a problem, unless our own launcher does so from the error file."""
        if self.watched.rank.launcher != "local":
            print(WorkerError(problem).report(), file=self.watched.stderr, flush=True)

    def _status(self) -> Status:
        now = time.monotonic()
        if now - self._checked_at > self.poll_s + SUSPENDED_S:
            self._resumed = now
        self._checked_at = now
        pulse, state = self.watched.reader.read(), self.watched.process.state
        return Status(
            host=self.host,
            pid=self.watched.process.pid,
            step=pulse.step,
            phase=pulse.phase,
            idle_s=now - max(pulse.beat, self._resumed),
            limit_s=time_limit(pulse, self.watched.reader.p99(), state, self.config),
            waiting=pulse.waiting,
            state=state,
            own_s=pulse.own_s,
            measured=pulse.measured,
        )


class Leader(Watcher):
    """The watcher of rank 0, which receives the statuses of all ranks and decides."""

    def __init__(self, watched: WatchedRank, hub: Hub) -> None:
        super().__init__(watched)
        self.hub = hub
        world_size = watched.rank.world_size
        per_stage = world_size // watched.plan.parallel.pipeline
        stages = {rank: rank // per_stage for rank in range(world_size)}
        self.stragglers = Stragglers(self.config.straggler_ratio, stages)
        self._hung = 0

    def check(self, status: Status) -> None:
        """Decides after two equal rounds, because the statuses of two ranks may be up to a round apart."""
        self.hub.poll(self.poll_s)
        statuses = {0: status} | self.hub.statuses
        self._report_straggler(statuses)
        if self.is_missing_for_long(bool(lost := lost_ranks(statuses))):
            self._end_all(loss_problem(statuses, lost))
        self._hung = self._hung + 1 if is_hung(statuses) else 0
        if self._hung >= 2:
            self._end_hung_run(statuses)

    def _end_hung_run(self, statuses: dict[int, Status]) -> NoReturn:
        self.hub.request_stacks()
        frames = {0: self.watched.process.dump_stacks()} | self.hub.collect_frames(DUMP_S + self.poll_s)
        statuses = {rank: replace(status, frame=frames.get(rank, "")) for rank, status in statuses.items()}
        self._end_all(hang_problem(statuses, self.watched.rank.world_size))

    def _end_all(self, problem: Problem) -> NoReturn:
        self.hub.end(problem)
        self.print_problem(problem)
        self.end(problem)

    def _report_straggler(self, statuses: dict[int, Status]) -> None:
        totals = {rank: (status.own_s, status.measured) for rank, status in statuses.items() if status.measured}
        if self.watched.rank.world_size == 1 or len(totals) < self.watched.rank.world_size:
            return
        slowest = self.stragglers.update(totals)
        if slowest is None:
            return
        self.watched.reader.set_slowest(slowest.rank, slowest.ratio, slowest.is_named)
        if slowest.is_named:
            slow = statuses[slowest.rank]
            where = f"rank {slowest.rank} on {slow.host} (process {slow.pid})"
            print(f"straggler: {where} takes {slowest.ratio:.1f} times as long as the median rank", flush=True)


class Follower(Watcher):
    """The watcher of any other rank: reports the state of its rank to rank 0, and follows its orders."""

    def __init__(self, watched: WatchedRank) -> None:
        super().__init__(watched)
        self.peer = Peer(watched.rank.rank)
        self._was_connected = False

    def check(self, status: Status) -> None:
        """Decides alone, and later, if it cannot reach rank 0: the others may be in a phase that takes long."""
        address = self.watched.reader.address()
        if not self.peer.has_link and address is not None:
            self.peer.connect(address)
        self.peer.send_status(status)
        for order in self.peer.poll(self.poll_s):
            if isinstance(order, Problem):
                self.end(order)
            self.peer.send_frame(self.watched.process.dump_stacks())
        self._was_connected |= self.peer.is_connected
        if self.is_missing_for_long(self._was_connected and not self.peer.is_connected and status.phase not in ENDING):
            self._end_with(cut_off_problem(self.watched.rank.rank, self.host))
        if not self.peer.is_connected and status.late and status.idle_s > self._limit_alone(status):
            alone = {self.watched.rank.rank: replace(status, frame=self.watched.process.dump_stacks())}
            self._end_with(hang_problem(alone, world_size=0))

    def _limit_alone(self, status: Status) -> float:
        others_may_work = 0.0 if status.is_blocked or status.phase == Phase.LOADING else self.config.phase_seconds
        return max(status.limit_s or 0.0, others_may_work) + ALONE_S

    def _end_with(self, problem: Problem) -> NoReturn:
        if self.watched.rank.local_rank == 0 or self.watched.rank.rank == 1:  # one of each machine
            self.print_problem(problem)
        self.end(problem)
