"""Commands that run at the same time take turns, and their times count only their own turns."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import pairs, turns

PROGRAM = """
import json, subprocess, sys, time
if len(sys.argv) > 2:  # a child in a session of its own does the work
    raise SystemExit(subprocess.run([sys.executable, __file__, sys.argv[1]], start_new_session=True).returncode)
ends = []
for _ in range(40):
    time.sleep(0.01)
    ends.append(time.time())
open(sys.argv[1], "w").write(json.dumps(ends))
print(json.dumps({"ends": ends, "step_ms": 10.0, "tokens_per_second": 100.0, "peak_gib": 1.0}))
"""


@pytest.fixture
def program(tmp_path, monkeypatch) -> Path:
    monkeypatch.setattr(turns, "TURN_S", 0.05)
    (tmp_path / "program.py").write_text(PROGRAM)
    return tmp_path / "program.py"


def test_one_command_runs_while_the_others_are_stopped_with_their_children(program, tmp_path, monkeypatch):
    made: list[turns.Running] = []
    monkeypatch.setattr(pairs, "Running", lambda *given: made.append(turns.Running(*given)) or made[-1])
    sides = [
        pairs.Side(name, ["python", str(program), str(tmp_path / name), *more])
        for name, more in (("a", []), ("b", ["in a child"]))
    ]
    first, second = pairs.measured_in_turns(sides, tmp_path)
    assert first.keys() == second.keys() == {"step_ms", "tokens_per_second", "peak_gib", pairs.OTHERS}
    spans = [one.spans for one in made]
    assert min(map(len, spans)) > 2
    for name, others in (("a", spans[1]), ("b", spans[0])):
        for end in json.loads((tmp_path / name).read_text()):
            assert not any(started < end < ended for started, ended in others)


def test_time_in_which_a_command_was_stopped_does_not_count():
    ends = [float(second) for second in range(15)]  # the first ten steps are excluded
    numbers = {"ends": ends, "step_ms": 2000.0, "tokens_per_second": 50.0, "peak_gib": 1.0}  # 100 tokens a step
    spans = [(0.0, 10.5), (11.75, 12.0), (12.5, 13.25), (13.5, 20.0)]  # then it ran 0.5, 0.25, 0.5 and 0.75 seconds
    assert turns.with_times(numbers, spans) == {"step_ms": 500.0, "tokens_per_second": 200.0, "peak_gib": 1.0}


def test_a_command_that_fails_is_named_and_the_others_end(program, tmp_path):
    sides = [
        pairs.Side("a", ["python", "-c", "raise SystemExit('no luck')"]),
        pairs.Side("b", ["python", str(program), str(tmp_path / "b")]),
    ]
    with pytest.raises(pairs.SideFailedError, match=r"(?s)a: .*no luck"):
        pairs.measured_in_turns(sides, tmp_path)


def test_an_interrupted_measurement_leaves_no_process(program, tmp_path, monkeypatch):
    def interrupt(one):
        raise KeyboardInterrupt

    running = turns.Running(["sleep", "60"], tmp_path, {})
    monkeypatch.setattr(turns.Running, "turn", interrupt)
    with pytest.raises(KeyboardInterrupt):
        turns.run_in_turns([running])
    assert running.process.returncode == -9
