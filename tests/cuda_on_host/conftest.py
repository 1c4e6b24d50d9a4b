"""The fixture `gpus`: ranks on the device of this folder."""

from __future__ import annotations

import json
import multiprocessing
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.cuda_on_host.build import FOLDER, build, cannot_build


def environment(
    libraries: Path, devices: int = 8, faults: Sequence[Mapping[str, Any]] = (), contexts: Path | None = None
) -> dict[str, str]:
    """Variables with which a Python program sees `devices` GPUs.

    faults: arguments of `plant` or `set_memory` (`order.h`). contexts: folder in which each process leaves a file
    `PID.DEVICE` when it makes a context.
    """
    paths = [str(FOLDER / "site"), str(FOLDER.parents[1]), os.environ.get("PYTHONPATH", "")]
    return os.environ | {
        "PATH": f"{FOLDER / 'bin'}{os.pathsep}{os.environ['PATH']}",
        "PYTHONPATH": os.pathsep.join(path for path in paths if path),
        "CUDA_ON_HOST": str(libraries),
        "CUDA_ON_HOST_DEVICES": str(devices),
        "CUDA_ON_HOST_FAULTS": json.dumps(faults),
        "CUDA_ON_HOST_CONTEXTS": str(contexts or ""),
        "DS_ACCELERATOR": "cuda",
    }


@pytest.fixture(scope="session")
def libraries() -> Path:
    """The built device."""
    if reason := cannot_build():
        pytest.skip(reason)
    return build()


@pytest.fixture(scope="session")
def gpus(libraries: Path) -> Iterator[Callable[..., list[Any]]]:
    """`gpus(ranks, function, *arguments)`: `function(rank, *arguments)` on each rank, each on a device of its own."""
    ours, theirs = multiprocessing.Pipe()
    command = [sys.executable, "-m", "tests.cuda_on_host.server", str(theirs.fileno())]
    server = subprocess.Popen(command, env=environment(libraries), pass_fds=[theirs.fileno()])
    theirs.close()

    def run(ranks: int, function: Callable[..., Any], *arguments: Any, timeout: float = 120) -> list[Any]:
        ours.send((ranks, function, arguments, timeout))
        results, failure = ours.recv()
        assert failure is None, failure
        return list(results)

    yield run
    ours.close()
    server.wait(timeout=30)
