"""Devices of the catalogue and of a user's own."""

from __future__ import annotations

import pytest
from pydantic import ValidationError

from llmtrain.cluster import DEVICES, Cluster, Device

MINE = Device(name="h100-pcie", memory_bytes=80 * 2**30, peak_flops={"bf16": 756e12}, memory_bandwidth=2e12)


def test_the_links_of_a_cluster_come_before_those_of_its_device():
    cluster = Cluster(nodes=2, devices_per_node=8, device="H100", network_bandwidth=1e9)
    assert (cluster.spec.network_bandwidth, cluster.spec.node_bandwidth) == (1e9, 450e9)
    assert Cluster(device="h100").spec == DEVICES["h100"]


def test_a_device_of_ones_own_survives_a_plan_file():
    cluster = Cluster(nodes=2, devices_per_node=8, device="h100-pcie", own_devices=[MINE])
    assert cluster.spec == MINE
    assert Cluster.model_validate_json(cluster.model_dump_json()) == cluster


def test_another_size_keeps_the_links_and_another_device_brings_its_own():
    cluster = Cluster(nodes=2, devices_per_node=8, device="h100", own_devices=[MINE], network_bandwidth=1e9)
    assert cluster.resized(4, None, None).network_bandwidth == 1e9
    assert cluster.resized(None, None, "h200").spec == DEVICES["h200"]
    assert cluster.resized(None, 4, "h100-pcie").spec == MINE


def test_what_is_wrong_is_refused():
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
