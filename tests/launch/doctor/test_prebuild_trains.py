"""Training finds the operators that --prebuild has compiled, and starts no compiler."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.helpers.disk_library import disk_library

REPOSITORY = Path(__file__).parents[3]
RECIPE = REPOSITORY / "recipes" / "tiny.py"

pytestmark = pytest.mark.breadth  # six minutes of a compiler


@pytest.fixture
def environment(tmp_path):
    """libaio, an empty cache of operators, and a compiler that notes each file that it is given."""
    compiler = tmp_path / "noting c++"
    note = f'case " $* " in *" -c "*) echo "$*" >> {tmp_path}/compiled ;; esac'
    compiler.write_text(f'#!/bin/sh\n{note}\nexec {shutil.which("c++")} "$@"\n')
    compiler.chmod(0o755)
    link = tmp_path / "c++"
    link.symlink_to(compiler)
    return {
        **os.environ,
        **disk_library(tmp_path / "aio"),
        "CXX": str(link),
        "TORCH_EXTENSIONS_DIR": str(tmp_path / "operators"),
        "LLMTRAIN_CACHE": str(tmp_path / "cache"),
        "PYTHONPATH": str(REPOSITORY),
        "MAX_JOBS": "2",
    }


def _llmtrain(environment, *arguments):
    command = [sys.executable, "-m", "llmtrain", *map(str, arguments)]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=1500)


def test_training_after_prebuild_does_not_compile(environment, tmp_path):
    fields = ("parallel.zero_stage=3", "parallel.offload_optimizer=nvme", f"parallel.nvme_path={tmp_path / 'disk'}")
    # Less than 1 MiB of states would stay in memory.
    fields += ("model.config.hidden_size=192", "model.config.intermediate_size=512")
    sets = [part for field in fields for part in ("--set", field)]
    result = _llmtrain(environment, "doctor", f"{RECIPE}:verify", *sets, "--prebuild", "--json")
    assert result.returncode == 0, result.stdout + result.stderr
    built = json.loads(result.stdout)["hosts"][0]["prebuilt"]
    assert [one["operator"] for one in built] == ["pin_memory", "async_io"]
    assert all(Path(one["file"]).is_relative_to(tmp_path / "operators") for one in built)
    compiled = (tmp_path / "compiled").read_text()
    assert "deepspeed_py_aio_handle.cpp" in compiled
    run = ("--run-dir", tmp_path / "run", "--max-steps", 2, "--set", "export.at_end=false")
    result = _llmtrain(environment, "train", f"{RECIPE}:verify", *sets, *run)
    assert result.returncode == 0, result.stdout + result.stderr
    assert list((tmp_path / "disk").rglob("*.swp"))  # it did train on the disk
    assert (tmp_path / "compiled").read_text() == compiled
