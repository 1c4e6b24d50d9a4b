"""`metrics.jsonl`, `samples.jsonl` and the trackers, on rank 0: a record per logged step, evaluation and sample."""

from __future__ import annotations

import json
import math
import os
import re
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Self

from llmtrain.plan.plan import Plan
from llmtrain.run_dir import RunDir
from llmtrain.system.durable import open_log, write_atomically
from llmtrain.system.untrusted import read_bytes
from llmtrain.train.metrics.throughput import Forecast, Window, rates
from llmtrain.train.metrics.trackers import Trackers

Record = dict[str, Any]
MAX_TEXT_LENGTH = 2000
"""Characters of a text that are kept."""
EventName = Literal["started", "stopped", "died", "finished", "skipped", "rolled_back"]
MAX_FILE_BYTES = 1 << 34
"""Size of the longest `metrics.jsonl`: some ten million lines."""
_NOT_IN_TAGS = re.compile(r"[^A-Za-z0-9-]+")
"""Characters that MLflow does not accept in a name, or that would create another group."""


@dataclass(frozen=True)
class StepMetrics:
    """The data that the training loop passes when it logs a step."""

    step: int
    """Optimizer steps done, from 1."""
    loss: float
    """Mean over the target tokens, or over the items of the objective, of the step's global batch."""
    grad_norm: float | None
    """Global norm before clipping."""
    lr: float
    """Learning rate of the step."""
    tokens: int
    """Tokens trained on since the beginning of the run, over all devices."""
    samples: int
    """Sequences trained on since the beginning of the run, over all devices."""
    window: Window
    """The steps since the last logged one."""
    peak_memory_bytes: int | None
    """Peak memory use on rank 0's device so far."""
    skipped_steps: int = 0
    """Skipped updates since the beginning of the run."""
    rollbacks: int = 0
    """Number of rollbacks to a checkpoint because of them."""
    slowest: tuple[int, float] | None = None
    """The slowest rank recently, and the ratio of its own time to the median rank's; None if unknown."""
    of_objective: Mapping[str, float] | None = None
    """The further metrics of the objective (`Engine.objective`); None if the loss is the cross-entropy of tokens."""
    router_loss: float | None = None
    """Mean of the router's loss over the micro-batches, times its coefficient; None without one."""
    expert_load: float | None = None
    """Tokens of a layer's busiest expert over the mean, where this is largest, since the last logged step; None for a
    dense model."""


@dataclass(frozen=True)
class Evaluation:
    """The result of an evaluation of a set."""

    loss: float
    """Mean over its target tokens, or over the items of the objective."""
    by_source: Mapping[str, float] = field(default_factory=dict)
    """The loss of each source."""
    of_objective: Mapping[str, float] | None = None
    """As in `StepMetrics`; only the cross-entropy of tokens has a perplexity."""
    bytes_per_token: float | None = None
    """Bytes of the targets, for bits per byte, which do not depend on the tokenizer; None if unknown."""
    own: Mapping[str, float] = field(default_factory=dict)
    """The user's own metrics (`evaluation.metrics`)."""

    def metrics(self) -> dict[str, float]:
        """Returns the metrics by name."""
        metrics = {"eval_loss": self.loss, **self.own}
        if self.of_objective is not None:
            return {**metrics, **self.of_objective}
        metrics["perplexity"] = perplexity(self.loss)
        if self.bytes_per_token:
            metrics["bits_per_byte"] = self.loss / math.log(2) / self.bytes_per_token
        return metrics


