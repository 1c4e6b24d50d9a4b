"""`python -m benchmarks gpu`: runs the cases, each in a process of its own, until the minutes are over.

python -m benchmarks gpu --minutes 9 --out DIR                    everything, most important first
python -m benchmarks gpu --minutes 5 --out DIR --done RESULTS     only what RESULTS (an earlier gpu.json) lacks
python -m benchmarks gpu --list                                   the cases and their approximate seconds

Nothing is downloaded. After each case, DIR has gpu.json (all results), table.md (the same as a table) and logs.txt (the
output of the cases). A case that takes too long is killed, and none is begun for which too little time is left. To
publish a result, copy DIR/gpu.json to benchmarks/results/ and run `python tools/render.py gpu benchmarks`.
"""

from __future__ import annotations

import argparse
import json
import os
import select
import shlex
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

from benchmarks.gpu.case import Case
from benchmarks.gpu.cases import CASES, SECOND_TURN, TOGETHER
from benchmarks.gpu.page import in_short, table
from benchmarks.machine import facts
from benchmarks.pairs import ROOT, python_path
from benchmarks.turns import family
from llmtrain.errors import did_you_mean
from llmtrain.recipe.cluster import visible_gpus
from llmtrain.system.durable import write_atomically
from llmtrain.system.untrusted import UNREADABLE, file_fault, read_json

RESERVE_S = 5.0
"""Seconds that are kept for ending."""
PATIENCE, IMPORTS_S = 2.5, 40.0
"""A case may take `PATIENCE` times its approximate duration, plus `IMPORTS_S`."""
SMALL_S, SMALL_LIMIT_S = 20, 400.0
"""With small models: with how many seconds left a case is begun, and how many it may take, whatever the machine."""
LOG_LINES = 12
"""Number of lines of its output that the result of a failed case has."""
TAIL_BYTES = 200_000
WIDTH = 160
"""Longest line on the screen, in characters."""
RESULT, TABLE, LOGS = "gpu.json", "table.md", "logs.txt"
SELF_TEST = "self-test"
PROCESS = "benchmarks.gpu.process"
ROOM = 30 * 2**30
"""Bytes that the weights of the largest model and the checkpoints need."""
Row = dict[str, Any]


@dataclass
class _Running:
    """The process of a case."""

    name: str
    process: subprocess.Popen[str]
    log: IO[str] = field(repr=False)

    def answer(self, limit: float, rates: Path | None) -> Row:
        """Lets it measure for at most `limit` seconds, and returns its answer. rates: a file of `MeasuredRates`."""
        assert self.process.stdin, "it is a pipe"
        assert self.process.stdout, "it is a pipe"
        with suppress(BrokenPipeError):  # it has ended while it waited
            self.process.stdin.write(f"{rates or ''}\n")
            self.process.stdin.flush()
        if not select.select([self.process.stdout], [], [], max(limit, 0))[0]:
            return {"status": "failed", "reason": f"killed after {limit:.0f} s"}
        if line := self.process.stdout.readline():
            row: Row = json.loads(line)
            return row
        return {"status": "failed", "reason": f"its process ended with code {self.process.wait()}"}

    def kill(self) -> None:
        """Ends it and all that it has started."""
        for pid in family(self.process.pid):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)  # those whose parents have ended
        self.process.wait()

    def written(self) -> str:
        """Returns the end of what it wrote to standard error."""
        size = os.fstat(self.log.fileno()).st_size
        return os.pread(self.log.fileno(), TAIL_BYTES, max(0, size - TAIL_BYTES)).decode(errors="replace")


