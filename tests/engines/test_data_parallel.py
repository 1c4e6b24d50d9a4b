"""`nn.DataParallel` matches the plain loop; its own code needs GPUs."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

from llmtrain.engines.data_parallel import DataParallel, rows_by_device
from llmtrain.engines.plain import PlainLoop
from llmtrain.engines.state.writer import DiskWriter
from llmtrain.overrides.torch import keep_own_hooks
from llmtrain.plan.rules import resolve
from llmtrain.recipe import Recipe
from llmtrain.recipe.cluster import Cluster
from tests.helpers.batches import GLOBAL_BATCH, MIXTRAL, step_batch, tiny_recipe
from tests.helpers.moe import GPT_OSS
from tests.helpers.reference_run import ReferenceRun
from tests.helpers.traces import Trace, trace, worst

STEPS = 6
FP32 = 1e-5
"""The bound of the project for fp32; see test_parity.py."""
CPU = torch.device("cpu")
SGD = {"optim.name": "sgd", "optim.lr": 0.1}
BLOOM = {
    "architecture": "bloom",
    "attention": "eager",
    "config": {"vocab_size": 256, "hidden_size": 32, "n_layer": 2, "n_head": 4},
}
VARIANTS = {
    "AdamW": {},
    "SGD": SGD,
    "recomputed": {**SGD, "parallel.activation_checkpointing": "full"},
    "experts": {**SGD, **MIXTRAL},
    "sinks": {**SGD, "model": GPT_OSS},
    "ALiBi": {**SGD, "model": BLOOM},
}
"""The last two make their masks without positions."""


class InTurn(nn.Module):
    """What `nn.DataParallel` computes, one part after the other on one device."""

    def __init__(self, module: nn.Module, parts: int) -> None:
        super().__init__()
        self.module = module
        self.parts = parts

    def forward(self, batch, **named):
        found = [self.module(part, **named) for part in rows_by_device(batch, self.parts)]
        losses, auxiliaries = zip(*found, strict=True)
        return torch.cat(losses), None if auxiliaries[0] is None else torch.cat(auxiliaries)


def _engine(devices: int, device: torch.device, micro_batch: int, **fields) -> PlainLoop:
    recipe = tiny_recipe(**{"parallel.backend": "data_parallel", "batch.micro_batch_size": micro_batch, **fields})
    plan = resolve(recipe, Cluster(devices_per_node=devices, device="cpu" if devices == 1 else "gpu"))
    assert plan.workers == 1
    engine = DataParallel(plan, device)
    engine.shape = (plan.read_size, plan.batch.gradient_accumulation_steps)
    assert engine.shape == (micro_batch * devices, GLOBAL_BATCH // (micro_batch * devices))
    return engine


def _reference(recipe: Recipe, micro_batch: int, device: torch.device = CPU) -> Trace:
    return trace(ReferenceRun(recipe, device), range(STEPS), micro_batch, GLOBAL_BATCH // micro_batch)


def _same(run: Trace, expected: Trace) -> None:
    assert worst(run.losses, expected.losses) < FP32
    assert worst(run.grad_norms, expected.grad_norms) < FP32
    assert run.rates == expected.rates
    assert run.evaluation == pytest.approx(expected.evaluation, rel=FP32)
    assert run.weights.keys() == expected.weights.keys()
    for name, value in run.weights.items():
        # Where a gradient is near zero Adam moves a weight by its rounding; see test_parity.py.
        np.testing.assert_allclose(value, expected.weights[name], rtol=0, atol=1e-5, err_msg=name)


@pytest.mark.parametrize("fields", VARIANTS.values(), ids=VARIANTS)
def test_data_parallel_matches_the_plain_loop(fields):
    expected = _reference(tiny_recipe(**fields), 2)
    for devices in (1, 2):
        engine = _engine(devices, CPU, micro_batch=2, **fields)
        engine.module = InTurn(engine.module, devices)
        _same(trace(engine, range(STEPS), *engine.shape), expected)


def test_data_parallel_continues_from_its_checkpoint(tmp_path):
    first, second = (_engine(1, CPU, micro_batch=2) for _ in range(2))
    for step in range(3):
        first.train_step(step_batch(step, *first.shape))
    first.save(DiskWriter(tmp_path))
    second.load(tmp_path)
    whole, continued = (trace(engine, range(3, STEPS), *engine.shape) for engine in (first, second))
    assert continued.losses == whole.losses
    for name, value in whole.weights.items():
        np.testing.assert_array_equal(continued.weights[name], value, err_msg=name)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="nn.DataParallel spreads work over two or more CUDA GPUs")
@pytest.mark.parametrize("fields", VARIANTS.values(), ids=VARIANTS)
def test_several_gpus_match_the_plain_loop(fields):
    gpu = torch.device("cuda", 0)
    engine = _engine(2, gpu, micro_batch=2, **fields)
    assert len(engine.devices) == 2
    _same(trace(engine, range(STEPS), *engine.shape), _reference(tiny_recipe(**fields), 2, gpu))


def test_a_copy_has_hooks_of_its_own():
    """`transformers` adds some in each copy's forward pass, at the same time as in other copies."""
    model = nn.Sequential(nn.Linear(1, 1))
    copies = [model._replicate_for_data_parallel() for _ in range(2)]
    for copied in copies:
        keep_own_hooks(copied)
        copied.register_forward_hook(print)
    assert [len(one._forward_hooks) for one in (model, *copies)] == [0, 1, 1]
