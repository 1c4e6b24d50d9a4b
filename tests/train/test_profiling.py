"""A window of steps is recorded as the recipe says, or as requested from a running job; nothing else is."""

from __future__ import annotations

import gzip
import json
from types import SimpleNamespace

import pytest
import torch

from llmtrain.cli import app
from llmtrain.errors import RecipeError
from llmtrain.overrides import torch as private
from llmtrain.recipe import ProfileConfig
from llmtrain.run_dir import RunDir, write_json
from llmtrain.train.profiling import StepProfiler, profile_summary
from tests.helpers.commands import llmtrain


def recorded_steps(run: RunDir, profiler: StepProfiler, steps: range, every: int = 5) -> dict[str, list[int]]:
    """Runs steps of a product each, with a look at the request after every fifth, and returns what was written."""
    for step in steps:
        profiler.begin(step)
        torch.ones(8, 8) @ torch.ones(8, 8)
        profiler.end(step)
        if step % every == 0:
            profiler.check_request(step)
    profiler.close()
    return {
        str(file.relative_to(run.profile)): json.loads(file.read_text())["steps"]
        for file in run.profile.glob("*/*.json")
    }


@pytest.fixture
def run(tmp_path) -> RunDir:
    return RunDir(tmp_path)


def profiler_of(run: RunDir, rank: int = 0, step: int = 0, **fields: object) -> StepProfiler:
    return StepProfiler(run, rank, ProfileConfig(**fields), step, pytest.fail)


def test_the_window_of_the_recipe_is_recorded_once(run):
    found = recorded_steps(run, profiler_of(run, steps=2, after_step=3), range(1, 12))
    assert found == {"step_00000004/rank_0.json": [4, 5]}
    written = json.loads((run.profile / "step_00000004/rank_0.json").read_text())
    assert {one["name"]: one["calls"] for one in written["operations"]}["aten::mm"] == 2
    assert 0 < written["computation"] <= written["seconds"]
    with gzip.open(run.profile / "step_00000004/rank_0.trace.json.gz") as file:
        assert any(one.get("name") == "aten::mm" for one in json.load(file)["traceEvents"])


def test_nothing_is_recorded_by_other_ranks_or_after_the_window_or_without_one(run):
    assert recorded_steps(run, profiler_of(run, rank=1, steps=2, after_step=3), range(1, 9)) == {}
    assert recorded_steps(run, profiler_of(run, step=4, steps=2, after_step=3), range(5, 12)) == {}
    assert recorded_steps(run, profiler_of(run), range(1, 12)) == {}
    assert not run.profile.exists()


def test_a_request_starts_after_the_next_logged_step(run):
    run.profile.mkdir()
    write_json(run.profile_request, {"steps": 9})  # of an earlier attempt
    profiler = profiler_of(run, rank=2)
    assert recorded_steps(run, profiler, range(1, 7)) == {}
    write_json(run.profile_request, {"steps": 1, "ranks": [2]})
    assert recorded_steps(run, profiler, range(7, 20)) == {"step_00000011/rank_2.json": [11]}


@pytest.mark.parametrize("text", ["{", '{"steps": -1}', '{"other": 1}', '{"ranks": "all"}'])
def test_a_faulty_request_is_reported(run, text):
    said: list[str] = []
    profiler = StepProfiler(run, 0, ProfileConfig(), 0, said.append)
    run.profile.mkdir()
    run.profile_request.write_text(text)
    assert recorded_steps(run, profiler, range(1, 12)) == {}
    assert len(said) == 1
    assert str(run.profile_request) in said[0]


def test_a_folder_that_cannot_be_written_is_reported(run):
    said: list[str] = []
    run.profile.write_text("no folder")
    recorded_steps(run, StepProfiler(run, 0, ProfileConfig(steps=1, after_step=0), 0, said.append), range(1, 3))
    assert "cannot be written" in said[0]


def event(name: str, start: float, end: float, device: str = "CUDA") -> SimpleNamespace:
    time_range = SimpleNamespace(start=start, end=end, elapsed_us=lambda: end - start)
    kind = SimpleNamespace(name=device)
    return SimpleNamespace(name=name, time_range=time_range, device_type=kind, cpu_parent=None, self_cpu_time_total=1)


def test_communication_is_split_into_hidden_and_exposed():
    events = [
        event("gemm", 0, 4e6),
        event("ncclDevKernel_AllReduce", 3e6, 6e6),
        event("gemm", 5e6, 7e6),
        event("ncclDevKernel_AllGather", 8e6, 9e6),
        event("aten::mm", 0, 20e6, "CPU"),
    ]
    found = profile_summary(events)
    assert (found["device"], found["seconds"]) == ("gpu", 9.0)
    assert (found["computation"], found["communication"], found["exposed_communication"]) == (6.0, 4.0, 2.0)
    assert found["operations"][0] == {"name": "gemm", "calls": 2, "seconds": 6.0}
    assert profile_summary([])["seconds"] == 0.0


def test_memory_is_written_and_no_longer_recorded(monkeypatch, tmp_path):
    """Torch's functions are replaced, since they need a GPU."""
    called: list[tuple] = []
    memory = torch.cuda.memory
    monkeypatch.setattr(memory, "_record_memory_history", lambda **fields: called.append(("record", fields)))
    monkeypatch.setattr(memory, "_dump_snapshot", lambda file: called.append(("dump", file)))
    private.record_memory_history()
    private.write_memory_snapshot(tmp_path / "memory.pickle")
    assert called == [("record", {}), ("dump", str(tmp_path / "memory.pickle")), ("record", {"enabled": None})]


def test_requests_for_invalid_runs_or_ranks_are_refused(tmp_path):
    with pytest.raises(RecipeError, match=r"has no plan\.json"):
        app(["profile", str(tmp_path)], standalone_mode=False)


@pytest.mark.slow
def test_two_ranks_record_their_communication_and_a_request_is_written(small_recipe, tmp_path):
    fields = ["--set=profile.steps=1", "--set=profile.after_step=1", "--set=profile.ranks=[0,1]"]
    fields += ["--set=parallel.zero_stage=2", "--set=train.max_steps=3", "--set=export.at_end=false"]
    done = llmtrain("train", small_recipe, "--nproc", "2", "--run-dir", tmp_path / "run", *fields)
    assert done.returncode == 0, done.stdout + done.stderr
    for rank in (0, 1):
        written = json.loads((tmp_path / f"run/profile/step_00000002/rank_{rank}.json").read_text())
        assert written["communication"] > 0
    for ranks, words in (("0,2", "no rank 2"), ("all", "not a list of numbers")):
        refused = llmtrain("profile", tmp_path / "run", "--ranks", ranks)
        assert (refused.returncode, words in refused.stderr) == (2, True)
    assert "every" in llmtrain("profile", tmp_path / "run", "--ranks", "0,1", "--steps", "2").stdout
    assert json.loads((tmp_path / "run/profile/request.json").read_text())["ranks"] == [0, 1]
