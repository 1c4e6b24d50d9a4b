"""What only a GPU shows, on one GPU. The other tests skip kernels, and emulate the device (`tests/cuda_on_host/`).

pytest tests/gpu -n 0                      # with an NVIDIA GPU: a minute and a half
GPU_TESTS_ON_HOST=1 pytest tests/gpu -n 0  # without one: most tests run on the emulated device, which checks the tests
"""

from __future__ import annotations

import multiprocessing
import os
import pickle
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
import torch

EMULATED = bool(os.environ.get("GPU_TESTS_ON_HOST"))
needs_kernels = pytest.mark.skipif(EMULATED, reason="needs the kernels of a CUDA GPU, and the device is emulated")
TIMEOUT_S = 240
Run = Callable[..., Any]


@pytest.fixture(scope="session")
def gpu_environment() -> Callable[..., dict[str, str]]:
    """`gpu_environment(faults)`: variables of a program that uses the GPU. faults: of the emulated device."""
    if EMULATED:
        from tests.cuda_on_host.build import build
        from tests.cuda_on_host.conftest import environment

        libraries = build()
        return lambda faults=(): environment(libraries, devices=1, faults=faults)
    if not torch.cuda.is_available():
        pytest.skip("needs an NVIDIA GPU with CUDA; GPU_TESTS_ON_HOST=1 emulates it")
    first = os.environ.get("CUDA_VISIBLE_DEVICES", "0").partition(",")[0]
    own = {"DS_ACCELERATOR": "cuda", "CUDA_VISIBLE_DEVICES": first, "TRITON_INTERPRET": "0"}
    return lambda faults=(): os.environ | own


class _Worker:
    """A process of `worker.py`. After a failure another one takes its place: a CUDA error is never over."""

    def __init__(self, environment: Mapping[str, str]) -> None:
        self.environment = environment
        self.process: subprocess.Popen[bytes] | None = None
        self.connection: Connection | None = None

    def run(self, function: Callable[..., Any], *arguments: Any) -> Any:
        if self.process is None:
            self.connection, theirs = multiprocessing.Pipe()
            command = [sys.executable, "-m", "tests.gpu.worker", str(theirs.fileno())]
            of_child = {"env": self.environment, "pass_fds": [theirs.fileno()], "cwd": Path(__file__).parents[2]}
            self.process = subprocess.Popen(command, **of_child)
            theirs.close()
        assert self.connection
        failure: str | None = f"no answer within {TIMEOUT_S} s"
        result = None
        try:
            # Not `send`: torch would pass tensors through shared memory, which the other process cannot open.
            self.connection.send_bytes(pickle.dumps((function, arguments)))
            if self.connection.poll(TIMEOUT_S):
                failure, result = pickle.loads(self.connection.recv_bytes())
        except (EOFError, OSError):
            failure = f"the process of the GPU ended with code {self.process.wait()}"
        if failure:
            self.end()
        assert failure is None, failure
        return result

    def end(self) -> None:
        if self.process is not None:
            self.process.kill()
            self.process.wait()
        self.process = None


@pytest.fixture(scope="session")
def gpu(gpu_environment: Callable[..., dict[str, str]]) -> Iterator[Run]:
    """`gpu(function, *arguments)`: the result of a function in a process on the GPU."""
    worker = _Worker(gpu_environment())
    yield worker.run
    worker.end()


@pytest.fixture
def fresh_gpu(gpu_environment: Callable[..., dict[str, str]], gpu: Run) -> Iterator[Run]:
    """As `gpu`, in a process of its own. The other one has ended: its groups' communicators take memory."""
    gpu_worker_of(gpu).end()
    worker = _Worker(gpu_environment())
    yield worker.run
    worker.end()


def gpu_worker_of(run: Run) -> _Worker:
    worker: _Worker = run.__self__  # type: ignore[attr-defined]
    return worker


def faults_of(bytes_of_device: int) -> Sequence[Mapping[str, int]]:
    return [{"device": 0, "bytes": bytes_of_device}]
