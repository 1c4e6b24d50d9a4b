"""The losses that come as models for one's own: their values by hand."""

from __future__ import annotations

import math

import pytest
import torch

from llmtrain import objectives

LABELS = torch.tensor([[2, -100, 1, 3], [0, 2, -100, -100]])


@pytest.fixture
def logits() -> torch.Tensor:
    return torch.randn(2, 4, 5, generator=torch.Generator().manual_seed(3), dtype=torch.float64)


def tokens(logits):
    """The logits and the label of each target."""
    return [
        (logits[row, column].tolist(), int(LABELS[row, column])) for row, column in (LABELS >= 0).nonzero().tolist()
    ]


def log_z(values):
    return math.log(sum(map(math.exp, values)))


def values_of(sums):
    return {name: (float(total), int(count)) for name, (total, count) in sums.items()}


def test_z_loss(logits):
    entropies = [log_z(values) - values[label] for values, label in tokens(logits)]
    normalisers = [log_z(values) for values, _ in tokens(logits)]
    found = values_of(objectives.z_loss(logits, LABELS, weight=0.5))
    assert found["cross_entropy"] == (pytest.approx(sum(entropies)), 5)
    assert found["log_z"] == (pytest.approx(sum(normalisers)), 5)
    assert found["loss"] == (pytest.approx(sum(entropies) + 0.5 * sum(value**2 for value in normalisers)), 5)


def test_focal_loss(logits):
    entropies = [log_z(values) - values[label] for values, label in tokens(logits)]
    found = values_of(objectives.focal(logits, LABELS, gamma=1.5))
    assert found["loss"] == (pytest.approx(sum((1 - math.exp(-each)) ** 1.5 * each for each in entropies)), 5)
    assert found["cross_entropy"] == (pytest.approx(sum(entropies)), 5)


def test_the_gradient_of_a_focal_loss_is_finite_for_tokens_without_target(logits):
    leaf = logits.requires_grad_()
    total, _ = objectives.focal(leaf, LABELS, gamma=0.5)["loss"]
    (gradient,) = torch.autograd.grad(total, leaf)
    assert torch.isfinite(gradient).all()


def test_classification_is_among_the_classes_only(logits):
    classes = [3, 2]
    seen = [(values, label) for values, label in tokens(logits) if label in classes]
    entropies = [math.log(math.exp(values[3]) + math.exp(values[2])) - values[label] for values, label in seen]
    right = sum((values[3] > values[2]) == (label == 3) for values, label in seen)
    found = values_of(objectives.classification(logits, LABELS, classes))
    assert found == {"loss": (pytest.approx(sum(entropies)), 3), "accuracy": (right, 3)}
    assert objectives.classified(LABELS, classes) == 3


def test_the_reward_is_a_logit_at_the_last_target(logits):
    margin = float(logits[0, 3, 4] - logits[1, 1, 4])
    found = values_of(objectives.reward_model(logits, LABELS, token=4))
    assert found == {
        "loss": (pytest.approx(math.log(1 + math.exp(-margin))), 1),
        "reward_margin": (pytest.approx(margin), 1),
        "reward_accuracy": (int(margin > 0), 1),
    }


def test_a_score_is_predicted_by_a_logit_at_the_last_target(logits):
    scores = torch.tensor([0.5, -2.0], dtype=torch.float64)
    errors = [float(logits[0, 3, 4]) - 0.5, float(logits[1, 1, 4]) + 2]
    assert values_of(objectives.regression(logits, LABELS, scores, token=4)) == {
        "loss": (pytest.approx(sum(error**2 for error in errors)), 2),
        "absolute_error": (pytest.approx(sum(map(abs, errors))), 2),
    }
