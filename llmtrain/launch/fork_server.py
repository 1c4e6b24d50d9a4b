"""Forks workers from one process that has imported what they need, which saves each of them seconds.

`python -m llmtrain.launch.fork_server` is that process. A fork inherits neither threads nor devices, so the process has
none: it imports, and waits. A worker is forked twice and adopted by the launcher that asked for it, which can then wait
for it, signal it and end it like any child. Linux: it relies on subreapers.
"""

from __future__ import annotations

import ctypes
import gc
import importlib
import json
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from fcntl import F_DUPFD_CLOEXEC, fcntl
from pathlib import Path
from typing import Self

from llmtrain.system.parent import die_with, prctl, start_child
from llmtrain.system.stops import STOP_SIGNALS

PRELOADED_MODULES = (
    *("typer", "transformers.modeling_utils", "deepspeed", "torch.utils.cpp_extension"),
    *("llmtrain.train.console", "llmtrain.train.watchdog", "llmtrain.checkpoint.resume", "llmtrain.engines.own_time"),
    *("llmtrain.train.rollback", "llmtrain.train.loop", "llmtrain.train.finish"),
)
"""The modules that workers import, apart from the model's own."""
READY = b"r"
MAX_DESCRIPTORS = 16
"""Largest number of file descriptors that come with one request."""
PR_SET_CHILD_SUBREAPER, PR_GET_CHILD_SUBREAPER = 36, 37  # <linux/prctl.h>


class ForkedWorker:
    """A forked worker, with the part of the interface of `subprocess.Popen` that a launcher needs."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.returncode: int | None = None
        """None until it is waited for; negative after a signal."""

    def wait(self) -> int:
        """Waits for it to end, reaps it and returns its exit code."""
        if self.returncode is None:
            self.returncode = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        return self.returncode


class ForkServer:
    """The launcher's handle of the process that workers are forked from. It ends with the launcher, or by `close`."""

    def __init__(self, modules: Sequence[str] = PRELOADED_MODULES) -> None:
        """modules: the modules to import."""
        self._modules = modules
        self._environment: dict[str, str] | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._channel: socket.socket | None = None
        self._is_ready: bool | None = None
        """None while it imports; False if that failed."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def start(self, env: Mapping[str, str]) -> None:
        """Starts the imports for workers of this environment, without waiting. Must be called from the main thread.

        Imported modules may read any variable, such as OMP_NUM_THREADS, so workers of another environment need another
        process. A process that died is not restarted.
        """
        if self._environment == env:
            return
        self.close()
        self._environment, self._is_ready = dict(env), None
        self._channel, server_end = socket.socketpair()
        with server_end:
            self._process = start_child(
                [sys.executable, "-m", __name__, str(server_end.fileno()), *self._modules],
                env={**env, "DS_ACCELERATOR": "cpu"},
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                start_new_session=True,
                pass_fds=(server_end.fileno(),),
            )

    def wait_until_ready(self, seconds: float) -> bool:
        """Waits at most `seconds`. Returns whether it has finished importing, or never will."""
        if self._channel is not None and self._is_ready is None and select.select([self._channel], [], [], seconds)[0]:
            self._is_ready = self._channel.recv(1) == READY
        return self._channel is None or self._is_ready is not None

    def fork(
        self, command: Sequence[str], env: Mapping[str, str], descriptors: Mapping[int, int]
    ) -> ForkedWorker | None:
        """Forks a worker that leads a session of its own. Returns None if there is no process to fork it from.

        command: PYTHON -m MODULE ARGUMENT... descriptors: the worker's descriptor number → ours.
        """
        if not self._is_ready or self._channel is None:
            return None
        content = {"command": list(command), "env": dict(env), "numbers": list(descriptors)}
        request, pid = os.memfd_create("llmtrain-request"), b""
        report, reporter = os.pipe()
        try:
            os.write(request, json.dumps(content).encode())
            with suppress(OSError), _as_subreaper():
                try:
                    socket.send_fds(self._channel, [b"w"], [request, reporter, *descriptors.values()])
                finally:
                    os.close(reporter)
                pid = os.read(report, 32)  # empty once every process that could write is gone
        finally:
            os.close(request)
            os.close(report)
        return ForkedWorker(int(pid)) if pid else None

    def close(self) -> None:
        """Ends it; the workers continue."""
        if self._process is not None and self._channel is not None:
            self._channel.close()
            os.killpg(self._process.pid, signal.SIGKILL)  # including a worker that has no session of its own yet
            self._process.wait()
        self._process = self._channel = self._environment = None


@contextmanager
def _as_subreaper() -> Iterator[None]:
    """Makes orphans of this process's children its own children meanwhile."""
    before = ctypes.c_int()
    prctl(PR_GET_CHILD_SUBREAPER, ctypes.byref(before))
    prctl(PR_SET_CHILD_SUBREAPER, 1)
    try:
        yield
    finally:
        prctl(PR_SET_CHILD_SUBREAPER, before.value)


