"""Deviations between runs, and tolerances."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from llmtrain.engines.optimizers.adamw_8bit import fractions
from llmtrain.trials.verify.compare import (
    ADAM_WEIGHTS,
    CODES_OF_A_STEP,
    FP32,
    SAFETY,
    STEPS_TOGETHER,
    Trace,
    amplifying,
    deviation,
    tolerance,
)
from llmtrain.trials.verify.job import Deviation

INITIAL = {"w": torch.zeros(4), "norm": torch.ones(4)}
RUN = Trace([2.0, 1.0], [4.0, 3.0], [0.1, 0.2], 1.5, {"w": torch.full((4,), 2.0), "norm": torch.full((4,), 1.5)})


def _of(**fields) -> Deviation:
    return deviation(replace(RUN, **fields), RUN, INITIAL)


def test_equal_runs_do_not_deviate():
    assert _of() == Deviation(loss=0, grad_norm=0, weights=0, same_lr=True)


def test_each_number_counts_relative_to_its_size():
    assert _of(losses=[2.0, 1.01]).loss == pytest.approx(0.01)
    assert _of(evaluation=1.53).loss == pytest.approx(0.02)
    assert _of(grad_norms=[4.04, 3.0]).grad_norm == pytest.approx(0.01)
    assert not _of(rates=[0.1, 0.2000001]).same_lr


def test_a_weight_counts_relative_to_its_movement():
    # Half of what the norm has moved, a quarter of what it is.
    moved = _of(weights={**RUN.weights, "norm": torch.full((4,), 1.25)}).weights
    assert moved == pytest.approx(0.5, rel=0.1)


def test_rounding_a_weight_that_never_moved_is_no_deviation():
    still = replace(RUN, weights=INITIAL)
    nudged = {**INITIAL, "norm": torch.nextafter(torch.ones(4), torch.full((4,), 2.0))}
    assert 0 < deviation(replace(still, weights=nudged), still, INITIAL).weights <= FP32
    frozen = {**INITIAL, "norm": torch.full((4,), 1.001)}
    assert deviation(replace(still, weights=frozen), still, INITIAL).weights > ADAM_WEIGHTS


def test_a_weight_whose_gradient_is_rounding_counts_relative_to_all_and_only_under_sgd():
    nothing = 2e-7
    reference = replace(RUN, weights={**RUN.weights, "norm": torch.full((4,), 1 + nothing)})
    for rounding in (set(), {"norm"}):
        expected = replace(reference, rounding=frozenset(rounding))
        nudged = replace(reference, weights={**reference.weights, "norm": torch.full((4,), 1 - nothing)})
        off = replace(reference, weights={**reference.weights, "norm": torch.full((4,), 1.001)})
        assert (deviation(nudged, expected, INITIAL, "sgd").weights <= FP32) is bool(rounding)
        assert deviation(off, expected, INITIAL, "sgd").weights > FP32
        assert (deviation(off, expected, INITIAL, "adamw").weights == 0) is bool(rounding)
        lost = replace(off, weights={**off.weights, "norm": torch.full((4,), math.nan)})
        assert deviation(lost, expected, INITIAL, "adamw").weights is None


@pytest.mark.parametrize(
    "fields",
    [
        {"losses": [math.nan, 1.0]},
        {"grad_norms": [math.inf, 3.0]},
        {"evaluation": None},
        {"weights": {"w": RUN.weights["w"]}},
        {"weights": {**RUN.weights, "w": torch.full((4,), math.nan)}},
    ],
    ids=str,
)
def test_missing_or_non_finite_values_always_deviate(fields):
    most = Deviation(loss=1e9, grad_norm=1e9, weights=1e9, same_lr=True)
    assert not _of(**fields).within(most)


def test_a_weight_that_stays_zero_may_not_move():
    still = replace(RUN, weights=INITIAL)
    assert deviation(still, still, INITIAL).weights == 0
    moved = {**INITIAL, "w": torch.full((4,), 1e-10)}
    assert deviation(replace(still, weights=moved), still, INITIAL).weights is None


def test_8_bit_moments_make_the_differences_that_are_derived():
    """Of elements of each size x, by the distances of neighbouring values in the dynamic map.

    A moment that differs by δ is rounded to another value with probability δ/s. The first moment, x, differs by FP32 of
    the typical gradient, and the second one, x², by 2x times as much. A step of 1 changes by what they change relative
    to x, and to twice x²; at most it is another step altogether.
    """
    x = (torch.arange(1_000_000, dtype=torch.float64) + 0.5) / 1_000_000
    found = []
    for largest in (1, 4, 16):  # of the elements of a block
        first, second = (
            _distances(torch.tensor([0.0, *fractions(kind)], dtype=torch.float64), (x / largest) ** power)
            for kind, power in ((1, 1), (2, 2))
        )
        of_first = FP32 * first * largest / x**2
        of_second = FP32 * second * largest**2 / (2 * x**3)
        of_second[(x / largest) ** 2 < fractions(2)[0]] = 0.0  # all that is smaller has one code
        rounded = of_first.clamp(max=1) + of_second.clamp(max=1) + (FP32 / x).square()
        found.append(rounded.clamp(max=1).mean().item() / FP32)
    assert found == sorted(found)
    assert CODES_OF_A_STEP - 1 < found[-1] < CODES_OF_A_STEP
    steps = torch.arange(1.0, 11.0)
    assert steps.square().sum() / 100 == pytest.approx(STEPS_TOGETHER, abs=0.06)


def _distances(values: torch.Tensor, sizes: torch.Tensor) -> torch.Tensor:
    """Distances of the two values of a map between which each size is."""
    above = torch.searchsorted(values, sizes).clamp(1, len(values) - 1)
    return values[above] - values[above - 1]


def test_tolerances_follow_the_references_and_the_optimizer():
    other = replace(RUN, losses=[2.02, 1.0])
    assert tolerance([RUN], INITIAL, "sgd").weights == FP32
    assert tolerance([RUN], INITIAL, "adamw").weights == ADAM_WEIGHTS
    assert tolerance([RUN, RUN], INITIAL, "adamw").loss == FP32
    assert tolerance([RUN, other], INITIAL, "adamw").loss == pytest.approx(SAFETY * 0.01, rel=0.02)


def test_weights_that_amplify_roundings_are_compared_after_sgd_only():
    """In all layers, if one of them is as far from itself as half of the bound."""
    names = ("layers.0.decay", "layers.1.decay", "layers.0.gate")
    initial = {name: torch.zeros(4) for name in names}
    first = replace(RUN, weights={name: torch.ones(4) for name in names})
    far = replace(first, weights=first.weights | {"layers.1.decay": torch.ones(4) + ADAM_WEIGHTS})
    assert amplifying([first, far], initial, "adamw") == set(names[:2])
    assert amplifying([first, first], initial, "adamw") == set()
