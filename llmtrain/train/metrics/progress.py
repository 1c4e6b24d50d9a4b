"""The training run as its user sees it: a live line on a terminal, plain lines elsewhere."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from datetime import datetime, timedelta
from types import TracebackType
from typing import Any, Self

from rich.console import Console
from rich.panel import Panel
from rich.progress import BarColumn, Progress, ProgressColumn, SpinnerColumn, Task, TextColumn
from rich.table import Column
from rich.text import Text

from llmtrain.system.quantities import MAX_DURATION_S, compact, duration, four_digits
from llmtrain.system.streams import print_as_is, short_names, visible

REFRESH_PER_SECOND = 4
SPEED_PERIOD_S = 120.0
"""Seconds of steps from which the time left is estimated."""
SPEED_COLUMNS = 72
"""Minimum width of a terminal that shows the speed."""
ALL_COLUMNS = 100
"""Minimum width of a terminal that shows gradient norm and MFU."""
END_COLUMNS = 140
"""Minimum width of a terminal that shows the end and the cost of the run."""
FAR_S = 3600.0
"""Seconds left from which the end is also shown as a time of day."""


class TrainingProgress:
    """Prints one line per logged step, and on a terminal a live line with step, loss, speed and time left."""

    def __init__(self, console: Console, max_steps: int, start_step: int = 0, own_metrics: Iterable[str] = ()) -> None:
        """own_metrics: names of the user's own metrics of evaluations (`evaluation.metrics`)."""
        self._shown = (*QUALITY, *(name for name in own_metrics if name not in QUALITY))
        self._console = console
        self._max_steps = max_steps
        self._start_step = self._step = start_step
        self._started = time.monotonic()
        self._trained_s = 0.0
        self._trained_tokens = 0.0
        self._last: dict[str, Any] | None = None
        self._bar = _bar(console) if console.is_terminal else None
        if self._bar is not None:
            # The first step compiles and allocates: say so rather than show an idle bar.
            self._task = self._bar.add_task("first step", total=max_steps, completed=start_step, record={})

    def __enter__(self) -> Self:
        if self._bar is not None:
            self._bar.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        if self._bar is not None:
            if kind is not None:
                self._bar.update(self._task, description="stopped")
            self._bar.stop()

    def advance(self, step: int) -> None:
        """Shows that `step` steps are done."""
        self._step = step
        if self._bar is not None:
            done = step >= self._max_steps
            self._bar.update(self._task, completed=step, description="trained" if done else "training")

    def show(self, record: dict[str, Any]) -> None:
        """Shows a record of the metrics logger: a logged step or an evaluation."""
        if "eval_loss" in record:
            for line in _evaluations(record, self._shown):
                self.note(f"step {record['step']:,}  {line}")
            return
        before = self._last["step"] if self._last else self._start_step
        seconds = record["step_time_s"] * (record["step"] - before)
        self._trained_s += seconds
        self._trained_tokens += record["tokens_per_second"] * seconds
        self._last = record
        if self._bar is not None:
            self._bar.update(self._task, completed=record["step"], record=record)
            self._bar.refresh()  # otherwise the previous live line would be shown again below the printed one
        self.note(_plain_line(record, self._max_steps))

    def show_samples(self, step: int, samples: Iterable[tuple[str, str]]) -> None:
        """Shows prompts with their continuations."""
        for prompt, text in samples:
            self._console.print(sample_panel(prompt, text, f"sample after step {step:,}"))

    @contextmanager
    def busy(self, what: str) -> Iterator[None]:
        """Shows what the run does instead of training: `evaluating`, `saving`."""
        if self._bar is None:
            yield
            return
        before = self._bar.tasks[0].description
        self._bar.update(self._task, description=what)
        self._bar.refresh()
        try:
            yield
        finally:
            self._bar.update(self._task, description=before)

    def note(self, line: str) -> None:
        """Prints a separate line above the live line."""
        print_as_is(self._console, [line])

    def summary(self) -> None:
        """Ends the live line, and prints what was trained and how fast."""
        if self._bar is not None:
            self._bar.stop()
        if self._step == self._start_step:
            return
        line = f"trained {self._step - self._start_step:,} steps in {duration(time.monotonic() - self._started)}"
        if self._last is not None:
            line += f" ({compact(self._trained_tokens / self._trained_s)} tokens/s while training)"
            at = f" (step {self._last['step']:,})" if self._last["step"] != self._step else ""
            line += f"  loss {four_digits(self._last['loss'])}{at}"
        self.note(line)


def sample_panel(prompt: str, text: str, title: str) -> Panel:
    """Returns a prompt and its continuation in a frame; control characters are shown, not obeyed.

    Of several empty lines, as untrained models write them, one is left.
    """
    text = re.sub(r"\n(?:[^\S\n]*\n){2,}", "\n\n", text)
    return Panel(Text.assemble((visible(prompt), "bold"), visible(text)), title=title, title_align="left")


