"""Runs commands as a user would, and reads what a run wrote."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

from tests.helpers.harness import FORK_SERVER

BREAKABLE = f"{Path(__file__).parent / 'faulty'}:{Path(__file__).parents[2]}"
"""PYTHONPATH of a run whose ranks fail in the way that FAULT names (`faulty/sitecustomize.py`)."""


def run(*command: object, **env: str) -> subprocess.CompletedProcess[str]:
    """Runs a command as a user would; returns its output and exit code."""
    return subprocess.run(
        [str(part) for part in command], capture_output=True, text=True, timeout=300, env={**os.environ, **env}
    )


def llmtrain(*arguments: object, **env: str) -> subprocess.CompletedProcess[str]:
    """Runs `llmtrain`."""
    return run(sys.executable, "-m", "llmtrain", *arguments, **env)


def forked_llmtrain(*arguments: object, **env: str) -> subprocess.CompletedProcess[str]:
    """Runs `llmtrain` in a fork of a process that has imported torch and transformers already, which saves seconds.

    For commands that start no worker: one would be a fork, too.
    """
    words = [str(argument) for argument in arguments]
    with TemporaryDirectory() as output:
        process = FORK_SERVER.Process(target=_main, args=(words, {**os.environ, **env}, Path.cwd(), Path(output)))
        process.start()
        process.join(300)
        assert process.exitcode is not None, f"{words} did not end"
        texts = [(Path(output) / name).read_text(encoding="utf-8") for name in ("1", "2")]
    return subprocess.CompletedProcess(words, process.exitcode, *texts)


def _main(words: list[str], environment: dict[str, str], folder: Path, output: Path) -> None:
    """Runs the command line with the standard streams in files of a folder, named after their numbers."""
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    for stream in (1, 2):
        os.dup2(os.open(output / str(stream), os.O_WRONLY | os.O_CREAT), stream)
    from llmtrain.cli import main

    main(words)


def workers(launcher: int) -> list[int]:
    """Returns the process ids, by rank, of the workers that our launcher has started."""
    children = Path(f"/proc/{launcher}/task/{launcher}/children").read_text().split()
    return sorted(int(pid) for pid in children if b"llmtrain.train.worker" in Path(f"/proc/{pid}/cmdline").read_bytes())


def metrics(run_dir: Path) -> list[dict]:
    """Returns the lines of `metrics.jsonl`."""
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


def losses(run_dir: Path) -> list[tuple]:
    """Returns what a run computed, in the order in which it was written: everything except times."""
    wanted = ("step", "loss", "grad_norm", "lr", "tokens", "samples", "eval_loss")
    return [tuple(line[key] for key in wanted if key in line) for line in metrics(run_dir)]


def events(run_dir: Path) -> list[dict]:
    """Returns the lines of `events.jsonl`."""
    return [json.loads(line) for line in (run_dir / "events.jsonl").read_text().splitlines()]