class Measurement:
    """A call of the command."""

    def __init__(
        self,
        minutes: float,
        out: Path,
        small: bool,
        done: Mapping[str, Any],
        given: Mapping[str, Any],
        work: Path,
    ) -> None:
        """done: the document of an earlier call, or empty. given: hardware, versions, commit and command."""
        self._started = time.monotonic()
        self._until = self._started + 60 * minutes - RESERVE_S
        self._out, self._small, self._work = out, small, work
        self._facts = given
        self._earlier: list[Row] = done.get("rows", [])
        self._earlier_facts = [*done.get("earlier", []), *([{name: done[name] for name in given}] if done else [])]
        self._rows: list[Row] = []
        self._waiting: dict[str, _Running] = {}
        self._running: list[_Running] = []
        self._lock = threading.Lock()

    @property
    def succeeded(self) -> bool:
        """Whether no case of this call has failed."""
        return all(row["status"] != "failed" for row in self._rows)

    def run(self, names: Sequence[str]) -> None:
        """Runs cases, in this order."""
        done = {row["case"] for row in self._earlier if row["status"] == "done"}
        groups = list(_grouped([name for name in names if name not in done]))
        self._write()
        try:
            for group, following in zip(groups, [*groups[1:], []], strict=True):
                self._run_group(group, following)
        finally:
            for one in (*self._waiting.values(), *self._running):
                one.kill()

    def _run_group(self, group: Sequence[str], following: Sequence[str]) -> None:
        self._running = []
        for name in group:
            if self._left() < self._seconds(CASES[name]):
                reason = f"{max(self._left(), 0):.0f} s were left, and it takes about {self._seconds(CASES[name])}"
                self._keep({"case": name, "status": "skipped", "reason": reason}, "")
            else:
                self._running.append(self._waiting.pop(name) if name in self._waiting else self._start(name))
        for name in following:
            if CASES[name].imports and self._left() > self._seconds(CASES[name]):
                self._waiting[name] = self._start(name)
        threads = [threading.Thread(target=self._follow, args=(one,)) for one in self._running]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    def _start(self, name: str) -> _Running:
        command = [sys.executable, "-m", PROCESS, name, "--work", str(self._work)]
        command += ["--small"] if self._small else []
        log = tempfile.TemporaryFile("w+", dir=self._work)  # noqa: SIM115  (closed with `_Running`)
        process = subprocess.Popen(
            command,
            cwd=ROOT,
            env=self._environment(),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
            start_new_session=True,
        )
        return _Running(name, process, log)

    def _environment(self) -> dict[str, str]:
        """Returns the variables of a case. Caches last as long as the call, so that nothing depends on earlier ones."""
        caches = {"LLMTRAIN_CACHE": "cache", "TORCHINDUCTOR_CACHE_DIR": "inductor", "TRITON_CACHE_DIR": "triton"}
        return {
            **os.environ,
            **{name: str(self._work / folder) for name, folder in caches.items()},
            "PYTHONPATH": python_path(),
            "PYTHONUNBUFFERED": "1",
            "HF_HUB_OFFLINE": "1",
            "TMPDIR": str(self._work),
        }

    def _follow(self, one: _Running) -> None:
        """Lets a process measure, and keeps what it found."""
        case, started = CASES[one.name], time.monotonic()
        usual = SMALL_LIMIT_S if self._small else PATIENCE * case.seconds
        limit = min(usual + IMPORTS_S, self._left())
        try:
            row = one.answer(limit, self._rates())
        finally:
            one.kill()
        log = one.written()
        if row["status"] == "failed":
            row["log"] = [line[:300] for line in log.splitlines()[-LOG_LINES:]]
        wall = round(time.monotonic() - started, 1)
        self._keep({"case": one.name, "question": case.question, **row, "wall_s": wall}, log)
        one.log.close()

    def _keep(self, row: Row, log: str) -> None:
        """Adds a row, and writes all files."""
        with self._lock:
            self._rows.append({**row, "date": self._facts["date"]})
            with (self._out / LOGS).open("a", encoding="utf-8") as file:
                file.write(f"\n===== {row['case']}\n{log}\n")
            self._write()
            told = row.get("reason") or in_short(row.get("found", {}))
            spent = time.monotonic() - self._started
            print(f"[{spent:4.0f} s] {row['case']:17} {row['status']:7} {told}"[:WIDTH], flush=True)

    def _write(self) -> None:
        repeated = {row["case"] for row in self._rows}
        rows = [*(row for row in self._earlier if row["case"] not in repeated), *self._rows]
        document = {
            "benchmark": "gpu",
            "small": self._small,
            **self._facts,
            "earlier": self._earlier_facts,
            "rows": rows,
        }
        write_atomically(self._out / RESULT, json.dumps(document, indent=1) + "\n")
        write_atomically(self._out / TABLE, table(rows))

    def _rates(self) -> Path | None:
        """Writes the rates that the self-test has measured, in this call or an earlier one, and returns the file."""
        for row in [*self._rows, *reversed(self._earlier)]:
            if row["case"] == SELF_TEST and (measured := row.get("found", {}).get("measured")):
                file = self._work / "rates.json"
                write_atomically(file, json.dumps(measured))
                return file
        return None

    def _left(self) -> float:
        return self._until - time.monotonic()

    def _seconds(self, case: Case) -> int:
        return SMALL_S if self._small else case.seconds


