"""The objectives that compare pairs: their values by hand, their gradients, and their sums over slices of sequences."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import distributed as dist

from llmtrain.data import Completions, MicroBatch, StepBatch
from llmtrain.engines.divergence import estimate_divergence
from llmtrain.models import Objective
from llmtrain.models.objective import pair_losses
from llmtrain.recipe import ObjectiveConfig
from tests.helpers.harness import run_ranks

LABELS = torch.tensor([[1, -100, 1, 1, 1, -100, 1, 1, 1, -100], [1, 1, 1, 1, -100, -100, -100, -100, -100, -100]])
SEGMENTS = torch.tensor([[0, 0, 0, 1, 1, 1, 2, 2, 3, 0], [0, 0, 0, 1, 1, 1, 0, 0, 0, 0]])
REFERENCES = torch.tensor([[-1.0, -2.0, -3.0, -4.0], [-2.5, -0.5, 0.0, 0.0]], dtype=torch.float64)
DESIRABLE = torch.tensor([[True, False, True, False]]).repeat(2, 1)


def pairs() -> Completions:
    return Completions.of(SEGMENTS, LABELS, REFERENCES, DESIRABLE)


def losses() -> torch.Tensor:
    drawn = torch.rand(2, 10, generator=torch.Generator().manual_seed(1)) + 0.1
    return drawn * (LABELS > 0)


def sigmoid(value: float) -> float:
    return 1 / (1 + math.exp(-value))


def by_hand(config: ObjectiveConfig) -> tuple[float, list[float]]:
    """The sum of the losses, and the sums of the rewards, and the numbers, of the three pairs, one by one."""
    values, total, seen = losses(), 0.0, [0.0, 0.0, 0.0]
    for row, pair in ((0, 0), (0, 1), (1, 0)):
        logps, sizes, ratios = [], [], []
        for segment in (2 * pair, 2 * pair + 1):
            tokens = [
                -float(loss)
                for loss, label, own in zip(values[row], LABELS[row], SEGMENTS[row], strict=True)
                if label > 0 and own == segment
            ]
            logps.append(sum(tokens))
            sizes.append(len(tokens))
            ratios.append(sum(tokens) - float(REFERENCES[row, segment]))
        means = [logp / size for logp, size in zip(logps, sizes, strict=True)]
        rewards = [config.beta * ratio for ratio in ratios]
        if config.name == "dpo":
            right, wrong = sigmoid(rewards[0] - rewards[1]), sigmoid(rewards[1] - rewards[0])
            loss = -(1 - config.label_smoothing) * math.log(right) - config.label_smoothing * math.log(wrong)
        elif config.name == "ipo":
            loss = (ratios[0] / sizes[0] - ratios[1] / sizes[1] - 1 / (2 * config.beta)) ** 2
        else:
            odds = [math.exp(mean) / (1 - math.exp(mean)) for mean in means]
            loss = -means[0] - config.beta * math.log(sigmoid(math.log(odds[0] / odds[1])))
            rewards = [config.beta * mean for mean in means]
        total += loss - config.sft_weight * means[0]
        seen = [
            seen[0] + rewards[0],
            seen[1] + rewards[1],
            seen[2] + (rewards[0] > rewards[1]),
        ]
    return total, [*seen, 3.0, 3.0]


CONFIGS = [
    ObjectiveConfig(name="dpo", beta=0.3),
    ObjectiveConfig(name="dpo", beta=0.3, label_smoothing=0.2, sft_weight=0.7),
    ObjectiveConfig(name="ipo", beta=0.4),
    ObjectiveConfig(name="ipo", sft_weight=0.5),
    ObjectiveConfig(name="orpo", beta=0.2),
]


@pytest.mark.parametrize("config", CONFIGS, ids=str)
def test_sums_are_those_computed_by_hand(config: ObjectiveConfig) -> None:
    objective = Objective(config)
    total, seen = by_hand(config)
    assert objective(losses(), pairs()).item() == pytest.approx(total, rel=2**-23)  # rounded once, to fp32
    assert objective.metric_sums(torch.device("cpu")).tolist() == pytest.approx(seen, rel=2**-22)
    objective.begin()
    assert objective.metric_sums(torch.device("cpu")).tolist() == [0] * 5


@pytest.mark.parametrize("config", CONFIGS, ids=str)
def test_gradients_are_finite_and_those_of_differences(config: ObjectiveConfig) -> None:
    def loss(values: torch.Tensor) -> torch.Tensor:
        held = pairs()
        members = (held.segment_ids[:, None] == torch.arange(4)[:, None]).double()
        log_probs = -(members @ values[:, :, None])[:, :, 0]
        return pair_losses(config, log_probs, held.lengths, held.references)[0].where(held.lengths[:, 0::2] > 0, 0)

    assert torch.autograd.gradcheck(loss, (losses().double().requires_grad_(),))
    tokens = losses().requires_grad_()
    (gradient,) = torch.autograd.grad(Objective(config)(tokens, pairs()), tokens)
    assert gradient.isfinite().all()


def _sliced(rank: int, config: ObjectiveConfig) -> list[list[Any]]:
    """This rank's share of loss and rewards, and the gradient of its slice, half of each sequence."""
    held, own = pairs(), slice(5 * rank, 5 * rank + 5)
    tokens = losses()[:, own].clone().requires_grad_()
    objective = Objective(config, dist.group.WORLD)
    share = objective(tokens, replace(held, segment_ids=held.segment_ids[:, own]))
    share.backward()  # type: ignore[no-untyped-call]
    assert tokens.grad is not None
    return [[share.item()], objective.metric_sums(torch.device("cpu")).tolist(), tokens.grad.tolist()]


