"""Compares runs: what is recorded of each, how far two differ, and how far they may differ.

**fp32.** The layouts differ in the order of summation. The relative error of a sum of n terms is about sqrt(n)·2⁻²⁴:
1.5e-5 for a norm over 60,000 gradients at worst, and typically about 1e-6. `FP32`, 1e-5, is the bound for losses and
norms. For weights, the bound depends on the optimizer. Let ε be the error of a gradient relative to the typical
gradient of its matrix:

- SGD: `FP32`, because the weights are sums of gradients.
- Adam divides each gradient by its own magnitude. An element whose gradient is x times as large as the typical one
  differs by ε/x, at most by its whole step. If elements are as dense around zero as elsewhere, the mean square of that
  is ∫ min(1, (ε/x)²) dx = 2ε. So weights may differ by sqrt(2·FP32) of their movement (4.5e-3). This is coarse, which
  is one more reason for the SGD probe.
- Lion takes only the sign. At most a share ε of the elements has another sign, which changes them by twice their step,
  so the mean square is at most 4ε.
- Adafactor divides the elements of vectors as Adam does, and those of matrices by what is typical of their row and
  column, so Adam's bound holds for it.
- 8-bit moments are rounded to values at distances of s. A moment that differs by δ is rounded to another value with
  probability δ/s, and then differs by s: a mean square of δ·s. If elements are as dense around zero as elsewhere, and
  the largest one of a block is at most √256 times the typical one, the mean square in a step is 11ε with the distances
  of the dynamic map, Adam's 2ε included (`tests/trials/verify/test_compare.py` computes it). Such a difference stays.
  That of step k of ten moves the weight in the remaining 11 − k steps, so the mean square over ten steps is
  (1² + 2² + … + 10²) / 10² = 3.9 times as large.
- Muon multiplies the smallest singular values of a matrix, and the error in their directions, by at most 3.4445 in each
  of its five iterations, while the norm of the result is at least 1.

A weight without an effect, such as the bias of keys without rotary positions, which shifts all scores of a query alike,
has a gradient of nothing but rounding. If a weight's gradient is less than `FP32` of the norm of all gradients in each
step, its movement is an error that the norm may have. So with SGD its distance counts relative to the movement of all
weights, and with other optimizers, which make whole steps of it, it does not count.

A recurrence may amplify roundings. The gated delta rule takes differences of sums of logarithms, so the gradients of
its decays are off by some 1e-4, in its usual kernel as well. How much is measured: other references start with other
last bits of their weights. If a weight's distance between two of them is more than 1 / `SAFETY` of the bound, it is
compared after SGD only, in all layers, and with what was measured there.

**Lower precisions** round at every operation, and a micro-batch of another size rounds differently. The effect is
measured: several references process the samples of each step in other orders and in other micro-batches, and one
rounds nothing between operations. Fused and compiled kernels round after some operations only, so their results lie
between those of the first reference and of that one. Other orders do not show this difference, which has the same
direction for every sample. No plan may differ from the reference by more than `SAFETY` times the largest difference
between two of them: if the largest of d differences lies, as for a normal distribution, 2.5 to 3.5 deviations out,
twice that is more than 5. `FP32` remains the least bound.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations

import torch
from torch import Tensor

from llmtrain.trials.verify.job import Deviation, worst

FP32 = 1e-5
ADAM_WEIGHTS = math.sqrt(2 * FP32)
CODES_OF_A_STEP, STEPS_TOGETHER = 11.0, 3.9
"""Mean square of the differences that 8-bit moments cause in a step, relative to ε; its factor over ten steps."""
OF_WEIGHTS = {
    "sgd": FP32,
    "lion": math.sqrt(4 * FP32),
    "muon": 3.4445**5 * FP32,
    "adamw_8bit": math.sqrt(CODES_OF_A_STEP * STEPS_TOGETHER * FP32),
}
"""Bound of the weights, for optimizers to which Adam's bound does not apply."""
SAFETY = 2.0
ROUNDING = 2.0**-24
"""Half a unit in the last place of fp32, relative: the largest change from storing a number."""

Weights = dict[str, Tensor]
"""Hugging Face name → whole weight, fp32, on the CPU."""


@dataclass(frozen=True)
class Trace:
    """The results of a run."""

    losses: Sequence[float]
    grad_norms: Sequence[float]
    rates: Sequence[float]
    evaluation: float | None
    weights: Weights
    metric: float | None = None
    """The cross-entropy of `METRICS` over the held-out sequences; None if it is not compared."""
    rounding: frozenset[str] = frozenset()
    """Of a reference, the names of the weights whose gradients are nothing but rounding, or amplify it."""


