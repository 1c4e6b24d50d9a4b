"""Skips updates whose loss or gradient norm is not finite or spikes, without waiting for the device.

Loss and gradient norm of a step are known on all ranks before torch's optimizer begins. Its fused kernels read
`found_inf`: if that is 1, they leave weights, moments and their count of updates unchanged, bit for bit. The device
itself writes the guard's decision there; the host reads it every few steps. Only a class of the user's, which does not
know `found_inf`, waits for the decision (`engines/optimizers/own.py`).
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch import distributed as dist
from torch.optim import Optimizer

from llmtrain.engines.optimizers.own import OwnOptimizer
from llmtrain.recipe import GuardConfig

SMALLEST_SIGMA = 1e-3
"""Lower bound on the standard deviation of a logarithm. Without it, values that hardly move would exceed it by the
rounding of the next one."""
LARGEST = sys.float_info.max
"""The largest finite number."""
COLUMNS = ("loss", "grad_norm", "loss_limit", "grad_norm_limit", "skipped")
"""Values that are kept of each recent step."""


@dataclass(frozen=True)
class LossAndNorm:
    """Loss and gradient norm of a step over all ranks: scalars on the device, bitwise equal on every rank."""

    loss: Tensor
    """Mean over the items of the global batch."""
    grad_norm: Tensor
    """2-norm of the whole gradient before clipping."""


@dataclass(frozen=True)
class SkippedStep:
    """A step whose update was skipped."""

    steps_ago: int
    """0 for the last step."""
    loss: float
    grad_norm: float
    loss_limit: float
    """NaN if too few updates were taken to compute one."""
    grad_norm_limit: float

    def why(self) -> str:
        """Describes which value exceeded its limit or was not finite."""
        named = (("loss", self.loss, self.loss_limit), ("gradient norm", self.grad_norm, self.grad_norm_limit))
        return ", ".join(
            f"{name} {value:.4g} above {limit:.4g}" if math.isfinite(value) else f"{name} not finite"
            for name, value, limit in named
            if not math.isfinite(value) or value > limit
        )


@dataclass(frozen=True)
class Skipped:
    """The skipped updates, as known to the host."""

    total: int
    """Number since the run began."""
    recent: tuple[SkippedStep, ...]
    """The skipped ones among the last `window_steps` steps, the oldest first."""

    def describe(self, step: int, new: int) -> str:
        """Returns a line about the last `new` skipped steps; the window may no longer contain all of them.

        step: the last step.
        """
        if not self.recent:
            return f"{new:,} updates skipped"
        last = self.recent[-1]
        what = "update skipped" if new == 1 else f"{new:,} updates skipped, the last one for its"
        return f"step {step - last.steps_ago:,}  {what}{':' if new == 1 else ''} {last.why()}"


class Guard:
    """Decides for each update of an engine whether to skip it. Every rank has a guard, and all decide alike."""

    def __init__(self, config: GuardConfig, device: torch.device) -> None:
        self._config = config
        self._device = device
        window = config.window_steps
        # Loss and norm of the updates taken. Missing rows are NaN, which makes the mean NaN, and nothing exceeds NaN.
        self._taken = torch.full((window, 2), math.nan, dtype=torch.float64, device=device)
        self._steps = torch.zeros((window, len(COLUMNS)), dtype=torch.float64, device=device)
        self._total = torch.zeros((), dtype=torch.float64, device=device)
        # How far a logarithm of loss or norm may always exceed its mean, whatever the deviation.
        self._always = torch.tensor([0.0, math.log(config.spike_norm_ratio)], dtype=torch.float64, device=device)

    @torch.no_grad()
    def should_skip(self, measured: LossAndNorm, overflowed: Tensor | None = None) -> Tensor:
        """Returns 1 to skip the update of a step, else 0: a scalar on the device. Called before each update.

        It takes few operations, because their overhead counts on a small model. overflowed: whether a loss scaler drops
        the step by itself; None without a loss scaler.
        """
        values = torch.stack([measured.loss, measured.grad_norm]).double()
        limits = self._limits()
        # The largest number stands for an unknown limit; infinity and NaN are not within it.
        bad = ~(values <= limits.nan_to_num(nan=LARGEST)).all()
        if overflowed is None:
            dropped = skipped = bad
        else:
            # If scaled gradients overflow, only that is known about them; the loss itself is never scaled.
            overflowed = overflowed.to(self._device).bool()
            skipped = ~torch.isfinite(values[0]) | (bad & ~overflowed)
            dropped = skipped | overflowed
        taken = torch.cat([self._taken[1:], values[None]])
        no_logarithm = (values <= 0).any()  # for example, if all gradients are zero
        self._taken = torch.where(dropped | no_logarithm, self._taken, taken)
        self._steps = torch.cat([self._steps[1:], torch.cat([values, limits, skipped[None]])[None]])
        self._total = self._total + skipped
        return dropped.float()

    def read(self) -> Skipped:
        """Returns the updates that were skipped so far; waits for the device."""
        content = torch.cat([self._steps.flatten(), self._total[None]]).tolist()
        width, window = len(COLUMNS), self._config.window_steps
        rows = [content[index * width : (index + 1) * width] for index in range(window)]
        return Skipped(
            total=int(content[-1]),
            recent=tuple(
                SkippedStep(window - 1 - index, *values) for index, (*values, skipped) in enumerate(rows) if skipped
            ),
        )

    def state(self) -> dict[str, Tensor]:
        """Returns what a checkpoint keeps; these tensors are never modified afterwards."""
        return {"taken": self._taken, "steps": self._steps, "total": self._total}

    def load(self, state: Mapping[str, Tensor]) -> None:
        """Restores what `state` returned, from a guard with the same window or another."""
        window = self._config.window_steps
        self._taken = _last_rows(state["taken"], window, math.nan).to(self._device)
        self._steps = _last_rows(state["steps"], window, 0.0).to(self._device)
        self._total = state["total"].to(self._device)

    def count_from(self, total: int) -> None:
        """Sets the total, so that a run that rolls back to a checkpoint keeps its count of skipped steps."""
        self._total = torch.full_like(self._total, total)

    def _limits(self) -> Tensor:
        """Returns the largest allowed loss and norm; NaN if they are unknown."""
        if not self._config.spike_sigma:
            return torch.full_like(self._taken[0], math.nan)
        sigma, mean = torch.std_mean(self._taken.log(), dim=0, correction=0)
        above = self._config.spike_sigma * sigma.clamp_min(SMALLEST_SIGMA)
        return (mean + torch.maximum(above, self._always)).exp()


def check_fused(optimizer: Optimizer) -> None:
    """Raises TypeError for an optimizer that does not read `found_inf`: torch's do so if they are fused."""
    if not isinstance(optimizer, OwnOptimizer) and not all(group.get("fused") for group in optimizer.param_groups):
        raise TypeError(
            f"{type(optimizer).__name__} is not fused: it would apply every update, even if the guard skips it"
        )


