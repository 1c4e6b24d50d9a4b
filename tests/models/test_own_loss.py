"""A loss of one's own is given tokens, whole documents or pairs, and its metrics are sums over micro-batches."""

from __future__ import annotations

import math

import pytest
import torch

from llmtrain import Custom
from llmtrain.data import MicroBatch
from llmtrain.errors import RecipeError
from llmtrain.models import OwnLoss
from tests.helpers import own_losses
from tests.helpers.batches import tiny_recipe

CPU = torch.device("cpu")
VOCABULARY = 16
POSITIONS = torch.tensor([[0, 1, 2, 0, 1, 0, 1, 2], [0, 1, 2, 3, 0, 1, 0, 1]])
NONE = -100
LABELS = torch.tensor([[NONE, 3, 4, 5, NONE, NONE, NONE, NONE], [NONE, NONE, 6, 7, 8, 9, NONE, NONE]])
"""Documents [3, 2, padding 3] and [4, 2, padding 2]."""
DOCUMENTS = ((0, 0, 3), (0, 3, 5), (1, 0, 4), (1, 4, 6))


def loss_of(loss, **options) -> OwnLoss:
    return OwnLoss(tiny_recipe(objective=Custom(loss, **options)), VOCABULARY)


WEIGHTS = (2.0, 3.0, 5.0, 7.0)
"""Of these documents."""


def micro_batch(labels=LABELS, values=None) -> MicroBatch:
    return MicroBatch(torch.zeros_like(labels), POSITIONS, labels, values=values)


def values_of(*columns) -> torch.Tensor:
    """The numbers of each document, one a column, at its tokens: [2, 8, columns]."""
    values = torch.zeros(2, 8, len(columns))
    for number, weights in enumerate(columns):
        for (row, begin, end), weight in zip(DOCUMENTS, weights, strict=True):
            values[row, begin:end, number] = weight
    return values


def logits(dtype=torch.float32) -> torch.Tensor:
    drawn = torch.randn(2, 8, VOCABULARY, generator=torch.Generator().manual_seed(1))
    return drawn.to(dtype).requires_grad_()


def of_documents(values: torch.Tensor) -> list[torch.Tensor]:
    return [
        own_losses.losses_of(values[None, row, begin:end], LABELS[None, row, begin:end]).sum()
        for row, begin, end in DOCUMENTS
    ]


def test_tokens_are_given_as_they_are():
    own, values = loss_of(own_losses.token_sum), logits()
    torch.testing.assert_close(own(values, micro_batch()), sum(of_documents(values)))
    assert own.metric_sums(CPU).tolist() == [7]


def test_documents_with_targets_are_rows_of_their_own():
    own, values = loss_of(own_losses.document_mean, unit="document"), logits()
    total = own(values, micro_batch())
    lengths = [2, 1, 2, 2]
    torch.testing.assert_close(total, sum(a / b for a, b in zip(of_documents(values), lengths, strict=True)))
    (gradient,) = torch.autograd.grad(total, values)
    assert (gradient.abs().sum(-1) > 0).equal(LABELS >= 0)
    assert own.metric_sums(CPU).tolist() == [4, 7, 4]
    assert own.metrics([4, 7, 4]) == {"length": 7 / 4}


def test_columns_are_given_with_the_tokens_or_the_documents():
    values = logits()
    expected = sum(loss * weight for loss, weight in zip(of_documents(values), WEIGHTS, strict=True))
    of_tokens = loss_of(own_losses.weighted, columns=("a", "b"))
    numbers = values_of([weight / 2 for weight in WEIGHTS], [2.0] * 4)
    torch.testing.assert_close(of_tokens(values, micro_batch(values=numbers)), expected)
    of_rows = loss_of(own_losses.weighted_documents, columns=["a"], unit="document")
    lengths = (2, 1, 2, 2)
    numbers = values_of([weight * length for weight, length in zip(WEIGHTS, lengths, strict=True)])
    torch.testing.assert_close(of_rows(values, micro_batch(values=numbers)), expected)
    assert of_rows.metrics(of_rows.metric_sums(CPU).tolist()) == {"weight": (4 + 3 + 10 + 14) / 4}


def test_documents_without_targets_leave_out_their_numbers():
    own, values = loss_of(own_losses.weighted_documents, columns=["a"], unit="document"), logits()
    labels = LABELS.clone()
    labels[0, 3] = labels[1, 2] = labels[1, 3] = NONE
    own(values, micro_batch(labels, values_of(WEIGHTS)))
    assert own.metric_sums(CPU).tolist() == [2, 2.0 + 7.0, 2]


def test_pairs_are_adjacent_rows():
    own, values = loss_of(own_losses.pair_margin, unit="pair"), logits()
    first, second, third, fourth = of_documents(values)
    torch.testing.assert_close(own(values, micro_batch()), first - second + third - fourth)


def test_the_loss_is_computed_in_fp32_whatever_the_precision():
    own, values = loss_of(own_losses.token_sum), logits(torch.bfloat16)
    with torch.autocast("cpu", torch.bfloat16):
        total = own(values, micro_batch())
    assert total.dtype == torch.float32
    torch.testing.assert_close(total, sum(of_documents(values.float())))


@pytest.mark.parametrize(
    ("loss", "unit"),
    [(own_losses.document_mean, "document"), (own_losses.pair_margin, "pair"), (own_losses.token_sum, "token")],
)
def test_a_micro_batch_without_targets_has_a_gradient_of_zero(loss, unit):
    own, values = loss_of(loss, unit=unit), logits()
    total = own(values, micro_batch(torch.full_like(LABELS, NONE)))
    (gradient,) = torch.autograd.grad(total, values)
    assert total.item() == 0
    assert not gradient.any()
    assert not own.metric_sums(CPU).any()


def test_metrics_are_sums_over_micro_batches_until_the_next_step():
    own, values = loss_of("llmtrain.objectives:z_loss", weight=0.0), logits()
    assert own.names == ("cross_entropy", "log_z")
    totals = [own(values, micro_batch()).item() for _ in range(3)]
    sums = own.metric_sums(CPU).tolist()
    assert sums[0] == 21
    assert own.metrics(sums)["cross_entropy"] == pytest.approx(sum(totals) / 21)
    own.begin()
    assert own.metric_sums(CPU).tolist() == [0] * 5
    assert math.isnan(own.metrics([0.0] * 5)["log_z"])


def test_sums_of_chunks_add_up():
    own, values = loss_of("llmtrain.objectives:z_loss", weight=0.1), logits()
    parts = [own.sums(values[:, part], LABELS[:, part]) for part in (slice(3), slice(3, 8))]
    torch.testing.assert_close(own.take(sum(parts)), own(values, micro_batch()))
    of_chunks, whole = own._seen
    torch.testing.assert_close(of_chunks, whole)
    assert not of_chunks.requires_grad


def test_a_count_that_is_not_that_of_the_data_is_reported():
    own = loss_of(own_losses.token_sum)
    own.check_count([2.0**24], 2**24 + 1)  # as exact as fp32 is
    with pytest.raises(
        RecipeError, match=r"own_losses:token_sum has counted 24 items .* 25, according to objective.unit"
    ):
        own.check_count([24.0], 25)


def test_an_exception_names_the_loss_unless_memory_is_short(monkeypatch):
    own = loss_of(own_losses.token_sum)
    for error, raised in ((ValueError("odd"), RecipeError), (torch.OutOfMemoryError("full"), torch.OutOfMemoryError)):

        def fails(*_, error=error):
            raise error

        monkeypatch.setattr(own, "_function", fails)
        with pytest.raises(raised):
            own(logits(), micro_batch())
