"""`pytest --start-at N --budget-minutes M`: runs as many tests as fit into the time, from the Nth on.

The order is random, but always the same, so that a failure can be repeated, and so that runs whose N grows by no more
than the tests of a run see all of them. No test starts after the minutes are over. At the end, pytest says which tests
were run.
"""

from __future__ import annotations

import hashlib
import time

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("budget")
    group.addoption("--start-at", type=int, metavar="N", help="run the tests in a random order, from the Nth on")
    group.addoption("--budget-minutes", type=float, metavar="N", help="start no test after so many minutes")


def pytest_configure(config: pytest.Config) -> None:
    if config.option.start_at is not None or config.option.budget_minutes is not None:
        config.pluginmanager.register(Budget(config.option.start_at, config.option.budget_minutes))


class Budget:
    """Orders and ends the tests of this process, which may be a worker of xdist; the controller reports what was
    run."""

    def __init__(self, start: int | None, minutes: float | None) -> None:
        self.start = start
        self.seconds = float("inf") if minutes is None else 60 * minutes

    def pytest_sessionstart(self, session: pytest.Session) -> None:
        self.session = session

    @pytest.hookimpl(trylast=True)  # pytest itself orders tests by their fixtures
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        if self.start is not None and items:
            items.sort(key=lambda item: hashlib.sha256(item.nodeid.encode()).digest())
            start = self.start % len(items)
            items[:] = items[start:] + items[:start]

    def pytest_collection_finish(self) -> None:
        self.end = time.monotonic() + self.seconds

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_protocol(self) -> bool | None:
        return True if time.monotonic() > self.end else None

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        reports = [report for kind in terminalreporter.stats.values() for report in kind]
        run = sorted({report.nodeid for report in reports if isinstance(report, pytest.TestReport)})
        terminalreporter.section(f"{len(run)} of {self.session.testscollected} tests were run")
        for nodeid in run:
            terminalreporter.line(nodeid)
