"""A part of the tests, by a budget of minutes and from a number on."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

TESTS = """
import pytest
from tests.helpers import budget

@pytest.mark.parametrize("number", range(20))
def test_takes_a_minute(number):
    budget.time.now += 60
    with open("order", "a") as file:
        file.write(f"{number}\\n")
"""
CLOCK = """
import types
from tests.helpers import budget

budget.time = types.SimpleNamespace(now=0, monotonic=lambda: budget.time.now)
"""


@pytest.fixture
def run(tmp_path):
    """Runs the twenty tests with some options; which were run, in their order, and what pytest says."""
    (tmp_path / "test_minutes.py").write_text(TESTS)
    (tmp_path / "conftest.py").write_text(CLOCK)

    def run(*options: str) -> tuple[list[int], str]:
        command = [sys.executable, "-m", "pytest", "-p", "tests.helpers.budget", *options]
        environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[1])}
        result = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=120)
        assert result.returncode == 0, result.stdout
        order = tmp_path / "order"
        numbers = [int(line) for line in order.read_text().splitlines()] if order.exists() else []
        order.unlink(missing_ok=True)
        return numbers, result.stdout

    return run


ORDER = [7, 3, 10, 6, 12, 15, 14, 2, 18, 9, 16, 8, 11, 13, 19, 0, 1, 4, 5, 17]


def test_the_order_is_always_the_same_and_begins_at_a_number(run):
    assert run("--start-at", "0")[0] == ORDER
    assert run("--start-at", "47")[0] == ORDER[7:] + ORDER[:7]


def test_no_test_starts_after_the_budget_and_the_report_lists_the_started_ones(run):
    numbers, said = run("--start-at", "0", "--budget-minutes", "3.5")
    assert numbers == ORDER[:4]
    assert "4 of 20 tests were run" in said
    named = [line for line in said.splitlines() if line.startswith("test_minutes.py::")]
    assert named == sorted(f"test_minutes.py::test_takes_a_minute[{number}]" for number in numbers)
    assert run("--budget-minutes", "-1")[0] == []


def test_workers_take_the_tests_in_that_order(run):
    workers = ("-n", "2", "--dist", "load", "--maxschedchunk", "1")
    numbers, _ = run("--start-at", "3", *workers)
    assert sorted(numbers) == sorted(ORDER)
    numbers, said = run("--start-at", "3", "--budget-minutes", "1.5", *workers)
    assert sorted(numbers) == sorted(ORDER[3:7])  # two of each worker
    assert "4 of 20 tests were run" in said
