"""Typical bugs of metrics of one's own, planted into the real engine. Each is `bug(patch)`, as in `planted`."""

from __future__ import annotations

from llmtrain.engines.deepspeed.engine import DeepSpeedEngine
from llmtrain.models import OwnMetrics


def sums_of_a_rank(patch):
    patch.setattr(DeepSpeedEngine, "own_metric_sums", lambda self: self.own_metrics.sums(self.device))


def positions_before(patch):
    """Each label is compared with the logits of the position before it."""
    original = OwnMetrics.add
    patch.setattr(OwnMetrics, "add", lambda self, logits, labels: original(self, logits.roll(1, -2), labels))


def kept_from_the_batch_before(patch):
    patch.setattr(OwnMetrics, "begin", lambda self: vars(self).setdefault("_seen", []))
