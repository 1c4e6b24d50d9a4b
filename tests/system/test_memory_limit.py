"""The memory that the control groups of a process grant."""

import pytest

from llmtrain.system import host


@pytest.mark.parametrize(
    ("own", "limits", "expected"),
    [
        ("0::/\n", {".": "max"}, None),
        ("0::/\n", {".": "2048"}, 2048),
        ("1:cpu:/x\n0::/system.slice/job_7/step_0\n", {"system.slice/job_7": "4096"}, 4096),
        ("0::/job_7/step_0\n", {"job_7": "4096", "job_7/step_0": "1024"}, 1024),
        ("0::/job_7/step_0\n", {"job_7": "512", "job_7/step_0": "1024", ".": "max"}, 512),
        ("0::/../elsewhere\n", {}, None),
        ("", {}, None),
    ],
)
def test_the_smallest_limit_from_the_own_group_to_the_root_counts(own, limits, expected, monkeypatch, tmp_path):
    (tmp_path / "own").write_text(own)
    for group, limit in limits.items():
        (tmp_path / "tree" / group).mkdir(parents=True, exist_ok=True)
        (tmp_path / "tree" / group / "memory.max").write_text(f"{limit}\n")
    monkeypatch.setattr(host, "CGROUP_ROOT", tmp_path / "tree")
    monkeypatch.setattr(host, "PROCESS_CGROUP", tmp_path / "own")
    assert host.memory_limit() == expected


def test_this_machine_has_none_or_some():
    assert (host.memory_limit() or 1) > 0
