"""Reads a run from its directory, whether the run is finished, active or damaged."""

from __future__ import annotations

import math
import os
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from io import BufferedReader
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from pydantic import TypeAdapter, ValidationError
from pydantic_core import from_json

from llmtrain.checkpoint.folder import STATE_FILE, find, newest, step_of
from llmtrain.errors import CheckpointError, Problem, RecipeError
from llmtrain.plan.plan import Plan
from llmtrain.report.table import MetricsTable, as_number
from llmtrain.run_dir import RunDir
from llmtrain.run_dir.lock import is_held
from llmtrain.system.untrusted import UNREADABLE, file_fault, open_regular, read_json

T = TypeVar("T")
MAX_LINE_BYTES = 1 << 20
"""Size limit of a line in bytes. Longer lines are skipped."""
MAX_ENTRIES = 10_000
"""Number of events and of samples of a run that are kept (the newest ones)."""
MAX_PROFILES = 64
"""Number of profiled windows that are read (the newest ones)."""
MAX_PROFILE_BYTES = 1 << 20
MAX_DOCUMENT_BYTES = 16 << 20
"""Size limit in bytes of a JSON document. The plan of a large model lists all of its weights."""
STILL_S = 120.0
"""Seconds without a new line after which a run without a lock is considered to have ended."""


@dataclass(frozen=True)
class RunEvent:
    """Something that happened to a run: `started`, `stopped`, `died`, `finished`, `skipped` or `rolled_back`."""

    event: str
    step: int
    """Number of optimizer steps taken."""
    time: str = ""
    """UTC, ISO 8601."""
    text: str = ""
    """Readable description."""


@dataclass(frozen=True)
class TextSample:
    """A text that the model wrote during training."""

    step: int
    prompt: str
    text: str


@dataclass(frozen=True)
class SavedCheckpoint:
    """A checkpoint of a run."""

    folder: Path
    step: int
    bytes: int
    written: str
    """UTC, ISO 8601."""
    eval_loss: float | None
    is_latest: bool
    problem: str = ""
    """Why its manifest cannot be read, in which case size and time are unknown; empty if it can."""


@dataclass(frozen=True)
class ProfiledWindow:
    """Steps that a rank recorded with torch's profiler, with the content of the window's summary."""

    step: int
    rank: int
    device: str
    seconds: float
    computation: float
    communication: float
    exposed_communication: float
    operations: tuple[dict[str, str | int | float], ...]


@dataclass(frozen=True)
class TaskScores:
    """Scores of downstream tasks after a step."""

    step: int
    scores: dict[str, float]
    """`TASK METRIC` → score."""


@dataclass(frozen=True)
class RunData:
    """All information about a run that its directory contains."""

    path: Path
    recipe: dict[str, Any] = field(default_factory=dict)
    """Dotted name → value of each field of the recipe."""
    plan: Plan | None = None
    """None if it is missing, or was written by a version of llmtrain with another plan format."""
    environment: dict[str, Any] = field(default_factory=dict)
    """Versions, machine and commit of the last start."""
    launch: dict[str, Any] = field(default_factory=dict)
    """The last start of the workers."""
    metrics: MetricsTable = field(default_factory=MetricsTable)
    """The logged steps."""
    evaluations: MetricsTable = field(default_factory=MetricsTable)
    events: tuple[RunEvent, ...] = ()
    samples: tuple[TextSample, ...] = ()
    checkpoints: tuple[SavedCheckpoint, ...] = ()
    data_key: str = ""
    """Identifies the prepared data (tokens and their order). Read from the newest checkpoint."""
    profiles: tuple[ProfiledWindow, ...] = ()
    scores: tuple[TaskScores, ...] = ()
    status: str = "unknown"
    """`running`, `finished`, `stopped`, `died`, `interrupted` (killed, or without a recorded end) or `new`."""
    seconds_since_line: float | None = None
    """Age of the newest line of the metrics in seconds, by this machine's clock."""
    problems: tuple[str, ...] = ()
    """Readable descriptions of files and lines that could not be read."""

    @property
    def name(self) -> str:
        """The name of the recipe or, if unknown, of the folder."""
        return str(self.recipe.get("name") or self.path.resolve().name)

    @property
    def step(self) -> int:
        """The last step that was logged, evaluated or saved; 0 if there is none."""
        logged = (table.last("step") or 0 for table in (self.metrics, self.evaluations))
        return int(max([*logged, *(checkpoint.step for checkpoint in self.checkpoints)]))

    @property
    def max_steps(self) -> int | None:
        """The number of steps of the whole run, if it is known."""
        steps = self.recipe.get("train.max_steps")
        return steps if type(steps) is int else None


