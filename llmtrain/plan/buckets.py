"""Sizes of DeepSpeed's buffers, both for its configuration and for the predicted memory of a plan."""

from __future__ import annotations

from llmtrain.plan.plan import Plan

MAX_LIVE_PARAMETERS = 1_000_000_000
"""Elements that ZeRO-3 gathers at most before it waits with the next ones."""
SUB_GROUP_SIZE = 1_000_000_000
"""Elements that ZeRO-3 updates at once."""


def bucket_elements(plan: Plan) -> int:
    """Elements per reduction, the same heuristic as Megatron-LM's: max(40e6, 1e6 × dp), so that each of
    the dp chunks of a ring stays large enough for the bandwidth. No more than a rank's share of the
    model, since DeepSpeed allocates the whole buffer; even, as DeepSpeed asks.
    """
    share = plan.model.parameters // (plan.layout.pp * plan.layout.tp)
    elements = min(max(40_000_000, 1_000_000 * plan.layout.dp), share)
    return max(elements + elements % 2, 2)


def persistence_threshold(plan: Plan) -> int:
    """Returns the size of the largest parameter that ZeRO-3 does not shard: norms and biases are not worth messages."""
    return 10 * plan.model.hidden_size
