"""The use of this process's cores by others, and the waiting of its threads."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from llmtrain import cli
from llmtrain.system import host
from llmtrain.train.metrics import throughput
from llmtrain.train.metrics.throughput import BusyCores

SPIN_S = 1.0
SPIN = f"""
import time
until = time.process_time() + {SPIN_S}
while time.process_time() < until:
    pass
"""


def test_a_child_counts_as_another_process_until_it_has_ended():
    started, meter = time.monotonic(), host.CoreMeter()
    child = subprocess.Popen([sys.executable, "-c", SPIN])
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    beside = meter.cores_used_by_others() * (time.monotonic() - started)
    child.wait()
    after = meter.cores_used_by_others() * (time.monotonic() - started)
    assert beside - after > 0.9 * SPIN_S


def test_the_time_of_this_process_is_not_counted(monkeypatch):
    busy_s = iter([10.0, 10.0 + 3 * SPIN_S])
    monkeypatch.setattr(host, "_busy_s", lambda: next(busy_s))
    started, meter = time.monotonic(), host.CoreMeter()
    exec(SPIN)
    of_others = meter.cores_used_by_others() * (time.monotonic() - started)
    assert of_others == pytest.approx(2 * SPIN_S, abs=0.1)


def test_a_larger_machine_may_have_more_background_load():
    assert host.max_cores_used_by_others(2) == host.max_cores_used_by_others(15) == 0.15
    assert host.max_cores_used_by_others(128) == 1.28


def test_all_processes_of_a_launcher_count_as_its_own():
    before, other = host._tree_s(os.getpid()), subprocess.Popen(["sleep", "60"])
    grandparent = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {SPIN!r}])"
    child = subprocess.Popen([sys.executable, "-c", grandparent])
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    running = host._tree_s(os.getpid())
    assert host._tree_s(other.pid) < 0.1 * SPIN_S
    child.wait()
    assert running - before > 0.9 * SPIN_S
    assert host._tree_s(os.getpid()) >= running
    other.kill()
    other.wait()


@pytest.fixture
def nothing_said(monkeypatch):
    """No variable says how threads wait; what a test sets is taken back."""
    for name in ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY"):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)


def test_waiting_threads_sleep_soon(nothing_said):
    with pytest.raises(SystemExit):
        cli.main(["--help"])
    assert os.environ["GOMP_SPINCOUNT"] == "10000"


def test_openmp_reads_the_setting(nothing_said):
    library = next(Path(torch.__file__).parent.glob("lib/libgomp*"), None)
    if library is None:
        pytest.skip("this torch brings no GNU OpenMP")
    load = (
        "import ctypes, os; from llmtrain.system.host import *; limit_spinning(os.environ); "
        f"ctypes.CDLL({str(library)!r})"
    )
    done = subprocess.run(
        [sys.executable, "-c", load], env={**os.environ, "OMP_DISPLAY_ENV": "verbose"}, capture_output=True, check=True
    )
    assert b"GOMP_SPINCOUNT = '10000'" in done.stderr


@pytest.mark.parametrize("said", [{"GOMP_SPINCOUNT": "5"}, {"OMP_WAIT_POLICY": "active"}])
def test_a_setting_of_the_user_for_waiting_threads_is_kept(said):
    environment = dict(said)
    host.limit_spinning(environment)
    assert environment == said


@pytest.mark.parametrize(
    ("said", "version", "expected"),
    [
        ({}, "2.13.0+cpu", {"PYTORCH_ALLOC_CONF": "pinned_max_round_threshold_mb:64"}),
        ({}, "2.12.1", {}),
        ({"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}, "2.13.0", {}),
    ],
)
def test_large_pinned_memory_is_not_rounded_unless_allocators_are_configured(monkeypatch, said, version, expected):
    monkeypatch.setattr(host.metadata, "version", lambda name: version)
    environment = dict(said)
    host.bound_pinned_memory(environment)
    assert environment == said | expected


@pytest.mark.parametrize(
    ("said", "ranks", "others", "spins"),
    [
        ({}, 1, 0.6, "0"),
        ({}, 1, 0.4, "10000"),
        ({}, 2, 0.6, "0"),
        ({"OMP_NUM_THREADS": "2"}, 1, 1.9, "10000"),
        ({"OMP_NUM_THREADS": "2"}, 1, 2.6, "0"),
        ({"OMP_NUM_THREADS": "1"}, 4, 4.0, "10000"),
        ({}, 4, 4.0, "10000"),
        ({"GOMP_SPINCOUNT": "5"}, 1, 4.0, "5"),
    ],
)
def test_threads_sleep_if_other_processes_use_their_cores(monkeypatch, said, ranks, others, spins):
    monkeypatch.setattr(host, "available_cores", lambda: 4)
    monkeypatch.setattr(host, "cores_used_by_others", lambda seconds: others)
    environment = dict(said)
    host.limit_spinning(environment)
    line = host.stop_spinning_on_busy_cores(environment, ranks)
    assert environment["GOMP_SPINCOUNT"] == spins
    assert (line is not None) == (spins == "0")
    assert line is None or line.startswith(f"others use {others:.2f} of 4 cores: threads sleep")


class Used:
    """A stand-in for the meter: others use so many cores, in one look after the other."""

    def __init__(self, monkeypatch, *cores, seconds=throughput.LOOK_S):
        self.cores, self.seconds = iter(cores), seconds
        monkeypatch.setattr(throughput, "CoreMeter", lambda of_launcher: self)
        for module in (throughput, host):
            monkeypatch.setattr(module, "available_cores", lambda: 4)

    def cores_used_by_others(self):
        return next(self.cores)


@pytest.mark.parametrize(
    ("ranks", "threads", "others", "is_told"),
    [(1, 4, 0.4, False), (1, 4, 0.6, True), (2, 2, 0.6, True), (1, 2, 2.4, False), (1, 2, 2.6, True)],
)
def test_a_run_reports_that_other_processes_use_its_cores(monkeypatch, ranks, threads, others, is_told):
    monkeypatch.setenv("GOMP_SPINCOUNT", str(host.SPIN_COUNT))
    Used(monkeypatch, others)
    cores = BusyCores(ranks, threads)
    line = cores.line()
    assert (line is not None) == is_told
    if line:
        assert f"others use {others:.2f} of 4 cores; this run computes with {ranks * threads} threads" in line
        assert "--set kernels.threads=1" in line
        assert cores.line() is None  # once


def test_the_message_does_not_advise_active_settings(monkeypatch):
    monkeypatch.setenv("GOMP_SPINCOUNT", str(host.SPIN_COUNT))
    Used(monkeypatch, 1.0, 1.0)
    assert "continued" not in BusyCores(4, 1).line()
    monkeypatch.setenv("GOMP_SPINCOUNT", "0")
    assert "continued" not in BusyCores(1, 4).line()


def test_use_of_the_cores_is_not_reported_after_a_short_time(monkeypatch):
    Used(monkeypatch, seconds=throughput.LOOK_S - 1)
    assert BusyCores(1, 4).line() is None
