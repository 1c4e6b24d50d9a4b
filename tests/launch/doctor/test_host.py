"""Network, folders, limits, packages and tools of a host, with one fault at a time."""

from __future__ import annotations

import os
import resource
import time
from dataclasses import replace
from pathlib import Path

import pytest

from llmtrain.launch.discovery.interfaces import GLOO, NCCL, Interface, Network
from llmtrain.launch.doctor import limits, network, versions
from llmtrain.launch.doctor.agent import CHECKS, run_checks
from llmtrain.launch.doctor.finding import run_command
from llmtrain.launch.local import common_environment

LO = Interface("lo", ("127.0.0.1",), is_loopback=True)
ETH0 = Interface("eth0", ("10.0.0.5", "fe80::5"))


@pytest.fixture
def here(monkeypatch):
    """Describes the network of the host."""

    def describe(*known, own="127.0.1.1"):
        monkeypatch.setattr(Network, "here", lambda: Network("node5", own, (LO, *known)))

    return describe


def _only(findings):
    [finding] = findings
    return finding


def test_interfaces_are_shown_with_their_rate(context, here):
    here(ETH0)
    rate = context.sys / "class" / "net" / "eth0" / "speed"
    rate.parent.mkdir(parents=True)
    rate.write_text("25000\n")
    assert _only(network.interfaces(context)).text == "eth0 10.0.0.5 (25 Gbit/s)"


def test_no_interface_is_a_fault_for_several_hosts_only(context, here):
    here()
    assert _only(network.interfaces(context)).level == "ok"
    assert _only(network.interfaces(replace(context, master="10.0.0.1"))).level == "fault"


def test_a_host_name_on_the_loopback_is_reported_only_for_several_hosts(context, here):
    here(ETH0)
    assert _only(network.host_name(context)).level == "ok"
    finding = _only(network.host_name(replace(context, master="10.0.0.1")))
    assert (finding.level, finding.text) == ("warning", "the host name 'node5' resolves to 127.0.1.1")
    here(ETH0, own="10.0.0.5")
    assert _only(network.host_name(replace(context, master="10.0.0.1"))).text == "'node5' resolves to 10.0.0.5"


@pytest.mark.parametrize(
    ("env", "check", "said"),
    [
        ({GLOO: "eth7"}, "network.gloo", "names eth7, but there are only lo, eth0"),
        ({GLOO: "lo"}, "network.gloo", "is the loopback"),
        ({NCCL: "=eth"}, "network.nccl", "matches no interface here"),
        ({NCCL: "ib"}, "network.nccl", "matches no interface here"),
    ],
)
def test_invalid_interface_variables_are_faults(context, here, env, check, said):
    here(ETH0)
    wrong = [one for one in network.choices(replace(context, master="10.0.0.1", env=env)) if one.level == "fault"]
    assert said in _only(wrong).text
    assert wrong[0].check == check


@pytest.mark.parametrize("env", [{GLOO: "eth0"}, {NCCL: "eth"}, {NCCL: "=eth0"}, {NCCL: "^docker"}])
def test_valid_interface_variables_are_accepted(context, here, env):
    here(ETH0, own="10.0.0.5")
    assert {one.level for one in network.choices(replace(context, master="10.0.0.1", env=env))} == {"ok"}


def test_folders_are_tested_for_writing_and_left_unchanged(context, tmp_path):
    assert {one.level for one in limits.folders(context)} == {"ok"}
    assert list(tmp_path.iterdir()) == []


