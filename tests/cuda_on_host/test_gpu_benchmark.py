"""`python -m benchmarks gpu --small` on the emulated device."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.gpu import page
from benchmarks.gpu.cases import CASES
from tests.cuda_on_host.conftest import environment

ROOT = Path(__file__).parents[2]


def measured(libraries: Path, out: Path, *options: str) -> dict[str, dict]:
    """Case → row."""
    words = [sys.executable, "-m", "benchmarks", "gpu", "--small", "--out", str(out), *options]
    env = environment(libraries, devices=1)
    ended = subprocess.run(words, cwd=ROOT, env=env, capture_output=True, text=True, check=False)
    rows = json.loads((out / "gpu.json").read_text())["rows"]
    assert rows, ended.stderr
    return {row["case"]: row for row in rows}


@pytest.mark.slow
def test_plans_take_steps_with_the_predicted_memory(libraries, tmp_path):
    """The weights of the 4-bit case are read from a folder. Its small model is too small for a close prediction."""
    rows = measured(libraries, tmp_path, "--only", "1b plain,1b zero3 offload,8b qlora")
    assert [row["status"] for row in rows.values()] == ["done", "done", "done"], rows
    assert all("mfu" in row["found"] for row in rows.values())
    for name in ("1b plain", "1b zero3 offload"):
        assert abs(page.memory_error(rows[name]["found"])) < page.CLOSE


@pytest.mark.breadth
def test_the_whole_command_ends_in_its_minutes(libraries, tmp_path):
    """Some ten minutes. fp8 is computed in no emulation. Those tests of tests/gpu that can run here have an own option,
    and the other libraries call what the emulation lacks."""
    left_out = ("tests", "Trainer", "TRL")
    names = [name for name in CASES if not name.startswith(left_out)]
    rows = measured(libraries, tmp_path, "--minutes", "30", "--only", ",".join(names))
    assert list(rows) == names
    assert {name: row["reason"] for name, row in rows.items() if row["status"] != "done"}.keys() <= {"1b fp8"}
