"""What others use of the cores of this process."""

from __future__ import annotations

import os
import subprocess
import sys
import time

import pytest

from llmtrain import host

SPIN_S = 1.0
SPIN = f"""
import time
until = time.process_time() + {SPIN_S}
while time.process_time() < until:
    pass
"""


def test_a_child_is_of_others_until_it_has_ended():
    started, meter = time.monotonic(), host.CoreMeter()
    child = subprocess.Popen([sys.executable, "-c", SPIN])
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    beside = meter.cores_of_others() * (time.monotonic() - started)
    child.wait()
    after = meter.cores_of_others() * (time.monotonic() - started)
    assert beside - after > 0.9 * SPIN_S


def test_what_this_process_computes_is_its_own(monkeypatch):
    busy_s = iter([10.0, 10.0 + 3 * SPIN_S])
    monkeypatch.setattr(host, "_busy_s", lambda: next(busy_s))
    started, meter = time.monotonic(), host.CoreMeter()
    exec(SPIN)
    of_others = meter.cores_of_others() * (time.monotonic() - started)
    assert of_others == pytest.approx(2 * SPIN_S, abs=0.1)


def test_a_large_machine_does_more_by_itself():
    assert host.most_cores_of_others(2) == host.most_cores_of_others(15) == 0.15
    assert host.most_cores_of_others(128) == 1.28