def test_a_folder_below_a_file_and_a_full_disk_are_reported(context, tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    findings = {one.check: one for one in limits.folders(replace(context, cache=tmp_path / "file" / "cache"))}
    assert findings["storage.cache"].level == "fault"
    assert "below a file" in findings["storage.cache"].text
    monkeypatch.setattr(limits, "MIN_FREE_BYTES", 2**60)
    assert {one.level for one in limits.folders(context)} == {"warning"}


def test_a_folder_that_cannot_be_written_to_is_reported(context):
    finding = {one.check: one for one in limits.folders(replace(context, run_root=Path("/proc/runs")))}["storage.runs"]
    assert finding.level == "fault"
    assert "/proc cannot be written to" in finding.text


def test_little_shared_memory_is_reported(context, monkeypatch):
    monkeypatch.setattr(limits, "MIN_SHARED_BYTES", 2**60)
    finding = _only(limits.shared_memory(context))
    assert finding.level == "warning"
    assert "--shm-size" in finding.fix


def test_low_limits_are_reported(context, monkeypatch):
    monkeypatch.setattr(
        resource, "getrlimit", lambda which: (1024, 1024) if which == resource.RLIMIT_NOFILE else (65536, -1)
    )
    found = {one.check: one for one in limits.limits(context)}
    assert found["limits.open_files"].fix == "ulimit -n 4096, after raising the hard limit of 1024"
    assert found["limits.limits"].text == "processes 65,536, locked memory 64.0 KiB"


def test_the_limit_of_locked_memory_matters_only_with_network_adapters(context, monkeypatch):
    monkeypatch.setattr(resource, "getrlimit", lambda _: (65536, 65536))
    assert {one.level for one in limits.limits(context)} == {"ok"}
    (context.sys / "class" / "infiniband" / "mlx5_0").mkdir(parents=True)
    assert {one.check: one.level for one in limits.limits(context)}["limits.locked_memory"] == "fault"


def test_packages_are_compared_with_pyproject(context, monkeypatch):
    assert {one.level for one in versions.packages(context)} == {"ok"}
    monkeypatch.setattr(versions, "requirements", lambda: (">=3.11", {"rich": ">=999", "no-such-package": ">=1"}))
    finding = next(iter(versions.packages(context)))
    assert finding.level == "fault"
    assert ">=999 is required" in finding.text
    assert "no-such-package is not installed" in finding.text


def test_an_untested_version_is_a_warning(context, monkeypatch):
    monkeypatch.setitem(versions.TRIED, "deepspeed", "0.19.7")
    (finding,) = (one for one in versions.packages(context) if one.check == "versions.untested")
    assert (finding.level, finding.fix) == ("warning", "pip install deepspeed==0.19.7")


def test_an_old_python_is_a_fault(context, monkeypatch):
    assert _only(versions.python(context)).level == "ok"
    monkeypatch.setattr(versions, "requirements", lambda: (">=3.99", {}))
    assert _only(versions.python(context)).level == "fault"


def test_requirements_are_those_of_the_project():
    python, needed = versions.requirements()
    assert python == ">=3.11"
    assert {"torch", "deepspeed", "transformers", "accelerate", "datasets"} <= set(needed)
    assert "wandb" not in needed


def test_a_lock_of_a_killed_build_is_reported(context, tmp_path):
    context = replace(context, env={"TORCH_EXTENSIONS_DIR": str(tmp_path)})
    lock = tmp_path / "async_io" / "lock"
    lock.parent.mkdir()
    lock.write_text("")
    assert [one.level for one in versions.operators(context)] == ["ok"]
    old = time.time() - 2 * versions.STALE_S
    os.utime(lock, (old, old))
    finding = list(versions.operators(context))[-1]
    assert (finding.level, finding.fix) == ("warning", f"rm {lock}")


def test_the_folder_of_operators_is_that_of_workers(context, monkeypatch, tmp_path):
    monkeypatch.setenv("LLMTRAIN_CACHE", str(tmp_path))
    told = common_environment(1)["TORCH_EXTENSIONS_DIR"]
    assert str(versions.extensions_root(replace(context, env=dict(os.environ)))) == told


def test_missing_compilers_are_reported(context, monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    levels = {one.check: one.level for one in versions.compilers(context)}
    assert levels["tools.compiler"] == levels["tools.ninja"] == "warning"


def test_compilers_that_say_nothing_or_no_text_are_listed(programs, context):
    programs("c++", "")
    programs("ninja", "").with_suffix(".txt").write_bytes(b"1.13 \xff\n")
    assert next(versions.compilers(context)).text.startswith("c++; ninja 1.13 \ufffd;")


def test_a_hanging_program_is_abandoned(programs):
    file = programs("slow", "")
    file.write_text("#!/bin/sh\nexec sleep 60\n")
    assert run_command("slow", seconds=0.2).error == "slow did not answer within 0 s"


def test_a_failing_check_does_not_hide_others(context):
    def fail(_):
        raise RuntimeError("strange machine")

    found = run_checks(context, {"limits.strange": fail, "limits.limits": limits.limits})
    assert (found[0].check, found[0].level) == ("limits.strange", "warning")
    assert "strange machine" in found[0].text
    assert found[-1].check == "limits.limits"


def test_the_table_has_each_check_once():
    assert len(CHECKS) == len(set(CHECKS.values()))
    assert all(name.count(".") == 1 for name in CHECKS)
