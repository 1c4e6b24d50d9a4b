"""`llmtrain doctor --self-test` on this machine's CPUs, and the recommendation to run it."""

from __future__ import annotations

import json

import pytest
from typer.testing import CliRunner

from llmtrain.cli import app
from llmtrain.plan.search.enumerate import enumerate_plans
from llmtrain.recipe import parse_recipe
from llmtrain.recipe.cluster import Cluster, MeasuredRates, local_cluster, measured_on, self_test_folder
from llmtrain.train.start import offer_self_test
from llmtrain.trials.self_test import run
from tests.helpers.commands import forked_llmtrain


def test_each_strategy_is_tried_once():
    recipe = parse_recipe(run.TINY)
    legal, _ = enumerate_plans(recipe, 4, "cpu")
    names = [one.name for one in run.representatives(legal, 4, experts=False)]
    assert len(names) == len(set(names)) < len(legal) / 2
    for part in ("zero0", "zero1", "zero2", "zero3", "offload", "ddp", "fsdp2", "tp", "sp", "pp"):
        assert any(part in name for name in names), part
    assert any("pp2" in name and "tp2" in name for name in names)
    legal, _ = enumerate_plans(recipe.with_(model=run.EXPERTS), 4, "cpu")
    assert all("ep" in one.name for one in run.representatives(legal, 4, experts=True))


def test_the_self_test_is_recommended_once_on_gpus(monkeypatch, tmp_path, capfd):
    monkeypatch.setenv("LLMTRAIN_CACHE", str(tmp_path))
    offer_self_test(Cluster())
    assert capfd.readouterr().err == ""
    for _ in range(2):
        offer_self_test(Cluster(device="h100"))
    assert capfd.readouterr().err.count("llmtrain doctor --self-test") == 1


@pytest.mark.parametrize("option", ["--prebuild", "--hostfile=hosts", "recipes/tiny.py"])
def test_options_of_another_task_are_refused(option):
    done = forked_llmtrain("doctor", "--self-test", option)
    assert done.returncode == 2
    assert "cannot be combined with --self-test" in done.stderr


@pytest.mark.parametrize(
    "most", [pytest.param(1, marks=pytest.mark.slow), pytest.param(None, marks=pytest.mark.breadth)]
)
def test_this_machine_passes_the_self_test(monkeypatch, tmp_path, most):
    """most: number of plans that are compared, of dense models and of those with experts."""
    monkeypatch.setenv("LLMTRAIN_CACHE", str(tmp_path))
    monkeypatch.setenv("LLMTRAIN_SELF_TEST", str(tmp_path / "named.json"))
    chosen = run.representatives
    monkeypatch.setattr(run, "representatives", lambda *arguments, **options: chosen(*arguments, **options)[:most])
    done = CliRunner().invoke(app, ["doctor", "--self-test", "--nproc", "2", "--json"])
    assert done.exit_code == 0, done.output
    report = json.loads(done.stdout)
    for path in (self_test_folder() / "report.json", tmp_path / "named.json"):
        assert report == json.loads(path.read_text())
    assert local_cluster().measured == MeasuredRates(**report["measured"])
    assert {one["level"] for one in report["findings"] if one["check"] == "parity.plans"} == {"ok"}
    dense, experts = report["parity"]
    assert len(dense["plans"]) == most or (not most and len(dense["plans"]) > 10)
    assert all(plan["certified"] for plan in dense["plans"] + experts["plans"])
    assert [one["rank"] for one in report["devices"]] == [0, 1]
    assert measured_on(self_test_folder() / "report.json").node_bandwidth > 0
