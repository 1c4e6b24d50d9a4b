"""The end of a run and its cost follow from the time that its steps took so far."""

from __future__ import annotations

import json

import pytest

from llmtrain.train.metrics import MetricsLogger
from llmtrain.train.metrics.throughput import Forecast
from tests.helpers.small_plan import small_plan
from tests.helpers.step_metrics import metrics


class Clock:
    def __init__(self) -> None:
        self.now = 50.0

    def __call__(self) -> float:
        return self.now


def test_evaluations_and_saves_count_and_the_first_steps_do_not():
    clock = Clock()
    forecast = Forecast(devices=8, last_step=110, price=2.0, device_hours=1.0, clock=clock)
    clock.now += 900  # compilation
    hours = 1 + 8 * 900 / 3600
    after = {"left_s": 100 * 3.0, "device_hours": hours, "cost": 2 * hours}
    assert forecast.after(10, 3.0) == after | {"cost_at_end": 2 * (hours + 8 * 300 / 3600)}
    clock.now += 40  # ten steps of 3 s, and an evaluation
    found = forecast.after(20, 3.0)
    assert found["left_s"] == pytest.approx(90 * 4.0)
    assert found["cost_at_end"] == pytest.approx(2 * (hours + 8 * (40 + 360) / 3600))
    assert forecast.after(120, 3.0)["left_s"] == 0
    assert "cost" not in Forecast(1, 10).after(1, 1.0)


def test_the_cost_of_a_continued_run_includes_repeated_steps(run_dir):
    fields = {"logging.trackers": [], "logging.price_per_device_hour": 2.0}
    plan = small_plan(**fields)
    spent = [{"step": step, "device_hours": float(step)} for step in (10, 20, 30)]
    run_dir.metrics_file.write_text("".join(json.dumps(one) + "\n" for one in (*spent, {"step": 30, "eval_loss": 1.0})))
    with MetricsLogger(run_dir, plan, 20, stop_step=25) as logger:
        record = logger.step_record(metrics(21))
        assert record["device_hours"] == pytest.approx(30, abs=1)
        assert record["cost"] == 2 * record["device_hours"]
        assert record["left_s"] == 4 * record["step_time_s"]
    with MetricsLogger(run_dir, plan) as logger:
        assert logger.step_record(metrics(1))["device_hours"] < 1