class MetricsLogger:
    """Writes each record as one line, and sends it to the trackers. Only rank 0 creates one.

    A number that is not finite is written as `null`, since JSON has none: a loss of `null` is a run that diverged.
    `mfu` is `null` if the peak of the device is unknown.
    """

    def __init__(
        self,
        run_dir: RunDir,
        plan: Plan,
        start_step: int = 0,
        warn: Callable[[str], None] = print,
        stop_step: int | None = None,
    ) -> None:
        """start_step: the step after which training resumes; later lines are removed.

        warn: is called with a message about a full disk. stop_step: the last step, if it is not that of the recipe.
        """
        self._plan, self._run_dir = plan, run_dir
        self._forecast = Forecast(
            plan.cluster.world_size,
            stop_step or plan.recipe.train.steps,
            plan.recipe.logging.price_per_device_hour,
            _device_hours(run_dir.metrics_file) if start_step else 0.0,
        )
        for file in (run_dir.metrics_file, run_dir.samples_file):
            forget_after(file, start_step)
        self._lines = _Lines(run_dir.metrics_file, warn)
        self._samples = _Lines(run_dir.samples_file, warn) if plan.recipe.samples.every_steps else None
        self._files = [lines for lines in (self._lines, self._samples) if lines]
        self._trackers = Trackers(run_dir, plan.recipe, start_step)

    def step_record(self, metrics: StepMetrics) -> Record:
        """Returns the record of a logged step."""
        window = metrics.window
        fields = {
            "step": metrics.step,
            "time": time.time(),
            "loss": metrics.loss,
            "grad_norm": metrics.grad_norm,
            "lr": metrics.lr,
            "tokens": metrics.tokens,
            "samples": metrics.samples,
            "step_time_s": window.seconds / window.steps,
            **asdict(rates(self._plan, window)),
            "peak_memory_bytes": metrics.peak_memory_bytes,
            "data_wait_s": window.data_wait_s / window.steps,
            "save_blocked_s": window.save_blocked_s,
            "skipped_steps": metrics.skipped_steps,
            "rollbacks": metrics.rollbacks,
            **self._forecast.after(metrics.step, window.seconds / window.steps),
        }
        if metrics.slowest is not None:
            fields["slowest_rank"], fields["slowest_ratio"] = metrics.slowest
        if metrics.router_loss is not None:
            fields["router_loss"] = metrics.router_loss
        if metrics.expert_load is not None:
            fields["expert_load"] = metrics.expert_load
        return _finite_fields({**fields, **(metrics.of_objective or {})})

    def eval_record(self, step: int, main: Evaluation, sets: Mapping[str, Evaluation] | None = None) -> Record:
        """Returns the record of an evaluation after `step` steps.

        main: of the set without a name. sets: of the others, whose metrics are written as `METRIC_by_set`.
        """
        fields: dict[str, Any] = {"step": step, **main.metrics()}
        if len(main.by_source) > 1:
            fields["eval_loss_by_source"] = {name: _finite(loss) for name, loss in main.by_source.items()}
        for name, evaluation in (sets or {}).items():
            for metric, value in evaluation.metrics().items():
                fields.setdefault(f"{metric}_by_set", {})[name] = _finite(value)
        return _finite_fields(fields)

    def log(self, record: Record) -> None:
        """Writes the record of a step or of an evaluation, and sends it to the trackers."""
        self._lines.add(json.dumps(record, allow_nan=False))
        self._trackers.log(_flat(record, "eval" if "eval_loss" in record else "train"), record["step"])

    def log_event(self, event: EventName, step: int, text: str) -> None:
        """Writes an event."""
        note_event(self._run_dir, event, step, text)

    def log_samples(self, step: int, samples: Iterable[tuple[str, str]]) -> None:
        """Writes prompts with the texts that the model wrote after `step` steps."""
        assert self._samples is not None, "the recipe asks for samples"
        for number, (prompt, text) in enumerate(samples):
            self._samples.add(json.dumps({"step": step, "prompt": prompt, "text": text}))
            self._trackers.log_text(f"samples/{number}", prompt + text, step)

    def log_score(self, step: int, task: str, metric: str, value: float) -> None:
        """Sends a score of a downstream task, which is known after `step` steps, to the trackers."""
        self._trackers.log({f"tasks/{_NOT_IN_TAGS.sub('_', task)}/{_NOT_IN_TAGS.sub('_', metric)}": value}, step)

    def flush(self) -> None:
        """Waits until all lines are on disk, as far as the disk accepts them."""
        for lines in self._files:
            lines.flush()

    def close(self) -> None:
        """Ends the run in the trackers."""
        for lines in self._files:
            lines.close()
        self._trackers.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        self.close()


