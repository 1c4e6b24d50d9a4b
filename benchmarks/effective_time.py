"""Measures how much of a run's time is training when workers are killed: `python benchmarks/effective_time.py`.

In a run of two workers under `llmtrain train --max-restarts`, SIGKILL ends a random worker at seeded, exponentially
distributed times. Effective time is the time that the run's steps take undisturbed, divided by the wall time from the
command to its end. The ideal run, for this checkpoint interval and these kills, saves and starts instantly; it loses
only the steps since the last checkpoint that was due. Both are written to `results/effective_time.json` with their
ratio.

The undisturbed time of a step is the median of the hundred steps around it. A separate run could not serve as the
reference, because the speed of machines varies by a fifth within minutes (seen). Time that saves add, and steps that
are slower by chance, count as lost. The machine must be otherwise idle.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
RESULT = ROOT / "benchmarks/results/effective_time.json"
os.environ.update(DS_ACCELERATOR="cpu", OMP_NUM_THREADS="1", TOKENIZERS_PARALLELISM="false", HF_HUB_OFFLINE="1")

from benchmarks.machine import short_facts  # noqa: E402
from llmtrain.system.host import available_cores  # noqa: E402
from tests.helpers.commands import metrics, workers  # noqa: E402
from tests.helpers.small_runs import write_small_recipe  # noqa: E402

WORKERS = 2
FIELDS = {
    "parallel.zero_stage": 1,
    "model.config.hidden_size": 256,
    "model.config.intermediate_size": 1024,
    "batch.micro_batch_size": 4,
    "evaluation.every_steps": 0,
    "export.at_end": "false",
    "logging.every_steps": 10,
}
AROUND = 5
"""Number of logged lines before and after a line whose median gives the undisturbed time of its steps."""


def main() -> None:
    """Runs and kills the job, and writes the results."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=15.0, help="of training, without the kills")
    parser.add_argument("--between", type=float, default=240.0, help="mean seconds between kills")
    parser.add_argument("--interval", type=float, default=10.0, help="seconds of training between checkpoints")
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        recipe = write_small_recipe(folder)
        step_s = _step_time(recipe, folder / "before")
        steps, every = round(60 * options.minutes / step_s), max(1, round(options.interval / step_s))
        command = _command(recipe, folder / "run", steps, every)
        command += ["--max-restarts", "1000"]
        kills = _instants(options.between, random.Random(options.seed))
        wall_s, lost = _killed_run(command, folder / "run", every, kills, random.Random(options.seed))
        training_s = _undisturbed_s(folder / "run")
    step_s = training_s / steps
    effective, ideal = training_s / wall_s, training_s / (training_s + sum(lost) * step_s)
    _write(
        {
            "step_s": round(step_s, 5),
            "steps": steps,
            "checkpoint_every_steps": every,
            "mean_s_between_kills": options.between,
            "kills": len(lost),
            "steps_lost": lost,
            "wall_s": round(wall_s, 1),
            "effective": round(effective, 4),
            "ideal": round(ideal, 4),
            "of_the_ideal": round(effective / ideal, 4),
        }
    )


def _command(recipe: Path, run: Path, steps: int, every: int) -> list[str]:
    fields = {**FIELDS, "train.max_steps": steps, "checkpoint.every_steps": every, "checkpoint.keep_last": 2}
    sets = [part for name, value in fields.items() for part in ("--set", f"{name}={value}")]
    base = [sys.executable, "-m", "llmtrain", "train", str(recipe), "--run-dir", str(run)]
    return [*base, "--nproc", str(WORKERS), *sets]


def _step_time(recipe: Path, folder: Path) -> float:
    """Returns the seconds per step of a short run, from which the number of steps for the requested minutes follows."""
    subprocess.run(_command(recipe, folder, 200, 200), check=True, stdout=subprocess.DEVNULL)
    return statistics.median(line["step_time_s"] for line in _lines(folder))


def _undisturbed_s(run: Path) -> float:
    """Returns the seconds that all steps of a run would take if each took the median time of its neighbours."""
    lines = _lines(run)
    seconds = [line["step_time_s"] for line in lines]
    last, total = 0, 0.0
    for number, line in enumerate(lines):
        around = seconds[max(0, number - AROUND) : number + AROUND + 1]
        total += (line["step"] - last) * statistics.median(around)
        last = line["step"]
    return total


def _lines(run: Path) -> list[dict[str, Any]]:
    """Returns the logged lines of the steps that were kept."""
    return [line for line in metrics(run) if "loss" in line]


def _instants(mean_s: float, generator: random.Random) -> Iterator[float]:
    """Yields the times of the kills in seconds since the start, in ascending order."""
    at = 0.0
    while True:
        at += generator.expovariate(1 / mean_s)
        yield at


def _killed_run(
    command: list[str], run: Path, every: int, instants: Iterator[float], generator: random.Random
) -> tuple[float, list[int]]:
    """Kills a run's workers at the given times; returns its duration in seconds and the steps lost by each kill."""
    started, lost, last = time.monotonic(), [], 0
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    due = next(instants)
    while process.poll() is None:
        if time.monotonic() - started >= due:
            pids = workers(process.pid)
            if len(pids) == WORKERS and (step := _last_step(run)):
                os.kill(generator.choice(pids), signal.SIGKILL)
                lost.append(step % every if step != last else 0)  # same step as before: still starting
                print(f"{due:.0f} s: killed after step {step}, {lost[-1]} steps lost", flush=True)
                last = step
            due = next(instants)
        time.sleep(0.05)
    if process.returncode:
        raise SystemExit(f"the run ended with exit code {process.returncode}; see {run / 'logs'}")
    return time.monotonic() - started, lost


def _last_step(run: Path) -> int:
    """Returns the last logged step, or 0 if there is none."""
    file = run / "metrics.jsonl"
    lines = file.read_text().splitlines() if file.exists() else []
    return int(json.loads(lines[-1])["step"]) if lines else 0


def _write(found: dict[str, Any]) -> None:
    hardware = f"{available_cores()} × {platform.machine()} CPU, gloo"
    document = {
        **short_facts(" ".join(["python", *sys.argv]), hardware, "torch", "deepspeed"),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        **found,
    }
    RESULT.write_text(json.dumps(document, indent=2) + "\n")
    print(f"{found['effective']:.1%} effective, {found['of_the_ideal']:.1%} of the ideal ({found['ideal']:.1%})")


if __name__ == "__main__":
    main()
