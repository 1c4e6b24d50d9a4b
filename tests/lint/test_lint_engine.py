"""The corpus against the real engine: what only building it, or a step, brings to light, and what trains."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.helpers.harness import run_ranks

CORPUS = Path(__file__).parents[1] / "lint_corpus"
FAILS = [
    "checkpoint_fast_writer",
    "clipping_text",
    "cosine_with_max_lr",
    "decay_without_total",
    "fp32_accumulation_stage0",
    "infinite_steps_per_print",
    "legacy_stage1",
    "no_grad_norm_with_clipping",
    "optimizer_adamww",
    "optimizer_betas_one",
    "optimizer_learning_rate",
    "optimizer_lr_text",
    "optimizer_max_grad_norm",
    "optimizer_sgd_lower",
    "param_dtype_conflict",
    "predivide_zero3",
    "prescale_zero2",
    "removed_onebit_adam",
    "scheduler_linear",
    "sgd_zero1",
    "unmanaged_overlap",
    "warmup_ratio",
    "warmup_zero",
]
"""Malformed files that DeepSpeedConfig takes, and the engine or its first steps do not."""
TRAINS = [
    "bf16_zero1_fp32_accumulation",
    "checkpoint",
    "long_warmup",
    "lr_range_test",
    "minimal",
    "no_clipping",
    "one_cycle",
    "own_comment_keys",
    "scientific_counts",
    "sgd_allowed",
    "torch_autocast",
    "torch_scheduler",
    "two_rates",
    "warmup_cosine",
    "zero_true",
]


def _outcomes(rank: int, kind: str, names: list[str]) -> dict[str, str]:
    return {name: _outcome(CORPUS / kind / f"{name}.json") for name in names}


def _outcome(path: Path) -> str:
    import deepspeed
    import hjson
    import torch

    values = hjson.loads(path.read_text(encoding="utf-8"))
    optimizer = values.setdefault("optimizer", {"type": "AdamW"})
    if optimizer["type"].lower() in ("adam", "adamw"):
        optimizer.setdefault("params", {})["torch_adam"] = True  # DeepSpeed's own would be compiled first
    for key in ("train_batch_size", "gradient_accumulation_steps"):  # made for other numbers of ranks
        values.pop(key, None)
    values["train_micro_batch_size_per_gpu"] = 2
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 8))
    try:
        engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=values)
        dtype = next(iter(engine.module.parameters())).dtype
        for _ in range(2):
            engine.backward(engine(torch.ones(2, 8, dtype=dtype)).float().square().mean())
            engine.step()
        engine.destroy()
    except Exception as error:  # whatever the engine raises is its answer
        return f"{type(error).__name__}: {str(error)[:80]}"
    return "trained"


def test_refused_configurations_fail_in_the_engine():
    (outcomes,) = run_ranks(1, _outcomes, "malformed", FAILS)
    assert [name for name, outcome in outcomes.items() if outcome == "trained"] == []


def test_valid_configurations_train():
    (outcomes,) = run_ranks(1, _outcomes, "valid", TRAINS)
    assert {name: outcome for name, outcome in outcomes.items() if outcome != "trained"} == {}


def _log_warmup_of_an_unknown_type(rank: int) -> str:
    import torch
    from deepspeed.runtime.lr_schedules import WarmupLR

    optimizer = torch.optim.SGD([torch.zeros(1)], lr=1.0)
    return WarmupLR(optimizer, warmup_num_steps=10, warmup_type="cosine").warmup_type


def test_unknown_warmups_become_logarithmic():
    assert run_ranks(1, _log_warmup_of_an_unknown_type) == ["log"]


@pytest.mark.parametrize("key", ["zero_optimisation", "gradient_accumulation_step"])
def test_unknown_keys_have_no_effect(key):
    from deepspeed.runtime.config import DeepSpeedConfig

    config = DeepSpeedConfig({"train_batch_size": 8, key: {"stage": 2}})
    assert config.zero_optimization_stage == 0
    assert config.gradient_accumulation_steps == 1
