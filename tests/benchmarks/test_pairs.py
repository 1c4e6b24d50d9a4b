"""Commands run alternately, each in a new process, and their output is summarized."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from benchmarks import pairs
from benchmarks.machine import facts

PROGRAM = """
import json, os, sys
from pathlib import Path
log = Path(sys.argv[2])
with log.open("a") as file:
    file.write(sys.argv[1] + "\\n")
print("chatter")
print(json.dumps({"value": float(sys.argv[3]) + log.read_text().count(sys.argv[1]), "pid": os.getpid()}))
"""


def side(name: str, value: float) -> pairs.Side:
    return pairs.Side(name, ["python", "-c", PROGRAM, name, "{work}/log", str(value)])


def test_sides_alternate_in_new_processes(tmp_path):
    said: list[str] = []
    prepared = pairs.Side("made", ["python", "-c", "open(r'{work}/made', 'w')"])
    case = pairs.Case("two", [side("a", 10), side("b", 20)], setup=[prepared])
    result = pairs.run_case(case, 3, tmp_path, said.append)
    assert (tmp_path / "log").read_text().split() == ["a", "b"] * 3
    assert (tmp_path / "made").exists()
    assert len(said) == 7
    ours, peer = result["sides"]
    assert [run["value"] for run in ours["runs"]] == [11, 12, 13]
    assert len({run["pid"] for one in (ours, peer) for run in one["runs"]}) == 6
    assert ours["summary"]["value"] == {"median": 12, "lowest": 11, "highest": 13}
    assert result["against"]["b"]["value"] == {"median": 12 / 22, "lowest": 11 / 21, "highest": 13 / 23}
    assert pairs.OTHERS in ours["runs"][0]
    json.dumps(result)


@pytest.mark.parametrize(
    ("program", "told"), [("raise SystemExit('no luck')", "no luck"), ("print('words')", "no JSON"), ("", "no JSON")]
)
def test_a_side_that_fails_is_named(program, told, tmp_path):
    with pytest.raises(pairs.SideFailedError, match=f"(?s)a: .*{told}"):
        pairs.measured(pairs.Side("a", ["python", "-c", program]), tmp_path)


def test_only_children_of_the_side_are_reaped(tmp_path):
    with subprocess.Popen([sys.executable, "-c", "raise SystemExit(3)"]) as child:
        os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
        before = pairs._children()
        leaves_a_child = "import subprocess; subprocess.Popen(['sleep', '0.2'], stdout=-3); print('{}')"
        pairs.measured(pairs.Side("a", ["python", "-c", leaves_a_child]), tmp_path)
        assert pairs._children() == before
        assert child.wait() == 3


def test_the_machine_is_described(monkeypatch):
    monkeypatch.setenv("LLMTRAIN_CACHE", "/somewhere")
    found = facts()
    assert found["hardware"]["cores"] >= 1
    assert found["hardware"]["memory_gib"] > 0
    assert found["versions"]["torch"]
    assert "LLMTRAIN_CACHE" not in found["variables"]
    assert len(found["load_average"]) == 3