def cross_entropy(logits: Tensor, labels: Tensor) -> tuple[Tensor, int]:
    """Returns the sum of the cross-entropies of tokens, and their number, as a metric of evaluations."""
    return torch.nn.functional.cross_entropy(logits, labels, reduction="sum"), len(labels)


def deviation(ours: Trace, theirs: Trace, initial: Weights, optimizer: str = "") -> Deviation:
    """Returns how far `ours` differs from `theirs`; both started from `initial`. optimizer: its name in recipes."""
    losses = [*zip(ours.losses, theirs.losses, strict=True)]
    if theirs.evaluation is not None:
        losses.append((math.nan if ours.evaluation is None else ours.evaluation, theirs.evaluation))
        if ours.metric is not None:
            losses.append((ours.metric, theirs.evaluation))
    return Deviation(
        loss=worst(_relative(a, b) for a, b in losses),
        grad_norm=worst(_relative(a, b) for a, b in zip(ours.grad_norms, theirs.grad_norms, strict=True)),
        weights=_weight_deviation(ours, theirs, initial, optimizer),
        same_lr=list(ours.rates) == list(theirs.rates),
    )


def tolerance(traces: Sequence[Trace], initial: Weights, optimizer: str) -> Deviation:
    """Returns how far a plan may differ from the first reference, given all of them."""
    floor = {"loss": FP32, "grad_norm": FP32, "weights": OF_WEIGHTS.get(optimizer, ADAM_WEIGHTS)}
    if len(traces) > 1:
        pairs = [deviation(a, b, initial) for a, b in combinations(traces, 2)]
        for name, least in floor.items():
            spread = worst(getattr(pair, name) for pair in pairs)
            floor[name] = least if spread is None else max(least, SAFETY * spread)
    return Deviation(**floor, same_lr=True)


def _relative(ours: float, theirs: float) -> float:
    if ours == theirs:
        return 0.0
    return abs(ours - theirs) / abs(theirs) if theirs else math.inf


def amplifying(traces: Sequence[Trace], initial: Weights, optimizer: str) -> frozenset[str]:
    """Returns the weights that amplify roundings: whose distance between two references is near the bound of weights.

    If one does, so do those of the same name in other layers.
    """
    bound = OF_WEIGHTS.get(optimizer, ADAM_WEIGHTS)
    near = {
        _in_any_layer(name)
        for a, b in combinations(traces, 2)
        for name, distance in _distances(a, b, initial, optimizer).items()
        if SAFETY * distance > bound
    }
    return frozenset(name for name in initial if _in_any_layer(name) in near)


def _in_any_layer(name: str) -> str:
    return ".".join("*" if part.isdigit() else part for part in name.split("."))


def _weight_deviation(ours: Trace, theirs: Trace, initial: Weights, optimizer: str) -> float | None:
    """Returns the largest distance of a weight, relative to its movement, or None if the names differ."""
    if ours.weights.keys() != theirs.weights.keys():
        return None
    return worst(_distances(ours, theirs, initial, optimizer).values())


def _distances(ours: Trace, theirs: Trace, initial: Weights, optimizer: str) -> dict[str, float]:
    """Returns the distance of each weight, relative to its movement.

    Each step stores each weight again, so over K steps two runs differ by a random walk of 2·K roundings. A weight that
    hardly moves, such as a norm's under SGD, differs by nothing else; therefore the movement has a minimum at which
    those roundings are `FP32` of it. A weight that stays 0 in the reference must stay 0.
    """
    movements = {name: (weight - initial[name]).norm().item() for name, weight in theirs.weights.items()}
    distances = {}
    for name, reference in theirs.weights.items():
        stored = ROUNDING * math.sqrt(2 * len(theirs.losses)) * reference.norm().item()
        moved = movements[name] + stored / FP32
        distance = (ours.weights[name] - reference).norm().item()
        if name in theirs.rounding and math.isfinite(distance):
            if optimizer != "sgd":
                continue
            moved = math.hypot(*movements.values())
        distances[name] = distance / moved if moved else math.inf if distance else 0.0
    return distances


def clone(weights: Weights) -> Weights:
    """Returns a copy that the next step does not change."""
    return {name: weight.detach().to("cpu", torch.float32).clone() for name, weight in weights.items()}
