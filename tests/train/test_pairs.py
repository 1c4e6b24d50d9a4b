"""A run on preferences: its lines of metrics, and a second run that finds the reference's log-probabilities."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from tests.helpers.commands import llmtrain
from tests.helpers.small_pairs import small_pairs, write_pairs

REWARDS = {"rewards_chosen", "rewards_rejected", "reward_margin", "reward_accuracy"}


def _recipe(folder: Path, **fields: object) -> Path:
    own = {"train.max_steps": 6, "logging.every_steps": 2, "evaluation.every_steps": 3, "evaluation.at_start": True}
    labelled = fields.get("objective.name") == "kto"
    own |= {"optim.warmup_steps": 0, "logging.trackers": []}
    made = small_pairs(write_pairs(folder, labelled=labelled), **{**own, **fields})
    made = made.with_(**{"train.max_steps": 6})  # `small` chose the steps of a verification
    path = folder / "pairs.py"
    path.write_text(
        "from llmtrain.recipe import parse_recipe\n\n\n"
        f"def recipe():\n    return parse_recipe({json.loads(made.model_dump_json())!r})\n"
    )
    return path


def _lines(run_dir: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.slow
def test_rewards_are_logged_and_references_kept(tmp_path: Path) -> None:
    recipe, runs = _recipe(tmp_path), [tmp_path / name for name in ("first", "second")]
    for run_dir in runs:
        result = llmtrain("train", recipe, "--run-dir", run_dir)
        assert result.returncode == 0, result.stderr + result.stdout
        assert "unigram" not in result.stdout
    first, second = ([{**line} for line in _lines(run_dir)] for run_dir in runs)
    assert all(line.keys() >= REWARDS for line in first)
    assert not any("perplexity" in line for line in first)
    before, *_, after = [line for line in first if "eval_loss" in line]
    assert before["eval_loss"] == pytest.approx(math.log(2), abs=1e-5)  # the model is its own reference
    assert after["reward_margin"] == pytest.approx(after["rewards_chosen"] - after["rewards_rejected"], abs=1e-6)
    assert after["reward_accuracy"] > 0.8 > after["eval_loss"] + 0.1
    kept = list((tmp_path / "cache" / "references").glob("*/meta.json"))
    assert len(kept) == 2  # of training and evaluation; the second run has added none
    for ours, theirs in zip(first, second, strict=True):
        assert {name: ours.get(name) for name in ("loss", "eval_loss", *REWARDS)} == {
            name: theirs.get(name) for name in ("loss", "eval_loss", *REWARDS)
        }


@pytest.mark.slow
def test_kto_logs_its_divergence_and_keeps_the_references_of_mismatched_completions(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    result = llmtrain("train", _recipe(tmp_path, **{"objective.name": "kto"}), "--run-dir", run_dir)
    assert result.returncode == 0, result.stderr + result.stdout
    lines = _lines(run_dir)
    assert all(line.keys() >= {*REWARDS, "kl"} for line in lines)
    before, *_, after = [line for line in lines if "eval_loss" in line]
    assert before["eval_loss"] == pytest.approx(0.5, abs=1e-5)  # the model is its own reference
    assert before["kl"] == pytest.approx(0.0, abs=1e-4)
    assert 0 <= after["reward_accuracy"] <= 1
    assert after["reward_margin"] > 0
    assert after["eval_loss"] < before["eval_loss"]
    assert after["reward_margin"] == pytest.approx(after["rewards_chosen"] - after["rewards_rejected"], abs=1e-6)
    assert len(list((tmp_path / "cache" / "references").glob("*/meta.json"))) == 4


@pytest.mark.breadth
@pytest.mark.parametrize("name", ["dpo", "kto"])
def test_a_dry_run_reads_random_completions(name: str, tmp_path: Path) -> None:
    recipe = _recipe(tmp_path, **{"objective.name": name})
    result = llmtrain("train", recipe, "--dry-run", "--nproc", "2", "--set", "parallel.zero_stage=2")
    assert result.returncode == 0, result.stderr + result.stdout
