"""`llmtrain doctor --hostfile` over real ssh, with healthy, lost and hanging hosts."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.helpers.two_hosts import ADDRESSES, INTERFACE, missing, two_hosts

REPOSITORY = Path(__file__).parents[2]

pytestmark = [pytest.mark.slow, pytest.mark.skipif(missing() is not None, reason=str(missing()))]


@pytest.fixture(scope="module")
def hosts(tmp_path_factory):
    with two_hosts(tmp_path_factory.mktemp("hosts")) as both:
        yield both


def _doctor(hosts, hostfile, *arguments, **env):
    command = hosts.hosts[0].command(sys.executable, "-m", "llmtrain", "doctor", "--hostfile", hostfile, *arguments)
    environment = {**hosts.environment({}), "PYTHONPATH": str(REPOSITORY), **env}
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)


def _levels(findings):
    return {one["check"]: one["level"] for one in findings}


def _our_processes(hosts):
    """What is left of doctors and their agents."""
    lines = [_line(pid) for host in hosts.hosts for pid in host.processes()]
    return [line for line in lines if "llmtrain" in line]


def _line(pid):
    """Of a process; nothing where it is over."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace")
    except OSError:
        return ""


def test_both_hosts_are_checked_and_reduce_over_the_network(hosts):
    result = _doctor(hosts, hosts.hostfile(2), "--json")
    assert result.returncode == 0, result.stdout + result.stderr
    document = json.loads(result.stdout)
    assert [host["host"] for host in document["hosts"]] == list(ADDRESSES)
    for host, address in zip(document["hosts"], ADDRESSES, strict=True):
        assert host["facts"]["addresses"] == [address]
        assert _levels(host["findings"])["network.host_name"] == "warning"
        assert host["facts"]["clock"]["uncertainty_s"] < 1
    assert _levels(document["together"]) == {"hosts.versions": "ok", "hosts.clocks": "ok", "all_reduce": "ok"}
    measured = document["all_reduce"]
    assert (measured["ranks"], measured["correct"]) == (4, True)
    assert all(lines[0].startswith(f"gloo: {INTERFACE} (") for lines in measured["interfaces"].values())
    assert not _our_processes(hosts)


def test_a_silent_host_is_named_and_the_others_are_checked(hosts, tmp_path):
    hostfile = tmp_path / "hostfile"
    hostfile.write_text(f"{ADDRESSES[0]} slots=1\n192.0.2.77 slots=1\nno-such-host.invalid slots=1\n")
    result = _doctor(hosts, hostfile)
    assert result.returncode == 5
    assert "fault: 192.0.2.77: no route leads there" in result.stdout
    assert "fault: no-such-host.invalid: its name is unknown here" in result.stdout
    assert "all-reduce not run, since 192.0.2.77 and no-such-host.invalid could not be checked" in result.stdout
    assert "torch built for" in result.stdout


@pytest.mark.breadth
def test_a_key_that_is_not_known_or_not_accepted_is_explained(hosts, tmp_path):
    config = (hosts.folder / "ssh_config").read_text()
    for old, new, said in (
        (f"{hosts.folder}/known_hosts", f"{tmp_path}/none", "its host key is not in ~/.ssh/known_hosts"),
        (f"{hosts.folder}/key\n", f"{hosts.folder}/host_key\n", "ssh would ask for a password"),
    ):
        try:
            (hosts.folder / "ssh_config").write_text(config.replace(old, new))
            result = _doctor(hosts, hosts.hostfile(1))
        finally:
            (hosts.folder / "ssh_config").write_text(config)
        assert result.returncode == 5
        assert f"fault: {ADDRESSES[1]}: {said}" in result.stdout


@pytest.mark.breadth
def test_gloo_on_the_loopback_is_reported(hosts):
    """The hosts cannot connect there; gloo or the time limit ends it."""
    result = _doctor(hosts, hosts.hostfile(1), "--time-limit", "30", GLOO_SOCKET_IFNAME="lo")
    assert result.returncode == 5
    assert "GLOO_SOCKET_IFNAME=lo is the loopback, which other hosts cannot reach" in result.stdout
    [told] = [line for line in result.stdout.splitlines() if "[all_reduce]" in line]
    for rank, address in enumerate(ADDRESSES):
        assert f"{rank} ({address})" in told
    assert not _our_processes(hosts)


@pytest.mark.breadth
def test_a_hang_is_bounded_and_the_rank_is_named(hosts):
    """The second host's rank is stopped from its start on."""
    command = hosts.hosts[0].command(
        sys.executable, "-m", "llmtrain", "doctor", "--hostfile", hosts.hostfile(1), "--time-limit", 30
    )
    environment = {**hosts.environment({}), "PYTHONPATH": str(REPOSITORY)}
    process = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True)
    while not (
        ranks := [pid for pid in hosts.hosts[1].processes() if "llmtrain.launch.doctor.all_reduce_worker" in _line(pid)]
    ):
        assert process.poll() is None
        time.sleep(0.05)
    os.kill(ranks[0], signal.SIGSTOP)
    said = process.communicate(timeout=120)[0]
    assert process.returncode == 5, said
    [told] = [line for line in said.splitlines() if "[all_reduce]" in line]
    assert told.startswith("fault: not finished after 30 s: ")
    assert f"1 ({ADDRESSES[1]})" in told
    assert not _our_processes(hosts)


@pytest.mark.breadth
def test_another_version_on_a_host_is_one_line(hosts, tmp_path):
    """One host has another package in its path; files are shared, so by the interpreter's start-up of that host."""
    fake = tmp_path / "site" / "wandb-9.9.dist-info"
    fake.mkdir(parents=True)
    (fake / "METADATA").write_text("Metadata-Version: 2.1\nName: wandb\nVersion: 9.9\n")
    (tmp_path / "site" / "sitecustomize.py").write_text(
        "import os, sys\n"
        f"if os.environ.get('SSH_CONNECTION', '').split()[2:3] != ['{ADDRESSES[1]}']:\n"
        f"    sys.path.remove({str(tmp_path / 'site')!r})\n"
    )
    path = f"{REPOSITORY}:{tmp_path / 'site'}"
    result = _doctor(hosts, hosts.hostfile(1), "--json", PYTHONPATH=path)
    [finding] = [one for one in json.loads(result.stdout)["together"] if one["check"] == "hosts.versions"]
    own = version("wandb") if find_spec("wandb") else "missing"
    assert finding["text"] == f"versions differ: wandb {own} on {ADDRESSES[0]}, 9.9 on {ADDRESSES[1]}"
    assert result.returncode == 5


def test_started_processes_end_with_the_command(hosts):
    """Even if it is killed and cannot report anything."""
    command = hosts.hosts[0].command(
        sys.executable, "-m", "llmtrain", "doctor", "--hostfile", hosts.hostfile(1), "--time-limit", 250
    )
    environment = {**hosts.environment({}), "PYTHONPATH": str(REPOSITORY), "GLOO_SOCKET_IFNAME": "lo"}
    process = subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        while not any("llmtrain.launch.doctor.all_reduce_worker" in line for line in _our_processes(hosts)):
            assert process.poll() is None
            time.sleep(0.2)
    finally:
        process.kill()
        process.wait()
    for _ in range(200):
        if not _our_processes(hosts):
            break
        time.sleep(0.1)
    assert not _our_processes(hosts)
