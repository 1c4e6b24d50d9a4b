"""Starts the workers of this machine, and ends all of them if one fails. The first error is reported.

Linux: it relies on `prctl` and `waitid`.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from queue import Empty, SimpleQueue
from threading import Thread
from typing import TYPE_CHECKING

from llmtrain.errors import Exit
from llmtrain.launch.authentication import Secret
from llmtrain.launch.discovery.discover import LAUNCHER_VARIABLE
from llmtrain.launch.failure import WorkerExit, clear_failures, exit_code_before_first_step, job_exit_code
from llmtrain.launch.rendezvous import reserved_port
from llmtrain.run_dir import RunDir
from llmtrain.system.durable import open_log
from llmtrain.system.heartbeat import HeartbeatPages
from llmtrain.system.host import available_cores, limit_spinning
from llmtrain.system.kernel_caches import use_kernel_caches
from llmtrain.system.parent import start_child
from llmtrain.system.stops import QUIT, caught_signals
from llmtrain.system.streams import plain_console

if TYPE_CHECKING:
    from llmtrain.launch.fork_server import ForkedWorker, ForkServer

GRACE_S = 10.0
"""Seconds between SIGTERM and SIGKILL for workers that are left after one died."""
_POLL_S = 0.05
RANK_VARIABLES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
"""Variables by which a child of a rank would take itself for a rank."""


def run_workers(
    command: list[str],
    world_size: int,
    run_dir: RunDir,
    env: Mapping[str, str] | None = None,
    heartbeats: HeartbeatPages | None = None,
    fork_server: ForkServer | None = None,
) -> int:
    """Runs `world_size` processes of one command and waits for all of them.

    Rank 0 writes to the launcher's output, the others to their logs. When a worker dies, the others get SIGTERM, and
    SIGKILL `GRACE_S` later. The first stop signal that arrives is passed on to the workers; if none has begun a step
    yet, it ends them. A second Ctrl-C kills the workers, and so does SIGQUIT at any time; other signals are then
    ignored, since batch systems repeat them. No worker outlives the launcher, even if the launcher is killed. Must be
    called from the main thread, and `run_dir` must exist.

    env: variables for the workers, which override those of this process. heartbeats: where they write their heartbeats.
    fork_server: the process to fork them from, if the command is PYTHON -m MODULE ARGUMENT... and they run on a CPU.

    Returns the exit code: 0, 75 (stopped, after saving if a step was begun) or 130 (ended at once). Raises the error of
    the worker that failed first: the `UserError` that it raised, or WorkerError if it died.
    """
    clear_failures(run_dir)
    run_dir.write_launch("local", world_size, command)
    with caught_signals() as events, reserved_port() as port:
        pool = _Pool(run_dir, events, heartbeats, fork_server)
        common = common_environment(world_size, env)
        if fork_server and (stopped_by := _start_fork_server(fork_server, common, events)) is not None:
            return exit_code_before_first_step(stopped_by)
        size = str(world_size)
        rendezvous = {
            "WORLD_SIZE": size,
            "LOCAL_WORLD_SIZE": size,
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
        }
        env = {**common, **Secret.new().environment, **(heartbeats.environment if heartbeats else {}), **rendezvous}
        try:
            for rank in range(world_size):
                pool.start(rank, command, {**env, "RANK": str(rank), "LOCAL_RANK": str(rank)})
            pool.wait()
        finally:
            pool.kill()
            if any(worker.exit.failed for worker in pool.workers) and sys.stdout.isatty():
                print()  # rank 0 may have left the cursor at the end of its progress line
    return pool.exit_code()


def environment_without_rank() -> dict[str, str]:
    """Returns the environment for a process that a rank starts and that is not a rank itself."""
    return {name: value for name, value in os.environ.items() if name not in RANK_VARIABLES}


def common_environment(world_size: int, env: Mapping[str, str] | None = None) -> dict[str, str]:
    """Returns the environment that all workers of a machine share. env: variables that override this process's own.

    Raises RecipeError if other users can write to the cache of compiled code.
    """
    # By default every worker would start as many threads as there are cores.
    threads = max(1, available_cores() // world_size)
    common = {"OMP_NUM_THREADS": str(threads), **os.environ, **(env or {}), LAUNCHER_VARIABLE: "local"}
    limit_spinning(common)  # the command line has done it, a program that imports llmtrain has not
    use_kernel_caches(common)
    return common


def _start_fork_server(
    fork_server: ForkServer, env: Mapping[str, str], events: SimpleQueue[_LocalWorker | int]
) -> int | None:
    """Waits until workers can be forked. Returns the signal that arrived before, if any."""
    fork_server.start(env)
    with plain_console().status("starting workers"):
        while not fork_server.wait_until_ready(_POLL_S):
            if not events.empty():
                event = events.get()
                assert isinstance(event, int), "there are no workers"
                return event
    return None


@dataclass
class _LocalWorker:
    """One process. `returncode` is None while it runs, and negative after a signal, as in `subprocess`."""

    rank: int
    process: subprocess.Popen[bytes] | ForkedWorker
    log: Path
    log_start: int
    """Size of the log before the worker started."""
    ended_at: float = 0.0
    sent: set[int] = field(default_factory=set)
    """Signals that were sent to it while it ran."""

    @property
    def returncode(self) -> int | None:
        return self.process.returncode

    @property
    def exit(self) -> WorkerExit:
        """The end of a worker that was reaped."""
        code, time_s = self.returncode or 0, self.ended_at
        if code == -signal.SIGABRT:  # it wrote its stack to its log before the others were affected
            with suppress(OSError):
                time_s = min(time_s, self.log.stat().st_mtime)
        return WorkerExit(self.rank, code, time_s, tuple(self.sent), self.log_start)

    @property
    def ended(self) -> bool:
        """Whether the process has ended. It may still be a zombie, since `returncode` is set when it is reaped."""
        return self.returncode is not None or _exit_status(self.process.pid, os.WNOHANG) is not None

    def wait(self, events: SimpleQueue[_LocalWorker | int]) -> None:
        """Puts the worker in the queue when its process ends.

        The process stays a zombie until it is reaped, so that its id is not reused.
        """
        with suppress(ChildProcessError):  # killed and reaped meanwhile
            _exit_status(self.process.pid)
            self.ended_at = time.time()
            events.put(self)

    def reap(self) -> None:
        """Collects the exit code of a process that has ended."""
        status = _exit_status(self.process.pid)
        if status is None or status.si_code != os.CLD_EXITED or status.si_status not in (Exit.DONE, Exit.RESUME):
            self.signal_group(signal.SIGKILL)  # processes that a failed worker started must not outlive it
        self.process.wait()

    def send(self, number: int) -> None:
        """Sends a signal, unless the worker has ended."""
        if not self.ended:
            self.sent.add(number)
            os.kill(self.process.pid, number)

    def signal_group(self, number: int) -> None:
        """Signals the worker and its children; each worker leads a session of its own."""
        if self.returncode is None:
            os.killpg(self.process.pid, number)


def _exit_status(pid: int, options: int = 0) -> os.waitid_result | None:
    """Returns how a child ended, without reaping it, or None if `WNOHANG` is given and it is still running."""
    return os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT | options)


@dataclass
class _Pool:
    """The workers, and the queue of all events that concern them."""

    run_dir: RunDir
    events: SimpleQueue[_LocalWorker | int]
    heartbeats: HeartbeatPages | None
    """Where the workers write their heartbeats, if they do."""
    fork_server: ForkServer | None
    stopped_by: int | None = None
    """The signal that stopped the launcher, if one did."""
    had_begun: bool = True
    """Whether a worker had begun a step before that, as far as is known."""
    was_interrupted: bool = False
    workers: list[_LocalWorker] = field(default_factory=list)

    @property
    def inherited_descriptors(self) -> tuple[int, ...]:
        return (self.heartbeats.descriptor,) if self.heartbeats else ()

    @property
    def running(self) -> list[_LocalWorker]:
        return [worker for worker in self.workers if worker.returncode is None]

    def start(self, rank: int, command: list[str], env: dict[str, str]) -> None:
        """Starts one worker in a session of its own, so that a Ctrl-C only reaches it through us."""
        log = self.run_dir.log_file(rank)
        log_start = log.stat().st_size if log.exists() else 0
        output = None if rank == 0 else open_log(log)
        sys.stdout.flush()
        try:
            process = self._forked(command, env, output) or start_child(
                command,
                env=env,
                stdout=output,
                stderr=output,
                start_new_session=True,
                pass_fds=self.inherited_descriptors,
            )
        finally:
            if output is not None:
                os.close(output)
        self.workers.append(_LocalWorker(rank, process, log, log_start))

    def _forked(self, command: list[str], env: dict[str, str], output: int | None) -> ForkedWorker | None:
        if self.fork_server is None:
            return None
        streams = {number: number if output is None else output for number in (1, 2)}
        descriptors = streams | {number: number for number in self.inherited_descriptors}
        return self.fork_server.fork(command, env, descriptors)

    def wait(self) -> None:
        """Waits for all workers."""
        for worker in self.workers:
            Thread(target=worker.wait, args=(self.events,), daemon=True).start()
        deadline: float | None = None
        while self.running:
            try:
                event = self.events.get(timeout=None if deadline is None else max(0.0, deadline - time.monotonic()))
            except Empty:
                self.kill()
                continue
            if isinstance(event, int):
                self._handle_signal(event)
                continue
            event.reap()
            if event.exit.failed and deadline is None:
                self.send(signal.SIGTERM)
                deadline = time.monotonic() + GRACE_S

    def _handle_signal(self, number: int) -> None:
        """Handles a signal that the launcher received."""
        if number == QUIT:
            self.was_interrupted = True
            self.kill()
        elif self.stopped_by is None:
            self.stopped_by = number
            self.had_begun = self.heartbeats is None or self.heartbeats.has_begun()
            if self.had_begun:
                self.send(number)
            else:
                self.kill()

    def send(self, number: int) -> None:
        for worker in self.running:
            worker.send(number)

    def kill(self) -> None:
        """Kills and reaps the workers that are still running, and the processes that they started."""
        self.send(signal.SIGKILL)
        for worker in self.running:
            worker.signal_group(signal.SIGKILL)
        for worker in self.running:
            worker.process.wait()

    def exit_code(self) -> int:
        """Returns the exit code of the job, or raises the error of the worker that failed first."""
        if self.was_interrupted:
            return Exit.INTERRUPTED
        if self.stopped_by is not None and not self.had_begun:
            return exit_code_before_first_step(self.stopped_by)
        return job_exit_code([worker.exit for worker in self.workers], self.run_dir, self.stopped_by)
