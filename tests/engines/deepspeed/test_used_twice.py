"""A module that is called twice before one backward pass, as trainers of pairs do: DeepSpeed#8224 saw ZeRO-2 lose the
gradients of one call. llmtrain calls the model once for both completions, whatever DeepSpeed does."""

from __future__ import annotations

import deepspeed
import pytest
import torch
from torch import nn

from tests.helpers.harness import run_ranks

RATE = 0.1


def _model() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4))


def _loss(model: nn.Module, rank: int) -> torch.Tensor:
    """The difference of two calls goes through one function, as in DPO."""
    chosen, rejected = torch.randn(2, 3, 8, generator=torch.Generator().manual_seed(rank)).unbind()
    return nn.functional.softplus(model(rejected).square().sum() - model(chosen).square().sum())


def _step(rank: int, stage: int) -> list[float]:
    """How far the weights are from those of plain SGD after one step, relative to their movement."""
    plain = _model()
    before = [weight.detach().clone() for weight in plain.parameters()]
    (sum(_loss(plain, one) for one in (0, 1)) / 2).backward()  # type: ignore[union-attr]
    model = _model()
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 1,
        "gradient_clipping": 0.0,
        "optimizer": {"type": "SGD", "params": {"lr": RATE}},
        "zero_optimization": {"stage": stage},
        "zero_allow_untested_optimizer": True,
    }
    engine = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)[0]
    engine.backward(_loss(engine, rank))
    engine.step()
    found = []
    for weight, start, expected in zip(model.parameters(), before, plain.parameters(), strict=True):
        with deepspeed.zero.GatheredParameters([weight], enabled=stage == 3):
            moved = weight.detach().clone() - start
        assert expected.grad is not None
        found.append(float((moved + RATE * expected.grad).norm() / (RATE * expected.grad).norm()))
    return found


@pytest.mark.parametrize(
    "stage", [pytest.param(0, marks=pytest.mark.breadth), 2, pytest.param(3, marks=pytest.mark.breadth)]
)
def test_gradients_of_both_calls_are_summed(stage: int) -> None:
    for apart in run_ranks(2, _step, stage):
        assert max(apart) < 1e-5
