"""`llmtrain tune`, and runs that take what it found."""

from __future__ import annotations

import json

import pytest

from llmtrain.tune.choice import KERNELS
from tests.helpers.commands import llmtrain, metrics
from tests.helpers.small_runs import write_small_recipe


def test_nothing_is_left_to_be_measured(tmp_path):
    named = [f"{field}={value}" for field, value in zip(KERNELS, (1, "sdpa", "eager", "whole"), strict=True)]
    words = [part for one in named for part in ("--set", one)]
    done = llmtrain("tune", write_small_recipe(tmp_path), *words)
    assert done.returncode == 2
    assert "names all of its kernels" in done.stderr


BESIDE = """
from llmtrain.system import host
host.CoreMeter.cores_of_others = lambda meter: {cores}
"""
"""For a `sitecustomize`: others are the tests beside this one."""


def _beside(folder, monkeypatch, cores):
    (folder / "site").mkdir()
    (folder / "site" / "sitecustomize.py").write_text(BESIDE.format(cores=cores))
    monkeypatch.setenv("PYTHONPATH", str(folder / "site"))


def test_on_a_busy_machine_nothing_is_measured_or_started(tmp_path, monkeypatch):
    _beside(tmp_path, monkeypatch, cores=0.9)
    named = ["--set", "kernels.blocks=eager", "--set", "kernels.threads=1"]
    done = llmtrain("tune", write_small_recipe(tmp_path), *named)
    assert done.returncode == 2
    assert "cannot be measured: others use 0.90 of" in done.stderr
    assert "measure again when nothing else is running" in done.stderr
    assert not (tmp_path / "cache").exists()  # not even data were prepared


def _attention(run_dir) -> str:
    return json.loads((run_dir / "plan.json").read_text())["kernels"]["values"]["model.attention"]


@pytest.mark.breadth
def test_a_measurement_is_taken_by_later_runs_and_kept_by_each(tmp_path, monkeypatch):
    _beside(tmp_path, monkeypatch, cores=0)
    recipe, run_dir = write_small_recipe(tmp_path), tmp_path / "run"
    named = ("--set", "kernels.blocks=eager", "--set", "kernels.threads=1", "--set", "kernels.loss=whole")
    done = llmtrain("tune", recipe, *named, "--json")
    assert done.returncode == 0, done.stderr
    measured = json.loads(done.stdout)
    assert set(measured["milliseconds"]["model.attention"]) == {"sdpa", "varlen", "eager"}

    file = next((tmp_path / "cache" / "kernels").glob("*.json"))
    other = "eager" if measured["values"]["model.attention"] != "eager" else "varlen"
    measured["values"]["model.attention"] = other
    file.write_text(json.dumps(measured))  # so that the choice is not the rules' own
    assert llmtrain("train", recipe, *named, "--run-dir", run_dir, "--max-steps", 4).returncode == 0
    assert _attention(run_dir) == other
    file.unlink()
    assert llmtrain("train", recipe, *named, "--run-dir", run_dir).returncode == 0
    assert _attention(run_dir) == other
    assert metrics(run_dir)[-1]["step"] == 12
