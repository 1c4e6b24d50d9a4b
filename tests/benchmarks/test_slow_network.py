"""What the measurement over a slow network predicts, and how it compares."""

from __future__ import annotations

import pytest

from benchmarks.programs.slow_network import BACKWARD_S, LAYERS, MICRO_BATCHES, PLANS, plan_of
from benchmarks.questions import QUESTIONS
from benchmarks.slow_network import ASSUMED, RATE, predicted, row_of


@pytest.mark.parametrize("name", PLANS)
def test_a_rank_waits_for_what_it_cannot_hide(name):
    waiting, hidden = predicted(plan_of(name))
    assert waiting >= 0
    assert hidden >= 0
    assert waiting + hidden > 0


def test_a_ring_over_the_cable_takes_its_bytes_over_its_rate():
    """DDP reduces all gradients once, three of four parts of them twice over the cable, beside one backward pass."""
    plan = plan_of("DDP")
    waiting, hidden = predicted(plan)
    seconds = 2 * 3 / 4 * 4 * plan.model.parameters / (RATE * ASSUMED.link)
    assert waiting + hidden == pytest.approx(seconds, rel=0.01)
    assert hidden == pytest.approx(min(seconds, LAYERS * BACKWARD_S))


def test_neighbours_send_less_over_the_cable():
    every, neighbours = (sum(predicted(plan_of(name))) for name in ("ZeRO-3", "ZeRO-3, hpZ"))
    parameters = 4 * plan_of("ZeRO-3").model.parameters
    less = 3 / 4 * parameters * (MICRO_BATCHES - 1) / (RATE * ASSUMED.link)
    assert every - neighbours == pytest.approx(less, rel=0.02)


def test_a_row_has_prediction_and_measurement():
    waiting, _ = predicted(plan_of("DDP"))
    free = {"step_s": 1.0, "cable_bytes": 10.0}
    row = row_of("DDP", free, {"step_s": 1.0 + waiting, "cable_bytes": 10.0})
    assert row["step_error"] == pytest.approx(0.0, abs=1e-3)
    assert row["measured_hidden"] == pytest.approx(row["predicted_hidden"], abs=1e-3)
    [verdict] = QUESTIONS["slow_network"].verdicts({"rows": [row]})
    assert verdict.met
    [verdict] = QUESTIONS["slow_network"].verdicts({"rows": [row | {"step_error": 0.2}]})
    assert not verdict.met
