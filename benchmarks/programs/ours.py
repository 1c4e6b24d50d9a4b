"""Runs `llmtrain train RECIPE` as a user does; prints one line of JSON, computed from its run directory.

python -m benchmarks.programs.ours --ranks 2 --steps 60 --set parallel.zero_stage=1

Seconds are counted from the command. The phases of the start are derived from the times at which files appear in the
run directory. Speed is the median of the logged windows after the first; it includes data, logging, guard and watcher.
The run does not evaluate or export, and it saves only at the end.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.programs.windows import ENDS

RECIPE = "recipes/tiny.py"
ALONE = ("evaluation.every_steps=0", "checkpoint.every_steps=1000000", "export.at_end=false")
POLL_S = 0.002


def main() -> None:
    """Runs the command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--recipe", default=RECIPE)
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--set", action="append", default=[], dest="fields")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        run = Path(name) / "run"
        command = [sys.executable, "-m", "llmtrain", "train", options.recipe, "--run-dir", str(run)]
        command += ["--nproc", str(options.ranks), "--max-steps", str(options.steps)]
        for field in (*ALONE, *options.fields):
            command += ["--set", field]
        watched = {
            "planned_s": run / "recipe.json",
            "worker_s": run / "logs" / "rank_0.log",
            "engine_s": run / "tokenizer" / "tokenizer.json",
            "first_log_s": run / "metrics.jsonl",
        }
        found: dict[str, Any] = {}
        started = time.time()
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
        while process.poll() is None:
            for number, path in watched.items():
                if number not in found and path.exists() and (number != "first_log_s" or path.stat().st_size):
                    found[number] = time.time() - started
            time.sleep(POLL_S if len(found) < len(watched) else 0.1)
        if process.returncode:
            raise SystemExit(process.returncode)
        lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    windows = [line for line in lines if "loss" in line][1:]
    if windows:
        found["step_ms"] = statistics.median(line["step_time_s"] for line in windows) * 1000
        found["tokens_per_second"] = statistics.median(line["tokens_per_second"] for line in windows)
        found["stall"] = statistics.median(line["data_wait_s"] / line["step_time_s"] for line in windows)
        if windows[-1]["mfu"] is not None:
            found["mfu"] = statistics.median(line["mfu"] for line in windows)
        found["peak_gib"] = windows[-1]["peak_memory_bytes"] / 2**30
    if "logging.every_steps=1" in options.fields:
        found["first_step_s"] = found.pop("first_log_s")
        found[ENDS] = [line["time"] for line in lines if "loss" in line]
    else:
        found.pop("first_log_s", None)
    print(json.dumps(found))


if __name__ == "__main__":
    main()
