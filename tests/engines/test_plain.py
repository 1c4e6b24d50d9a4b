"""The plain loop in bf16: fp32 master weights of a rounded model."""

from __future__ import annotations

import torch

from llmtrain.engines.plain import PlainLoop
from llmtrain.engines.state.writer import DiskWriter
from llmtrain.models import build_model
from tests.helpers.batches import GLOBAL_BATCH, step_batch, tiny_recipe

CPU = torch.device("cpu")
RECIPE = tiny_recipe(**{"parallel.precision": "bf16", "parallel.zero_stage": 1, "optim.lr": 1e-5})


def _engine() -> PlainLoop:
    return PlainLoop(build_model(RECIPE, torch.bfloat16, CPU), RECIPE)


def test_master_weights_start_rounded_and_stay_in_fp32():
    engine = _engine()
    norm = engine.model.model.norm.weight
    master = engine.masters[norm]
    assert torch.equal(master, norm.float())
    for step in range(4):
        engine.train_step(step_batch(step, 2, GLOBAL_BATCH // 2))
    # Steps of 1e-5 on a weight of 1: lost in bf16, kept by the master.
    assert torch.equal(norm, torch.ones_like(norm))
    assert (master != 1).all()
    assert all(torch.equal(weight, master.bfloat16()) for weight, master in engine.masters.items())


def test_gradients_of_micro_batches_are_collected_in_fp32():
    engine = _engine()
    gradients = []
    engine.optimizer.register_step_pre_hook(lambda *_: gradients.extend(one.grad for one in engine.masters.values()))
    engine.train_step(step_batch(0, 1, GLOBAL_BATCH))
    assert all(gradient.dtype == torch.float32 for gradient in gradients)
    assert any(not torch.equal(gradient, gradient.bfloat16().float()) for gradient in gradients)


def test_a_saved_bf16_loop_continues_bit_for_bit(tmp_path):
    engine, again = _engine(), _engine()
    engine.train_step(step_batch(0, 4, 2))
    engine.train_step(step_batch(1, 4, 2))
    engine.save(DiskWriter(tmp_path))
    again.load(tmp_path)
    ours, theirs = (one.train_step(step_batch(2, 4, 2)) for one in (engine, again))
    assert ours == theirs
    for mine, other in zip(engine.masters.values(), again.masters.values(), strict=True):
        assert torch.equal(mine, other)


def test_a_weight_without_a_gradient_is_not_updated():
    model = build_model(RECIPE, torch.float32, CPU)
    model.unmet = torch.nn.Parameter(torch.ones(2, 2))
    engine = PlainLoop(model, RECIPE.with_(**{"parallel.precision": "fp32", "optim.lr": 1e-2}))
    for step in range(3):
        engine.train_step(step_batch(step, 2, GLOBAL_BATCH // 2))
    assert (model.unmet == 1).all()
