"""Results of a rank that are not finite, or far above the usual, change no weight on any rank."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import pytest
import torch
from deepspeed.accelerator import get_accelerator
from torch import nn

from llmtrain.checkpoint.contents import TrainerState
from llmtrain.checkpoint.folder import newest
from llmtrain.checkpoint.save import Saver
from llmtrain.checkpoint.state import load
from llmtrain.plan.rules import resolve
from llmtrain.recipe import Recipe
from llmtrain.recipe.cluster import Cluster
from tests.helpers.batches import GLOBAL_BATCH, MIXTRAL, step_batch, tiny_recipe
from tests.helpers.harness import run_ranks
from tests.helpers.traces import engine_of, plan_of, reference_of, worst

STEPS, BAD = 6, 2
"""Steps of a run, and the one whose numbers are spoiled."""

FSDP2 = {"parallel.backend": "accelerate", "parallel.accelerate": "fsdp2", "parallel.zero_stage": 3}
OWN = "torch.optim:NAdam"
CUT = {"optim.options": {"block_size": 48}, "model.config.vocab_size": 257}
"""Partitions of ZeRO end within blocks of 8-bit moments."""
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
    "zero2_lion": {"parallel.zero_stage": 2, "optim.name": "lion"},
    "zero0_muon": {"optim.name": "muon"},
    "zero3_muon": {"parallel.zero_stage": 3, "optim.name": "muon"},
    "pipeline_muon": {"parallel.pipeline": 2, "parallel.zero_stage": 1, "optim.name": "muon"},
    "zero2_schedule_free": {"parallel.zero_stage": 2, "optim.name": "schedule_free_adamw"},
    "zero3_schedule_free": {"parallel.zero_stage": 3, "optim.name": "schedule_free_adamw"},
    "zero0_adafactor": {"optim.name": "adafactor"},
    "zero3_adafactor": {"parallel.zero_stage": 3, "optim.name": "adafactor"},
    "pipeline_adafactor": {"parallel.pipeline": 2, "parallel.zero_stage": 1, "optim.name": "adafactor"},
    "fsdp2_adafactor": {**FSDP2, "optim.name": "adafactor"},
    "zero0_8bit": {"optim.name": "adamw_8bit"},
    "zero1_8bit": {"parallel.zero_stage": 1, "optim.name": "adamw_8bit", **CUT},
    "zero3_8bit": {"parallel.zero_stage": 3, "optim.name": "adamw_8bit", **CUT},
    "pipeline_8bit": {"parallel.pipeline": 2, "parallel.zero_stage": 1, "optim.name": "adamw_8bit"},
    "fsdp2_8bit": {**FSDP2, "optim.name": "adamw_8bit"},
    "fsdp2_lion": {**FSDP2, "optim.name": "lion"},
    "zero0_own": {"optim.name": OWN},
    "zero1_own": {"parallel.zero_stage": 1, "optim.name": OWN},
    "zero3_own": {"parallel.zero_stage": 3, "optim.name": OWN},
    "pipeline_own": {"parallel.pipeline": 2, "parallel.zero_stage": 1, "optim.name": OWN},
    "fsdp2_own": {**FSDP2, "optim.name": OWN},
    "fsdp2_muon": {**FSDP2, "optim.name": "muon"},
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
    "fsdp2": FSDP2,
    "fsdp2_sgd": {**FSDP2, "optim.name": "sgd"},
    "accelerate_zero0": {"parallel.backend": "accelerate", "parallel.accelerate": "deepspeed"},
}


def _recipe(name: str) -> Recipe:
    return tiny_recipe(**{"batch.micro_batch_size": 2, **CASES[name]})


class Spoiler:
    """Multiplies what one matrix of a rank's model gives, in the steps where that is asked for.

    which: 0 for the first one, where NaN passes through all the others; -1 for that of the logits, whose loss grows
    with the factor. With larger queries each token would only look at one other: loss and gradient may stay as usual.
    """

    def __init__(self, engine, which: int = 0) -> None:
        model = engine.model
        self.factor = 1.0
        matrix = [module for module in model.modules() if isinstance(module, nn.Linear)][which]
        matrix.register_forward_hook(lambda _, __, output: output * self.factor if self.factor != 1.0 else output)


@contextmanager
def _readers() -> Iterator[set[str]]:
    """Files of ours, and of DeepSpeed, that have the host wait for a number, up to the end of the context."""
    found: set[str] = set()
    names = ("item", "tolist", "__bool__", "__float__", "__int__")
    own = {name: getattr(torch.Tensor, name) for name in names}

    def noting(name: str):
        def read(tensor: torch.Tensor):
            file = sys._getframe(1).f_code.co_filename
            if "/deepspeed/" in file or "/llmtrain/" in file:
                found.add(file)
            return own[name](tensor)

        return read

    for name in names:
        setattr(torch.Tensor, name, noting(name))
    try:
        yield found
    finally:
        for name in names:
            setattr(torch.Tensor, name, own[name])


def _held(engine) -> Iterator[np.ndarray]:
    """Everything that is trained, what the optimizer keeps for it, and its counts of updates."""
    for pieces in engine.checkpoint_shards():
        for piece in pieces:
            yield from (tensor.float().cpu().numpy().copy() for tensor in piece.tensors.values())
            if piece.steps is not None:
                yield piece.steps.cpu().numpy().copy()


def _run(rank: int, names: list[str], spoiled_rank: int):
    """Of each case: losses, norms, rates; what was skipped; whether all was left as it was; who waited for numbers."""
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
            batch = step_batch(step, *shape, engine.data_parallel_rank, plan.data_parallel_size)
            with _readers() as readers:
                results.append(engine.train_step(batch))
            if bad:
                same = all(np.array_equal(old, new) for old, new in zip(before, _held(engine), strict=True))
                same &= all(torch.equal(weights[key], value) for key, value in engine.named_weights())
        numbers = [(one.loss.item(), one.grad_norm.item(), one.lr) for one in results]
        found.append((numbers, engine.guard.read(), same, readers))
    return found


def _without(name: str):
    """Losses and norms of the plain loop that never sees the bad step; its schedule advances nevertheless."""
    engine = reference_of(_recipe(name))
    found = []
    for step in range(STEPS):
        if step == BAD:
            engine.loop.steps += 1
        else:
            result = engine.train_step(step_batch(step, 1, GLOBAL_BATCH))
            found.append((result.loss.item(), result.grad_norm.item(), result.lr))
    return found


QUICK = ("zero0", "zero1_bf16", "zero3", "zero3_muon", "pipeline", "ddp", "fsdp2")
SLOW = ("pipeline_bf16", "zero1_own")
"""Of the others, those that are tried in CI."""


def _check(names, ranks: int, spoiled_rank: int) -> None:
    by_rank = run_ranks(ranks, _run, list(names), spoiled_rank)
    for index, name in enumerate(names):
        for numbers, skipped, same, readers in (found[index] for found in by_rank):
            assert same, name
            # Offloaded states are updated by the host, and it sends tokens to experts by their numbers. It waits for
            # the verdict before it calls a class of one's own.
            may_read = any(word in name for word in ("offload", "expert", "own"))
            assert not readers or may_read, (name, readers)
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


def test_nan_on_one_rank_changes_no_weight_and_the_run_continues():
    _check(QUICK, 2, 1)


@pytest.mark.parametrize(
    ("name", "spoiled_rank"),
    [
        pytest.param(name, rank, marks=pytest.mark.slow if rank and name in SLOW else pytest.mark.breadth)
        for name in CASES
        for rank in (0, 1)
        if name not in QUICK
    ],
)
def test_every_strategy_skips_an_update_if_one_rank_has_nan(name, spoiled_rank):
    _check([name], 2, spoiled_rank)


def _fp16(rank: int, stage: int) -> tuple[list[int], int, list[bool]]:
    """What the guard has counted, and how often DeepSpeed's scaler dropped a step; what changed no weight.

    A CPU that says it has fp16: torch computes it there. One step that the loss scale spoils, then a loss of NaN.
    """
    get_accelerator().is_fp16_supported = lambda: True
    recipe = tiny_recipe(**{"batch.micro_batch_size": 2, "parallel.zero_stage": stage, "parallel.precision": "fp16"})
    plan = resolve(recipe, Cluster(devices_per_node=2, device="gpu"))  # on a CPU a rule refuses it
    engine = engine_of(plan)
    spoiler = Spoiler(engine)
    scaler = engine.engine.optimizer.loss_scaler
    counted, same = [], []
    for step, (scale, factor) in enumerate([(4.0, 1.0), (2.0**40, 1.0), (4.0, 1.0), (4.0, math.nan)]):
        scaler.cur_scale = scale
        spoiler.factor = factor if rank == 1 else 1.0
        before = [*_held(engine)]
        engine.train_step(step_batch(step, 2, plan.batch.gradient_accumulation_steps, rank, 2))
        same.append(all(np.array_equal(old, new) for old, new in zip(before, _held(engine), strict=True)))
        counted.append(engine.guard.read().total)
    return counted, engine.engine.skipped_steps, same


@pytest.mark.parametrize("stage", [pytest.param(1, marks=pytest.mark.breadth), pytest.param(3, marks=pytest.mark.slow)])
def test_overflows_of_the_loss_scale_are_not_counted(stage):
    for found in run_ranks(2, _fp16, stage):
        assert found == ([0, 0, 0, 1], 2, [False, True, False, True])


WINDOW, STOP, SPIKE, END = 3, 4, 6, 8
"""A run is saved at STOP, in the midst of what the guard needs to find the spike."""


def _recipe_of_a_spike(name: str) -> Recipe:
    return _recipe(name).with_(**{"guard.window_steps": WINDOW, "model.config.attention_dropout": 0.1})


def _steps(engine, plan, spoiler: Spoiler, steps: range) -> list[tuple[float, float, float]]:
    """A NaN on the second rank, and later a spike."""
    shape = (plan.batch.micro_batch_size, plan.batch.gradient_accumulation_steps)
    numbers = []
    for step in steps:
        spoiler.factor = {BAD: math.nan, SPIKE: 1e4}.get(step, 1.0) if torch.distributed.get_rank() == 1 else 1.0
        result = engine.train_step(step_batch(step, *shape, engine.data_parallel_rank, plan.data_parallel_size))
        numbers.append((result.loss.item(), result.grad_norm.item(), result.lr))
    return numbers


def _interrupted(rank: int, names: list[str], folder):
    """Of each case: the run, the same one from its checkpoint on, gone back in place, and under another plan."""
    found = []
    for name in names:
        plan = plan_of(_recipe_of_a_spike(name), 2)
        first = engine_of(plan)
        spoiler = Spoiler(first, -1)
        _steps(first, plan, spoiler, range(STOP))
        Saver(folder / name, plan, first).save(TrainerState(step=STOP, data="key"))
        runs = [_steps(first, plan, spoiler, range(STOP, END))]
        skipped = [str(first.guard.read())]
        weights = [_weights(first)]
        load(newest(folder / name), first, plan, "key")
        runs.append(_steps(first, plan, spoiler, range(STOP, END)))
        skipped.append(str(first.guard.read()))
        weights.append(_weights(first))
        second = engine_of(plan)
        load(newest(folder / name), second, plan, "key")
        runs.append(_steps(second, plan, Spoiler(second, -1), range(STOP, END)))
        skipped.append(str(second.guard.read()))
        weights.append(_weights(second))
        other_plan = plan_of(plan.recipe.with_(**{"parallel": {}, "parallel.zero_stage": 2}), 2)
        other = engine_of(other_plan)
        load(newest(folder / name), other, other_plan, "key")
        found.append((runs, skipped, weights, other.guard.read()))
    return found


def _weights(engine) -> dict[str, np.ndarray]:
    return {name: weight.float().numpy().copy() for name, weight in engine.named_weights()}


RESUMED = ("zero0", "zero1_bf16", "zero3")


def _check_resumed(names, folder) -> None:
    for by_case in run_ranks(2, _interrupted, list(names), folder):
        for name, (runs, skipped, weights, elsewhere) in zip(names, by_case, strict=True):
            assert str(runs[1]) == str(runs[2]) == str(runs[0]), name  # the same digits, and NaN where there was NaN
            assert skipped[1] == skipped[2] == skipped[0], name
            assert skipped[0].startswith("Skipped(total=2"), name
            for again in weights[1:]:
                assert all(np.array_equal(value, again[key]) for key, value in weights[0].items()), name
            assert (elsewhere.total, [one.steps_ago for one in elsewhere.recent]) == (1, [STOP - 1 - BAD]), name


@pytest.mark.breadth
def test_the_guards_state_is_saved_and_the_run_continues_bit_for_bit(tmp_path):
    _check_resumed(RESUMED, tmp_path)


@pytest.mark.parametrize(
    "name",
    [
        pytest.param("pipeline", marks=pytest.mark.slow),
        *(
            pytest.param(name, marks=pytest.mark.breadth)
            for name in (
                "zero3_adafactor",
                "zero1_8bit",
                "zero3_8bit",
                "zero3_bf16",
                "zero2_bf16",
                "zero1_offload",
                "tensor",
                "ddp",
                "fsdp2",
                "fsdp2_sgd",
            )
        ),
    ],
)
def test_continues_bit_for_bit_under_every_strategy(name, tmp_path):
    _check_resumed([name], tmp_path)
