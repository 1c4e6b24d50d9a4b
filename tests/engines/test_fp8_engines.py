"""Layers whose products are in fp8, emulated, train as the plain loop does with the same layers."""

from __future__ import annotations

from dataclasses import replace
from importlib.util import find_spec

import pytest
import torch
from torch import nn

from llmtrain.engines.plain import PlainLoop
from llmtrain.models import build_model, precision
from tests.helpers.batches import GLOBAL_BATCH, tiny_recipe
from tests.helpers.harness import run_ranks
from tests.helpers.traces import Trace, engine_of, plain_run, plan_of, trace, worst

STEPS = 4
STAGES = {"parallel.pipeline": 2, "parallel.zero_stage": 1, "batch.micro_batch_size": 2}
CASES = {
    "ZeRO-1": {"parallel.zero_stage": 1},
    "ZeRO-2, checkpointing": {"parallel.zero_stage": 2, "parallel.activation_checkpointing": "full"},
    "stages": STAGES,
    "sequence": {"parallel.sequence": 2, "parallel.zero_stage": 1},
}


def _emulate(patch: pytest.MonkeyPatch) -> None:
    """Operands are rounded to fp8, and multiplied in fp32: a CPU has no products of fp8."""
    plain = precision._config
    patch.setattr(precision, "_config", lambda kind: replace(plain(kind), emulate=True))
    patch.setattr(precision, "fp8_unavailable", lambda device: "")


def _train(rank: int, recipes: dict) -> dict[str, Trace]:
    with pytest.MonkeyPatch.context() as patch:
        _emulate(patch)
        return {name: _trace(recipe) for name, recipe in recipes.items()}


def _converted(model: nn.Module) -> list[str]:
    return [name for name, module in model.named_modules() if type(module).__name__ == "Float8Linear"]


def _trace(recipe) -> Trace:
    """The plan is made without fp8: the rules refuse it on CPUs."""
    plan = plan_of(recipe.with_(**{"kernels.fp8": "off"}), 2).model_copy(update={"recipe": recipe})
    engine, batch = engine_of(plan), plan.batch
    assert _converted(engine.model)
    own = engine.data_parallel_rank, plan.data_parallel_size
    return trace(engine, range(STEPS), batch.micro_batch_size, batch.gradient_accumulation_steps, *own)


@pytest.mark.skipif(find_spec("torchao") is None, reason="needs torchao: pip install -e '.[fp8]'")
@pytest.mark.parametrize(
    "trained",
    [
        pytest.param({}, marks=pytest.mark.slow, id="all"),
        pytest.param({"model.adapter": {"rank": 4, "alpha": 16.0}}, marks=pytest.mark.breadth, id="adapter"),
    ],
)
def test_fp8_in_bf16_engines_stays_near_fp8_in_the_fp32_loop(monkeypatch, trained):
    """The bounds are those of bf16 in `test_parity`. The weights have the names of the plain model's."""
    fields = {"kernels.fp8": "rowwise", "parallel.precision": "bf16", "batch.micro_batch_size": 2, **trained}
    runs = run_ranks(2, _train, {name: tiny_recipe(**fields | case) for name, case in CASES.items()})
    recipe = tiny_recipe(**trained)
    plain = plain_run(recipe, STEPS)
    reference = PlainLoop(build_model(recipe, torch.float32, torch.device("cpu")), recipe)
    _emulate(monkeypatch)
    precision.use_fp8(reference.model, "rowwise")
    expected = trace(reference, range(STEPS), 1, GLOBAL_BATCH)
    assert worst(expected.grad_norms, plain.grad_norms) > 1e-4  # other numbers: fp32 runs deviate by a tenth of it
    for run in runs:
        for name, found in run.items():
            assert worst(found.losses, expected.losses) < 2**-8, name
            assert worst(found.grad_norms, expected.grad_norms) < 2**-6, name
            assert found.weights.keys() == plain.weights.keys(), name
