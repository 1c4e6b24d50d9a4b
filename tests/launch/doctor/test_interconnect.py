"""Links as nvidia-smi prints them, and adapters as the kernel lists them."""

from __future__ import annotations

import pytest

from llmtrain.launch.doctor import devices
from llmtrain.launch.doctor.devices import count_gpu_links, count_links

# Of a machine with four GPUs in two pairs and a network adapter; the header is underlined there.
TOPOLOGY = """\t\x1b[4mGPU0\tGPU1\tGPU2\tGPU3\tNIC0\tCPU Affinity\tNUMA Affinity\tGPU NUMA ID\x1b[0m
GPU0\t X \tNV12\tSYS\tSYS\tPXB\t0-31\t0\t\tN/A
GPU1\tNV12\t X \tSYS\tSYS\tPXB\t0-31\t0\t\tN/A
GPU2\tSYS\tSYS\t X \tNV12\tSYS\t32-63\t1\t\tN/A
GPU3\tSYS\tSYS\tNV12\t X \tSYS\t32-63\t1\t\tN/A
NIC0\tPXB\tPXB\tSYS\tSYS\t X

Legend:
  X    = Self
"""
NVLINK = """GPU 0: NVIDIA H100 (UUID: GPU-1)
\t Link 0: 26.562 GB/s
\t Link 1: <inactive>
"""


def test_each_pair_is_counted_once():
    assert count_gpu_links(TOPOLOGY) == {"NV12": 2, "SYS": 4}
    assert not count_gpu_links("\tGPU0\tCPU Affinity\nGPU0\t X \t0-31\n")


def test_links_that_are_down_are_counted():
    assert count_links(NVLINK) == (1, 1)


def test_skipped_checks_are_reported(context, monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    [finding] = devices.gpu_links(context)
    assert finding.text == "links between GPUs not checked: nvidia-smi is not installed"


def _port(context, adapter, state):
    port = context.sys / "class" / "infiniband" / adapter / "ports" / "1"
    port.mkdir(parents=True)
    (port / "state").write_text(f"{state}\n")
    (port / "rate").write_text("400 Gb/sec (4X NDR)\n")
    (port / "link_layer").write_text("InfiniBand\n")


@pytest.mark.parametrize(
    ("states", "levels"),
    [
        ((), ["ok"]),
        (("4: ACTIVE",), ["ok"]),
        (("4: ACTIVE", "1: DOWN"), ["ok", "warning"]),
        (("1: DOWN", "2: INIT"), ["fault"]),
    ],
)
def test_ports_of_adapters_that_are_down_are_reported(context, states, levels):
    for number, state in enumerate(states):
        _port(context, f"mlx5_{number}", state)
    found = list(devices.adapters(context))
    assert [one.level for one in found] == levels
    if "ACTIVE" in "".join(states):
        assert found[0].text == "mlx5_0:1 InfiniBand 400 Gb/sec (4X NDR)"
    if "1: DOWN" in states:
        assert "is DOWN" in found[-1].text
