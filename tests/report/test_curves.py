"""The curves of a page have the points of `metrics.jsonl`."""

import base64
import json
import math
from io import StringIO

import numpy as np
from rich.console import Console

from llmtrain.report import read_run
from llmtrain.report.curves import charts_of, curves_of, hours_of, names_of_callbacks
from llmtrain.report.terminal import overview
from tests.helpers.recorded_runs import long_run, step_record, write_lines


def _curves(folder, runs=1):
    run = read_run(folder)
    return curves_of(run, charts_of([run]), runs)


def _records(folder):
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def test_curves_of_a_short_run_have_all_points(run):
    training, evaluation = _curves(run)
    steps = [one for one in _records(run) if "loss" in one]
    for name in ("step", "loss", "grad_norm", "tokens", "data_wait_s", "slowest_ratio"):
        wanted = [math.nan if one[name] is None else one[name] for one in steps]
        np.testing.assert_array_equal(training.columns[name], wanted)
    assert evaluation.columns["eval_loss"].tolist() == [3.0] * 20
    assert evaluation.columns["tokens"].tolist() == [512 * step for step in range(3, 61, 3)]


def test_curves_of_a_long_run_keep_whole_lines_and_every_extreme(tmp_path):
    folder = long_run(tmp_path / "run", 30_000)
    training, _ = _curves(folder)
    assert training.rows == 30_000
    assert 4_000 < len(training.columns["step"]) < 15_000
    by_step = {one["step"]: one for one in _records(folder) if "loss" in one}
    for position, step in enumerate(training.columns["step"]):
        for name in ("loss", "grad_norm", "tokens", "slowest_ratio"):
            wanted = by_step[step][name]
            value = training.columns[name][position]
            assert value == wanted or (wanted is None and math.isnan(value))
    kept = training.columns
    assert kept["loss"][kept["step"] == 10_000] == [50.0]
    assert math.isnan(kept["loss"][kept["step"] == 15_000][0])
    assert (kept["step"][0], kept["step"][-1]) == (1, 30_000)
    ratios = np.array([one["slowest_ratio"] for one in by_step.values()])
    tops = [row for row in range(500, 29_500) if ratios[row] == ratios[row - 500 : row + 500].max()]
    assert len(tops) > 20
    assert {row + 1 for row in tops} <= set(kept["step"])


def test_hours_are_those_of_steps_and_saves(tmp_path):
    tmp_path = tmp_path / "run"
    tmp_path.mkdir()
    (tmp_path / "recipe.json").write_text("{}")
    records = [step_record(10, 1.0, step_time_s=2.0), step_record(30, 1.0, step_time_s=1.0, save_blocked_s=5.0)]
    write_lines(tmp_path / "metrics.jsonl", records)
    assert hours_of(read_run(tmp_path).metrics).tolist() == [20 / 3600, 45 / 3600]


def test_unknown_columns_get_their_own_chart(tmp_path):
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / "recipe.json").write_text("{}")
    evaluation = {"step": 1, "eval_loss": 1.0, "eval_loss_by_source": {"a": 1.0, "b": 2.0}}
    write_lines(folder / "metrics.jsonl", [step_record(1, 1.0, router_load=0.5), evaluation])
    charts = {chart.title: chart for chart in charts_of([read_run(folder)])}
    assert charts["Router load"].training == ("router_load",)
    assert charts["Evaluation loss by source"].evaluation == ("eval_loss_by_source/a", "eval_loss_by_source/b")
    assert "MFU" not in charts


def test_the_terminal_shows_the_metrics_of_callbacks(tmp_path):
    (tmp_path / "recipe.json").write_text("{}")
    evaluation = {"step": 1, "eval_loss": 1.0, "eval_loss_by_source": {"a": 1.0, "b": 2.0}, "mine/accuracy": 0.75}
    write_lines(tmp_path / "metrics.jsonl", [step_record(1, 1.0, calls=3.0), evaluation])
    found = read_run(tmp_path)
    assert names_of_callbacks(found) == ["mine/accuracy", "calls"]
    console = Console(width=100, file=StringIO())
    console.print(overview(found, console))
    lines = [line.split() for line in console.file.getvalue().splitlines()]
    own = [line[:2] for line in lines if line[:1] in (["mine/accuracy"], ["calls"])]
    assert own == [["mine/accuracy", "0.75"], ["calls", "3"]]


def test_numbers_are_written_exactly(run):
    training, _ = _curves(run)
    encoded = training.document()["columns"]["lr"]
    assert np.frombuffer(base64.b64decode(encoded), "<f8").tolist() == [1e-3 / step for step in range(1, 61)]


def test_rows_in_disorder_are_put_in_order(tmp_path):
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / "recipe.json").write_text("{}")
    write_lines(
        folder / "metrics.jsonl", [step_record(step, float(number)) for number, step in enumerate((5, 3, 5, 9))]
    )
    training, _ = _curves(folder)
    assert training.columns["step"].tolist() == [3, 5, 9]
    assert training.columns["loss"].tolist() == [1.0, 2.0, 3.0]
