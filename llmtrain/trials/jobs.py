"""Runs a job in workers of this machine: the launcher writes it to a folder, and each worker reads it there.

A worker is `python -m llmtrain.trials.worker MODULE:CLASS FOLDER`, with the class of the job.
"""

from __future__ import annotations

import sys
from abc import abstractmethod
from collections.abc import Callable, Mapping
from typing import ClassVar

from llmtrain.launch import run_workers
from llmtrain.launch.fork_server import ForkServer
from llmtrain.recipe import Part
from llmtrain.run_dir import RunDir

Say = Callable[[str], None]
"""Prints a text for the user on rank 0; a line ends where the text has a newline."""


class Job(Part):
    """The work of every worker."""

    file: ClassVar[str]
    """Name of the file for the job."""
    work: ClassVar[str]
    """MODULE:FUNCTION that does a rank's part, given the job, its folder, the rank's device, and `Say`."""

    @property
    @abstractmethod
    def on_cpu(self) -> bool:
        """Whether the workers compute on CPUs."""


def run_job(
    job: Job,
    world_size: int,
    run_dir: RunDir,
    env: Mapping[str, str] | None = None,
    fork_server: ForkServer | None = None,
) -> int:
    """Runs a job in `world_size` workers. Returns and raises as `run_workers` does."""
    run_dir.logs.mkdir(parents=True, exist_ok=True)
    (run_dir.path / job.file).write_text(job.model_dump_json(indent=2) + "\n")
    kind = f"{type(job).__module__}:{type(job).__name__}"
    command = [sys.executable, "-m", "llmtrain.trials.worker", kind, str(run_dir.path)]
    return run_workers(command, world_size, run_dir, env, fork_server=fork_server)
