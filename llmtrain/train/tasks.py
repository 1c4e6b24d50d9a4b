"""Scores downstream tasks in a separate process, so that training neither waits nor holds another model."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import dataclass
from importlib.util import find_spec

from pydantic import BaseModel
from rich.table import Table
from rich.text import Text

from llmtrain.checkpoint.folder import step_folder
from llmtrain.errors import Problem, RecipeError
from llmtrain.launch.local import environment_without_rank
from llmtrain.run_dir import RunDir
from llmtrain.system.durable import open_log
from llmtrain.system.parent import start_child
from llmtrain.system.untrusted import UNREADABLE, file_fault, read_json

Results = dict[str, dict[str, float | str | None]]
"""By task, the values of its metrics, as the harness names them: `acc,none`, `acc_stderr,none`."""


class Scored(BaseModel):
    """The content of `eval/step_N.json`."""

    results: Results = {}
    computed: dict[str, dict[str, str | int | None]] = {}
    """By task: when it was scored, the limit on its documents, and the version of the harness."""


class ScoringError(Exception):
    """A process that computes scores has failed."""


def check_harness() -> None:
    """Raises RecipeError if lm-evaluation-harness is not installed; does not import it."""
    if find_spec("lm_eval") is None:
        message = "lm-evaluation-harness is not installed"
        raise RecipeError(Problem("tasks.harness", "tasks.names", message, "pip install 'llmtrain[eval]'"))


@dataclass(frozen=True)
class Score:
    """A metric of a task."""

    task: str
    metric: str
    value: float
    stderr: float | None
    """Standard error of the value; None if it is unknown."""


def scores(results: Results) -> list[Score]:
    """Returns the numbers among results. A metric that a filter was applied for has its name in brackets."""
    rows = []
    for task, values in results.items():
        for name, value in values.items():
            metric, _, kind = name.partition(",")
            if isinstance(value, int | float) and not metric.endswith("_stderr"):
                stderr = values.get(f"{metric}_stderr,{kind}")
                shown = metric if kind == "none" else f"{metric} ({kind})"
                rows.append(Score(task, shown, float(value), stderr if isinstance(stderr, int | float) else None))
    return rows


def score_table(results: Results, step: int) -> Table:
    """Renders results for a rich console."""
    shown = Table("task", "metric", title=f"Scores after step {step:,}", title_justify="left")
    for heading in ("value", "standard error"):
        shown.add_column(heading, justify="right")
    for score in scores(results):
        error = "" if score.stderr is None else f"{score.stderr:.4f}"
        shown.add_row(Text(score.task), Text(score.metric), f"{score.value:.4f}", error)
    return shown


class BackgroundScoring:
    """Scores checkpoints during training, one at a time; on rank 0."""

    def __init__(self, run: RunDir, every_steps: int, step: int) -> None:
        """step: the number of steps that the run has done."""
        self._run, self._every = run, every_steps
        self._begun = step
        self._process: subprocess.Popen[bytes] | None = None

    def poll(self, step: int) -> Results | None:
        """Returns the results of a checkpoint once they exist, and starts to score the newest one that is due.

        Raises ScoringError if they were not computed.
        """
        if self._process is None:
            self._begin(step)
        elif self._process.poll() is not None:
            return self._end(self._process)
        return None

    def wait(self) -> None:
        """Waits for results that are being computed. Raises ScoringError if they were not computed."""
        if self._process is not None:
            self._process.wait()
            self._end(self._process)

    def cancel(self) -> None:
        """Ends what is being computed."""
        if self._process is not None:
            self._process.terminate()
            self._process.wait()

    def _begin(self, step: int) -> None:
        for due in range(step - step % self._every, self._begun, -self._every):
            if step_folder(self._run.checkpoints, due).is_dir():
                self._begun = due
                self._process = _start(self._run, due)
                return

    def _end(self, process: subprocess.Popen[bytes]) -> Results:
        self._process = None
        return _results(self._run, self._begun, process.returncode)


def score_last(run: RunDir, step: int) -> Results:
    """Returns the results of the last checkpoint, which is the one of a step. Raises ScoringError."""
    return _results(run, step, _start(run, step).wait())


def _start(run: RunDir, step: int) -> subprocess.Popen[bytes]:
    """Starts to score a checkpoint, with low priority; what is printed goes to a log."""
    log = open_log(run.eval_log)
    # The user's recipe, with which this run was started, permits the code that it names.
    command = ["llmtrain", "eval", str(run.path), "--step", str(step), "--trust-remote-code"]
    try:
        command = ["nice", sys.executable, "-m", *command]
        return start_child(command, env=environment_without_rank(), stdout=log, stderr=log)
    finally:
        os.close(log)


def _results(run: RunDir, step: int, code: int) -> Results:
    try:
        if code == 0:
            return read_json(run.eval_file(step), Scored).results
        why_not = f"the process ended with code {code}, see {run.eval_log}"
    except UNREADABLE as error:
        why_not = f"{run.eval_file(step)}: {file_fault(error)}"
    raise ScoringError(f"step {step:,} has no scores: {why_not}")
