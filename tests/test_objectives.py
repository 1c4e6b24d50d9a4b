"""The losses that come as models for one's own: their values by hand."""

from __future__ import annotations

import math

import pytest
import torch
from transformers import AutoConfig, AutoModelForSequenceClassification

from llmtrain import objectives
from llmtrain.models.classifier import declare_head, decoder_of

LABELS = torch.tensor([[2, -100, 1, 3], [0, 2, -100, -100]])


@pytest.fixture
def logits() -> torch.Tensor:
    return torch.randn(2, 4, 5, generator=torch.Generator().manual_seed(3), dtype=torch.float64)


@pytest.fixture
def outputs() -> torch.Tensor:
    """Of a head of two, at the same positions."""
    return torch.randn(2, 4, 2, generator=torch.Generator().manual_seed(4), dtype=torch.float64)


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


def test_classification_is_of_the_outputs_where_a_class_is_the_target(outputs):
    classes = [3, 2]
    seen = [(values, classes.index(label)) for values, label in tokens(outputs) if label in classes]
    entropies = [log_z(values) - values[number] for values, number in seen]
    right = sum(values[number] == max(values) for values, number in seen)
    found = values_of(objectives.classification(outputs, LABELS, classes))
    assert found == {"loss": (pytest.approx(sum(entropies)), 3), "accuracy": (right, 3)}
    assert objectives.classified(LABELS, classes) == 3


def test_the_loss_of_a_reward_model_is_that_of_trl(outputs):
    """`RewardTrainer.compute_loss`: the mean over pairs of -log sigmoid(rewards_chosen - rewards_rejected)."""
    rewards = outputs[..., :1].detach().requires_grad_()
    chosen, rejected = rewards[0, 3, 0], rewards[1, 1, 0]
    expected = -torch.log(1 / (1 + torch.exp(-(chosen - rejected))))
    sums = objectives.reward_model(rewards, LABELS)
    margin = (chosen - rejected).item()
    assert values_of(sums) == {
        "loss": (pytest.approx(float(expected)), 1),
        "reward_margin": (pytest.approx(margin), 1),
        "reward_accuracy": (int(margin > 0), 1),
    }
    ours, theirs = (torch.autograd.grad(loss, rewards, retain_graph=True)[0] for loss in (sums["loss"][0], expected))
    torch.testing.assert_close(ours, theirs)


def test_a_classifier_has_the_loss_of_transformers_on_the_same_weights():
    """Each text ends before its class; `transformers` scores the last token that is no padding."""
    values = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = AutoConfig.for_model("llama", **values, vocab_size=64, pad_token_id=63)
    declare_head(config, 3)
    torch.manual_seed(0)
    model, family = decoder_of(config), AutoModelForSequenceClassification.from_config(config)
    family.load_state_dict(model.state_dict())
    texts, classes, lengths = torch.randint(3, 60, (4, 7)), [11, 12, 13], torch.tensor([7, 3, 5, 1])
    texts[torch.arange(7) >= lengths[:, None]] = 63
    numbers = torch.tensor([2, 0, 1, 2])
    labels = torch.full((4, 7), -100)
    labels[torch.arange(4), lengths - 1] = torch.tensor(classes)[numbers]
    total, count = objectives.classification(model(texts).logits, labels, classes)["loss"]
    expected = family(texts, labels=numbers).loss
    torch.testing.assert_close(total / count, expected)
    (total / count).backward()
    expected.backward()
    for ours, theirs in zip(model.parameters(), family.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad)


def test_a_score_is_predicted_by_the_output_at_the_last_target(outputs):
    scores = torch.tensor([0.5, -2.0], dtype=torch.float64)
    errors = [float(outputs[0, 3, 0]) - 0.5, float(outputs[1, 1, 0]) + 2]
    assert values_of(objectives.regression(outputs[..., :1], LABELS, scores)) == {
        "loss": (pytest.approx(sum(error**2 for error in errors)), 2),
        "absolute_error": (pytest.approx(sum(map(abs, errors))), 2),
    }
