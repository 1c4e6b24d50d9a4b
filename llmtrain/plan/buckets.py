"""How large DeepSpeed's buffers are made: what the configuration says and the memory of a plan counts."""

from __future__ import annotations

from llmtrain.plan.plan import Plan

MAX_LIVE_PARAMETERS = 1_000_000_000
"""Elements that ZeRO-3 has gathered at once, before it waits with the next ones."""
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
    """Largest parameter that ZeRO-3 keeps whole: norms and biases are not worth a message of their own each."""
    return 10 * plan.model.hidden_size
