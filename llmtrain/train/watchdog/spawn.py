"""The watcher of a rank: its child, forked before it has threads, which the kernel ends with it.

A thread would stop together with its rank, and the launcher may be another program's. The child shares the page of the
heartbeat and checks it once a second. Rank 0's watcher receives the statuses of the others, and decides for all.
"""

from __future__ import annotations

import ctypes
import gc
import os
import signal
import sys
import traceback
from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING, NoReturn, TextIO

from llmtrain.launch.authentication import MessageAuthenticator, read_verified
from llmtrain.launch.discovery.rank import LOOPBACK, Rank
from llmtrain.plan import Plan
from llmtrain.run_dir import RunDir
from llmtrain.system.heartbeat import Heartbeat
from llmtrain.system.parent import die_with
from llmtrain.system.stops import STOP_SIGNALS
from llmtrain.train.watchdog.link import Hub, address_of, listen
from llmtrain.train.watchdog.rank_process import RankProcess, install_signal_handlers
from llmtrain.train.watchdog.watcher import Follower, Leader, WatchedRank, Watcher

if TYPE_CHECKING:
    from torch.distributed.distributed_c10d import Store

PR_SET_NAME = 15  # <linux/prctl.h>


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

    authenticator: that of rank 0, on rank 0. stderr: the terminal, for messages if the launcher is not ours.
    """
    config = plan.recipe.watchdog
    if not (config.min_seconds or config.straggler_ratio):
        return WatcherHandle(heartbeat, rank)
    install_signal_handlers()
    listener = listen(rank.on_one_machine) if rank.rank == 0 else None
    port = listener.getsockname()[1] if listener else 0
    for stream in (sys.stdout, sys.stderr, stderr):
        stream.flush()
    watched = WatchedRank(
        rank, run_dir, plan, heartbeat.reader(), RankProcess(os.getpid(), run_dir.log_file(rank.rank)), stderr
    )
    prctl = ctypes.CDLL(None).prctl
    pid = os.fork()
    if pid == 0:
        _run_watcher(
            lambda: Leader(watched, Hub(listener, authenticator, rank.world_size)) if listener else Follower(watched),
            watched.process.pid,
            prctl,
        )
    if listener:
        listener.close()
    return WatcherHandle(heartbeat, rank, pid, port)


def _run_watcher(make: Callable[[], Watcher], parent: int, prctl: ctypes._NamedFuncPointer) -> NoReturn:
    """Runs the child process until it ends."""
    try:
        for number in STOP_SIGNALS:
            signal.signal(number, signal.SIG_IGN)  # they concern the rank, but reach its whole process group
        prctl(PR_SET_NAME, b"llmtrain-watch")
        die_with(parent, prctl)
        gc.freeze()  # inherited memory stays shared with the rank
        make().run()
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(1)
