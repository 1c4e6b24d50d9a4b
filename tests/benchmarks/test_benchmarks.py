"""Every benchmark has its commands, and is rendered from its result file alone."""

from __future__ import annotations

import importlib.util
import json
import math

import pytest

from benchmarks import __main__ as command
from benchmarks import render
from benchmarks.benchmark import Benchmark
from benchmarks.definitions import BENCHMARKS
from benchmarks.pairs import OTHERS, ROOT, SideFailedError, summary
from benchmarks.programs.interleaved import result_of

PAIRED = [benchmark for benchmark in BENCHMARKS.values() if isinstance(benchmark, Benchmark)]
FACTS = {
    "command": "python -m benchmarks x",
    "commit": "0123456789abcdef",
    "modified": True,
    "hardware": {"cpu": "A processor", "cores": 2, "memory_gib": 23.5, "gpus": []},
    "versions": {"torch": "1", "deepspeed": "2"},
    "pairs": 2,
}


def made_up(benchmark: Benchmark, value: float = 1.0, others: float = 0.0) -> dict:
    """A result in which every number of every side is the same."""
    runs = [{**dict.fromkeys(benchmark.columns, value), OTHERS: others}] * 2
    cases = []
    for case in benchmark.cases(False):
        sides = [{"name": side.name, "runs": runs, "summary": summary(runs)} for side in case.sides]
        ratio = {"median": 1.0, "lowest": 1.0, "highest": 1.0}
        against = {side.name: dict.fromkeys(benchmark.columns, ratio) for side in case.sides[1:]}
        cases.append({"name": case.name, "sides": sides, "against": against})
    return {**FACTS, "benchmark": benchmark.name, "cases": cases, OTHERS: others}


@pytest.mark.parametrize("benchmark", PAIRED, ids=lambda benchmark: benchmark.name)
def test_commands_name_programs_that_exist(benchmark):
    for short in (False, True):
        cases = benchmark.cases(short)
        assert len({case.name for case in cases}) == len(cases)
        for side in (side for case in cases for side in (*case.setup, *case.sides)):
            assert side.command[0] == "python" or side.command[0].startswith("{work}/")  # of a peer's own environment
            for word in side.command:
                if word.startswith("benchmarks."):
                    assert importlib.util.find_spec(word) is not None
                elif word.endswith(".py"):
                    assert (ROOT / word).is_file()


@pytest.mark.parametrize("benchmark", PAIRED, ids=lambda benchmark: benchmark.name)
def test_a_result_is_shown_with_its_aims(benchmark):
    result = json.loads(json.dumps(made_up(benchmark)))
    page = render.render({**dict.fromkeys(BENCHMARKS), benchmark.name: result}, "tried")
    section = page.partition(f"## {benchmark.title}\n")[2].partition("\n## ")[0]
    assert "Measured by" in section
    assert "commit 0123456789ab with changes" in section
    assert "2 × A processor, 24 GiB" in section
    for verdict in benchmark.verdicts(result):
        assert f"- {verdict.aim}: **{'met' if verdict.met else 'missed'}**, {verdict.found}" in section
    for case in result["cases"]:
        for side in case["sides"]:
            assert f"| {case['name']} | {side['name']} |" in section
    assert "The machine was busy" not in section
    busy = render.render({**dict.fromkeys(BENCHMARKS), benchmark.name: made_up(benchmark, others=1.5)}, "")
    assert "The machine was busy" in busy


def test_missing_measurements_are_marked():
    page = render.render(dict.fromkeys(BENCHMARKS), "")
    assert page.count("**Not measured.**") == len(BENCHMARKS) - 1
    assert page.count("**Not measured on a GPU.** `python -m benchmarks gpu`, about 9 minutes.") == 1


def test_stored_results_are_complete():
    for benchmark in PAIRED:
        result = render.found(benchmark.name)
        if result is None:
            continue
        assert [case["name"] for case in result["cases"]] == [case.name for case in benchmark.cases(False)]
        runs = [side["runs"] for case in result["cases"] for side in case["sides"]]
        assert min(map(len, runs)) >= benchmark.pairs


def test_the_difference_of_loops_in_turn_is_found_in_noise():
    drift = [1 + math.sin(block / 5) / 4 for block in range(63)]
    peer = [0.4 * factor for factor in drift]
    ours = [seconds + 0.004 for seconds in peer]
    ours[20] += 3.0  # somebody else's minute
    turns = {"ours_s": ours, "peer_s": peer, "ours_cpu_s": ours, "peer_cpu_s": peer}
    found = result_of([turns], block=4)
    assert found["blocks"] == 60
    assert found["more_ms"] == pytest.approx(1.0, abs=1e-3)
    assert found["error_ms"] < 0.1


def test_a_busy_machine_is_refused(monkeypatch):
    monkeypatch.setattr(command, "cores_used_by_others", lambda seconds: 1.25)
    with pytest.raises(SystemExit, match=r"others use 1\.25 cores"):
        command.main(["scale"])


def test_a_case_that_fails_leaves_the_others(monkeypatch, capsys, tmp_path):
    benchmark = BENCHMARKS["wrapper"]
    first, *others = benchmark.cases(False)

    def run(case, *_):
        if case.name == first.name:
            raise SideFailedError("ours: exit code 1 of python")
        return next(one for one in made_up(benchmark)["cases"] if one["name"] == case.name)

    monkeypatch.setattr(command, "RESULTS", tmp_path)
    monkeypatch.setattr(command, "cores_used_by_others", lambda seconds: 0.0)
    monkeypatch.setattr(command, "run_case", run)
    with pytest.raises(SystemExit, match=f"1 failed: {first.name}"):
        command.main(["wrapper"])
    (kept,) = tmp_path.iterdir()
    assert kept.name == "wrapper.failed.json"
    result = json.loads(kept.read_text())
    assert [case["name"] for case in result["cases"]] == [case.name for case in others]
    assert result["failed"] == {first.name: "ours: exit code 1 of python"}


def test_a_short_measurement_is_not_kept(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(command, "RESULTS", tmp_path)
    monkeypatch.setattr(command, "cores_used_by_others", lambda seconds: 0.0)
    monkeypatch.setattr(command, "measure", lambda benchmark, *_: made_up(benchmark))
    command.main(["scale", "--pairs", "2"])
    assert "not kept" in capsys.readouterr().out
    assert not list(tmp_path.iterdir())
    command.main(["scale"])
    assert json.loads((tmp_path / "scale.json").read_text())["benchmark"] == "scale"