def read_run(path: str | Path) -> RunData:
    """Returns the run in a directory. Raises RecipeError if the directory holds no run."""
    return RunReader(Path(path)).read()


class RunReader:
    """Reads a run directory repeatedly. Of its files, it only reads those that have changed."""

    def __init__(self, path: Path) -> None:
        """Raises RecipeError if the folder is not that of a run."""
        self._dir = RunDir(path)
        if not self._dir.recipe_file.is_file() and not self._dir.metrics_file.is_file():
            why_not = "is not a run directory: it has no recipe.json and no metrics.jsonl"
            message = why_not if os.path.lexists(path) else "does not exist"
            raise RecipeError(Problem("run_dir.missing", str(path), message))
        self._contents: dict[Path, _Content] = {}
        self._problems: list[str] = []

    @property
    def stamp(self) -> str:
        """A value that changes whenever one of the files that were read changes."""
        stamps = {str(path): content.stamp for path, content in self._contents.items()}
        return repr((stamps, self._problems))

    def read(self) -> RunData:
        """Returns the current state of the run. Unreadable files and lines are left out and listed in `problems`."""
        self._problems = []
        metrics, evaluations = self._current(self._dir.metrics_file, _tables, (MetricsTable(), MetricsTable()))
        events = self._current(self._dir.events_file, partial(_entries, RunEvent), ())
        samples = self._current(self._dir.samples_file, partial(_entries, TextSample), ())
        checkpoints = self._current(self._dir.checkpoints, _checkpoints, ())
        recipe = self._document(self._dir.recipe_file, dict[str, Any], {})
        latest = next((checkpoint.folder for checkpoint in checkpoints if checkpoint.is_latest), None)
        state = self._document(latest / STATE_FILE, dict[str, Any], {}) if latest else {}
        age = _age(self._dir.metrics_file)
        return RunData(
            path=self._dir.path,
            recipe=dotted(recipe),
            plan=self._document(self._dir.plan_file, Plan, None),
            environment=self._document(self._dir.environment_file, dict[str, Any], {}),
            launch=self._document(self._dir.launch_file, dict[str, Any], {}),
            metrics=metrics,
            evaluations=evaluations,
            events=events,
            samples=samples,
            checkpoints=checkpoints,
            data_key=str(state.get("data", "")),
            profiles=self._profiles(),
            scores=self._scores(),
            status=self._status(events, age),
            seconds_since_line=age,
            problems=tuple(self._problems),
        )

    def _current(self, path: Path, read: Callable[[Path], tuple[Any, str]], missing: Any) -> Any:
        """Returns the content of a file or a folder, which is read again only if it has changed.

        If that fails, returns what was read before. read: returns the content, and what is wrong with it.
        """
        try:
            status = path.stat()
            stamp = status.st_mtime_ns, status.st_size
            if path not in self._contents or self._contents[path].stamp != stamp:
                self._contents[path] = _Content(stamp, *read(path))
        except FileNotFoundError:
            return missing
        except CheckpointError as error:
            self._problems.append(str(error))
        except UNREADABLE as error:
            self._problems.append(f"{path}: cannot be read: {file_fault(error)}")
        if path not in self._contents:
            return missing
        content = self._contents[path]
        if content.fault:
            self._problems.append(f"{path}: {content.fault}")
        return content.value

    def _document(self, file: Path, kind: Any, missing: Any) -> Any:
        """Returns the content of a JSON file."""
        return self._current(file, lambda file: (read_json(file, kind, MAX_DOCUMENT_BYTES), ""), missing)

    def _profiles(self) -> tuple[ProfiledWindow, ...]:
        def windows(file: Path, step: int) -> ProfiledWindow | None:
            about = self._document(file, dict[str, Any], None)
            try:
                rank = int(file.stem.removeprefix("rank_"))
                return about and TypeAdapter(ProfiledWindow).validate_python(about | {"step": step, "rank": rank})
            except ValueError:
                self._problems.append(f"{file}: is not a summary of the profiler")
                return None

        return tuple(self._by_step(self._dir.profile, "step_*/rank_*.json", windows))

    def _scores(self) -> tuple[TaskScores, ...]:
        def scores(file: Path, step: int) -> TaskScores | None:
            about = self._document(file, dict[str, Any], None)
            return about and TaskScores(step, dict(_scores(about.get("results"))))

        return tuple(self._by_step(self._dir.path / "eval", "step_*.json", scores))

    def _by_step(self, folder: Path, pattern: str, read: Callable[[Path, int], T | None]) -> list[T]:
        """Returns the content of the files in a folder whose names contain a step, for the newest steps."""
        files = []
        try:
            for file in folder.glob(pattern):
                digits = file.relative_to(folder).parts[0].removeprefix("step_").removesuffix(".json")
                if digits.isdecimal() and len(digits) <= 15 and file.stat().st_size <= MAX_PROFILE_BYTES:
                    files.append((int(digits), file))
        except OSError as error:
            self._problems.append(f"{folder}: cannot be read: {file_fault(error)}")
        one_by_one = (read(file, step) for step, file in sorted(files)[-MAX_PROFILES:])
        return [entry for entry in one_by_one if entry is not None]

    def _status(self, events: Sequence[RunEvent], age: float | None) -> str:
        last = next((event.event for event in reversed(events) if event.event in _STATUS), None)
        if last in ("stopped", "died", "finished"):
            return last
        if is_held(self._dir.path) or (age is not None and age < STILL_S):
            return "running"
        return "interrupted" if age is not None or last else "new"


