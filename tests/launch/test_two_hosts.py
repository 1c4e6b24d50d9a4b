"""DeepSpeed's own launcher trains over two hosts what one process trains."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from two_hosts import missing, two_hosts

from llmtrain.verify.compare import FP32

REPOSITORY = Path(__file__).parents[2]
RECIPE = REPOSITORY / "recipes" / "tiny.py"
FIELDS = ("logging.every_steps=1", "checkpoint.every_steps=1000", "evaluation.every_steps=3", "export.at_end=false")
STEPS = 6

pytestmark = [pytest.mark.slow, pytest.mark.skipif(missing() is not None, reason=str(missing()))]


@pytest.fixture(scope="module")
def hosts(tmp_path_factory):
    with two_hosts(tmp_path_factory.mktemp("hosts")) as both:
        yield both


@pytest.fixture(scope="module")
def workers_environment(tmp_path_factory):
    return {
        "DS_ACCELERATOR": "cpu",
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
        "LLMTRAIN_CACHE": str(tmp_path_factory.mktemp("cache")),
    }


def _arguments(run_dir: Path, *fields: str) -> list[str]:
    sets = [part for field in (*FIELDS, *fields) for part in ("--set", field)]
    return ["--run-dir", str(run_dir), "--max-steps", str(STEPS), *sets]


def _logged(run_dir: Path, key: str) -> dict[int, float]:
    lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    return {line["step"]: line[key] for line in lines if key in line}


def test_a_pipeline_over_two_hosts_trains_as_one_process(hosts, workers_environment, tmp_path):
    here = [sys.executable, "-m", "llmtrain", "train", f"{RECIPE}:verify", *_arguments(tmp_path / "one")]
    there = ("--variant", "verify", *_arguments(tmp_path / "two", "parallel.pipeline=2", "parallel.zero_stage=1"))
    command = hosts.deepspeed(2, RECIPE, *there)
    environments = {"one": {**os.environ, **workers_environment}, "two": hosts.environment(workers_environment)}
    for name, line in (("one", here), ("two", command)):
        result = subprocess.run(line, env=environments[name], capture_output=True, text=True, timeout=150)
        assert result.returncode == 0, result.stdout + result.stderr
    plan = json.loads((tmp_path / "two" / "plan.json").read_text())
    assert {key: plan["layout"][key] for key in ("dp", "pp", "zero_stage")} == {"dp": 2, "pp": 2, "zero_stage": 1}
    assert plan["cluster"]["nodes"] == plan["cluster"]["devices_per_node"] == 2
    for key, entries in (("loss", STEPS), ("grad_norm", STEPS), ("eval_loss", STEPS // 3)):
        one = _logged(tmp_path / "one", key)
        assert len(one) == entries
        assert _logged(tmp_path / "two", key) == pytest.approx(one, rel=FP32)
