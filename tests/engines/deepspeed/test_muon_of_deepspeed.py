"""The reason for our own Muon: under ZeRO, DeepSpeed's measures and clips the orthogonal update, not the gradient."""

from __future__ import annotations

import copy

import pytest

from tests.helpers.harness import run_ranks

LIMIT = 0.5
"""Of the gradient's norm."""


def _train(rank: int, stage: int, scale: float) -> tuple[float, float, float]:
    """The norm of the gradient, the norm that DeepSpeed has, and the size of the change of a matrix."""
    import deepspeed
    import torch

    torch._dynamo.config.disable = True  # DeepSpeed compiles its iterations, which takes longer than to run them
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(16, 16, bias=False), torch.nn.Linear(16, 16, bias=False))
    plain = copy.deepcopy(model)
    for parameter in model.parameters():
        parameter.use_muon = True
    config = {
        "train_micro_batch_size_per_gpu": 4,
        "gradient_clipping": LIMIT,
        "zero_optimization": {"stage": stage, "reduce_scatter": stage < 3},
        "optimizer": {"type": "Muon", "params": {"lr": 1e-2, "momentum": 0.95, "ns_method": "standard"}},
    }
    engine = deepspeed.initialize(model=model, model_parameters=list(model.parameters()), config=config)[0]
    inputs = scale * torch.randn(4, 16)
    plain(inputs).square().mean().backward()
    gradients = [parameter.grad for parameter in plain.parameters()]
    engine.backward(engine(inputs).square().mean())
    engine.step()
    with deepspeed.zero.GatheredParameters(list(model.parameters()), enabled=stage == 3):
        moved = (model[0].weight.detach() - plain[0].weight.detach()).norm().item()
    found = float(torch.cat([one.flatten() for one in gradients]).norm()), float(engine.get_global_grad_norm()), moved
    engine.destroy()
    return found


@pytest.mark.breadth
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_deepspeed_clips_the_update_of_its_muon(stage):
    """A matrix of 16 × 16 moves by about 4 × the learning rate, whatever its gradient; here by a tenth of that."""
    gradient, norm, moved = run_ranks(1, _train, stage, 0.01)[0]
    assert gradient < LIMIT, "nothing to clip"
    assert norm > 3 > 10 * gradient, "the norm of two orthogonal matrices"
    assert moved < 0.2 * 4 * 1e-2
