"""Typical bugs of another head than that over the vocabulary, planted into the real engine, as in `planted`."""

from __future__ import annotations

from torch import distributed as dist
from torch.nn.functional import linear

from llmtrain.models import initial
from llmtrain.models.classifier import _OutputsOfAllTokens
from llmtrain.models.head_loss import HeadLoss
from llmtrain.models.own_loss import OwnLoss
from llmtrain.plan.facts.classifier import MODULE


def head_drawn_by_rank(patch):
    """Each rank draws another head."""
    original = initial.seed_for_name

    def seed_for_name(seed, name):
        return original(seed + dist.get_rank() * (name == MODULE), name)

    patch.setattr(initial, "seed_for_name", seed_for_name)


def head_without_gradient(patch):
    """The gradient of the head does not arrive."""

    def forward(self, input_ids, position_ids=None, use_cache=False, **arguments):
        output = self.base_model(input_ids=input_ids, position_ids=position_ids, use_cache=use_cache, **arguments)
        output.logits = linear(output.last_hidden_state, self.score.weight.detach() + 0 * self.score.weight)
        return output

    patch.setattr(_OutputsOfAllTokens, "forward", forward)


def position_before(patch):
    """The outputs of the position before the right one are read."""
    original = OwnLoss.__call__
    patch.setattr(OwnLoss, "__call__", lambda self, logits, batch: original(self, logits.roll(1, 1), batch))


def weight_without_gradient(patch):
    """The loss of hidden states gets a copy of the head's weight."""
    original = HeadLoss.computing
    patch.setattr(
        HeadLoss,
        "computing",
        lambda self, loss: original(self, lambda hidden, weight: loss(hidden, weight.detach() + 0 * weight)),
    )