def _bar(console: Console) -> Progress:
    return Progress(
        SpinnerColumn(style="cyan"),
        TextColumn("{task.description}", table_column=Column(min_width=len("evaluating"))),  # the bar keeps its place
        BarColumn(bar_width=None, table_column=Column(ratio=1)),  # takes the room that the text leaves
        *(_Column(console, text) for text in (_steps, _numbers, _time_left)),
        console=console,
        expand=True,
        refresh_per_second=REFRESH_PER_SECOND,
        speed_estimate_period=SPEED_PERIOD_S,
        # sys.stdout is the rank's log by now, which does not belong on the terminal.
        redirect_stdout=False,
        redirect_stderr=False,
    )


class _Column(ProgressColumn):
    """A column whose text a function makes, given the width of the terminal."""

    def __init__(self, console: Console, text: Callable[[Task, int], Text]) -> None:
        super().__init__()
        self._console, self._text = console, text

    def render(self, task: Task) -> Text:
        return self._text(task, self._console.width)


def _steps(task: Task, width: int) -> Text:
    """Shows the number of steps done, and of all steps."""
    return Text(f"{int(task.completed):,}/{int(task.total or 0):,}", style="green", no_wrap=True)


def _numbers(task: Task, width: int) -> Text:
    """Shows the loss of the last logged step; speed, gradient norm and MFU if there is room."""
    record = task.fields["record"]
    if not record:
        return Text()
    diverged = record["loss"] is None
    parts = [(f"loss {four_digits(record['loss'])}", "bold red" if diverged else "bold")]
    if width >= ALL_COLUMNS and record["grad_norm"] is not None:
        parts.append((f"grad {four_digits(record['grad_norm'])}", ""))
    if width >= SPEED_COLUMNS:
        parts.append((f"{compact(record['tokens_per_second'])} tok/s", "magenta"))
    if width >= ALL_COLUMNS and record["mfu"] is not None:
        parts.append((f"{record['mfu']:.1%} mfu", "magenta"))
    return Text.assemble(*((f" {text} ", style) for text, style in parts), no_wrap=True)


def _time_left(task: Task, width: int) -> Text:
    """Shows the time left, with end and cost if there is room; the elapsed time while it is unknown, and at the end."""
    if task.finished:
        text = f"took {duration(task.finished_time or 0)}"
    elif (left := task.time_remaining) is None:
        text = duration(task.elapsed or 0)
    else:
        text = f"{duration(left)} left"
        if width >= END_COLUMNS:
            text = "  ".join(filter(None, (f"{text}{_end(left)}", _cost(task.fields["record"]))))
    return Text(text, style="cyan", no_wrap=True)


def _plain_line(record: dict[str, Any], max_steps: int) -> str:
    """Formats a logged step as one line of a log."""
    parts = [
        f"step {record['step']:,}/{max_steps:,}",
        f"loss {four_digits(record['loss'])}",
        f"grad {four_digits(record['grad_norm'])}" if record["grad_norm"] is not None else "",
        f"lr {record['lr']:.2e}",
        f"{compact(record['tokens_per_second'])} tok/s",
        f"{record['mfu']:.1%} mfu" if record["mfu"] is not None else "",
        f"{duration(record['left_s'])} left{_end(record['left_s'])}",
        _cost(record),
    ]
    return "  ".join(part for part in parts if part)


def _end(left_s: float) -> str:
    """Returns the day and the hour at which a longer run ends."""
    return (
        f", until {datetime.now() + timedelta(seconds=left_s):%a %d %b %H:%M}"
        if FAR_S <= left_s < MAX_DURATION_S
        else ""
    )


def _cost(record: dict[str, Any]) -> str:
    return f"cost {record['cost']:,.2f} of {record['cost_at_end']:,.2f}" if "cost" in record else ""


QUALITY = ("perplexity", "bits_per_byte", "reward_accuracy", "accuracy")
"""Metrics of an evaluation that are shown next to its loss."""


def _evaluations(record: dict[str, Any], shown: Sequence[str]) -> Iterator[str]:
    """Yields a line for the evaluation, and one for each further set, with the metrics in `shown`."""
    losses = record.get("eval_loss_by_source", {})
    short = short_names(losses)
    by_source = "".join(f"  {short[name]} {four_digits(loss)}" for name, loss in losses.items())
    yield f"eval loss {four_digits(record['eval_loss'])}{_quality(record, shown)}{by_source}"
    for name, loss in record.get("eval_loss_by_set", {}).items():
        of_set = {metric: record.get(f"{metric}_by_set", {}) for metric in shown}
        metrics = {metric: values[name] for metric, values in of_set.items() if name in values}
        yield f"eval loss of {name} {four_digits(loss)}{_quality(metrics, shown)}"


def _quality(record: dict[str, Any], shown: Sequence[str]) -> str:
    values = {metric: record[metric] for metric in shown if metric in record}
    return "".join(f"  {metric.replace('_', ' ')} {four_digits(value)}" for metric, value in values.items())
