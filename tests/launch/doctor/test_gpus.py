"""GPUs as nvidia-smi reports them; torch sees none here."""

from __future__ import annotations

from dataclasses import replace

import pytest

from llmtrain.launch.doctor import devices
from llmtrain.launch.doctor.devices import VISIBLE, parse_gpus, visible_gpus

H100 = "{}, GPU-{}aaaa-bbbb, NVIDIA H100 80GB HBM3, 81559, {}, 570.86.10, {}"
FOUR = "\n".join(H100.format(index, index, 3, 0) for index in range(4))


@pytest.fixture
def seen(monkeypatch):
    """What torch sees."""
    names: list[str] = []
    monkeypatch.setattr(devices, "seen_by_torch", lambda: (names, "" if names else "no device"))
    return names


def _levels(findings):
    return {one.check: one.level for one in findings}


def test_healthy_gpus_have_no_findings(programs, context, seen):
    programs("nvidia-smi", FOUR)
    seen += ["NVIDIA H100 80GB HBM3"] * 4
    first, second = devices.gpus(context)
    assert (first.level, second.level) == ("ok", "ok")
    assert first.text == "4 × NVIDIA H100 80GB HBM3 with 79.6 GiB; driver 570.86.10"
    assert second.text == "torch sees 4 × NVIDIA H100 80GB HBM3"


def test_missing_nvidia_smi_is_reported(context, seen, monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    [finding] = devices.gpus(context)
    assert finding.text == "no GPU: nvidia-smi is not installed; torch sees none (no device)"


def test_a_driver_that_fails_is_a_fault(programs, context, seen):
    programs("nvidia-smi", "Unable to determine the device handle for GPU3\n", code=15)
    [finding] = devices.gpus(context)
    assert finding.level == "fault"
    assert finding.text == "nvidia-smi ended with code 15: Unable to determine the device handle for GPU3"


def test_a_torch_without_cuda_on_a_machine_with_gpus_is_a_fault(programs, context, monkeypatch):
    programs("nvidia-smi", FOUR)
    monkeypatch.setattr(devices, "seen_by_torch", lambda: ([], "a build of torch for CPUs"))
    assert _levels(devices.gpus(context))["devices.torch"] == "fault"


def test_an_error_of_torch_without_a_message_is_shown(monkeypatch):
    def fail():
        raise RuntimeError

    monkeypatch.setattr("torch.version.cuda", "13.0")
    monkeypatch.setattr("torch.cuda.device_count", fail)
    assert devices.seen_by_torch() == ([], "it gives no reason")


def test_broken_busy_and_different_gpus_are_named(programs, context, seen):
    lines = [H100.format(0, 0, 3, 0), H100.format(1, 1, 40000, 2), "2, GPU-2, NVIDIA L4, 23034, 1, 570.86.10, [N/A]"]
    programs("nvidia-smi", "\n".join(lines))
    seen += ["NVIDIA H100 80GB HBM3", "NVIDIA H100 80GB HBM3", "NVIDIA L4"]
    levels = _levels(devices.gpus(context))
    assert levels["devices.memory_errors"] == "fault"
    assert levels["devices.in_use"] == levels["devices.kinds"] == levels["devices.order"] == "warning"
    in_order = replace(context, env={"CUDA_DEVICE_ORDER": "PCI_BUS_ID"})
    assert "devices.order" not in _levels(devices.gpus(in_order))


@pytest.mark.parametrize(
    ("visible", "indices", "level"),
    [
        (None, "0123", None),
        ("2,0", "20", "ok"),
        ("0,1,2,3", "0123", None),
        ("GPU-1aaaa-bbbb,GPU-3a", "13", "ok"),
        ("", "", "warning"),
        ("-1", "", "warning"),
        ("1,-1,2", "1", "ok"),  # CUDA reads no further
        ("1,7,2", "1", "fault"),
        ("GPU-9", "", "fault"),
        ("GPU-", "", "fault"),  # would be any of them
        ("1,1", "", "fault"),
        ("1,GPU-1aaaa", "", "fault"),
        ("MIG-1", "", "warning"),
    ],
)
def test_visible_devices_are_read_as_cuda_reads_them(visible, indices, level):
    found, problems = visible_gpus(visible, parse_gpus(FOUR))
    assert "".join(gpu.index for gpu in found) == indices
    assert [one.level for one in problems] == ([level] if level else [])
    assert all(VISIBLE in one.text for one in problems)


def test_a_hostfile_with_more_slots_than_gpus_is_a_fault(context, seen):
    seen += ["NVIDIA L4"] * 2
    [finding] = devices.slots(replace(context, devices=(0, 3)))
    assert (finding.level, finding.text) == ("fault", "the hostfile gives 4 slots, but torch sees 2 GPUs")
    assert not list(devices.slots(replace(context, devices=(0, 1))))
    assert not list(devices.slots(context))
