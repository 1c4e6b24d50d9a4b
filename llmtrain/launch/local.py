"""Starts the workers of this machine, and ends all of them if one fails. The first error is reported.

Linux: it relies on `prctl` and `waitid`.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from queue import Empty, SimpleQueue
from threading import Thread
from typing import TYPE_CHECKING

from llmtrain.errors import Exit, Problem, WorkerError
from llmtrain.launch.authentication import Secret
from llmtrain.launch.discovery.discover import LAUNCHER_VARIABLE
from llmtrain.launch.failure import Failure
from llmtrain.launch.hang_detector import CHECK_INTERVAL_S, DEFAULT_TIMEOUT_S, HangDetector
from llmtrain.run_dir import RunDir
from llmtrain.system.durable import open_log
from llmtrain.system.heartbeat import HeartbeatPages
from llmtrain.system.host import available_cores, limit_spinning
from llmtrain.system.kernel_caches import use_kernel_caches
from llmtrain.system.parent import kill_with_parent
from llmtrain.system.stops import QUIT, STOP_SIGNALS, before_the_first_step, caught_signals, say
from llmtrain.system.streams import plain_console

if TYPE_CHECKING:
    from llmtrain.launch.fork_server import ForkedWorker, ForkServer

GRACE_S = 10.0
"""Seconds between SIGTERM and SIGKILL for workers that are left after one died."""
TAIL_LINES = 12
TAIL_BYTES = 8192
_POLL_S = 0.05
RANK_VARIABLES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
"""Variables that would make a process that a rank starts a rank itself."""
# Signals that kill a worker without warning, before it can write an error file. SIGABRT is not among them: libraries
# raise it on purpose, often because another worker is gone.
KILL_SIGNALS = (signal.SIGKILL, signal.SIGSEGV, signal.SIGBUS, signal.SIGILL, signal.SIGFPE)


def run_workers(
    command: list[str],
    world_size: int,
    run_dir: RunDir,
    env: Mapping[str, str] | None = None,
    board: HeartbeatPages | None = None,
    fork_server: ForkServer | None = None,
    hang_timeout_s: float = DEFAULT_TIMEOUT_S,
) -> int:
    """Runs `world_size` processes of one command and waits for all of them.

    Rank 0 writes to the launcher's output, the others to their logs. When a worker dies, the others get SIGTERM, and
    SIGKILL `GRACE_S` later. The first of `STOP_SIGNALS` is passed on to the workers; if none has begun a step yet, it
    ends them. A second Ctrl-C kills the workers, and so does SIGQUIT at any time; other signals are then ignored, since
    batch systems repeat them. No worker outlives the launcher, even if the launcher is killed. Must be called from the
    main thread, and `run_dir` must exist.

    env: variables for the workers, which override those of this process. board: where they write their heartbeats.
    fork_server: the process to fork them from, if the command is PYTHON -m MODULE ARGUMENT... and they run on a CPU.
    hang_timeout_s: as for `HangDetector`.

    Returns the exit code: 0, 75 (stopped, after saving if a step was begun) or 130 (ended at once). Raises the error of
    the worker that failed first: the `UserError` that it raised, or WorkerError if it died or is stopped.
    """
    clear_failures(run_dir)
    run_dir.write_launch("local", world_size, command)
    with caught_signals() as events, reserved_port() as port:
        hang_detector = HangDetector(hang_timeout_s)
        pool = _Pool(run_dir, events, hang_detector, board, fork_server)
        common = common_environment(world_size, env)
        if fork_server:
            if (stopped_by := _start_fork_server(fork_server, common, events, hang_detector)) is not None:
                return exit_code_before_first_step(stopped_by)
            with suppress(OSError), os.fdopen(open_log(run_dir.log_file(0)), "wb") as log:
                log.write(fork_server.output())  # as the imports of each worker would have done
        size = str(world_size)
        rendezvous = {
            "WORLD_SIZE": size,
            "LOCAL_WORLD_SIZE": size,
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
        }
        env = {**common, **Secret.new().environment, **(board.environment if board else {}), **rendezvous}
        try:
            for rank in range(world_size):
                pool.start(rank, command, {**env, "RANK": str(rank), "LOCAL_RANK": str(rank)})
            pool.wait()
        finally:
            pool.kill()
            if any(worker.failed for worker in pool.workers) and sys.stdout.isatty():
                print()  # rank 0 may have left the cursor at the end of its progress line
    return _outcome(pool)


def environment_without_rank() -> dict[str, str]:
    """Returns the environment for a process that a rank starts and that is not a rank itself."""
    return {name: value for name, value in os.environ.items() if name not in RANK_VARIABLES}


def clear_failures(run_dir: RunDir) -> None:
    """Removes the error files of an earlier attempt, which would be mistaken for this one's."""
    for stale in run_dir.logs.glob("rank_*.error.json"):
        stale.unlink(missing_ok=True)


