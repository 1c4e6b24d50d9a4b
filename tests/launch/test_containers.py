"""The Dockerfile passes a linter and fits the examples that use it; SkyPilot's example trains."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from llmtrain.launch.jobs.kubernetes import USER, KubernetesOptions
from tests.helpers.launching_doc import shell_lines

ROOT = Path(__file__).parents[2]
DOCKERFILE = ROOT / "Dockerfile"
DOCKER = """#!/bin/bash
# Stands for docker, which cannot run here: runs what follows the image.
while [ "$1" != "$IMAGE" ]; do shift; done
shift
exec "$@"
"""


def test_the_dockerfile_passes_the_linter():
    hadolint = Path(sys.executable).with_name("hadolint")
    done = subprocess.run([hadolint, DOCKERFILE], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "")


def test_copied_files_are_not_ignored():
    text = DOCKERFILE.read_text()
    sources = [name for line in re.findall(r"COPY --chown=llmtrain (.*)", text) for name in line.split()[:-1]]
    kept = [line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")]
    assert sorted(sources) == sorted(kept)
    assert all((ROOT / name).exists() for name in sources)


def test_kubernetes_finds_the_recipes_and_its_user():
    text = DOCKERFILE.read_text()
    assert re.findall("WORKDIR (.*)", text)[-1] == KubernetesOptions(image="image", pvc="claim").workdir
    assert re.findall("USER (.*)", text) == [str(USER)]
    assert f"--uid {USER} " in text


def test_the_kubernetes_example_is_the_output_of_the_command_in_the_guide():
    guide = (ROOT / "docs/guides/containers.md").read_text(encoding="utf-8")
    [line] = [line for line in shell_lines(guide) if "--launcher kubernetes" in line]
    command = [sys.executable, "-m", *shlex.split(line)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout == (ROOT / "examples/kubernetes.yaml").read_text(encoding="utf-8")


@pytest.mark.breadth
def test_skypilot_trains_on_two_nodes(tmp_path, small_recipe):
    job = yaml.safe_load((ROOT / "examples/skypilot.yaml").read_text())
    (tmp_path / "docker").write_text(DOCKER)
    (tmp_path / "docker").chmod(0o755)
    own = {
        **os.environ,
        **job["envs"],
        "PATH": f"{tmp_path}:{Path(sys.executable).parent}:{os.environ['PATH']}",
        "RECIPE": str(small_recipe),
        "RUN": str(tmp_path / "run"),
        "LLMTRAIN_CACHE": str(tmp_path / "cache"),
        "SKYPILOT_NODE_IPS": "127.0.0.1\n127.0.0.1",
        "SKYPILOT_NUM_NODES": "2",
        "SKYPILOT_NUM_GPUS_PER_NODE": "1",
    }
    nodes = [
        subprocess.Popen(["bash", "-c", job["run"]], cwd=ROOT, env={**own, "SKYPILOT_NODE_RANK": str(node)})
        for node in range(job["num_nodes"])
    ]
    assert [node.wait(150) for node in nodes] == [0, 0]
    assert (tmp_path / "run/metrics.jsonl").stat().st_size
