"""Deviations between runs, and tolerances."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from llmtrain.verify.compare import ADAM_WEIGHTS, FP32, SAFETY, Trace, deviation, tolerance
from llmtrain.verify.job import Deviation

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


def test_tolerances():
    other = replace(RUN, losses=[2.02, 1.0])
    assert tolerance([RUN], INITIAL, "sgd", "fp32").weights == FP32
    assert tolerance([RUN], INITIAL, "adamw", "fp32").weights == ADAM_WEIGHTS
    assert tolerance([RUN, other], INITIAL, "adamw", "fp32").loss == FP32
    assert tolerance([RUN, other], INITIAL, "adamw", "bf16").loss == pytest.approx(SAFETY * 0.01, rel=0.02)
