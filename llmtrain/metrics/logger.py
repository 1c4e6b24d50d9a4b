"""`metrics.jsonl` and the trackers: one record per logged step and per evaluation, on rank 0."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from types import TracebackType
from typing import Any, Self

from llmtrain.durable import write_atomically
from llmtrain.metrics.throughput import Window, rates
from llmtrain.metrics.trackers import Trackers
from llmtrain.plan.plan import Plan
from llmtrain.run_dir import RunDir

Record = dict[str, Any]


@dataclass(frozen=True)
class StepMetrics:
    """What the loop knows when it logs a step."""

    step: int
    """Optimizer steps done, from 1."""
    loss: float
    """Mean over the target tokens of the step's global batch."""
    grad_norm: float | None
    """Global norm before clipping."""
    lr: float
    """Rate that the step was taken with."""
    tokens: int
    """Tokens trained on since the run began, over all devices."""
    samples: int
    """Sequences trained on since the run began, over all devices."""
    window: Window
    """The steps since the last logged one."""
    peak_memory_bytes: int | None
    """Highest memory in use on rank 0's device so far."""
    skipped_steps: int = 0
    """Updates that were not taken, of all steps since the run began."""
    rollbacks: int = 0
    """How often the run went back to a checkpoint because of them."""


class MetricsLogger:
    """Writes each record as one line, and sends it to the trackers. Only rank 0 makes one.

    A number that is not finite is written as `null`, since JSON has none: a loss of `null` is a run
    that diverged. `mfu` is `null` where the peak of the device is unknown.
    """

    def __init__(self, run_dir: RunDir, plan: Plan, start_step: int = 0) -> None:
        """start_step: the step that training resumes after; lines after it are removed."""
        self._plan = plan
        forget_after(run_dir, start_step)
        self._file = run_dir.metrics_file.open("a", encoding="utf-8")
        self._trackers = Trackers(run_dir, plan.recipe, start_step)

    def log_step(self, metrics: StepMetrics) -> Record:
        """Writes a logged step; returns its record."""
        window = metrics.window
        fields = {
            "step": metrics.step,
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
        }
        return self._write(fields, "train")

    def log_eval(self, step: int, eval_loss: float) -> Record:
        """Writes an evaluation after `step` steps; returns its record."""
        return self._write({"step": step, "eval_loss": eval_loss, "perplexity": perplexity(eval_loss)}, "eval")

    def flush(self) -> None:
        """Waits until every line is on the disk."""
        os.fsync(self._file.fileno())

    def close(self) -> None:
        """Ends the run in the trackers."""
        self._file.close()
        self._trackers.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        self.close()

    def _write(self, fields: Mapping[str, Any], group: str) -> Record:
        record = {name: _finite(value) for name, value in fields.items()}
        # One write per line: a reader, or a kill, never sees half of one.
        self._file.write(json.dumps(record, allow_nan=False) + "\n")
        self._file.flush()
        self._trackers.log(
            {f"{group}/{name}": value for name, value in record.items() if name != "step"}, record["step"]
        )
        return record


def perplexity(loss: float) -> float:
    """e to the loss, infinite where that overflows."""
    try:
        return math.exp(loss)
    except OverflowError:
        return math.inf


def forget_after(run_dir: RunDir, step: int) -> None:
    """Removes the lines of steps after `step`, all of them for 0, and a last line that was cut off."""
    if not run_dir.metrics_file.exists():
        return
    lines = run_dir.metrics_file.read_text(encoding="utf-8", errors="replace").splitlines()
    kept = [line for line in lines if 0 < _step(line) <= step]
    write_atomically(run_dir.metrics_file, "".join(f"{line}\n" for line in kept))


def _step(line: str) -> int:
    """Step of a line; 0 for one that is not whole."""
    try:
        return int(json.loads(line)["step"])
    except (ValueError, TypeError, KeyError):
        return 0


def _finite(value: Any) -> Any:
    return None if isinstance(value, float) and not math.isfinite(value) else value
