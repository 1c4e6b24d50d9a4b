"""Which ranks are late, which may take longer, and which did not arrive."""

import pytest

from llmtrain.recipe import WatchdogConfig
from llmtrain.system.heartbeat import Phase
from llmtrain.train.watchdog.diagnosis import (
    Status,
    cut_off_problem,
    hang_problem,
    is_hung,
    loss_problem,
    lost_ranks,
    missing_ranks,
    time_limit,
)


def status(**fields):
    base = {"host": "a", "pid": 7, "step": 57, "phase": Phase.TRAINING, "idle_s": 61.0, "limit_s": 60.0}
    return Status(**base | {"waiting": False, "state": "S"} | fields)


WAITING = status(waiting=True)


@pytest.mark.parametrize(
    ("phase", "p99", "state", "limit"),
    [
        (Phase.TRAINING, 0.0, "S", 60),
        (Phase.TRAINING, 5.9, "S", 60),
        (Phase.BETWEEN, 30.0, "S", 300),
        (Phase.FIRST_STEPS, 1.0, "R", 1800),
        (Phase.EVALUATING, 1.0, "S", 1800),
        (Phase.SAVING, 300.0, "D", 3000),
        (Phase.FINISHING, 1.0, "S", 1800),
        (Phase.LOADING, 1.0, "S", None),
        (Phase.DONE, 1.0, "S", None),
        (Phase.SAVING, 1.0, "T", 60),  # a stopped process cannot finish any phase
        (Phase.LOADING, 0.0, "T", 60),
        (Phase.DONE, 0.0, "T", None),
    ],
)
def test_the_limit_depends_on_phase_and_state(phase, p99, state, limit):
    assert time_limit(phase, p99, state, WatchdogConfig()) == limit


def test_limits_can_be_switched_off():
    assert time_limit(Phase.SAVING, 1.0, "S", WatchdogConfig(phase_seconds=0)) is None
    assert time_limit(Phase.SAVING, 1.0, "T", WatchdogConfig(min_seconds=0)) is None


def test_waiting_for_a_rank_that_saves_is_not_a_hang():
    saving = status(phase=Phase.SAVING, limit_s=1800.0, idle_s=100.0)
    assert is_hung({0: status(), 1: WAITING})
    assert not is_hung({0: saving, 1: WAITING})
    assert is_hung({0: status(phase=Phase.SAVING, limit_s=1800.0, idle_s=1900.0), 1: WAITING})
    assert not is_hung({0: status(idle_s=59.0), 1: WAITING.__class__(**vars(WAITING) | {"idle_s": 59.0})})
    assert not is_hung({0: status(phase=Phase.DONE, limit_s=None)})
    assert is_hung({0: status(), 1: status(phase=Phase.SAVING, limit_s=1800.0, state="")})  # it died in its save
    assert is_hung({0: saving, 1: status(phase=Phase.SAVING, state="T")})  # which the one that saves waits for


@pytest.mark.parametrize(
    ("statuses", "missing"),
    [
        ({0: WAITING, 1: status(), 2: WAITING}, [1]),
        ({0: WAITING, 1: status(state="T", waiting=True), 2: status()}, [1]),
        ({0: WAITING, 1: status(state=""), 2: status()}, [1]),
        ({0: status(), 1: status(step=56), 2: status()}, [1]),  # hosts run ahead of GPUs: no rank seems to wait
        ({0: status(phase=Phase.BETWEEN), 1: WAITING, 2: WAITING}, [0]),  # it logs, or should
        ({0: status(), 1: status(phase=Phase.BETWEEN), 2: WAITING}, [0]),  # 1 waits for its word
        ({0: status(), 1: status(), 2: status()}, []),
        ({0: WAITING, 1: WAITING}, []),
        ({0: status(frame="graph.py:979 in _engine_run_backward"), 1: status(frame="a.py:1 in f")}, [1]),
        ({0: status()}, [0]),
        ({0: WAITING, 1: status(phase=Phase.DONE, state="")}, []),
    ],
)
def test_ranks_that_did_not_arrive_are_found(statuses, missing):
    assert missing_ranks(statuses) == missing


def test_the_message_names_rank_host_process_step_phase_and_time():
    found = hang_problem({0: WAITING, 1: status(host="b", state="T", idle_s=63.2), 2: WAITING}, 3)
    assert (found.rule, found.field) == ("worker.hang", "rank 1")
    assert found.message == "did not arrive: no step for 63 s, but only 60 s are allowed"
    lines = found.fix.splitlines()
    assert lines[0] == "rank 1 on b (process 7): step 57, training for 63 s, stopped by a signal (SIGSTOP)"
    assert lines[1] == "    the others wait: ranks 0, 2"
    assert "logs/rank_*.log" in lines[2]


def test_the_message_reports_an_unknown_late_rank():
    found = hang_problem({0: status(frame="a.py:3 in f"), 1: status()}, 2)
    assert found.field == "ranks 0-1"
    assert "it is unknown which" in found.message
    assert "in a.py:3 in f" in found.fix
    alone = hang_problem({0: WAITING, 2: WAITING}, 4)
    assert alone.field == "ranks 1, 3"
    assert "no contact with ranks 1, 3" in alone.fix


def test_an_endless_save_is_reported_as_saving():
    found = hang_problem({0: status(phase=Phase.SAVING, idle_s=2000, limit_s=1800)}, 1)
    assert found.message == "did not arrive: saving for 2000 s, but only 1800 s are allowed"


def test_ranks_that_ended_before_the_run_are_found():
    ended = status(state="")
    assert lost_ranks({0: status(), 1: ended, 2: WAITING}) == [1]
    assert lost_ranks({0: status(), 1: status(phase=Phase.DONE, state="")}) == []
    assert lost_ranks({0: status(phase=Phase.DONE), 1: ended}) == []  # the run is over, and its last word was not heard
    assert lost_ranks({0: status(), 1: WAITING}) == []


def test_the_message_names_the_rank_that_ended():
    found = loss_problem({0: status(), 1: status(host="b", state="", idle_s=4.0)}, [1])
    assert (found.rule, found.field) == ("worker.gone", "rank 1")
    assert found.fix.splitlines()[0] == "rank 1 on b (process 7): step 57, training for 4 s, no contact"


def test_a_rank_that_is_cut_off_reports_itself():
    found = cut_off_problem(3, "b")
    assert (found.rule, found.field) == ("worker.cut_off", "rank 3 on b")
    assert found.message.startswith("lost contact with rank 0")
