"""The corpus on the real engine: faults that only building it, or a step, reveals, and files that train."""

from __future__ import annotations

import pytest

from llmtrain_lint import RULES
from llmtrain_lint.schema import schema
from tests.helpers.harness import run_ranks
from tests.lint.corpus import Case, cases

NOT_SHOWN = {
    "batch_missing": "the harness gives sizes",
    "batch_value": "the harness gives sizes",
    "batch_triangle": "the harness gives sizes",
    "world_divides": "the harness has one rank",
    "mesh": "the harness has one rank",
    "expert_conflict": "needs experts and several ranks",
    "expert_tensor": "needs experts and several ranks",
    "tensor_size": "needs several ranks",
    "deepcompile": "needs CUDA",
    "managed_accumulation": "needs CUDA for DeepCompile",
    "checkpoint_writer": "fails when a checkpoint is saved, or under torchrun",
    "strict_json": "the reader refuses it",
    "auto": "the reader refuses it",
    "zero_missing": "the reader refuses it",
    "accumulation_twice": "the reader refuses it",
    "mismatch": "the reader refuses it",
    "duplicate": "reading the file refuses it",
    "quantized_autocast": "needs CUDA",
    "adamw_mode": "the harness takes torch's Adam",
    "zenflow": "the harness takes torch's Adam",
}
"""Rules whose refusals an engine on one CPU does not show, and why."""


def _outcomes(rank: int, names: list[str]) -> dict[str, str]:
    from tests.lint.oracle import build, read

    known = {case.path.name: case for case in (*cases("malformed"), *cases("valid"))}
    made = {}
    for name in names:
        case = known[name]
        try:
            made[name] = build(read(case.text, case.reader, case.world or 1, case.path.suffix == ".yaml"))
        except Exception as error:  # whatever is raised is the answer
            made[name] = f"{type(error).__name__}: {error}"
    return made


def _can_be_built(case: Case) -> bool:
    """Whether the installed DeepSpeed shows on one CPU what the file does."""
    return case.buildable and case.deepspeed == schema().deepspeed


def test_skipped_rules_exist():
    assert {f"lint.{name}" for name in NOT_SHOWN} <= {rule.id for rule in RULES}


@pytest.mark.slow
def test_refused_configurations_fail_in_the_engine():
    shown = [
        case.path.name
        for case in cases("malformed")
        if _can_be_built(case)
        and any(
            one.effect == "refuses" and one.rule.removeprefix("lint.") not in NOT_SHOWN for one in case.found("error")
        )
    ]
    assert len(shown) > 40
    (outcomes,) = run_ranks(1, _outcomes, shown)
    assert [name for name, outcome in outcomes.items() if not outcome] == []


@pytest.mark.breadth
def test_valid_configurations_train():
    shown = [case.path.name for case in cases("valid") if _can_be_built(case)]
    assert len(shown) > 60
    (outcomes,) = run_ranks(1, _outcomes, shown)
    assert {name: outcome for name, outcome in outcomes.items() if outcome} == {}


def test_the_engine_refuses_some_configurations_and_trains_others():
    """Two of each kind, so that every run of the tests builds some."""
    refused, trained = ["optimizer_adamww.json", "sgd_zero1.json"], ["minimal.json", "trainer_stage3.json"]
    (outcomes,) = run_ranks(1, _outcomes, [*refused, *trained])
    assert [name for name, outcome in outcomes.items() if outcome] == refused


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
