"""A checkpoint of one plan continues under any other: the next losses are those of the uninterrupted run."""

from __future__ import annotations

import random

import pytest

from llmtrain.checkpoint.folder import newest
from llmtrain.checkpoint.state import load
from llmtrain.trials.verify.compare import FP32
from tests.helpers.batches import MIXTRAL, step_batch
from tests.helpers.harness import run_ranks
from tests.helpers.layouts import BACKENDS, EXPERTS, LAYOUTS, STOP, plan_under, save_each, take_steps
from tests.helpers.traces import engine_of, plain_run

NEXT = 20
"""Steps after which a sample of the pairs is compared."""
FEW = 3
"""Steps of every pair: the first loss shows the weights, the others the moments, the rate and the counted updates."""
CLOSE = 1e-6
"""Relative, of a loss in fp32: the plain loop's rounding over as many steps."""

PLAIN = {"dp1-zero1": (1, {"zero_stage": 1}), "dp2-zero3": (2, {"zero_stage": 3}), "dp2-zero0": (2, {})}


def _go_on(rank: int, pairs: list, others: dict, folder) -> list[list[float]]:
    losses = []
    for source, (ranks, fields) in pairs:
        plan = plan_under(fields, ranks, **others)
        engine = engine_of(plan)
        load(newest(folder / source), engine, plan, "key")
        losses.append(take_steps(engine, plan, range(STOP, STOP + NEXT)).losses)
    return losses


def _go_on_from_all(rank: int, sources: list[str], target: tuple[int, dict], folder) -> list[list[float]]:
    """The target's engine takes up every source, one after the other: nothing of the one before may stay."""
    ranks, fields = target
    plan = plan_under(fields, ranks)
    engine = engine_of(plan)
    shape = (plan.batch.micro_batch_size, plan.batch.gradient_accumulation_steps)
    found = []
    for source in sources:
        load(newest(folder / source), engine, plan, "key")
        batches = [
            step_batch(STOP + step, *shape, engine.data_parallel_rank, plan.data_parallel_size) for step in range(FEW)
        ]
        found.append([engine.train_step(batch).loss.item() for batch in batches])
    return found


def _compare(
    pairs: list[tuple[str, str]], plans: dict, others: dict, folder, close: float = CLOSE, steps: int = NEXT
) -> None:
    """Saves under the first plan of each pair, continues under the second, and compares steps with the plain loop."""
    micro = others.get("micro", 1)
    whole = plain_run(plan_under({}, 1, **others).recipe, STOP + NEXT, micro).losses
    for ranks in (1, 2, 4):
        sources = {name: plans[name] for name in {first for first, _ in pairs} if plans[name][0] == ranks}
        if sources:
            run_ranks(ranks, save_each, sources, others, folder)
    for ranks in (1, 2, 4):
        chosen = [(first, second) for first, second in pairs if plans[second][0] == ranks]
        if not chosen:
            continue
        todo = [(first, plans[second]) for first, second in chosen]
        for found in run_ranks(ranks, _go_on, todo, others, folder):
            for pair, losses in zip(chosen, found, strict=True):
                assert losses[:steps] == pytest.approx(whole[STOP:][:steps], rel=close), pair


def _pairs(names, count: int, seed: int) -> list[tuple[str, str]]:
    """A sample, in which each plan is a source and a target."""
    drawn = random.Random(seed)
    sources, targets = list(names), list(names)
    drawn.shuffle(sources)
    drawn.shuffle(targets)
    every = list(zip(sources, targets, strict=True))
    return every[:count]


@pytest.mark.breadth
@pytest.mark.parametrize("part", range(6))
def test_each_plan_loads_a_checkpoint_of_another_plan(part, tmp_path):
    _compare(_pairs(LAYOUTS, len(LAYOUTS), seed=3)[part::6], LAYOUTS, {}, tmp_path)


@pytest.fixture(scope="module")
def every_source(tmp_path_factory):
    """A checkpoint of each plan."""
    folder = tmp_path_factory.mktemp("sources")
    for ranks in (1, 2, 4):
        sources = {name: plan for name, plan in LAYOUTS.items() if plan[0] == ranks}
        run_ranks(ranks, save_each, sources, {}, folder)
    return folder


@pytest.mark.breadth
@pytest.mark.parametrize("target", LAYOUTS)
def test_every_plan_continues_from_every_checkpoint(target, every_source):
    whole = plain_run(plan_under({}, 1).recipe, STOP + FEW).losses
    for found in run_ranks(LAYOUTS[target][0], _go_on_from_all, list(LAYOUTS), LAYOUTS[target], every_source):
        for source, losses in zip(LAYOUTS, found, strict=True):
            assert losses == pytest.approx(whole[STOP:], rel=CLOSE), source


@pytest.mark.parametrize(
    "part",
    [pytest.param(0, marks=pytest.mark.slow), *(pytest.param(part, marks=pytest.mark.breadth) for part in (1, 2, 3))],
)
def test_engines_load_the_checkpoints_of_other_engines(part, tmp_path):
    plans = BACKENDS | PLAIN
    _compare(_pairs(plans, len(plans), seed=13)[part::4], plans, {}, tmp_path)


