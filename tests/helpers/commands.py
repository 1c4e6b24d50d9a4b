"""Runs commands as a user would, and reads what a run wrote."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

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