def skip_if(skip: Tensor, optimizer: Optimizer) -> None:
    """Makes the next step of a fused optimizer change nothing if `skip`, a scalar, is 1."""
    if isinstance(optimizer, torch.optim.SGD) and not isinstance(optimizer, OwnOptimizer):
        _make_momentum(optimizer)
    # The copy blocks if the optimizer runs on the host, because its kernels would not wait for an asynchronous one.
    devices = (parameter.device for group in optimizer.param_groups for parameter in group["params"])
    optimizer.found_inf = skip.to(next(devices, skip.device))  # type: ignore[attr-defined]


def step_with_verdict(
    step: Callable[[], object],
    optimizer: Optimizer,
    decide: Callable[[Tensor | None], tuple[LossAndNorm, Tensor]],
    device: torch.device,
) -> LossAndNorm:
    """Runs a step of DeepSpeed, and calls `decide` between the gradient norm and the update; returns what it measured.

    Both lie within the step. `FP16_Optimizer`, `BF16_Optimizer` and ZeRO with offload take the norm there, and a loss
    scaler, DeepSpeed's or torch's, knows only there whether the gradients overflow. The optimizer that DeepSpeed wraps
    begins after that, with ZeRO more than once. optimizer: this one. decide: gets 1 for an overflow or 0, or None if
    neither is known; returns what was measured, and 1 to skip the update, else 0.
    """
    decided: list[tuple[LossAndNorm, Tensor]] = []

    def before(optimizer: Optimizer, *_: Any) -> None:
        if not decided:
            scaled = hasattr(optimizer, "grad_scale")  # set by torch's scaler, which has checked for overflow itself
            decided.append(decide(optimizer.found_inf if scaled else None))  # type: ignore[attr-defined]
        skip_if(decided[0][1], optimizer)

    hook = optimizer.register_step_pre_hook(before)
    try:
        step()
    finally:
        hook.remove()
    # A loss scaler has dropped an update that did not begin, which is not a fault of the run.
    measured, _ = decided[0] if decided else decide(torch.ones((), device=device))
    return measured


def reduce_loss_and_norm(loss: Tensor, grad_norm: Tensor, replicas: int = 1) -> LossAndNorm:
    """Sums the loss over all ranks, and averages their norms, each of which is the norm of the whole gradient.

    replicas: number of ranks that have the same part of the loss. A NaN on one rank becomes NaN on all ranks. The
    reduced norm is bitwise equal on all ranks, even if each rank computed its own with other bits.
    """
    world = dist.get_world_size()
    both = torch.stack([loss, finite_or_infinite(grad_norm)])
    if world > 1:
        both = both.double()
        both[0] /= replicas
        both[1] /= world
        dist.all_reduce(both)
    return LossAndNorm(*both.float().unbind())


def finite_or_infinite(grad_norm: Tensor) -> Tensor:
    """Replaces −1, which DeepSpeed writes for a norm that is not finite, by infinity."""
    return torch.where(grad_norm < 0, math.inf, grad_norm)


def _make_momentum(optimizer: torch.optim.SGD) -> None:
    """Makes momentum buffers of zeros; those that torch would make in a skipped update would stay uninitialized."""
    for group in optimizer.param_groups:
        for parameter in group["params"] if group["momentum"] else ():
            state = optimizer.state[parameter]
            if state.get("momentum_buffer") is None:
                state["momentum_buffer"] = torch.zeros_like(parameter, memory_format=torch.preserve_format)


def _last_rows(rows: Tensor, number: int, filler: float) -> Tensor:
    """Returns the last `number` rows; missing rows are filled in before them."""
    missing = rows.new_full((max(0, number - len(rows)), rows.shape[1]), filler)
    return torch.cat([missing, rows[-number:]])
