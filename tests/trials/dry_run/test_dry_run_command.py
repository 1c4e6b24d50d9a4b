"""`llmtrain train --dry-run` as a user runs it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from llmtrain.trials.dry_run.run import _clear
from tests.helpers.commands import forked_llmtrain

ROOT = Path(__file__).parents[3]
USAGE, CHECKPOINT, WORKER = 2, 4, 5

BROKEN = """
import os, signal, sys

if "llmtrain.launch.fork_server" in sys.orig_argv:
    from llmtrain.trials.dry_run import ranks

    taken, step = [], ranks._step

    def broken(engine, *arguments):
        taken.append(step(engine, *arguments))
        if os.environ["RANK"] == "1" and len(taken) == 2:
            match os.environ["BROKEN_BY"]:
                case "raise":
                    raise ValueError("cannot be trained")
                case "kill":
                    os.kill(os.getpid(), signal.SIGKILL)
        if os.environ["RANK"] == "1" and len(taken) == 4 and os.environ["BROKEN_BY"] == "other":
            return taken[-1].model_copy(update={"loss": 3.0})
        return taken[-1]

    ranks._step = broken
"""


def dry_run(*arguments: object, folder: Path, **env: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "llmtrain", "train", *map(str, arguments), "--dry-run"]
    env = {**os.environ, "PYTHONPATH": str(ROOT), **env}
    return subprocess.run(command, capture_output=True, text=True, timeout=300, cwd=folder, env=env)


def left_in(folder: Path) -> list[str]:
    return sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())


@pytest.mark.slow
def test_the_json_report_equals_the_saved_one(tmp_path):
    recipe = f"{ROOT}/recipes/llama3_70b.py:pipeline"
    kernels = ("--set", "kernels=auto")  # the compiler takes longer than the run
    result = dry_run(recipe, "--nodes", 4, "--device", "h200", *kernels, "--json", folder=tmp_path)
    assert result.returncode == 0, result.stderr
    report = json.loads(result.stdout)
    assert left_in(tmp_path) == ["runs/llama3_70b-pipeline-dry-run/dry_run.json"]
    assert report == json.loads((tmp_path / "runs/llama3_70b-pipeline-dry-run/dry_run.json").read_text())
    assert (report["plan"]["layout"]["pp"], report["plan"]["layout"]["dp"]) == (16, 2)
    assert len(report["plan"]["layout"]["stages"]) == len(report["communication"]) == 16
    assert set(report["communication"][1]) == {"p2p", "all_reduce", "all_gather"}
    small = report["dry_run"]
    assert small["plan"]["layout"]["pp"] == small["plan"]["layout"]["dp"] == 2
    assert small["plan"]["batch"]["gradient_accumulation_steps"] == 4
    assert small["steps"][0]["lr"] == 0  # warmed up
    assert small["checkpoint"]["files"] > 4
    # The ranks read in the order of the plan: data rank 1 begins with the second micro-batch.
    assert [(one["data_rank"], one["samples"]) for one in small["ranks"]] == [
        (0, [0, 2, 4, 6]),
        (1, [1, 3, 5, 7]),
    ] * 2
    order = report["data_order"]
    assert order["ranks"] == [list(range(0, 32, 2)), list(range(1, 32, 2))]
    first = [read["first"] for read in order["reads"] if (read["step"], read["data_rank"]) == (2, 1)]
    assert first == [1024 + 1, 1024 + 3, 1024 + 5, 1024 + 7]


@pytest.fixture
def broken(tmp_path):
    (tmp_path / "sitecustomize.py").write_text(BROKEN)
    arguments = (f"{ROOT}/recipes/tiny.py:zero3", "--nproc", 2, "--run-dir", "mine")

    def run(how: str) -> subprocess.CompletedProcess[str]:
        return dry_run(*arguments, folder=tmp_path, BROKEN_BY=how, PYTHONPATH=f"{tmp_path}{os.pathsep}{ROOT}")

    return run


@pytest.mark.parametrize(
    ("how", "code", "words"),
    [
        pytest.param("raise", WORKER, ["rank 1: ValueError: cannot be trained", "rank_1.log"], marks=pytest.mark.slow),
        pytest.param("kill", WORKER, ["rank 1: killed by signal 9", "rank_1.log"], marks=pytest.mark.breadth),
        pytest.param("other", CHECKPOINT, ["rank 1", "loss 3.0 instead of"], marks=pytest.mark.breadth),
    ],
)
def test_a_failure_names_the_rank_and_the_cause_and_keeps_the_logs(broken, how, code, words, tmp_path):
    result = broken(how)
    assert result.returncode == code, result.stderr
    assert "Traceback" not in result.stderr
    assert all(word in result.stderr for word in words), result.stderr
    left = left_in(tmp_path / "mine-dry-run")
    assert {"logs/rank_0.log", "logs/rank_1.log"} <= set(left)
    assert not any(name.startswith("scratch") or name == "dry_run.json" for name in left)
    if how == "raise":
        assert "cannot be trained" in (tmp_path / "mine-dry-run/logs/rank_1.log").read_text()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--dry-run", "--nodes", "0"], ["--nodes"]),
        (["--dry-run", "--device", "h10"], ["did you mean 'h100'"]),
        (["--dry-run", "--nodes", "1000000000000"], ["--nodes", "cluster.size"]),
        (["--dry-run", "--nproc", "1000000000000"], ["--nproc", "1024"]),
        (["--dry-run", "--nproc", "2", "--nodes", "2"], ["--nproc", "leave one of them out"]),
        (["--nodes", "2", "--device", "h100"], ["--nodes", "--device", "--launcher local --dry-run"]),
        (["--dry-run", "--set", "parallel.tensor=3"], ["parallel.tensor"]),
        (
            ["--dry-run", "--set", "model.config.hidden_size=1000000000000"],
            ["model.config.hidden_size", "must be at most"],
        ),
    ],
    ids=lambda value: " ".join(value),
)
def test_an_invalid_command_line_starts_nothing(arguments, words, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    result = forked_llmtrain("train", f"{ROOT}/recipes/tiny.py", *arguments)
    assert result.returncode == USAGE, result.stderr
    assert "Traceback" not in result.stderr
    assert all(word in result.stderr for word in words), result.stderr
    assert not left_in(tmp_path)


def test_a_folder_with_other_content_is_not_changed(tmp_path):
    (tmp_path / "mine-dry-run").mkdir()
    (tmp_path / "mine-dry-run/thesis.txt").write_text("years of work")
    result = dry_run(f"{ROOT}/recipes/tiny.py", "--run-dir", "mine", "--json", folder=tmp_path)
    assert result.returncode == USAGE
    assert "thesis.txt" in json.loads(result.stdout)["problems"][0]["message"]
    assert left_in(tmp_path) == ["mine-dry-run/thesis.txt"]


def test_a_link_in_the_place_of_the_logs_is_removed_without_what_it_points_to(tmp_path):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine/thesis.txt").write_text("years of work")
    (tmp_path / "mine-dry-run").mkdir()
    (tmp_path / "mine-dry-run/logs").symlink_to(tmp_path / "mine")
    _clear(tmp_path / "mine-dry-run")
    assert not list((tmp_path / "mine-dry-run").iterdir())
    assert left_in(tmp_path) == ["mine/thesis.txt"]
