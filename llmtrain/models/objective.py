"""The objectives that compare the two completions of a pair, as a sum over pairs that the caller divides.

A loss depends on the sums of the log-probabilities of a completion's tokens, and mostly on small differences between
such sums. A sum over a thousand tokens has an error of 1e-4 in fp32, therefore sums and differences are in fp64.

The completions of a pair lie in one sequence, of which ranks may hold slices. Then the sums are added over the ranks
before the loss is computed, which is no sum over tokens itself.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch import distributed as dist
from torch.nn.functional import logsigmoid

from llmtrain.data import Pairs
from llmtrain.recipe import ObjectiveConfig


class Objective:
    """An objective, and what it has seen of the pairs since `begin`."""

    def __init__(self, config: ObjectiveConfig, slices: dist.ProcessGroup | None = None) -> None:
        """slices: the ranks that hold slices of this rank's sequences, if there are any."""
        self._config = config
        self._slices = slices
        self.begin()

    def begin(self) -> None:
        """Forgets the pairs seen so far."""
        self.log_probs: list[Tensor] = []
        """For each micro-batch, [rows, conversations]: the log-probability of each completion; detached."""
        self._rewards: list[Tensor] = []

    def rewards(self, device: torch.device) -> Tensor:
        """Returns [3]: this rank's share of the sums over all pairs of the reward of the chosen completion, of that of
        the rejected one, and of how often the former is greater."""
        return torch.stack([torch.zeros(3, device=device), *(one.to(device) for one in self._rewards)]).sum(0)

    def __call__(self, losses: Tensor, pairs: Pairs) -> Tensor:
        """Returns this rank's share of the sum of the losses of a micro-batch's pairs.

        losses: [rows, T], the cross-entropy of each token of this rank's slices, 0 without a target.
        """
        pairs = pairs.to(losses.device)
        conversations = torch.arange(pairs.lengths.shape[1], device=losses.device)
        # Not an addition by index, whose order on a GPU differs from run to run.
        members = (pairs.segments[:, None] == conversations[:, None]).double()
        log_probs = -(members @ losses.double()[:, :, None])[:, :, 0]
        share = 1.0
        if self._slices is not None:
            log_probs = _SummedOverSlices.apply(log_probs, self._slices)  # type: ignore[no-untyped-call]
            share = 1 / dist.get_world_size(self._slices)
        self.log_probs.append(log_probs.detach())
        exists = pairs.lengths[:, 0::2] > 0
        losses_of_pairs, rewards = pair_losses(self._config, log_probs, pairs.lengths, pairs.references)
        with torch.no_grad():
            chosen, rejected = rewards.detach().unbind(-1)
            seen = torch.stack([chosen, rejected, (chosen > rejected).double()]).where(exists, 0)
            self._rewards.append((share * seen.sum((1, 2))).float())
        return (share * losses_of_pairs.where(exists, 0).sum()).float()


def pair_losses(
    config: ObjectiveConfig, log_probs: Tensor, lengths: Tensor, references: Tensor
) -> tuple[Tensor, Tensor]:
    """Returns the loss of each pair, [rows, pairs], and the rewards of both completions, [rows, pairs, 2].

    log_probs, lengths, references: [rows, 2 · pairs], chosen and rejected in turn, as in `Pairs`; fp64. The values
    for a pair that a row does not have are finite and without meaning.
    """
    counts = lengths.clamp(min=1)
    if config.name == "orpo":
        # Hong et al., arXiv 2403.07691: the odds of the geometric mean of a completion's token probabilities.
        mean = (log_probs / counts).where(lengths > 0, -1.0)
        odds = mean - torch.log(-torch.expm1(mean))
        loss = -mean[:, 0::2] - config.beta * logsigmoid(odds[:, 0::2] - odds[:, 1::2])
        return loss, config.beta * _by_pair(mean)
    ratios = log_probs - references
    if config.name == "ipo":
        # Azar et al., arXiv 2310.12036, equation 17, with means over tokens, which its authors have confirmed to use.
        means = ratios / counts
        loss = (means[:, 0::2] - means[:, 1::2] - 1 / (2 * config.beta)).square()
    else:
        # Rafailov et al., arXiv 2305.18290, equation 7; label smoothing as in its authors' conservative DPO.
        margin = config.beta * (ratios[:, 0::2] - ratios[:, 1::2])
        loss = -(1 - config.label_smoothing) * logsigmoid(margin) - config.label_smoothing * logsigmoid(-margin)
    if config.sft_weight:
        # Pang et al., arXiv 2404.19733, equation 1.
        loss = loss - config.sft_weight * (log_probs / counts)[:, 0::2]
    return loss, config.beta * _by_pair(ratios)


def _by_pair(values: Tensor) -> Tensor:
    return values.view(len(values), -1, 2)


class _SummedOverSlices(torch.autograd.Function):
    """The sum over the ranks of a group, each of which goes on to compute an equal share of one function of it.

    The gradient of the whole function is therefore that of a share times the number of ranks, on every rank.
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