def test_slices_of_sequences_are_summed_before_the_loss() -> None:
    config: Any = CONFIGS[1]
    tokens = losses().requires_grad_()
    whole = Objective(config)
    total = whole(tokens, pairs())
    (gradient,) = torch.autograd.grad(total, tokens)
    ranks = run_ranks(2, _sliced, config)
    shares, rewards, gradients = ([torch.tensor(one) for one in values] for values in zip(*ranks, strict=True))
    torch.testing.assert_close(sum(shares), total.detach()[None])
    torch.testing.assert_close(sum(rewards), whole.metric_sums(torch.device("cpu")))
    torch.testing.assert_close(torch.cat(gradients, dim=1), gradient)


def test_a_pair_without_a_known_reference_has_no_finite_loss() -> None:
    unknown = replace(pairs(), references=torch.full_like(REFERENCES, torch.nan))
    assert Objective(CONFIGS[0])(losses(), unknown).isnan()
    assert Objective(CONFIGS[-1])(losses(), unknown).isfinite()  # ORPO has no reference


def test_the_kto_loss_is_that_of_the_paper() -> None:
    config = ObjectiveConfig(name="kto", beta=0.3, desirable_weight=1.2, undesirable_weight=0.7)
    labels = torch.tensor([[True, True, False, False], [False, True, False, False]])
    labelled, objective = replace(pairs(), desirable=labels), Objective(config)
    objective.divergence = torch.tensor(0.4, dtype=torch.float64)
    values, total, sums = losses(), 0.0, [0.0] * 5
    for row, one in ((0, 0), (0, 1), (0, 2), (0, 3), (1, 0), (1, 1)):
        log_prob = -float(values[row][(SEGMENTS[row] == one) & (LABELS[row] > 0)].double().sum())
        ratio, good = log_prob - float(REFERENCES[row, one]), bool(labels[row, one])
        value = sigmoid(0.3 * (ratio - 0.4) if good else 0.3 * (0.4 - ratio))
        total += (1.2 if good else 0.7) * (1 - value)
        sums[0 if good else 1] += 0.3 * ratio
        sums[2] += (ratio > 0.4) == good
        sums[3 if good else 4] += 1
    assert objective(values, labelled).item() == pytest.approx(total, rel=2**-23)
    seen = objective.metric_sums(torch.device("cpu")).tolist()
    assert seen == pytest.approx(sums, rel=2**-22)
    metrics = objective.metrics(seen)
    assert metrics["rewards_chosen"] == pytest.approx(sums[0] / 3, rel=2**-21)
    assert metrics["rewards_rejected"] == pytest.approx(sums[1] / 3, rel=2**-21)
    assert metrics["reward_accuracy"] == pytest.approx(sums[2] / 6)
    assert metrics["kl"] == 0.4
    only_good = objective.metrics([*seen[:4], 0.0])
    assert math.isnan(only_good["rewards_rejected"])


class Evaluated:
    """An engine whose evaluations have seen these sums."""

    def __init__(self, *sums: list[float]) -> None:
        self.objective: Objective | None = Objective(ObjectiveConfig(name="kto", beta=0.5))
        self.sums = iter(sums)
        self.batches: list[StepBatch] = []

    def eval_step(self, batch: StepBatch) -> torch.Tensor:
        self.batches.append(batch)
        return torch.zeros(())

    def metric_sums(self) -> torch.Tensor | None:
        return torch.tensor(next(self.sums))


def test_the_divergence_is_the_mean_of_all_mismatched_completions_and_not_negative() -> None:
    rows = MicroBatch(SEGMENTS, SEGMENTS, LABELS)
    batch = StepBatch([], 0, 2, 0, mismatched=[rows])
    engine = Evaluated([3.0, -1.0, 0.0, 2.0, 1.0], [1.0, 0.5, 0.0, 3.0, 1.0])
    estimate_divergence(engine, [batch, batch])
    assert engine.batches[0].micro_batches == [rows]
    assert engine.objective is not None
    assert engine.objective.divergence.item() == pytest.approx(3.5 / 7 / 0.5)
    engine = Evaluated([-3.0, -1.0, 0.0, 2.0, 1.0])
    estimate_divergence(engine, [batch])
    assert engine.objective is not None
    assert engine.objective.divergence.item() == 0.0
