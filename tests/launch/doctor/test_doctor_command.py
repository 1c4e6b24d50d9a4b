"""`llmtrain doctor` as a user gives it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.helpers.commands import forked_llmtrain

REPOSITORY = Path(__file__).parents[3]


def _doctor(*arguments, **env):
    command = [sys.executable, "-m", "llmtrain", "doctor", *map(str, arguments)]
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY), **env}
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)


def test_this_machine_is_reported_as_json():
    result = _doctor("--json")
    document = json.loads(result.stdout)  # and nothing else
    assert result.returncode == (5 if document["faults"] else 0)
    [host] = document["hosts"]
    groups = {one["check"].partition(".")[0] for one in host["findings"]}
    assert groups == {"versions", "devices", "interconnect", "network", "storage", "limits", "tools"}
    assert {one["level"] for one in host["findings"]} <= {"ok", "warning", "fault"}
    assert all(one["fix"] for one in host["findings"] if one["level"] != "ok")
    assert document["all_reduce"]["correct"] is True
    assert "Traceback" not in result.stderr


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--hostfile", "/none"), "cannot read /none"),
        (("--include", "h1"), "--include: needs a hostfile"),
        (("recipes/tiny.py",), "RECIPE: is only used with --prebuild"),
        (("--set", "a=b"), "--set: changes a recipe, but none is given"),
        (("none.py", "--prebuild"), "none.py"),
    ],
)
def test_an_invalid_command_line_is_refused_at_once(arguments, said):
    result = forked_llmtrain("doctor", *arguments)
    assert result.returncode == 2
    assert said in result.stderr
    assert result.stdout == ""
    as_json = forked_llmtrain("doctor", *arguments, "--json")
    assert (as_json.returncode, as_json.stderr) == (2, "")
    assert json.loads(as_json.stdout)["problems"][0]["rule"]


def test_a_fault_is_reported_and_exits_5(tmp_path):
    (tmp_path / "file").write_text("")
    result = _doctor("--nproc", 1, LLMTRAIN_CACHE=str(tmp_path / "file" / "cache"))
    assert result.returncode == 5
    assert "fault: cache:" in result.stdout
    assert "faults: 1" in result.stdout.splitlines()[-1]
    assert "one rank, gloo: correct; no link was used" in result.stdout
