"""Commands on a GPU, as a user gives them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from llmtrain.data import prepare
from llmtrain.models import build_model
from llmtrain.plan.load import load_recipe
from tests.helpers.commands import losses, metrics

SETTINGS = {
    "parallel.precision": "fp32",
    "parallel.zero_stage": "1",
    "model.attention": "sdpa",
    "kernels.blocks": "eager",
    "kernels.loss": "whole",
}


def start(*arguments: object, **environment: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "llmtrain", *map(str, arguments)]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    return subprocess.Popen(command, **pipes, text=True, env=os.environ | environment)


def test_a_run_equals_that_of_a_cpu_and_doctor_finds_the_gpu(gpu_environment, small_recipe, tmp_path):
    """All at once, to save time. Both runs start from stored weights, because each device draws others."""
    recipe, _ = load_recipe(str(small_recipe), [f"{name}={value}" for name, value in SETTINGS.items()])
    build_model(recipe, torch.float32, torch.device("cpu")).save_pretrained(tmp_path / "weights")
    model = json.dumps({"pretrained": str(tmp_path / "weights"), "attention": "sdpa"})
    settings = ["--set", f"model={model}", "--set", f"data.tokenizer={prepare(recipe).tokenizer_dir}"]
    settings += [part for name, value in SETTINGS.items() for part in ("--set", f"{name}={value}")]
    command = ("train", small_recipe, "--nproc", 1, *settings, "--run-dir")
    on_gpu, on_cpu = tmp_path / "gpu", tmp_path / "cpu"
    running = {
        "train": start(*command, on_gpu, **gpu_environment()),
        "train on a CPU": start(*command, on_cpu, DS_ACCELERATOR="cpu"),
        "doctor": start("doctor", "--json", **gpu_environment()),
    }
    said = {name: process.communicate(timeout=300) for name, process in running.items()}
    for name in ("train", "train on a CPU"):
        assert running[name].returncode == 0, said[name]
    assert json.loads((on_gpu / "plan.json").read_text())["cluster"]["device"] != "cpu"
    assert all(line["peak_memory_bytes"] > 0 for line in metrics(on_gpu) if "loss" in line)
    assert (on_gpu / "export" / "model.safetensors").exists()
    assert_close(on_gpu, on_cpu)
    assert_found(json.loads(said["doctor"][0]))


def assert_close(run: Path, expected: Path) -> None:
    """They differ by the order of sums; the bound is that of `test_parity`."""
    for ours, theirs in zip(losses(run), losses(expected), strict=True):
        assert ours == pytest.approx(theirs, rel=1e-5)


def assert_found(report: dict) -> None:
    (host,) = report["hosts"]
    found = [one for one in host["findings"] if one["check"].startswith(("devices", "gpu"))]
    assert any("NVIDIA" in one["text"] for one in found), found
    assert not [one for one in found if one["level"] == "fault"]
    assert report["all_reduce"]["backend"] == "nccl", report["all_reduce"]
