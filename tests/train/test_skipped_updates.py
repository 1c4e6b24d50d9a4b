"""Runs with data that cause bad updates skip these, roll back and skip the data, or stop."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from safetensors.torch import load_file

from llmtrain.errors import Exit
from tests.helpers.commands import events, llmtrain, metrics, run
from tests.helpers.small_runs import write_small_recipe

BATCH = 8
SPOILT = range(6 * BATCH, 10 * BATCH)
"""Samples of steps 7 to 10 of a run that never goes back."""

SPOILER = f"""
def _spoil():
    import math, os

    from llmtrain.engines.deepspeed.engine import DeepSpeedEngine as engine

    def train_step(self, batch, change_gradients=None):
        self.spoilt = os.environ["RANK"] == "1" and batch.first_sample in range({SPOILT.start}, {SPOILT.stop})
        return train(self, batch)

    def forward(self, micro_batch, metrics=None):
        loss, auxiliary = run(self, micro_batch, metrics)
        return (loss * math.nan if self.model.training and self.spoilt else loss), auxiliary

    train, run = engine.train_step, engine._forward
    engine.train_step, engine._forward = train_step, forward


if __name__ == "__main__":
    _spoil()
"""


@pytest.fixture(scope="module")
def spoilt_recipe(tmp_path_factory) -> Path:
    """A script that torchrun starts: on its second rank some samples give a loss of NaN."""
    path = write_small_recipe(tmp_path_factory.mktemp("spoilt"))
    before, main, after = path.read_text().partition('if __name__ == "__main__":')
    path.write_text(before + SPOILER.strip() + after)
    assert main
    return path


def _train(recipe: Path, run_dir: Path, **fields: object):
    torchrun = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2")
    values = {
        "parallel.zero_stage": 1,
        "guard.every_steps": 1,
        "export.at_end": "false",
        "evaluation.every_steps": 0,
        **fields,
    }
    settings = [argument for field, value in values.items() for argument in ("--set", f"{field}={value}")]
    return run(*torchrun, recipe, "--run-dir", run_dir, *settings)


@pytest.mark.slow
def test_a_run_rolls_back_and_skips_the_data_of_skipped_updates(spoilt_recipe, tmp_path):
    result = _train(spoilt_recipe, tmp_path / "run", **{"guard.max_skipped": 2})
    assert result.returncode == 0, result.stdout + result.stderr
    # Three of the last steps are too many; the last checkpoint from before step 7 is that of step 4.
    assert f"rolled back to step 4, the data continue with sample {9 * BATCH}" in result.stdout
    assert "update skipped: loss not finite, gradient norm not finite" in result.stdout
    lines = metrics(tmp_path / "run")
    assert [line["step"] for line in lines] == list(range(1, 13))
    assert [line["samples"] for line in lines[:5]] == [8, 16, 24, 32, 10 * BATCH]
    assert [line["loss"] is None for line in lines] == [step == 5 for step in range(1, 13)]
    assert [line["skipped_steps"] for line in lines] == [0] * 4 + [4] * 8
    assert [line["rollbacks"] for line in lines] == [0] * 4 + [1] * 8
    noted = [(one["event"], one["step"]) for one in events(tmp_path / "run")]
    assert noted[0] == ("started", 0)
    assert ("rolled_back", 4) in noted
    assert ("skipped", 5) in noted
    last = tmp_path / "run" / "checkpoints" / "step_00000012"
    assert json.loads((last / "trainer.json").read_text())["rollbacks"] == 1
    assert load_file(last / "engine" / "guard.safetensors")["total"] == 4


@pytest.mark.breadth
def test_a_run_stops_after_too_many_rollbacks(spoilt_recipe, tmp_path):
    result = _train(spoilt_recipe, tmp_path / "run", **{"guard.max_skipped": 0, "guard.max_rollbacks": 1})
    assert result.returncode != 0
    assert "no rollback is left (1 of 1)" in result.stderr
    assert "guard.max_rollbacks" in result.stderr


@pytest.mark.slow
def test_a_run_stops_instead_of_rolling_back_if_configured(small_recipe, tmp_path):
    """An ordinary step breaks the rule: a loss or a norm above the mean of the last three, soon in any run so long."""
    fields = {"spike_sigma": 1e-3, "spike_norm_ratio": 1, "window_steps": 3, "max_skipped": 0, "then": "stop"}
    fields |= {"every_steps": 1}
    settings = [argument for field, value in fields.items() for argument in ("--set", f"guard.{field}={value}")]
    settings += ["--set", "train.max_steps=100"]
    result = llmtrain("train", small_recipe, "--run-dir", tmp_path / "run", *settings)
    assert result.returncode == Exit.WORKER, result.stdout + result.stderr
    assert "Traceback" not in result.stderr
    started, *_, died = events(tmp_path / "run")
    assert (started["event"], died["event"]) == ("started", "died")
    assert "updates were skipped" in died["text"]
    assert "died at step" in (tmp_path / "run" / "report.html").read_text()
    assert "[guard.skipped]" in result.stderr
    assert "1 of the last 3 updates were skipped, more than 0: first step" in result.stderr
    assert "--set guard.then=rollback" in result.stderr
    last = metrics(tmp_path / "run")[-1]
    assert last["skipped_steps"] == 1
    assert f"first step {last['step']} " in result.stderr