@pytest.mark.breadth
@pytest.mark.slow
def test_experts_are_distributed_and_gathered(tmp_path):
    plans = EXPERTS | PLAIN
    pairs = [("dp2-ep2-zero3", "dp1-zero1"), ("dp2-zero3", "dp2-ep2-zero2"), ("dp2-ep2-zero0", "dp2-ep2-zero1")]
    _compare(pairs, plans, {**MIXTRAL, "model.config.tie_word_embeddings": False, "micro": 4}, tmp_path)


MINE = """
import torch
from torch.optim import Optimizer


class Counting(Optimizer):
    '''Momentum, divided by a count of its own and by one of the group; the rate is relative to the sum of all rates.'''

    def __init__(self, params, lr, weight_decay=0.0):
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay, "k": 0, "total": 0})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            group["k"] += 1
            group["total"] += group["lr"] + 0.01
            group["share"] = group["lr"] / group["total"] + group.get("share", 0.5)  # not there at first
            for weight in (weight for weight in group["params"] if weight.grad is not None):
                state = self.state[weight]
                if not state:
                    state |= {"count": 0, "decayed": 1.0, "mean": torch.ones_like(weight), "anchor": weight.clone()}
                state["count"] += 1
                state["decayed"] *= 0.75
                state["mean"].lerp_(weight.grad, 0.1)
                towards = (weight - state["anchor"]) * state["decayed"]
                weight.sub_(state["mean"] * group["lr"] * group["share"] / (state["count"] * group["k"]) ** 0.5)
                weight.sub_(group["lr"] * towards)


class Estimating(Optimizer):
    '''Goes as far as all weights together have gone, as Prodigy does; the groups hold what is known.'''

    def __init__(self, params, lr, weight_decay=0.0):
        defaults = {"lr": lr, "weight_decay": weight_decay, "d": 0.02, "numerator": 0.0, "denominator": 0.0}
        super().__init__(params, defaults)

    @torch.no_grad()
    def step(self, closure=None):
        group = self.param_groups[0]
        numerator, denominator, d = group["numerator"], group["denominator"], group["d"]
        weights = [weight for group in self.param_groups for weight in group["params"] if weight.grad is not None]
        for weight in weights:
            first = self.state[weight].setdefault("first", weight.clone())
            numerator += float(weight.grad.double().flatten() @ (first - weight).double().flatten())
            denominator += float(weight.grad.double().abs().sum())
        d += 100 * numerator / denominator
        for group in self.param_groups:
            group |= {"numerator": numerator, "denominator": denominator, "d": d}
        for weight in weights:
            weight.sub_(weight.grad / (weight.grad.abs() + 1e-2), alpha=d * group["lr"])
"""


@pytest.mark.parametrize(
    ("name", "source", "targets"),
    [
        *(
            pytest.param(name, source, targets, marks=pytest.mark.slow)
            for name, source, targets in (
                ("Counting", "dp2-pp1-tp1-zero3", ["dp1-pp2-tp1-zero1", "dp2-fsdp2", "dp2-ddp"]),
                ("Estimating", "dp2-pp1-tp1-zero0", ["dp2-pp1-tp1-zero0", "dp2-ddp", "dp1-pp1-tp1-zero0"]),
            )
        ),
    ],
)
def test_numbers_and_tensors_of_ones_own_optimizer_load_under_other_plans(name, source, targets, tmp_path):
    """Its states do not begin as zeros, so those that a plan makes for loading must be replaced."""
    (tmp_path / "mine_of_elastic.py").write_text(MINE)
    others = {"optim.name": f"mine_of_elastic:{name}", "code_dir": str(tmp_path)}
    pairs = [(source, target) for target in targets]
    _compare(pairs, LAYOUTS | BACKENDS, {**others, "optim.lr": 0.1, "optim.clip_grad_norm": 0.0}, tmp_path, steps=6)


@pytest.mark.breadth
@pytest.mark.parametrize(
    "name", ["lion", "muon", "schedule_free_adamw", "adafactor", "adamw_8bit", "torch.optim:NAdam"]
)
def test_states_of_other_optimizers_load_under_every_plan(name, tmp_path):
    """Their directions are less smooth functions of the gradient than Adam's: the bound is that of parity.

    Rounding decides the sign of an element near zero, which is all that Lion keeps of it: after ten steps, runs that
    are never stopped differ by 1e-5 as well, between stages and the plain loop. So its first steps are compared.
    """
    names = ["dp2-pp1-tp1-zero3", "dp1-pp2-tp1-zero1", "dp1-pp1-tp2-zero0", "dp2-pp1-tp1-zero2", "dp2-pp1-tp2-zero1"]
    pairs = list(zip(names, names[1:] + names[:1], strict=True))
    blocks = {"optim.options": {"block_size": 48}, "model.config.vocab_size": 257} if name == "adamw_8bit" else {}
    _compare(pairs, LAYOUTS, {"optim.name": name, **blocks}, tmp_path, close=FP32, steps=6 if name == "lion" else NEXT)
