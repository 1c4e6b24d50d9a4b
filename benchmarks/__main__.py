"""`python -m benchmarks NAME` runs a benchmark and writes the result to `results/NAME.json`.

Without a NAME, it lists the benchmarks. A result is kept only if all of it was measured on an otherwise idle machine.
With fewer `--pairs` than the benchmark needs, with `--only`, `--short` or `--force`, the verdicts are only printed; the
result is written only if `--out` names a file. If a case fails, the others are kept in NAME.failed.json.
"""

from __future__ import annotations

import argparse
import json
import shlex
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.benchmark import Benchmark, Script
from benchmarks.definitions import BENCHMARKS
from benchmarks.gpu import run as gpu
from benchmarks.machine import facts
from benchmarks.pairs import OTHERS, ROOT, SideFailedError, run_case
from llmtrain.system.host import available_cores, cores_used_by_others, max_cores_used_by_others

RESULTS = ROOT / "benchmarks" / "results"
LOOK_S = 3.0
"""Seconds for which the load of other processes is measured before anything is started."""


def main(arguments: list[str] | None = None) -> None:
    """Lists the benchmarks, or runs one."""
    words = sys.argv[1:] if arguments is None else arguments
    if words[:1] == ["gpu"]:  # has options of its own, and keeps what it has when it is stopped
        gpu.main(words[1:])
        return
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("name", nargs="?", choices=BENCHMARKS)
    parser.add_argument("--pairs", type=int, help="runs of each side, in turn; what a result needs if not given")
    parser.add_argument("--only", help="cases whose name has this in it")
    parser.add_argument("--short", action="store_true", help="small sizes: shows that all of it runs")
    parser.add_argument("--force", action="store_true", help="measure on a busy machine too")
    parser.add_argument("--out", type=Path, help="where the JSON goes, instead of results/NAME.json")
    options = parser.parse_args(arguments)
    if options.name is None:
        for benchmark in BENCHMARKS.values():
            where = ", on a GPU" if isinstance(benchmark, Script) and benchmark.needs_gpu else ""
            print(f"{benchmark.name:15} about {benchmark.minutes:3} min  {benchmark.title}{where}")
        return
    benchmark = BENCHMARKS[options.name]
    if not options.force:
        _refuse_busy()
    if isinstance(benchmark, Script):
        _run_script(benchmark, RESULTS / f"{benchmark.name}.json")
        return
    pairs = options.pairs or benchmark.pairs
    is_whole = pairs >= benchmark.pairs and not (options.short or options.force or options.only)
    out = options.out or (RESULTS / f"{benchmark.name}.json" if is_whole else None)
    document = measure(benchmark, pairs, options.short, options.only)
    has_failed = "failed" in document
    if has_failed and out is not None:
        out = out.with_suffix(".failed.json")
    for verdict in [] if options.only or has_failed else benchmark.verdicts(document):
        print(f"{'met   ' if verdict.met else 'MISSED'} {verdict.aim}: {verdict.found}")
    if out is None:
        print("not kept: a result needs all its pairs, whole sizes, every case and an idle machine")
        return
    out.parent.mkdir(exist_ok=True)
    out.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    if has_failed:
        sys.exit(f"{out} has the other cases; {len(document['failed'])} failed: {', '.join(document['failed'])}")
    print(f"{out}; now `python tools/render.py benchmarks benchmark_pictures`")


def measure(benchmark: Benchmark, pairs: int, short: bool, only: str | None = None) -> dict[str, Any]:
    """Runs all cases of a benchmark and returns the result; `failed` has the cases in which a command failed."""
    words = ["python", "-m", "benchmarks", benchmark.name]
    words += [*(["--pairs", str(pairs)] if pairs != benchmark.pairs else []), *(["--short"] if short else [])]
    document: dict[str, Any] = {"benchmark": benchmark.name, "command": " ".join(words), **facts(), "pairs": pairs}
    started = time.monotonic()

    def say(line: str) -> None:
        print(f"[{time.monotonic() - started:6.0f} s of about {60 * benchmark.minutes}] {line}", flush=True)

    with tempfile.TemporaryDirectory(prefix="benchmark-") as name:
        document["cases"], failed = [], {}
        for case in benchmark.cases(short):
            if only is None or only in case.name:
                try:
                    document["cases"].append(run_case(case, pairs, Path(name), say, benchmark.in_turns))
                except SideFailedError as error:
                    failed[case.name] = str(error)
                    say(f"{case.name}: {error}")
    document["seconds"] = round(time.monotonic() - started, 1)
    runs = [run for case in document["cases"] for side in case["sides"] for run in side["runs"]]
    document[OTHERS] = max((run[OTHERS] for run in runs), default=0.0)
    return document | ({"failed": failed} if failed else {})


def _refuse_busy() -> None:
    busy, most = cores_used_by_others(LOOK_S), max_cores_used_by_others(available_cores())
    if busy > most:
        sys.exit(
            f"this machine is busy: others use {busy:.2f} cores, where {most:.2f} may be used; "
            "wait, or measure all the same with --force"
        )


def _run_script(script: Script, out: Path) -> None:
    command = [sys.executable if word == "python" else word for word in script.command]
    print(shlex.join(script.command), flush=True)
    if not script.prints_result:
        raise SystemExit(subprocess.run(command, cwd=ROOT, check=False).returncode)
    done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=False)
    if done.returncode == 0:
        out.write_text(done.stdout, encoding="utf-8")
    raise SystemExit(done.returncode)


if __name__ == "__main__":
    main()