@contextmanager
def reserved_port() -> Iterator[int]:
    """Reserves a TCP port on which rank 0 can listen, and which the kernel gives to no other process meanwhile.

    The port stays bound here. Rank 0 can bind it too, since torch's store and this socket both set SO_REUSEADDR and
    only one of them listens. The kernel does not give a bound port to a process that asks for a free one.
    """
    dual = socket.has_dualstack_ipv6()
    with socket.socket(socket.AF_INET6 if dual else socket.AF_INET) as reservation:
        if dual:
            reservation.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        reservation.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        reservation.bind(("", 0))
        yield reservation.getsockname()[1]


def common_environment(world_size: int, env: Mapping[str, str] | None = None) -> dict[str, str]:
    """Returns the environment that all workers of a machine share. env: variables that override this process's own.

    Raises RecipeError if others could store compiled code for the workers.
    """
    # By default every worker would start as many threads as there are cores.
    threads = max(1, available_cores() // world_size)
    common = {"OMP_NUM_THREADS": str(threads), **os.environ, **(env or {}), LAUNCHER_VARIABLE: "local"}
    limit_spinning(common)  # a program that imports llmtrain has not done so
    use_kernel_caches(common)
    return common


def _start_fork_server(
    fork_server: ForkServer,
    env: Mapping[str, str],
    events: SimpleQueue[_LocalWorker | int],
    hang_detector: HangDetector,
) -> int | None:
    """Waits until workers can be forked. Returns the signal that arrived before, if any."""
    fork_server.start(env)
    with plain_console().status("starting workers"):
        while not fork_server.wait_until_ready(_POLL_S):
            hang_detector.check(fork_server.process)
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
    """Size of the log before the worker started; the part before belongs to earlier attempts."""
    ended_at: float = 0.0
    sent: set[int] = field(default_factory=set)
    """Signals that were sent to it while it ran."""

    @property
    def returncode(self) -> int | None:
        return self.process.returncode

    @property
    def failed(self) -> bool:
        return self.returncode not in (None, Exit.DONE, Exit.RESUME)

    @property
    def ended(self) -> bool:
        """Whether the process has ended. It may still be a zombie, since `returncode` is set when it is reaped."""
        return self.returncode is not None or _ended(self.process.pid, os.WNOHANG) is not None

    def wait(self, events: SimpleQueue[_LocalWorker | int]) -> None:
        """Puts the worker in the queue when its process ends.

        The process stays a zombie until it is reaped, so that its id is not reused.
        """
        with suppress(ChildProcessError):  # killed and reaped meanwhile
            _ended(self.process.pid)
            self.ended_at = time.time()
            events.put(self)

    def reap(self) -> None:
        """Collects the exit code of a process that has ended."""
        status = _ended(self.process.pid)
        if status is None or status.si_code != os.CLD_EXITED or status.si_status not in (Exit.DONE, Exit.RESUME):
            self.signal_group(signal.SIGKILL)  # processes that a failed worker started must not outlive it
        self.process.wait()

    @property
    def was_killed(self) -> bool:
        """Whether it crashed or was killed, except by us or while it was exiting after our signal."""
        number = -(self.returncode or 0)
        return number in KILL_SIGNALS and (number not in self.sent if number == signal.SIGKILL else not self.sent)

    def send(self, number: int) -> None:
        """Sends a signal, unless the worker has ended."""
        if not self.ended:
            self.sent.add(number)
            os.kill(self.process.pid, number)

    def signal_group(self, number: int) -> None:
        """Signals the worker and its children; each worker leads a session of its own."""
        if self.returncode is None:
            os.killpg(self.process.pid, number)


def _ended(pid: int, options: int = 0) -> os.waitid_result | None:
    """Returns how a child ended, without reaping it, or None if `WNOHANG` is given and it is still running."""
    return os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT | options)


