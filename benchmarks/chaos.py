"""Kills saves and runs, and counts what was lost: `python benchmarks/chaos.py --kills 500`.

Saves are killed before and after each of their filesystem calls, in the middle of each write, and at random times. This
is done on one rank and on several, with a stand-in and with DeepSpeed's engine (`tests/helpers/killing.py` has the
campaigns). Whole runs are killed next: the same run is started and killed repeatedly, and its final output is compared
bit for bit with that of an undisturbed run. The program writes `benchmarks/results/chaos.json`. It ends with an error
if a kill costs more than the save that it interrupts.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
RESULT = ROOT / "benchmarks/results/chaos.json"
os.environ.update(DS_ACCELERATOR="cpu", OMP_NUM_THREADS="1", TOKENIZERS_PARALLELISM="false", HF_HUB_OFFLINE="1")

from benchmarks.benchmark import sets  # noqa: E402
from benchmarks.machine import short_facts  # noqa: E402
from llmtrain.system.host import available_cores  # noqa: E402
from tests.helpers import killing  # noqa: E402
from tests.helpers.commands import llmtrain, losses, metrics, workers  # noqa: E402
from tests.helpers.small_runs import write_small_recipe  # noqa: E402

MEMORY = Path("/dev/shm")
TRAIN = ("--nproc", "2", *sets("parallel.zero_stage=1", "checkpoint.every_steps=2", "train.max_steps=400"))
DELAY_S = 3.0
"""Longest time in seconds between the first logged line of an attempt and its kill."""


def main() -> None:
    """Runs the campaigns until they have made the requested number of kills, and writes the results."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=500)
    parser.add_argument("--runs", type=int, default=8, help="of these kills, so many of whole runs")
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=MEMORY if MEMORY.is_dir() else None) as name:
        campaigns = [_timed(what, campaign) for what, campaign in _campaigns(Path(name), options.runs, options.seed)]
        missing = max(0, options.kills - sum(one["kills"] for one in campaigns))
        rest = Path(name) / "rest" / "checkpoints"
        campaigns.append(
            _timed("one rank, at random instants", lambda: killing.at_random_instants(rest, missing, options.seed))
        )
    kills = sum(one["kills"] for one in campaigns)
    hardware = f"{available_cores()} × {platform.machine()} CPU, gloo, tmpfs"
    document = {
        **short_facts(" ".join(["python", *sys.argv]), hardware, "torch", "deepspeed"),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "kills": kills,
        "unloadable": 0,  # an unloadable save, or the loss of a second interval, would have ended the program
        "campaigns": campaigns,
    }
    RESULT.write_text(json.dumps(document, indent=2) + "\n")
    print(f"{kills} kills, 0 unloadable")


def _campaigns(folder: Path, runs: int, seed: int) -> list[tuple[str, Callable[[], int]]]:
    found: list[tuple[str, Callable[[], int]]] = []
    for kind, what in (("kill", "before each call"), ("half", "after each call or half of a write")):
        for back in (False, True):
            told = f"one rank, {what}{', over an older checkpoint' if back else ''}"
            found.append((told, partial(killing.at_every_call, folder / f"{kind}{back}", kind, back)))
    for ranks, kills in ((2, 40), (4, 20)):
        found.append((f"{ranks} ranks", partial(killing.of_ranks, folder / f"s{ranks}", ranks, kills, seed)))
        real = partial(killing.of_ranks, folder / f"z{ranks}", ranks, kills // 4, seed, real=True)
        found.append((f"{ranks} ranks of DeepSpeed", real))
    found.append(("whole runs of 2 ranks", lambda: _runs(folder / "runs", runs, seed)))
    return found


def _timed(what: str, campaign: Callable[[], int]) -> dict[str, Any]:
    start = time.monotonic()
    kills = campaign()
    seconds = time.monotonic() - start
    print(f"{what}: {kills} kills in {seconds:.0f} s", flush=True)
    return {"what": what, "kills": kills, "seconds": round(seconds, 1)}


def _runs(folder: Path, kills: int, seed: int) -> int:
    """Kills one run repeatedly, and compares its output with that of an undisturbed run."""
    generator = random.Random(seed)
    folder.mkdir(parents=True)
    recipe = write_small_recipe(folder)
    killed, whole = folder / "killed", folder / "whole"
    for _ in range(kills):
        before = killing.assert_whole(killed / "checkpoints", at_least=0) if (killed / "checkpoints").exists() else 0
        _attempt(recipe, killed, generator)
        assert killing.assert_whole(killed / "checkpoints", at_least=before) >= before
    for run in (killed, whole):
        result = llmtrain("train", recipe, "--run-dir", run, *TRAIN)
        assert result.returncode == 0, result.stderr
    assert losses(killed) == losses(whole)
    assert [line["step"] for line in metrics(killed) if "loss" in line] == list(range(1, 401))
    weights = [(run / "export" / "model.safetensors").read_bytes() for run in (killed, whole)]
    assert weights[0] == weights[1]
    return kills


def _attempt(recipe: Path, run: Path, generator: random.Random) -> None:
    """Starts the run and, at a random time after its first logged line, kills one of its workers or the launcher."""
    command = [sys.executable, "-m", "llmtrain", "train", str(recipe), "--run-dir", str(run), *TRAIN]
    log = run / "metrics.jsonl"
    seen = log.stat().st_mtime_ns if log.exists() else 0
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    while not (log.exists() and log.stat().st_mtime_ns != seen):
        assert process.poll() is None, f"the run ended before it was killed; see {run / 'logs'}"
        time.sleep(0.01)
    time.sleep(generator.uniform(0, DELAY_S))
    os.kill(generator.choice([process.pid, *workers(process.pid)]), signal.SIGKILL)
    process.wait()
    time.sleep(0.5)  # until the kernel has ended the workers of a killed launcher


if __name__ == "__main__":
    main()