class _Lines:
    """Appends lines to a file. Lines that the disk does not accept are kept, and written with the next one."""

    def __init__(self, path: Path, warn: Callable[[str], None]) -> None:
        """Raises OSError if the file cannot be opened."""
        self._path = path
        self._warn = warn
        self._descriptor = open_log(path)
        self._left = bytearray()
        self._failed = False

    def add(self, line: str) -> None:
        """Writes a line in one piece if possible: a reader, or a kill, then never sees half of one."""
        self._left += line.encode() + b"\n"
        self._try(self._write)

    def flush(self) -> None:
        """Waits until the lines are on disk, as far as the disk accepts them."""
        self._try(lambda: os.fsync(self._descriptor))

    def close(self) -> None:
        """Tries for the last time."""
        self._try(self._write)
        if self._left:
            self._warn(f"the last {self._left.count(10):,} lines of {self._path} could not be written")
        os.close(self._descriptor)

    def _write(self) -> None:
        while self._left and (done := os.write(self._descriptor, self._left)):
            del self._left[:done]

    def _try(self, action: Callable[[], None]) -> None:
        try:
            action()
        except OSError as error:
            if not self._failed:
                self._warn(f"{self._path} cannot be written: {error.strerror}; its lines are kept for later")
            self._failed = True
        else:
            self._failed = bool(self._left)


def _flat(record: Record, group: str) -> dict[str, Any]:
    """Returns the values of a record under the trackers' names for them; those of sources are named after these."""
    values: dict[str, Any] = {}
    for name, value in record.items():
        if isinstance(value, dict):
            values |= {f"{group}/{name}/{_NOT_IN_TAGS.sub('_', source)}": loss for source, loss in value.items()}
        elif name not in ("step", "time"):  # trackers have both
            values[f"{group}/{name}"] = value
    return values


def metrics_of(record: Record) -> dict[str, float | None]:
    """Returns the metrics of an evaluation's record by name; those of sets and sources are `eval_loss_by_set/NAME`."""
    metrics: dict[str, float | None] = {}
    for name, value in record.items():
        if isinstance(value, dict):
            metrics |= {f"{name}/{of}": item for of, item in value.items()}
        elif name != "step":
            metrics[name] = value
    return metrics


def perplexity(loss: float) -> float:
    """Returns e to the power of the loss, or infinity if that overflows."""
    try:
        return math.exp(loss)
    except OverflowError:
        return math.inf


def forget_after(file: Path, step: int) -> None:
    """Removes the lines of steps after `step`, all of them for 0 (a new run), and a truncated last line."""
    try:
        text = read_bytes(file, MAX_FILE_BYTES).decode(errors="replace")
    except FileNotFoundError:
        return
    kept = "".join(f"{line}\n" for line in text.splitlines() if step and 0 <= _step(line) <= step)
    if kept != text:
        write_atomically(file, kept)


def _device_hours(file: Path) -> float:
    """Returns the last `device_hours` of a file of metrics, those of steps that are repeated included."""
    try:
        lines = read_bytes(file, MAX_FILE_BYTES).splitlines()
    except FileNotFoundError:
        return 0.0
    for line in reversed(lines):
        try:
            return float(json.loads(line)["device_hours"])
        except (ValueError, TypeError, KeyError, RecursionError):
            continue  # an evaluation, or a truncated line
    return 0.0


def _step(line: str) -> int:
    """Returns the step of a line, or -1 for an incomplete line."""
    try:
        return int(json.loads(line)["step"])
    except (ValueError, TypeError, KeyError, RecursionError):
        return -1


def _finite_fields(fields: Mapping[str, Any]) -> Record:
    return {name: _finite(value) for name, value in fields.items()}


def _finite(value: Any) -> Any:
    return None if isinstance(value, float) and not math.isfinite(value) else value


def note_event(run_dir: RunDir, event: EventName, step: int, text: str) -> None:
    """Appends a line to `events.jsonl`, of which no line is ever removed.

    If the disk does not accept the line, it is lost, and the run continues.

    step: number of optimizer steps taken. text: what happened, for people.
    """
    now = datetime.now(UTC).isoformat(timespec="seconds")
    line = json.dumps({"time": now, "event": event, "step": step, "text": text[:MAX_TEXT_LENGTH]}) + "\n"
    with suppress(OSError):
        descriptor = open_log(run_dir.events_file)
        try:
            os.write(descriptor, line.encode())
        finally:
            os.close(descriptor)
