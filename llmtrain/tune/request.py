"""Starts the measuring process, which ends with this one, and stores its result."""

from __future__ import annotations

import ctypes
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import IO

from llmtrain.errors import Problem, RecipeError
from llmtrain.launch.local import OF_A_RANK, die_with
from llmtrain.plan import KernelChoice, Plan
from llmtrain.tune.choice import write_cached


@dataclass(frozen=True)
class Request:
    """The input of the measuring process."""

    plan: str
    """The plan as JSON."""
    device: str
    """The device, as torch names it."""
    threads: int
    """Number of threads of a rank."""
    always: bool
    """Whether to measure for a short run, too."""


class NotMeasuredError(Exception):
    """The measuring process died, or others used the cores meanwhile."""


def measure(plan: Plan, device: str, threads: int, always: bool, say: Callable[[str], None]) -> KernelChoice:
    """Measures which kernels are fastest, which takes a minute or more.

    device: as torch names it. threads: those of a rank. always: whether to measure for a short run, too. say: is called
    with what is being tried. Raises RecipeError if the model cannot be computed, NotMeasuredError if the process dies
    or others use the cores.
    """
    request = Request(plan.model_dump_json(), device, threads, always)
    environment = {name: value for name, value in os.environ.items() if name not in OF_A_RANK}
    environment["DS_ACCELERATOR"] = device.partition(":")[0]
    with tempfile.TemporaryDirectory() as name, tempfile.TemporaryFile("w+") as errors:
        file = Path(name) / "request.json"
        file.write_text(json.dumps(asdict(request)))
        command = [sys.executable, "-m", "llmtrain.tune.process", str(file)]
        with subprocess.Popen(
            command,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            preexec_fn=partial(die_with, os.getpid(), ctypes.CDLL(None).prctl),
        ) as process:
            assert process.stdout is not None
            try:
                answer = _listen(process.stdout, say)
            except BaseException:
                process.kill()
                raise
        if answer is None:
            errors.seek(0)
            last = errors.read().strip().splitlines()[-1:]
            raise NotMeasuredError(f"the measuring process died, exit code {process.returncode}: {' '.join(last)}")
    if answer.milliseconds or answer.failed:
        write_cached(plan.recipe.data, answer)
    return answer


def _listen(lines: IO[str], say: Callable[[str], None]) -> KernelChoice | None:
    for line in lines:
        message = json.loads(line)
        if "trying" in message:
            say(f"measuring kernels: {message['trying']}")
        elif "problems" in message:
            raise RecipeError(Problem(**problem) for problem in message["problems"])
        elif "busy" in message:
            raise NotMeasuredError(message["busy"])
        else:
            return KernelChoice.model_validate_json(json.dumps(message["choice"]))
    return None
