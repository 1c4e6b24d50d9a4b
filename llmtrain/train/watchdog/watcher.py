"""The watcher of a rank: it checks the rank, exchanges statuses, and ends the rank if the run hangs.

It is a child of the rank, forked before the rank has threads, and the kernel ends it with the rank. It is no thread,
which would hang with its rank, and no part of the launcher, which may be torchrun. The child shares the page of the
heartbeat and checks it once a second. Rank 0's watcher receives the statuses of the others, and decides for all.
"""

from __future__ import annotations

import gc
import os
import signal
import socket
import sys
import time
import traceback
from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, NoReturn, TextIO

from llmtrain.errors import Problem, WorkerError
from llmtrain.launch.authentication import MessageAuthenticator, read_verified
from llmtrain.launch.discovery.rank import LOOPBACK, Rank
from llmtrain.launch.failure import Failure
from llmtrain.plan import Plan
from llmtrain.run_dir import RunDir
from llmtrain.system.heartbeat import Heartbeat, HeartbeatPage, Phase
from llmtrain.system.parent import die_with, prctl
from llmtrain.system.stops import STOP_SIGNALS
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
from llmtrain.train.watchdog.link import Hub, Peer, address_of, listen
from llmtrain.train.watchdog.rank_process import DUMP_S, RankProcess, install_signal_handlers
from llmtrain.train.watchdog.stragglers import Stragglers

if TYPE_CHECKING:
    from torch.distributed.distributed_c10d import Store

PR_SET_NAME = 15  # <linux/prctl.h>
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
    page: HeartbeatPage
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
        self._checked_at = self._resumed_at = time.monotonic()
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
        return is_missing and self._checked_at - max(self._missing_since or 0.0, self._resumed_at) >= GONE_S

    def print_problem(self, problem: Problem) -> None:
        """Prints a problem, unless our own launcher does so from the error file."""
        if self.watched.rank.launcher != "local":
            print(WorkerError(problem).report(), file=self.watched.stderr, flush=True)

    def _status(self) -> Status:
        now = time.monotonic()
        if now - self._checked_at > self.poll_s + SUSPENDED_S:
            self._resumed_at = now
        self._checked_at = now
        page, state = self.watched.page, self.watched.process.state
        phase = Phase(page.phase)
        return Status(
            host=self.host,
            pid=self.watched.process.pid,
            step=page.step,
            phase=phase,
            idle_s=now - max(page.beat, self._resumed_at),
            limit_s=time_limit(phase, page.p99(), state, self.config),
            waiting=bool(page.waiting),
            state=state,
            work_s=page.work_s,
            measured_steps=page.measured_steps,
        )


class Leader(Watcher):
    """The watcher of rank 0, which receives the statuses of all ranks and decides."""

    def __init__(self, watched: WatchedRank, hub: Hub) -> None:
        super().__init__(watched)
        self.hub = hub
        world_size = watched.rank.world_size
        per_stage = world_size // watched.plan.parallel.pipeline
        pipeline_ranks = {rank: rank // per_stage for rank in range(world_size)}
        self.stragglers = Stragglers(self.config.straggler_ratio, pipeline_ranks)
        self._hung_rounds = 0

    def check(self, status: Status) -> None:
        """Ends a run that hangs in two rounds in a row: the statuses of two ranks may be up to a round apart."""
        self.hub.poll(self.poll_s)
        statuses = {0: status} | self.hub.statuses
        self._report_straggler(statuses)
        if self.is_missing_for_long(bool(lost := lost_ranks(statuses))):
            self._end_all(loss_problem(statuses, lost))
        self._hung_rounds = self._hung_rounds + 1 if is_hung(statuses) else 0
        if self._hung_rounds >= 2:
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
        totals = {
            rank: (status.work_s, status.measured_steps) for rank, status in statuses.items() if status.measured_steps
        }
        if self.watched.rank.world_size == 1 or len(totals) < self.watched.rank.world_size:
            return
        slowest = self.stragglers.update(totals)
        if slowest is None:
            return
        page = self.watched.page
        page.slowest_rank, page.slowest_ratio = slowest.rank, slowest.ratio
        if slowest.is_named:
            page.straggler_reports += 1
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
        if not self.peer.has_link and self.watched.page.has_address:
            self.peer.connect(self.watched.page.address.decode())
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
        # One rank of each machine: rank 1 speaks for that of rank 0.
        if self.watched.rank.local_rank == 0 or self.watched.rank.rank == 1:
            self.print_problem(problem)
        self.end(problem)


class WatcherHandle:
    """A rank's handle of its watcher."""

    def __init__(self, heartbeat: Heartbeat, rank: Rank, pid: int | None = None, port: int = 0) -> None:
        """pid: that of the watcher, or None. port: the one on which rank 0's watcher listens."""
        self._heartbeat = heartbeat
        self._rank = rank
        self._pid = pid
        self._port = port

    def exchange_address(self, store: Store, authenticator: MessageAuthenticator) -> None:
        """Passes the address of rank 0's watcher to the watchers of the other ranks; called by all ranks."""
        if self._rank.rank == 0:
            store.set("port", authenticator.sign("watcher", str(self._port)))
            return
        port = int(read_verified(store, "port", authenticator, "watcher"))
        if port:
            host = LOOPBACK if self._rank.on_one_machine else os.environ["MASTER_ADDR"]
            self._heartbeat.set_address(address_of(host, port, authenticator))

    def stop(self) -> None:
        """Ends the watcher. The kernel does that too, but leaves a zombie to the program that started the rank."""
        if self._pid is not None:
            os.kill(self._pid, signal.SIGKILL)
            with suppress(ChildProcessError):
                os.waitpid(self._pid, 0)
            self._pid = None


def start(
    rank: Rank, run_dir: RunDir, plan: Plan, heartbeat: Heartbeat, authenticator: MessageAuthenticator, stderr: TextIO
) -> WatcherHandle:
    """Forks the watcher of this process. Must be called before there are threads, with the log as standard error.

    authenticator: used by rank 0's watcher only. stderr: the terminal, for messages if the launcher is not ours.
    """
    config = plan.recipe.watchdog
    if not (config.min_seconds or config.straggler_ratio):
        return WatcherHandle(heartbeat, rank)
    install_signal_handlers()
    listener = listen(rank.on_one_machine) if rank.rank == 0 else None
    port = listener.getsockname()[1] if listener else 0
    for stream in (sys.stdout, sys.stderr, stderr):
        stream.flush()
    process = RankProcess(os.getpid(), run_dir.log_file(rank.rank))
    watched = WatchedRank(rank, run_dir, plan, heartbeat.page, process, stderr)
    pid = os.fork()
    if pid == 0:
        _run_watcher(
            lambda: Leader(watched, Hub(listener, authenticator, rank.world_size)) if listener else Follower(watched),
            process.pid,
        )
    if listener:
        listener.close()
    return WatcherHandle(heartbeat, rank, pid, port)


def _run_watcher(make: Callable[[], Watcher], parent: int) -> NoReturn:
    """Runs the child process until it ends."""
    try:
        for number in STOP_SIGNALS:
            signal.signal(number, signal.SIG_IGN)  # they concern the rank, but reach its whole process group
        prctl(PR_SET_NAME, b"llmtrain-watch")
        die_with(parent)
        gc.freeze()  # inherited memory stays shared with the rank
        make().run()
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(1)
