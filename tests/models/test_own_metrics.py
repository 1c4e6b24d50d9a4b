"""Metrics of one's own get the logits of target tokens, a chunk at a time, whatever computes the loss."""

from __future__ import annotations

import math

import pytest
import torch

from llmtrain import EvalConfig
from llmtrain.errors import RecipeError
from llmtrain.models import OwnMetrics, build_model, liger, own_metrics, target_loss_sum
from tests.helpers.batches import VOCAB, global_batch, tiny_recipe
from tests.helpers.own_metrics import accuracy, entropy_of_even, raises

CPU = torch.device("cpu")
LABELS = torch.tensor([[-100, 3, 4, 5, -100, -100, -100, -100], [-100, -100, 6, 7, 8, 9, -100, -100]])


def _of(**metrics) -> OwnMetrics:
    return OwnMetrics(tiny_recipe(evaluation=EvalConfig(every_steps=5, metrics=metrics)))


def _logits(dtype=torch.float32) -> torch.Tensor:
    return torch.randn(2, 8, 16, generator=torch.Generator().manual_seed(1)).to(dtype)


def test_tokens_without_a_target_are_left_out_and_the_others_are_in_fp32(monkeypatch):
    monkeypatch.setattr(own_metrics, "CHUNK_TOKENS", 3)
    metrics, logits = _of(entropy=entropy_of_even, right=accuracy), _logits(torch.bfloat16)
    with torch.autocast("cpu", torch.bfloat16):
        metrics.add(logits, LABELS)
    kept = LABELS >= 0
    (total, even), (right, count) = (one(logits[kept].float(), LABELS[kept]) for one in (entropy_of_even, accuracy))
    assert metrics.sums(CPU).tolist() == pytest.approx([total, int(even), int(right), count], rel=1e-6)
    assert metrics.means([3.0, 4.0, 0.0, 2.0]) == {"entropy": 0.75, "right": 0.0}
    metrics.begin()
    metrics.add(logits, torch.full_like(LABELS, -100))
    sums = metrics.sums(CPU).tolist()
    assert sums == [0] * 4
    assert all(math.isnan(mean) for mean in metrics.means(sums).values())


def test_the_head_of_hidden_states_is_applied_to_a_chunk_at_a_time(monkeypatch):
    hidden, weight = torch.randn(2, 8, 4), torch.randn(16, 4)
    whole, chunks = _of(entropy=entropy_of_even), _of(entropy=entropy_of_even)
    whole.add(hidden @ weight.T, LABELS)
    monkeypatch.setattr(own_metrics, "CHUNK_TOKENS", 3)
    chunks.add_hidden(hidden, weight, LABELS)
    torch.testing.assert_close(chunks.sums(CPU), whole.sums(CPU))


def test_the_fused_loss_of_liger_leaves_the_logits_to_chunks(monkeypatch):
    """Without Liger: its kernel is not called."""
    monkeypatch.setattr(liger, "CHUNK_TOKENS", 24)
    model, sample = build_model(tiny_recipe(), torch.float32, CPU).eval(), global_batch(1)[0]
    with torch.no_grad():
        logits, loss, seen = model(sample.input_ids).logits, liger.LigerLoss(model), []
        with loss.observed_by(lambda *chunk: seen.append(chunk)):
            output = model(sample.input_ids, targets=sample.labels)
    torch.testing.assert_close(output.loss_sum, target_loss_sum(logits, sample.labels))
    assert [len(labels[0]) for _, labels in seen] == [24, 8]
    torch.testing.assert_close(torch.cat([part for part, _ in seen], 1), logits)
    assert loss.tokens == 0
    assert logits.shape[-1] == VOCAB


def test_an_exception_is_reported_with_the_field():
    with pytest.raises(RecipeError, match=r"own_metrics:raises fails for logits \[7, 16\]: IndexError") as error:
        _of(mine=raises).add(_logits(), LABELS)
    assert error.value.problems[0].field == "evaluation.metrics.mine"