def main() -> None:
    """Runs the process itself. A fork of it leaves at the end of this function, as the worker that it has become."""
    launcher, channel = os.getppid(), socket.socket(fileno=int(sys.argv[1]))
    handlers = {number: signal.getsignal(number) for number in STOP_SIGNALS}
    for number in STOP_SIGNALS:
        signal.signal(number, signal.SIG_IGN)  # batch systems signal all processes of a job
    gc.disable()  # saves a sixth of the time of all imports
    for name in sys.argv[2:]:
        importlib.import_module(name)
    gc.collect()
    gc.freeze()  # otherwise the collector of each worker would scan all this, and copy its pages
    gc.enable()
    for stream in (sys.stdout, sys.stderr):
        stream.flush()  # otherwise each worker would
    channel.send(READY)
    descriptors, intermediate = _serve(channel)
    channel.close()
    while os.getppid() == intermediate:
        time.sleep(0.001)
    die_with(launcher)
    os.setsid()
    for number, handler in handlers.items():
        signal.signal(number, handler)
    command = _become_worker(descriptors)
    runpy.run_module(command[2], run_name="__main__", alter_sys=True)


def _serve(channel: socket.socket) -> tuple[list[int], int]:
    """Forks a worker for each request.

    Returns only in the workers: the descriptors of the request, and the parent's process id.
    """
    while True:
        message, descriptors, *_ = socket.recv_fds(channel, 1, MAX_DESCRIPTORS, socket.MSG_CMSG_CLOEXEC)
        if not message:
            os._exit(0)  # the launcher has closed its end
        intermediate = os.fork()
        if intermediate == 0:
            intermediate = os.getpid()
            if os.fork():
                os._exit(0)
            return descriptors, intermediate
        for descriptor in descriptors:
            os.close(descriptor)
        os.waitpid(intermediate, 0)


def _become_worker(descriptors: list[int]) -> list[str]:
    """Applies a request to this process, reports its process id to the launcher and returns the command."""
    with os.fdopen(descriptors[0], "rb") as file:
        file.seek(0)
        content = json.load(file)
    numbers = content["numbers"]
    reporter, *inherited = (fcntl(descriptor, F_DUPFD_CLOEXEC, 1 + max(numbers)) for descriptor in descriptors[1:])
    for descriptor in descriptors[1:]:
        os.close(descriptor)
    for descriptor, number in zip(inherited, numbers, strict=True):
        os.dup2(descriptor, number)
        os.close(descriptor)
    os.environ.clear()
    os.environ.update(content["env"])
    command: list[str] = content["command"]
    sys.argv = command[2:]
    sys.orig_argv = command
    _set_process_title(command)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed()  # seeded from the system, as in a process of its own
    os.write(reporter, str(os.getpid()).encode())
    os.close(reporter)
    return command


def _set_process_title(command: list[str]) -> None:
    """Makes `ps` show a command instead of this process's own, as far as there is room."""
    start, end = map(int, Path("/proc/self/stat").read_text().rpartition(")")[2].split()[45:47])
    shown = b"\0".join(map(os.fsencode, command))[: end - start - 1]
    ctypes.memmove(start, shown.ljust(end - start, b"\0"), end - start)


if __name__ == "__main__":
    main()
