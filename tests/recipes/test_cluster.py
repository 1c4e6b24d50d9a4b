"""Devices of the catalogue and of a user's own."""

from __future__ import annotations

import os

import pytest
from pydantic import ValidationError

from llmtrain.errors import RecipeError
from llmtrain.recipe import cluster
from llmtrain.recipe.cluster import DEVICES, Cluster, Device, device_of, visible_gpus

MINE = Device(name="h100-pcie", memory_bytes=80 * 2**30, peak_flops={"bf16": 756e12}, memory_bandwidth=2e12)


def test_the_links_of_a_cluster_come_before_those_of_its_device():
    cluster = Cluster(nodes=2, devices_per_node=8, device="H100", network_bandwidth=1e9)
    assert (cluster.spec.network_bandwidth, cluster.spec.node_bandwidth) == (1e9, 450e9)
    assert Cluster(device="h100").spec == DEVICES["h100"]


def test_a_custom_device_is_preserved_in_a_plan_file():
    cluster = Cluster(nodes=2, devices_per_node=8, device="h100-pcie", own_devices=[MINE])
    assert cluster.spec == MINE
    assert Cluster.model_validate_json(cluster.model_dump_json()) == cluster


def test_another_size_keeps_the_links_and_another_device_replaces_them():
    cluster = Cluster(nodes=2, devices_per_node=8, device="h100", own_devices=[MINE], network_bandwidth=1e9)
    assert cluster.resized(4, None, None).network_bandwidth == 1e9
    assert cluster.resized(None, None, "h200").spec == DEVICES["h200"]
    assert cluster.resized(None, 4, "h100-pcie").spec == MINE


GPUS = """GPU-5a1c0001-0000, NVIDIA H100 80GB HBM3
GPU-5a1c0002-0000, NVIDIA H100 80GB HBM3
GPU-77770003-0000, NVIDIA A100-SXM4-80GB
"""


@pytest.fixture
def three_gpus(tmp_path, monkeypatch):
    """A machine whose nvidia-smi lists them; returns what CUDA_VISIBLE_DEVICES makes visible."""
    program = tmp_path / "nvidia-smi"
    program.write_text(f"#!/bin/sh\ncat <<'END'\n{GPUS}END\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")

    def visible(text):
        if text is None:
            monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
        else:
            monkeypatch.setenv("CUDA_VISIBLE_DEVICES", text)
        visible_gpus.cache_clear()
        return [device_of(name) for name in visible_gpus()]

    yield visible
    visible_gpus.cache_clear()


@pytest.mark.parametrize(
    ("text", "devices"),
    [
        (None, ["h100", "h100", "a100"]),
        ("2,0", ["a100", "h100"]),
        ("GPU-5a1c0002-0000", ["h100"]),
        (" GPU-7777 , GPU-5a1c0001", ["a100", "h100"]),
        ("MIG-1c,MIG-2d", ["h100", "h100"]),
        ("", []),
        ("-1", []),
        ("NoDevFiles", []),
        ("0,-1,1", ["h100"]),
    ],
)
def test_gpus_are_chosen_by_number_and_by_uuid(three_gpus, text, devices):
    assert three_gpus(text) == devices


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("0,3", "'3' matches none of this machine's 3 GPUs"),
        ("GPU-5a1c", "'GPU-5a1c' matches none"),  # two begin like this
        ("GPU-ffff", "'GPU-ffff' matches none"),
        ("first", "'first' matches none"),
        ("1,1", "names '1' twice"),
    ],
)
def test_missing_gpus_are_named(three_gpus, text, said):
    with pytest.raises(RecipeError, match="CUDA_VISIBLE_DEVICES") as error:
        three_gpus(text)
    assert said in str(error.value)


def test_gpus_that_are_not_listed_in_time_are_no_cpus(three_gpus, tmp_path, monkeypatch):
    monkeypatch.setattr(cluster, "NVIDIA_SMI_S", 0.1)
    (tmp_path / "nvidia-smi").write_text("#!/bin/sh\nexec sleep 60\n")
    with pytest.raises(RecipeError, match=r"nvidia-smi: has not answered within 0\.1 s(.|\n)*DS_ACCELERATOR=cpu"):
        three_gpus(None)


def test_invalid_clusters_are_refused():
    with pytest.raises(ValidationError, match=r"unknown device; did you mean 'h100'\? .*known: a100"):
        Cluster(device="h10")
    with pytest.raises(ValidationError, match="did you mean 'h100-pcie'"):
        Cluster(device="h100-pci", own_devices=[MINE])
    for wrong in ({"network_bandwidth": 0.0}, {"node_bandwidth": -1.0}, {"nodes": 0}, {"bandwidth": 1.0}):
        with pytest.raises(ValidationError):
            Cluster(**wrong)
    for wrong in ({"name": "H 100"}, {"memory_bandwidth": 0.0}, {"peak_flops": {"bf16": -1.0}}):
        with pytest.raises(ValidationError):
            MINE.model_validate(MINE.model_dump() | wrong)
