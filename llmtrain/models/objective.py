"""Losses on completions: DPO, IPO and ORPO on pairs, KTO on single ones; each is a sum, which the caller divides.

A loss depends on the sums of the log-probabilities of a completion's tokens, and mostly on small differences between
such sums. A sum over a thousand tokens has an error of 1e-4 in fp32, therefore sums and differences are in fp64.

A completion lies in one sequence, of which ranks may hold slices. Then the sums are added over the ranks before the
loss is computed, because the loss itself is not a sum over tokens.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch import distributed as dist
from torch.nn.functional import logsigmoid

from llmtrain.data import Completions
from llmtrain.recipe import ObjectiveConfig


class Objective:
    """An objective, with the log-probabilities and rewards of the completions since the last `begin`."""

    def __init__(self, config: ObjectiveConfig, slices: dist.ProcessGroup | None = None) -> None:
        """slices: the ranks that hold slices of this rank's sequences, if there are any."""
        self.config = config
        self._slices = slices
        self.divergence = torch.zeros(())
        """KTO's estimate of the divergence from the reference, a constant of each batch (`engines/divergence.py`)."""
        self.begin()

    @property
    def needs_divergence(self) -> bool:
        """Whether `divergence` has to be estimated before each step and each evaluation."""
        return self.config.name == "kto"

    def begin(self) -> None:
        """Forgets the completions seen so far."""
        self.log_probs: list[Tensor] = []
        """For each micro-batch, [rows, conversations]: the log-probability of each completion; detached."""
        self._seen: list[Tensor] = []

    def metric_sums(self, device: torch.device) -> Tensor:
        """Returns this rank's share of the sums that `metrics` reads, [sums], over all completions seen.

        In this order: rewards of desirable ones, rewards of undesirable ones, right decisions, and the numbers of
        desirable and of undesirable ones.
        """
        return torch.stack([torch.zeros(5, device=device), *(sums.to(device) for sums in self._seen)]).sum(0)

    def metrics(self, sums: Sequence[float]) -> dict[str, float]:
        """Returns the metrics of completions to log, given the sums of `metric_sums` over all ranks.

        The reward of desirable (chosen) completions and that of undesirable (rejected) ones are means over these; NaN
        without any. The accuracy is how often the chosen completion of a pair has the greater reward; without pairs,
        how often a reward is on the right side of the divergence.
        """
        chosen, rejected, right, desirable, undesirable = sums
        chosen = chosen / desirable if desirable else math.nan
        rejected = rejected / undesirable if undesirable else math.nan
        pairs = self.config.compares_pairs
        metrics = {
            "rewards_chosen": chosen,
            "rewards_rejected": rejected,
            "reward_margin": chosen - rejected,
            "reward_accuracy": right / (desirable if pairs else desirable + undesirable),
        }
        return metrics if pairs else metrics | {"kl": self.divergence.item()}

    def __call__(self, losses: Tensor, completions: Completions) -> Tensor:
        """Returns this rank's share of the sum of the losses of a micro-batch's pairs, or single completions.

        losses: [rows, T], the cross-entropy of each token of this rank's slices, 0 without a target.
        """
        own = completions.to(losses.device)
        conversations = torch.arange(own.lengths.shape[1], device=losses.device)
        # A product, because the order of an addition by index on a GPU differs from run to run.
        members = (own.segment_ids[:, None] == conversations[:, None]).double()
        log_probs = -(members @ losses.double()[:, :, None])[:, :, 0]
        share = 1.0
        if self._slices is not None:
            log_probs = _SummedOverSlices.apply(log_probs, self._slices)  # type: ignore[no-untyped-call]
            share = 1 / dist.get_world_size(self._slices)
        self.log_probs.append(log_probs.detach())
        exists = own.lengths > 0
        if self.config.compares_pairs:
            terms, rewards = pair_losses(self.config, log_probs, own.lengths, own.references)
            seen, right = exists[:, 0::2], rewards[:, 0::2] > rewards[:, 1::2]
        else:
            divergence = self.divergence.to(losses.device)
            terms, rewards = kto_losses(self.config, log_probs - own.references, own.desirable, divergence)
            seen, right = exists, (rewards > self.config.beta * divergence) == own.desirable
        with torch.no_grad():
            kinds = torch.stack([exists & own.desirable, exists & ~own.desirable])
            sums = [*rewards.where(kinds, 0).sum((1, 2)), (right & seen).sum(), *kinds.sum((1, 2))]
            self._seen.append((share * torch.stack([value.double() for value in sums])).float())
        return (share * terms.where(seen, 0).sum()).float()


def pair_losses(
    config: ObjectiveConfig, log_probs: Tensor, lengths: Tensor, references: Tensor
) -> tuple[Tensor, Tensor]:
    """Returns the loss of each pair, [rows, pairs], and the reward of each completion, detached.

    log_probs, lengths, references: [rows, 2 · pairs], chosen and rejected in turn, as in `Completions`; fp64. The
    values for a pair that a row does not have are finite and without meaning.
    """
    counts = lengths.clamp(min=1)
    if config.name == "orpo":
        # Hong et al., arXiv 2403.07691: the odds of the geometric mean of a completion's token probabilities.
        mean = (log_probs / counts).where(lengths > 0, -1.0)
        odds = mean - torch.log(-torch.expm1(mean))
        loss = -mean[:, 0::2] - config.beta * logsigmoid(odds[:, 0::2] - odds[:, 1::2])
        return loss, config.beta * mean.detach()
    ratios = log_probs - references
    if config.name == "ipo":
        # Azar et al., arXiv 2310.12036, equation 17, with means over tokens, as its authors have confirmed.
        means = ratios / counts
        loss = (means[:, 0::2] - means[:, 1::2] - 1 / (2 * config.beta)).square()
    else:
        # Rafailov et al., arXiv 2305.18290, equation 7; label smoothing as in its authors' conservative DPO.
        margin = config.beta * (ratios[:, 0::2] - ratios[:, 1::2])
        loss = -(1 - config.label_smoothing) * logsigmoid(margin) - config.label_smoothing * logsigmoid(-margin)
    if config.sft_weight:
        # Pang et al., arXiv 2404.19733, equation 1.
        loss = loss - config.sft_weight * (log_probs / counts)[:, 0::2]
    return loss, config.beta * ratios.detach()


def kto_losses(config: ObjectiveConfig, ratios: Tensor, desirable: Tensor, divergence: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the loss of each completion and its reward, detached; [rows, conversations], fp64.

    Ethayarajh et al., arXiv 2402.01306, equation 8, where the value of a completion is at most λ.

    ratios: log-probabilities minus those under the reference. divergence: z0 in the paper, a scalar.
    """
    advantage = config.beta * (ratios - divergence)
    losses = torch.where(
        desirable,
        config.desirable_weight * torch.sigmoid(-advantage),
        config.undesirable_weight * torch.sigmoid(advantage),
    )
    return losses, config.beta * ratios.detach()


class _SummedOverSlices(torch.autograd.Function):
    """All-reduces values over the ranks of a group, each of which then computes the same loss, divided by their number.

    On every rank, the gradient of the loss is therefore that of its own term times the number of ranks.
    """

    @staticmethod
    def forward(ctx: Any, values: Tensor, group: dist.ProcessGroup) -> Tensor:
        """Returns the sum."""
        ctx.ranks = dist.get_world_size(group)
        total = values.clone()
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        """Returns the gradient of the whole function."""
        return gradient * ctx.ranks, None