class _Content(NamedTuple):
    """What was read from a file or a folder."""

    stamp: tuple[int, int]
    """Time of its last change, in nanoseconds, and its size."""
    value: Any
    fault: str
    """What is wrong with it; empty if nothing is."""


_STATUS = ("started", "stopped", "died", "finished")


def _tables(file: Path) -> tuple[tuple[MetricsTable, MetricsTable], str]:
    """Returns the logged steps and the evaluations in a file."""
    metrics, evaluations, damaged = MetricsTable(), MetricsTable(), 0
    for record in _records(file):
        table = evaluations if "eval_loss" in record else metrics
        damaged += not table.add(record)
    return (metrics, evaluations), _damage(damaged)


def _entries(kind: type[T], file: Path) -> tuple[tuple[T, ...], str]:
    """Returns the newest objects of a type in a file."""
    adapter, damaged, entries = TypeAdapter(kind), 0, deque[T](maxlen=MAX_ENTRIES)
    for record in _records(file):
        try:
            entries.append(adapter.validate_python(record))
        except ValidationError:
            damaged += 1
    return tuple(entries), _damage(damaged)


def _damage(lines: int) -> str:
    return f"{lines:,} lines are damaged, or too many, and left out" if lines else ""


def _records(file: Path) -> Iterator[dict[str, Any]]:
    """Yields the JSON object of each line, or an empty one if there is none. An unfinished last line is left out."""
    with BufferedReader(open_regular(file)) as lines:
        while line := lines.readline(MAX_LINE_BYTES):
            if line.endswith(b"\n") or len(line) == MAX_LINE_BYTES:
                try:
                    value = from_json(line, allow_inf_nan=True)
                except ValueError:
                    value = None
                yield value if isinstance(value, dict) else {}


def dotted(document: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Returns dotted name → value for nested objects. Lists count as values."""
    flat: dict[str, Any] = {}
    for name, value in document.items():
        if isinstance(value, dict) and value:
            flat |= dotted(value, f"{prefix}{name}.")
        else:
            flat[prefix + name] = value
    return flat


def _age(file: Path) -> float | None:
    try:
        return max(0.0, time.time() - file.stat().st_mtime)
    except OSError:
        return None


def _checkpoints(folder: Path) -> tuple[tuple[SavedCheckpoint, ...], str]:
    latest = newest(folder)
    saved = tuple(
        SavedCheckpoint(
            folder=checkpoint.folder,
            step=checkpoint.manifests[0].step if checkpoint.manifests else step_of(checkpoint.folder.name),
            bytes=sum(part.bytes for part in checkpoint.manifests),
            written=checkpoint.written,
            eval_loss=checkpoint.manifests[0].eval_loss if checkpoint.manifests else None,
            is_latest=checkpoint.folder == latest,
            problem="; ".join(map(str, checkpoint.problems)),
        )
        for checkpoint in find(folder)
    )
    return saved, ""


def _scores(results: Any) -> list[tuple[str, float]]:
    """Returns the scores in the results of lm-evaluation-harness: `{TASK: {"METRIC,FILTER": NUMBER}}`."""
    if not isinstance(results, dict):
        return []
    return [
        (f"{task} {_metric(name)}", number)
        for task, metrics in results.items()
        if isinstance(metrics, dict)
        for name, value in metrics.items()
        if "_stderr" not in name and (number := as_number(value)) is not None and math.isfinite(number)
    ]


def _metric(name: str) -> str:
    """Returns the readable name of a metric, with the filter that was applied for it."""
    metric, _, of = name.partition(",")
    return metric if of in ("", "none") else f"{metric} ({of})"
