"""The self-test on faulty GPUs of the device for tests: each fault is named, with its device and its size."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest
import torch

from llmtrain.recipe.cluster import Cluster
from llmtrain.trials.self_test import job
from llmtrain.trials.self_test.job import DeviceRates, TimedModel
from llmtrain.trials.self_test.report import findings, measured_by
from tests.cuda_on_host.conftest import environment
from tests.helpers.commands import llmtrain

SLOW_LINK = {"device": 1, "operation": "communication", "seconds_per_byte": 1e-8}  # 100 MB/s
WRONG_PRODUCT = {"device": 0, "operation": "aten::mm", "is_wrong": True}
SLOW_PRODUCTS = {"device": 1, "operation": "aten::mm", "seconds_per_byte": 1e-7}  # some 20 times the usual
LESS_MEMORY = {"device": 1, "bytes": 40 << 30}


SMALL = TimedModel(width=128, layers=1, length=64, vocabulary=512, accumulation=1)


def measured_with(rank: int, cluster: Cluster, faults: list[dict[str, Any]]) -> DeviceRates:
    """What the worker of a rank measures; for a shorter time than on GPUs."""
    import _cuda_on_host as device

    from llmtrain.trials.self_test import measure

    job.MODELS, measure.SECONDS = (SMALL,), 0.05
    for fault in faults:
        (device.set_memory if "bytes" in fault else device.plant)(**fault)
    return measure.measure_device(cluster, torch.device("cuda", rank))


@pytest.mark.slow
def test_planted_faults_are_named(gpus, monkeypatch):
    """On three devices: two have one link, and do not tell which of them is slow."""
    cluster = Cluster(devices_per_node=3, device="h100")
    ranks = gpus(3, measured_with, cluster, [SLOW_LINK, WRONG_PRODUCT, SLOW_PRODUCTS, LESS_MEMORY])
    measured = measured_by(ranks, "h100")
    monkeypatch.setattr(job, "MODELS", (SMALL,))
    found = {one.check: one for one in findings(job.timed_plan(cluster, measured.matmul), ranks, measured)}
    for check, level, text in (
        ("compute.products", "fault", "wrong products of integers on rank 0 (NVIDIA H100 80GB HBM3) in fp32, bf16"),
        ("devices.memory", "warning", "rank 1 has 40.0 GiB of memory; 80.0 GiB expected"),
        ("compute.fp32", "warning", "; rank 1 reaches 0."),
        ("links.pairs", "warning", "; rank 1 reaches 0."),
    ):
        assert found[check].level == level, found[check]
        assert text in found[check].text, found[check]
        assert found[check].fix


@pytest.mark.breadth
def test_a_whole_self_test_names_a_fault_and_measures_for_plans(libraries, tmp_path):
    """Two minutes: strategies are right, one device has less memory, and plans then take the measured rates."""
    env = environment(libraries, devices=2, faults=[LESS_MEMORY]) | {"LLMTRAIN_CACHE": str(tmp_path)}
    command = [sys.executable, "-m", "llmtrain", "doctor", "--self-test", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=env)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    report = json.loads(done.stdout)
    assert all(plan["certified"] for certificate in report["parity"] for plan in certificate["plans"])
    (found,) = (one for one in report["findings"] if one["check"] == "devices.memory")
    assert "rank 1 has 40.0 GiB" in found["text"]
    recipe = tmp_path / "recipe.py"  # without a cluster of its own
    recipe.write_text("from recipes.tiny import recipe\n")
    plan = llmtrain("plan", recipe, "--gpus-per-node", 2, "--json", **env)
    assert json.loads(plan.stdout)["cluster"]["measured"] == report["measured"], plan.stderr