@dataclass
class _Pool:
    """The workers, and the queue of all events that concern them."""

    run_dir: RunDir
    events: SimpleQueue[_LocalWorker | int]
    hang_detector: HangDetector
    board: HeartbeatPages | None
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
        return (self.board.descriptor,) if self.board else ()

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
            process = self._forked(command, env, output) or subprocess.Popen(
                command,
                env=env,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
                pass_fds=self.inherited_descriptors,
                preexec_fn=kill_with_parent(),
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
        return self.fork_server.fork(command, env, descriptors, self.hang_detector)

    def wait(self) -> None:
        """Waits for all workers."""
        for worker in self.workers:
            Thread(target=worker.wait, args=(self.events,), daemon=True).start()
        deadline: float | None = None
        while self.running:
            self.hang_detector.check({f"rank {worker.rank}": worker.process.pid for worker in self.running})
            event = self._next(deadline)
            if deadline is not None and time.monotonic() > deadline:
                self.kill()
            elif isinstance(event, _LocalWorker):
                event.reap()
                if event.failed and deadline is None:
                    self.send(signal.SIGTERM)
                    deadline = time.monotonic() + GRACE_S
            elif event is not None:
                self._handle_signal(event)

    def _handle_signal(self, number: int) -> None:
        """Handles a signal that the launcher received."""
        if number == QUIT:
            self.was_interrupted = True
            self.kill()
        elif self.stopped_by is None:
            self.stopped_by = number
            self.had_begun = self.board is None or self.board.has_begun()
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

    def _next(self, deadline: float | None) -> _LocalWorker | int | None:
        """Returns the next event, or None if there is none for a while, or before the deadline."""
        left = CHECK_INTERVAL_S if deadline is None else min(CHECK_INTERVAL_S, max(0.0, deadline - time.monotonic()))
        try:
            return self.events.get(timeout=left)
        except Empty:
            return None


def exit_code_before_first_step(number: int) -> int:
    """Returns the exit code of a run that a signal ended before its first step."""
    if number == QUIT:
        return Exit.INTERRUPTED
    say(before_the_first_step(number))
    return Exit.RESUME


def _outcome(pool: _Pool) -> int:
    """Returns the exit code of the job, or raises the error of the worker that failed first."""
    if pool.was_interrupted:
        return Exit.INTERRUPTED
    if pool.stopped_by is not None and not pool.had_begun:
        return exit_code_before_first_step(pool.stopped_by)
    failed = [worker for worker in pool.workers if worker.failed]
    if not failed:
        return Exit.RESUME if any(worker.returncode == Exit.RESUME for worker in pool.workers) else Exit.DONE
    failures = {worker.rank: Failure.read(pool.run_dir.error_file(worker.rank)) for worker in failed}
    first = min(failed, key=lambda worker: _failure_order(worker, failures[worker.rank]))
    failure = failures[first.rank]
    if failure and failure.is_cut_off and pool.hang_detector.stopped:
        raise WorkerError(pool.hang_detector.stopped)
    user_error = failure.user_error() if failure else None
    if user_error is not None:
        raise user_error
    code = first.returncode or 0
    if pool.stopped_by is not None and -code in STOP_SIGNALS:
        return exit_code_before_first_step(pool.stopped_by)  # it did not handle signals yet
    message, fix = (failure.summary, f"see {first.log}") if failure else (describe_exit(code), _last_lines(first))
    raise WorkerError(Problem("worker.died", f"rank {first.rank}", message, fix))


def _failure_order(worker: _LocalWorker, failure: Failure | None) -> tuple[int, float]:
    """Orders failures: the cause comes before its consequences.

    An error file has the time of the exception. A worker without one has the time of its end, which is noticed late on
    a busy machine; but a worker that was killed cannot have been brought down by another.
    """
    if worker.was_killed:
        return 0, worker.ended_at
    if failure is not None:
        return 1, failure.time
    return (2 if worker.sent else 1), _end_time(worker)


def _end_time(worker: _LocalWorker) -> float:
    """Returns when a worker without an error file ended.

    A worker that aborts writes its stack before others are affected.
    """
    if worker.returncode != -signal.SIGABRT:
        return worker.ended_at
    with suppress(OSError):
        return min(worker.ended_at, worker.log.stat().st_mtime)
    return worker.ended_at


def describe_exit(code: int) -> str:
    """Describes how a worker without an error file ended. code: as in `subprocess`, negative after a signal."""
    if code >= 0:
        return f"exited with code {code} without an error message"
    hint = "; the kernel's out-of-memory killer does this" if -code == signal.SIGKILL else ""
    # The real-time signals have no names.
    name = signal.Signals(-code).name if -code in set(signal.Signals) else "real-time"
    return f"killed by signal {-code} ({name}){hint}"


def _last_lines(worker: _LocalWorker) -> str:
    """Returns the last lines of this attempt in its log; rank 0 has none, since it writes to the terminal."""
    try:
        with worker.log.open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(worker.log_start, size - TAIL_BYTES))
            lines = file.read().decode(errors="replace").splitlines()
    except OSError:
        return ""
    return "\n    ".join([f"see {worker.log}, which ends:", *lines[-TAIL_LINES:]]) if lines else ""
