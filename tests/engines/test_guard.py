"""What a rank computes that is not finite, or far above the usual, reaches no weight on any rank."""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from batches import GLOBAL_BATCH, MIXTRAL, step_batch, tiny_recipe
from harness import run_ranks
from torch import nn
from traces import engine_of, plan_of, reference_of, worst

from llmtrain.recipe import Recipe

STEPS, BAD = 6, 2
"""Steps of a run, and the one whose numbers are spoiled."""

CASES = {
    "zero0": {},
    "zero1": {"parallel.zero_stage": 1},
    "zero2": {"parallel.zero_stage": 2},
    "zero3": {"parallel.zero_stage": 3},
    "zero1_bf16": {"parallel.zero_stage": 1, "parallel.precision": "bf16"},
    "zero2_bf16": {"parallel.zero_stage": 2, "parallel.precision": "bf16"},
    "zero3_bf16": {"parallel.zero_stage": 3, "parallel.precision": "bf16"},
    "zero1_offload": {"parallel.zero_stage": 1, "parallel.offload_optimizer": "cpu"},
    "zero3_offload": {
        "parallel.zero_stage": 3,
        "parallel.offload_optimizer": "cpu",
        "parallel.offload_param": "cpu",
    },
    "zero1_sgd": {"parallel.zero_stage": 1, "optim.name": "sgd"},
    "zero3_adam": {"parallel.zero_stage": 3, "optim.name": "adam"},
    "autocast": {"parallel.zero_stage": 1, "parallel.precision": "autocast_bf16"},
    "pipeline": {"parallel.pipeline": 2, "parallel.zero_stage": 1},
    "pipeline_bf16": {"parallel.pipeline": 2, "parallel.zero_stage": 1, "parallel.precision": "bf16"},
    "pipeline_zero0": {"parallel.pipeline": 2, "optim.clip_grad_norm": 0.0},
    "tensor": {"parallel.tensor": 2, "parallel.zero_stage": 1},
    "tensor_zero0": {"parallel.tensor": 2},
    "sequence": {"parallel.sequence": 2, "parallel.zero_stage": 2},
    "expert": {**MIXTRAL, "parallel.expert": 2, "parallel.zero_stage": 1},
    "expert_zero0": {**MIXTRAL, "parallel.expert": 2},
    "ddp": {"parallel.backend": "accelerate", "parallel.accelerate": "ddp"},
    "ddp_sgd": {"parallel.backend": "accelerate", "parallel.accelerate": "ddp", "optim.name": "sgd"},
    "fsdp2": {"parallel.backend": "accelerate", "parallel.accelerate": "fsdp2", "parallel.zero_stage": 3},
    "accelerate_zero0": {"parallel.backend": "accelerate", "parallel.accelerate": "deepspeed"},
}


def _recipe(name: str) -> Recipe:
    return tiny_recipe(**{"batch.micro_batch_size": 2, **CASES[name]})


class Spoiler:
    """Multiplies what the first matrix of a rank's model gives, in the steps where that is asked for."""

    def __init__(self, engine) -> None:
        model = engine.module.stage.model if hasattr(engine, "module") else engine.model
        self.factor = 1.0
        matrix = next(module for module in model.modules() if isinstance(module, nn.Linear))
        matrix.register_forward_hook(lambda _, __, output: output * self.factor if self.factor != 1.0 else output)


def _held(engine) -> Iterator[np.ndarray]:
    """Everything that is trained, what the optimizer keeps for it, and its counts of updates."""
    for pieces in engine.pieces():
        for piece in pieces:
            yield from (tensor.float().cpu().numpy().copy() for tensor in piece.tensors.values())
            if piece.steps is not None:
                yield piece.steps.cpu().numpy().copy()


def _run(rank: int, names: list[str], spoiled_rank: int):
    """Of each case: losses, norms, rates, what was skipped, and whether all was left as it was."""
    found = []
    for name in names:
        plan = plan_of(_recipe(name), torch.distributed.get_world_size())
        engine = engine_of(plan)
        spoiler = Spoiler(engine)
        shape = (plan.batch.micro_batch_size, plan.batch.gradient_accumulation_steps)
        results, same = [], True
        for step in range(STEPS):
            bad = step == BAD
            spoiler.factor = math.nan if bad and rank == spoiled_rank else 1.0
            before = [*_held(engine)] if bad else []
            weights = {key: value.clone() for key, value in engine.named_weights()} if bad else {}
            results.append(engine.train_step(step_batch(step, *shape, engine.data_parallel_rank, plan.layout.dp)))
            if bad:
                same = all(np.array_equal(old, new) for old, new in zip(before, _held(engine), strict=True))
                same &= all(torch.equal(weights[key], value) for key, value in engine.named_weights())
        numbers = [(one.loss.item(), one.grad_norm.item(), one.lr) for one in results]
        found.append((numbers, engine.guard.read(), same))
    return found


def _without(name: str):
    """Losses and norms of the plain loop that never sees the bad step; its schedule goes on all the same."""
    engine = reference_of(_recipe(name))
    found = []
    for step in range(STEPS):
        if step == BAD:
            engine.scheduler.step()
        else:
            result = engine.train_step(step_batch(step, 1, GLOBAL_BATCH))
            found.append((result.loss.item(), result.grad_norm.item(), result.lr))
    return found


QUICK = ("zero0", "zero1_bf16", "zero3", "pipeline", "ddp", "fsdp2")


def _check(names, ranks: int, spoiled_rank: int) -> None:
    by_rank = run_ranks(ranks, _run, list(names), spoiled_rank)
    for index, name in enumerate(names):
        for numbers, skipped, same in (found[index] for found in by_rank):
            assert same, name
            assert skipped.total == len(skipped.recent) == 1, name
            assert skipped.recent[0].steps_ago == STEPS - 1 - BAD, name
            assert not math.isfinite(skipped.recent[0].loss), name
            assert all(map(math.isfinite, (value for step, one in enumerate(numbers) if step != BAD for value in one)))
            assert not any(map(math.isfinite, numbers[BAD][:2])), name
        if CASES[name].get("parallel.precision", "fp32") == "fp32" and "expert" not in name:
            kept = [one for step, one in enumerate(by_rank[0][index][0]) if step != BAD]
            expected = _without(name)
            for part in range(2):
                assert worst([one[part] for one in kept], [one[part] for one in expected]) < 1e-5, name
            assert [one[2] for one in kept] == [one[2] for one in expected], name


def test_nan_on_one_rank_changes_no_weight_and_the_run_goes_on():
    _check(QUICK, 2, 1)


@pytest.mark.slow
@pytest.mark.parametrize("spoiled_rank", [0, 1])
@pytest.mark.parametrize("name", [name for name in CASES if name not in QUICK])
def test_nan_on_one_rank_under_every_strategy(name, spoiled_rank):
    _check([name], 2, spoiled_rank)