def _grouped(names: Sequence[str]) -> Iterator[list[str]]:
    """Yields cases that run at the same time."""
    begun: set[str] = set()
    for name in names:
        if name not in begun:
            beside = next((group for group in TOGETHER if name in group), [name])
            group = [one for one in names if one in beside]
            begun.update(group)
            yield group


def _fast_folder() -> str | None:
    """Returns the memory file system if it has room: weights and checkpoints would take minutes on a slow disk."""
    try:
        found = os.statvfs("/dev/shm")
    except OSError:
        return None
    return "/dev/shm" if found.f_bavail * found.f_frsize >= ROOM else None


def _chosen(only: str | None, small: bool, parser: argparse.ArgumentParser) -> list[str]:
    if only is None:
        return [name for name in CASES if not (small and name in SECOND_TURN)]
    names = [name.strip() for name in only.split(",")]
    for name in names:
        if name not in CASES:
            parser.error(f"--only: there is no case '{name}'{did_you_mean(name, CASES)} --list shows all")
    return [name for name in CASES if name in names]


def _earlier(file: Path | None, small: bool, parser: argparse.ArgumentParser) -> dict[str, Any]:
    """Returns the document of an earlier call."""
    if file is None:
        return {}
    try:
        document = read_json(file, dict[str, Any])
    except UNREADABLE as error:
        parser.error(f"--done {file}: {file_fault(error)}")
    if document.get("benchmark") != "gpu" or document.get("small") != small:
        parser.error(f"--done {file}: is no result of this command {'with' if small else 'without'} --small")
    return document


def main(arguments: Sequence[str] | None = None) -> None:
    """Measures. Exits with 1 if a case failed, and with 130 if it was interrupted."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks gpu", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--minutes", type=float, default=9, help="time until it ends; default: 9")
    parser.add_argument("--out", type=Path, default=Path("gpu_results"), help="folder of the results")
    parser.add_argument("--done", type=Path, help="gpu.json of an earlier call, whose successful cases are kept")
    parser.add_argument("--only", help="names of cases, separated by commas")
    parser.add_argument("--small", action="store_true", help="small models: shows that everything runs, on a CPU too")
    parser.add_argument("--commit", help="the commit, where the sources are no git repository")
    parser.add_argument("--list", action="store_true", help="print the cases, and end")
    options = parser.parse_args(arguments)
    names = _chosen(options.only, options.small, parser)
    if options.list:
        for name in names:
            print(f"{name:17} about {CASES[name].seconds:3} s  {CASES[name].question}")
        return
    if not options.small and not visible_gpus():
        parser.error("this machine shows no GPU; --small runs all of it with small models")
    done = _earlier(options.done, options.small, parser)
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / LOGS).unlink(missing_ok=True)
    words = ["python", "-m", "benchmarks", "gpu", "--minutes", f"{options.minutes:g}"]
    words += [*(["--only", options.only] if options.only else []), *(["--small"] if options.small else [])]
    given = {**facts(), "command": shlex.join(words)}
    if options.commit:
        given["commit"] = options.commit
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    with tempfile.TemporaryDirectory(prefix="gpu-", dir=_fast_folder(), ignore_cleanup_errors=True) as work:
        measurement = Measurement(options.minutes, options.out, options.small, done, given, Path(work))
        try:
            measurement.run(names)
        except KeyboardInterrupt:
            sys.exit(130)
        finally:
            print(f"{options.out / RESULT}, {options.out / TABLE}, {options.out / LOGS}")
    sys.exit(0 if measurement.succeeded else 1)
