"""`llmtrain tune`, and runs that use its result."""

from __future__ import annotations

import json

import pytest

from llmtrain.train.tune.choice import KERNELS
from tests.helpers.commands import forked_llmtrain, llmtrain, losses, metrics
from tests.helpers.small_runs import write_small_recipe


def test_a_recipe_that_sets_all_kernels_is_refused(tmp_path):
    named = [f"{field}={value}" for field, value in zip(KERNELS, (1, "torch", "eager", "sdpa", "whole"), strict=True)]
    words = [part for one in named for part in ("--set", one)]
    done = forked_llmtrain("tune", write_small_recipe(tmp_path), *words)
    assert done.returncode == 2
    assert "are all set in the recipe" in done.stderr


BESIDE = """
import sys
from llmtrain.system import host
host.CoreMeter.cores_used_by_others = lambda meter: {cores}
if "llmtrain.train.tune.request" in sys.orig_argv:
    from llmtrain.train.tune import trial
    trial.COMPARE_S = trial.TURN_S = 0.01
"""
"""For a `sitecustomize`: others are the tests beside this one, and comparisons are short."""


def _beside(folder, monkeypatch, cores):
    (folder / "site").mkdir()
    (folder / "site" / "sitecustomize.py").write_text(BESIDE.format(cores=cores))
    monkeypatch.setenv("PYTHONPATH", str(folder / "site"))


@pytest.mark.slow
def test_nothing_is_measured_or_started_on_a_busy_machine(tmp_path, monkeypatch):
    _beside(tmp_path, monkeypatch, cores=0.9)
    named = ["--set", "kernels.blocks=eager", "--set", "kernels.threads=1"]
    done = llmtrain("tune", write_small_recipe(tmp_path), *named)
    assert done.returncode == 2
    assert "cannot be measured: others use 0.90 of" in done.stderr
    assert "measure again when nothing else is running" in done.stderr
    assert not (tmp_path / "cache").exists()  # not even data were prepared


NAMED = ("--set", "kernels.blocks=eager", "--set", "kernels.threads=1", "--set", "kernels.loss=whole")


def _measured(recipe) -> dict:
    done = llmtrain("tune", recipe, *NAMED, "--json")
    assert done.returncode == 0, done.stderr
    measured = json.loads(done.stdout)
    assert set(measured["milliseconds"]["model.attention"]) == {"sdpa", "varlen", "eager"}
    return measured


@pytest.mark.slow
def test_open_kernel_fields_are_measured_and_cached(tmp_path, monkeypatch):
    _beside(tmp_path, monkeypatch, cores=0)
    measured = _measured(write_small_recipe(tmp_path))
    [file] = (tmp_path / "cache" / "kernels").glob("*.json")
    assert json.loads(file.read_text())["values"] == measured["values"]


@pytest.mark.breadth
def test_later_runs_use_a_measurement_and_keep_its_kernels(tmp_path, monkeypatch):
    _beside(tmp_path, monkeypatch, cores=0)
    recipe = write_small_recipe(tmp_path)
    measured = _measured(recipe)
    [file] = (tmp_path / "cache" / "kernels").glob("*.json")
    other = "eager" if measured["values"]["model.attention"] != "eager" else "varlen"
    measured["values"]["model.attention"] = other
    file.write_text(json.dumps(measured))  # so that the choice is not the rules' own

    def attention(run_dir) -> str:
        return json.loads((run_dir / "plan.json").read_text())["kernels"]["values"]["model.attention"]

    whole, cut = tmp_path / "whole", tmp_path / "cut"
    assert llmtrain("train", recipe, *NAMED, "--run-dir", whole).returncode == 0
    assert attention(whole) == other
    assert llmtrain("train", recipe, *NAMED, "--run-dir", cut, "--max-steps", 4).returncode == 0
    file.unlink()
    assert llmtrain("train", recipe, *NAMED, "--run-dir", cut).returncode == 0
    assert attention(cut) == other
    assert losses(cut) == losses(whole)
    assert metrics(cut)
