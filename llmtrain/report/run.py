"""Reads a run from its directory, whether the run is finished, active or damaged."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from pydantic import TypeAdapter, ValidationError

from llmtrain.checkpoint.folder import STATE_FILE, find, newest, step_of
from llmtrain.errors import CheckpointError, Problem, RecipeError
from llmtrain.plan.plan import Plan
from llmtrain.report.lines import GrowingLines
from llmtrain.report.table import MetricsTable, as_number
from llmtrain.run_dir import RunDir
from llmtrain.run_dir.lock import is_held
from llmtrain.system.untrusted import UNREADABLE, file_fault, read_json

T = TypeVar("T")
MOST_ENTRIES = 10_000
"""Number of events and of samples of a run that are kept (the newest ones)."""
MOST_PROFILES = 64
"""Number of profiled windows that are read (the newest ones)."""
MOST_PROFILE_BYTES = 1 << 20
MOST_DOCUMENT_BYTES = 16 << 20
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
    """Reads a run directory repeatedly. Of growing files, it only reads what was added."""

    def __init__(self, path: Path) -> None:
        """Raises RecipeError if the folder is not that of a run."""
        self._dir = RunDir(path)
        if not self._dir.recipe_file.is_file() and not self._dir.metrics_file.is_file():
            why_not = "is not a run directory: it has no recipe.json and no metrics.jsonl"
            message = why_not if os.path.lexists(path) else "does not exist"
            raise RecipeError(Problem("run_dir.missing", str(path), message))
        self._metrics, self._evaluations = MetricsTable(), MetricsTable()
        self._metric_lines = GrowingLines(self._dir.metrics_file)
        self._events: list[RunEvent] = []
        self._event_lines = GrowingLines(self._dir.events_file)
        self._samples: list[TextSample] = []
        self._sample_lines = GrowingLines(self._dir.samples_file)
        self._kept: dict[Path, tuple[tuple[int, int], Any]] = {}
        self._problems: list[str] = []

    @property
    def stamp(self) -> str:
        """A value that changes whenever one of the files that were read changes."""
        kept = {str(file): stamp for file, (stamp, _) in self._kept.items()}
        return repr((self.bytes_read, kept, self._problems))

    @property
    def bytes_read(self) -> int:
        """Number of bytes read so far from growing files."""
        return sum(lines.bytes_read for lines in (self._metric_lines, self._event_lines, self._sample_lines))

    def read(self) -> RunData:
        """Returns the current state of the run. Unreadable files and lines are left out and listed in `problems`."""
        self._problems = []
        self._read_metrics()
        self._events = self._grown(self._event_lines, self._events, RunEvent)
        self._samples = self._grown(self._sample_lines, self._samples, TextSample)
        recipe = self._document(self._dir.recipe_file, dict[str, Any], {})
        age = _age(self._dir.metrics_file)
        return RunData(
            path=self._dir.path,
            recipe=dotted(recipe),
            plan=self._document(self._dir.plan_file, Plan, None),
            environment=self._document(self._dir.environment_file, dict[str, Any], {}),
            launch=self._document(self._dir.launch_file, dict[str, Any], {}),
            metrics=self._metrics,
            evaluations=self._evaluations,
            events=tuple(self._events),
            samples=tuple(self._samples),
            checkpoints=(checkpoints := self._checkpoints()),
            data_key=self._data_key(checkpoints),
            profiles=self._profiles(),
            scores=self._scores(),
            status=self._status(age),
            seconds_since_line=age,
            problems=tuple(self._problems),
        )

    def _read_metrics(self) -> None:
        lines = self._metric_lines
        if lines.is_replaced():
            self._metrics, self._evaluations = MetricsTable(), MetricsTable()
        try:
            for record in lines.new():
                table = self._evaluations if "eval_loss" in record else self._metrics
                lines.damaged += not table.add(record)
        except OSError as error:
            self._cannot_read(lines.path, error)
        if lines.damaged:
            self._problems.append(f"{lines.path}: {lines.damaged:,} lines are damaged, or too many, and left out")

    def _grown(self, lines: GrowingLines, known: list[T], kind: type[T]) -> list[T]:
        """Returns the newest entries of a growing file. known: the entries that were read before."""
        if lines.is_replaced():
            known = []
        adapter = TypeAdapter(kind)
        try:
            for record in lines.new():
                try:
                    known.append(adapter.validate_python(record))
                except ValidationError:
                    lines.damaged += 1
        except OSError as error:
            self._cannot_read(lines.path, error)
        if lines.damaged:
            self._problems.append(f"{lines.path}: {lines.damaged:,} lines are damaged, and left out")
        return known[-MOST_ENTRIES:]

    def _document(self, file: Path, kind: type[T], missing: Any) -> Any:
        """Returns the content of a JSON file, and rereads the file only if it has changed."""
        try:
            status = file.stat()
            stamp = (status.st_mtime_ns, status.st_size)
            if self._kept.get(file, (None,))[0] != stamp:
                self._kept[file] = stamp, read_json(file, kind, MOST_DOCUMENT_BYTES)
        except FileNotFoundError:
            return missing
        except UNREADABLE as error:
            self._cannot_read(file, error)
            return missing
        return self._kept[file][1]

    def _checkpoints(self) -> tuple[SavedCheckpoint, ...]:
        folder = self._dir.checkpoints
        try:
            stamp = (folder.stat().st_mtime_ns, 0)
            if self._kept.get(folder, (None,))[0] != stamp:
                self._kept[folder] = stamp, _checkpoints(folder)
        except FileNotFoundError:
            return ()
        except (OSError, CheckpointError) as error:
            self._problems.append(str(error))
            return ()
        saved: tuple[SavedCheckpoint, ...] = self._kept[folder][1]
        return saved

    def _data_key(self, checkpoints: tuple[SavedCheckpoint, ...]) -> str:
        latest = next((checkpoint.folder for checkpoint in checkpoints if checkpoint.is_latest), None)
        state = self._document(latest / STATE_FILE, dict[str, Any], {}) if latest else {}
        return str(state.get("data", ""))

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
                if digits.isdecimal() and len(digits) <= 15 and file.stat().st_size <= MOST_PROFILE_BYTES:
                    files.append((int(digits), file))
        except OSError as error:
            self._cannot_read(folder, error)
        one_by_one = (read(file, step) for step, file in sorted(files)[-MOST_PROFILES:])
        return [entry for entry in one_by_one if entry is not None]

    def _status(self, age: float | None) -> str:
        last = next((event.event for event in reversed(self._events) if event.event in _STATUS), None)
        if last in ("stopped", "died", "finished"):
            return last
        if is_held(self._dir.path) or (age is not None and age < STILL_S):
            return "running"
        return "interrupted" if age is not None or last else "new"

    def _cannot_read(self, file: Path, error: Exception) -> None:
        self._problems.append(f"{file}: cannot be read: {file_fault(error)}")


_STATUS = ("started", "stopped", "died", "finished")


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


def _checkpoints(folder: Path) -> tuple[SavedCheckpoint, ...]:
    latest = newest(folder)
    return tuple(
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
