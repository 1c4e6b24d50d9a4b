"""Other processes read the state of a rank, and how long its steps may take."""

import os
import subprocess
import sys

import pytest

from llmtrain.system import heartbeat
from llmtrain.system.heartbeat import RECENT, WARM_STEPS, Heartbeat, HeartbeatPages, Phase


class Clock:
    """A clock that the test advances."""

    def __init__(self, monkeypatch):
        self.now = 1000.0
        monkeypatch.setattr(heartbeat.time, "monotonic", lambda: self.now)


@pytest.fixture
def clock(monkeypatch):
    return Clock(monkeypatch)


def step(heartbeat, clock, number, seconds):
    heartbeat.begin_step(number)
    clock.now += seconds
    heartbeat.end_step(0.0)


def test_the_state_of_a_rank_is_read_by_another_process(clock):
    heartbeat = Heartbeat()
    page = heartbeat.page
    assert page.phase == Phase.LOADING
    for number in range(1, WARM_STEPS + 1):
        heartbeat.begin_step(number)
        assert page.phase == Phase.FIRST_STEPS
        heartbeat.end_step(0.0)
    heartbeat.begin_step(3)
    assert (page.phase, page.step) == (Phase.TRAINING, 3)
    clock.now += 7
    heartbeat.end_step(0.0)
    assert (page.phase, page.beat) == (Phase.BETWEEN, clock.now)
    for phase in (Phase.EVALUATING, Phase.SAVING):
        with heartbeat.phase(phase):
            assert page.phase == phase
        assert page.phase == Phase.BETWEEN
    with heartbeat.waiting():
        assert page.waiting
    assert not page.waiting
    heartbeat.done()
    assert page.phase == Phase.DONE


def test_a_step_that_compiles_may_take_as_long_as_the_first(clock):
    heartbeat = Heartbeat()
    page = heartbeat.page
    for number in range(1, WARM_STEPS + 1):
        step(heartbeat, clock, number, 1)
    heartbeat.begin_step(3)
    clock.now += 5
    with heartbeat.compiling():
        assert (page.phase, page.beat) == (Phase.FIRST_STEPS, clock.now)
        clock.now += 50
    assert (page.phase, page.beat) == (Phase.TRAINING, clock.now)
    with heartbeat.phase(Phase.EVALUATING), heartbeat.compiling():
        assert page.phase == Phase.EVALUATING


def test_the_p99_leaves_out_first_steps_evaluations_and_saves(clock):
    heartbeat = Heartbeat()
    page = heartbeat.page
    assert page.p99() == 0
    for number in range(1, WARM_STEPS + 1):
        step(heartbeat, clock, number, 500)
    for number in range(3, 203):
        step(heartbeat, clock, number, 1 if number % 50 else 9)
        with heartbeat.phase(Phase.SAVING):
            clock.now += 300
    assert page.p99() == 9


def test_the_p99_is_of_recent_steps_and_counts_what_follows_them(clock):
    heartbeat = Heartbeat()
    for number in range(1, WARM_STEPS + RECENT + 1):
        step(heartbeat, clock, number, 60)
    for number in range(RECENT + 10):
        step(heartbeat, clock, 5000 + number, 1)
        clock.now += 1  # reading the loss waits for the device
    assert heartbeat.page.p99() == pytest.approx(2)


def test_own_time_is_summed(clock):
    class Own:
        def begin(self):
            self.begun = clock.now

        def end(self, data_wait_s):
            return clock.now - self.begun + data_wait_s

    heartbeat = Heartbeat()
    heartbeat.work_timer = Own()
    for number in range(1, 8):
        heartbeat.begin_step(number)
        clock.now += 2
        heartbeat.end_step(0.5)
    assert (heartbeat.page.work_s, heartbeat.page.measured_steps) == (5 * 2.5, 5)


def test_a_straggler_from_the_watcher_is_read_once():
    heartbeat = Heartbeat()
    page = heartbeat.page
    assert heartbeat.slowest() is None
    page.slowest_rank, page.slowest_ratio = 3, 1.2
    assert heartbeat.slowest() == (3, 1.2)
    assert heartbeat.straggler() is None
    page.slowest_ratio, page.straggler_reports = 2.5, 1
    assert heartbeat.straggler() == (3, 2.5)
    assert heartbeat.straggler() is None


def test_an_address_fits_or_is_refused():
    heartbeat = Heartbeat()
    assert not heartbeat.page.has_address
    heartbeat.set_address('["fe80::1", 1234, "aä"]')
    assert heartbeat.page.address.decode() == '["fe80::1", 1234, "aä"]'
    assert heartbeat.page.has_address
    with pytest.raises(ValueError, match="too long"):
        heartbeat.set_address("x" * 1000)


def test_a_launcher_reads_the_steps_of_dead_workers():
    board = HeartbeatPages(2)
    program = """
import sys
from llmtrain.system.heartbeat import Heartbeat
heartbeat = Heartbeat.of_worker(int(sys.argv[1]))
for step in range(1, int(sys.argv[2]) + 1):
    heartbeat.begin_step(step)
import os; os.kill(os.getpid(), 9)
"""
    for rank, steps in ((0, 8), (1, 7)):
        assert board.step() == 0
        command = [sys.executable, "-c", program, str(rank), str(steps)]
        env = {**os.environ, **board.environment}
        assert subprocess.run(command, pass_fds=(board.descriptor,), env=env, check=False).returncode == -9
    assert board.step() == 7
    board.close()
