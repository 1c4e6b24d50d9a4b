"""Progress of the data preparation: a bar on a terminal, plain lines elsewhere."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

from rich.console import Console
from rich.progress import BarColumn, TaskID, TextColumn, TimeRemainingColumn
from rich.progress import Progress as Bar

from llmtrain.system.streams import visible

LINE_SECONDS = 10.0
"""Seconds between plain lines if the output is not a terminal."""


class Task:
    """A task in progress; created by `Progress.task`."""

    def __init__(self, name: str, console: Console, bar: Bar | None) -> None:
        self.fraction: float | None = None
        """Fraction of the work done, 0 to 1; None while it is unknown."""
        self._name = visible(name)
        self._console = console
        self._bar = bar
        self._id: TaskID | None = None if bar is None else bar.add_task(self._name, total=None, detail="")
        self._last = time.monotonic()

    def update(self, fraction: float | None, detail: str = "") -> None:
        """Shows the progress: the fraction done (0 to 1, None if unknown) and some words about it."""
        self.fraction, detail = fraction, visible(detail)
        if self._bar is not None and self._id is not None:
            total = None if fraction is None else 1.0
            self._bar.update(self._id, total=total, completed=fraction or 0.0, detail=detail)
        elif time.monotonic() - self._last >= LINE_SECONDS:
            self._last = time.monotonic()
            share = "" if fraction is None else f"{fraction:.0%} "
            self._console.print(f"{self._name}: {share}{detail}", highlight=False, markup=False)


class Progress:
    """Prints to the caller's console; silent without one."""

    def __init__(self, console: Console | None = None) -> None:
        self._console = console or Console(quiet=True)
        self._task: Task | None = None

    @property
    def fraction(self) -> float | None:
        """Fraction of the current task that is done; None if unknown."""
        return self._task.fraction if self._task else None

    def say(self, message: str) -> None:
        """Prints one line."""
        self._console.print(visible(message), highlight=False, markup=False)

    @contextmanager
    def task(self, name: str) -> Iterator[Task]:
        """Shows a task until the block ends; `fraction` remains readable afterwards, for error messages."""
        if not self._console.is_terminal:
            self.say(f"{name} ...")
            self._task = Task(name, self._console, None)
            yield self._task
            return
        plain = partial(TextColumn, markup=False)  # names of files may look like markup
        columns = (plain("{task.description}"), BarColumn(), plain("{task.fields[detail]}"))
        with Bar(*columns, TimeRemainingColumn(), console=self._console, transient=True) as bar:
            self._task = Task(name, self._console, bar)
            yield self._task
