"""Keeps what is not finite, or far above the usual, out of the weights; on the device, without a wait for it.

Loss and gradient norm of a step are known on all ranks before the optimizer of torch begins. Its fused kernels read
`found_inf`: where that is 1 they leave weights, moments and their count of updates as they are, bit for bit. The
verdict is written there by the device itself; the host reads it every few steps.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch import distributed as dist
from torch.optim import Optimizer

from llmtrain.recipe import GuardConfig

SMALLEST_SIGMA = 1e-3
"""Standard deviation of a logarithm that counts at least: numbers that hardly move would else be judged by the rounding
of the next one."""
LARGEST = sys.float_info.max
"""The largest number."""
COLUMNS = ("loss", "grad_norm", "loss_limit", "grad_norm_limit", "skipped")
"""What is kept of each of the last steps."""


@dataclass(frozen=True)
class Measured:
    """Of a step, over all ranks: scalars on the device, of the same bits on every rank."""

    loss: Tensor
    """Mean cross-entropy over the target tokens of the global batch."""
    grad_norm: Tensor
    """2-norm of the whole gradient before clipping."""


@dataclass(frozen=True)
class SkippedStep:
    """A step whose update was not taken."""

    steps_ago: int
    """0 for the last step."""
    loss: float
    grad_norm: float
    loss_limit: float
    """NaN where too few updates were taken for one."""
    grad_norm_limit: float

    def why(self) -> str:
        """What was wrong with it."""
        named = (("loss", self.loss, self.loss_limit), ("gradient norm", self.grad_norm, self.grad_norm_limit))
        found = [f"{name} {_above(value, limit)}" for name, value, limit in named if _is_bad(value, limit)]
        return ", ".join(found)


@dataclass(frozen=True)
class Skipped:
    """The updates that were not taken, as the host knows them."""

    total: int
    """Since the run began."""
    recent: tuple[SkippedStep, ...]
    """Those of the last `window_steps` steps, the oldest first."""

    def told(self, step: int, new: int) -> str:
        """A line on the last `new` skipped steps, some of which the window may have forgotten. step: the last one."""
        if not self.recent:
            return f"{new:,} updates skipped"
        last = self.recent[-1]
        what = "update skipped" if new == 1 else f"{new:,} updates skipped, the last one for its"
        return f"step {step - last.steps_ago:,}  {what}{':' if new == 1 else ''} {last.why()}"


class Guard:
    """Judges each update of an engine. Every rank has one, and all come to the same verdict."""

    def __init__(self, config: GuardConfig, device: torch.device) -> None:
        self._config = config
        self._device = device
        window = config.window_steps
        # Of the updates taken: loss and norm. A mean over one that is missing is NaN, which nothing is above.
        self._taken = torch.full((window, 2), math.nan, dtype=torch.float64, device=device)
        self._steps = torch.zeros((window, len(COLUMNS)), dtype=torch.float64, device=device)
        self._total = torch.zeros((), dtype=torch.float64, device=device)
        # Of loss and norm: how far above its mean a logarithm may be, whatever the deviation.
        self._always = torch.tensor([0.0, math.log(config.spike_norm_ratio)], dtype=torch.float64, device=device)
        self._verdict = torch.zeros((), device=device)

    def watch(self, optimizer: Optimizer) -> None:
        """Has a fused optimizer of torch take no update that is refused. Raises TypeError for any other one."""
        if not all(group.get("fused") for group in optimizer.param_groups):
            raise TypeError(
                f"{type(optimizer).__name__} is not fused: it would take every update, whatever the verdict"
            )
        optimizer.register_step_pre_hook(self._before_update)

    @torch.no_grad()
    def judge(self, measured: Measured, overflowed: Tensor | None = None) -> None:
        """Takes the verdict on a step, in few operations: on a small model each is seen. The update comes after it.

        overflowed: whether a loss scaler drops the step by itself; None where there is none.
        """
        values = torch.stack([measured.loss, measured.grad_norm]).double()
        limits = self._limits()
        # Nothing that is not finite is within the largest number, which stands for a limit that is not known.
        bad = ~(values <= limits.nan_to_num(nan=LARGEST)).all()
        if overflowed is None:
            dropped = skipped = bad
        else:
            # Of gradients that were scaled too far nothing is learned but that; the loss itself is never scaled.
            overflowed = overflowed.to(self._device).bool()
            skipped = ~torch.isfinite(values[0]) | (bad & ~overflowed)
            dropped = skipped | overflowed
        taken = torch.cat([self._taken[1:], values[None]])
        no_logarithm = (values <= 0).any()  # as of a gradient of zeros
        self._taken = torch.where(dropped | no_logarithm, self._taken, taken)
        self._steps = torch.cat([self._steps[1:], torch.cat([values, limits, skipped[None]])[None]])
        self._total = self._total + skipped
        self._verdict = dropped.float()

    def read(self) -> Skipped:
        """What was skipped so far; waits for the device."""
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
        """What a checkpoint keeps; never written to again."""
        return {"taken": self._taken, "steps": self._steps, "total": self._total}

    def load(self, state: Mapping[str, Tensor]) -> None:
        """Goes on from what `state` gave, of this window or another."""
        window = self._config.window_steps
        self._taken = _last_rows(state["taken"], window, math.nan).to(self._device)
        self._steps = _last_rows(state["steps"], window, 0.0).to(self._device)
        self._total = state["total"].to(self._device)

    def count_from(self, total: int) -> None:
        """Has the total go on from a number: a run that goes back to a checkpoint forgets no skipped step."""
        self._total = torch.full_like(self._total, total)

    def _before_update(self, optimizer: Optimizer, *_: Any) -> None:
        """Hands the verdict to the optimizer, which with ZeRO begins more than once in a step."""
        if isinstance(optimizer, torch.optim.SGD):
            _make_momentum(optimizer)
        # Blocking, where the optimizer runs on the host: its kernels would not wait for a copy that is under way.
        optimizer.found_inf = self._verdict.to(_device_of(optimizer) or self._device)  # type: ignore[attr-defined]

    def _limits(self) -> Tensor:
        """What loss and norm may be at most; NaN where nothing is known."""
        if not self._config.spike_sigma:
            return torch.full_like(self._taken[0], math.nan)
        sigma, mean = torch.std_mean(self._taken.log(), dim=0, correction=0)
        above = self._config.spike_sigma * sigma.clamp_min(SMALLEST_SIGMA)
        return (mean + torch.maximum(above, self._always)).exp()


def over_ranks(loss: Tensor, grad_norm: Tensor, copies: int = 1) -> Measured:
    """The loss summed over all ranks and the mean of their norms, of which each is that of the whole gradient.

    copies: ranks that have the same part of the loss. One rank's NaN becomes that of all ranks, and a sum has the
    same bits on all of them, whatever a norm that each took for itself has.
    """
    world = dist.get_world_size()
    both = torch.stack([loss, finite_or_infinite(grad_norm)])
    if world > 1:
        both = both.double()
        both[0] /= copies
        both[1] /= world
        dist.all_reduce(both)
    return Measured(*both.float().unbind())


def finite_or_infinite(grad_norm: Tensor) -> Tensor:
    """DeepSpeed writes −1 for a norm that is not finite."""
    return torch.where(grad_norm < 0, math.inf, grad_norm)


def _make_momentum(optimizer: torch.optim.SGD) -> None:
    """Momentum of zeros: what torch would make in an update that is then skipped has no values."""
    for group in optimizer.param_groups:
        for parameter in group["params"] if group["momentum"] else ():
            state = optimizer.state[parameter]
            if state.get("momentum_buffer") is None:
                state["momentum_buffer"] = torch.zeros_like(parameter, memory_format=torch.preserve_format)


def _device_of(optimizer: Optimizer) -> torch.device | None:
    """Where an optimizer computes; None where it holds nothing."""
    held = (parameter.device for group in optimizer.param_groups for parameter in group["params"])
    return next(held, None)


def _last_rows(rows: Tensor, number: int, filler: float) -> Tensor:
    """The last rows, so many of them; missing ones come first."""
    missing = rows.new_full((max(0, number - len(rows)), rows.shape[1]), filler)
    return torch.cat([missing, rows[-number:]])


def _is_bad(value: float, limit: float) -> bool:
    return not math.isfinite(value) or value > limit


def _above(value: float, limit: float) -> str:
    return f"{value:.4g} above {limit:.4g}" if math.isfinite(value) else "not finite"
