"""The FLOPs of a model, counted with the convention of published MFU figures."""

from __future__ import annotations

from llmtrain.plan.facts.model import ModelFacts


def matmul_parameters(facts: ModelFacts) -> int:
    """Returns N: the active parameters without the input tables.

    Looking up a row costs no FLOPs. A tied table counts once, since it is also the matrix of the output projection;
    learned positions are never multiplied.
    """
    tied_head = head_parameters(facts) if facts.tied_embeddings else 0
    return facts.active_parameters - facts.embedding_parameters + tied_head


def flops_per_token(facts: ModelFacts, sequence_length: int) -> float:
    """Returns the model FLOPs of forward and backward per token: 6·N + 12·L·d·T (PaLM, arXiv 2204.02311, appendix B).

    d is heads × head_dim. Attention counts in full: halving it because it is causal, as some do, lowers the figure.
    Recomputation under activation checkpointing does not count. A frozen weight has no product for its gradient: 4·N;
    below the first trained one there is no backward pass: 2·N.
    """
    if facts.trained_parameters is None:
        return float(6 * matmul_parameters(facts) + facts.layers * attention_flops(facts, sequence_length))
    return sum(layer_costs(facts, sequence_length))


def layer_costs(facts: ModelFacts, sequence_length: int) -> list[float]:
    """Returns the FLOPs per token of each decoder layer, the head's in the last one; see `flops_per_token`.

    An embedding is looked up, which takes almost no time; in a mixture of experts only the experts count that a token
    is routed to.
    """
    attention = attention_flops(facts, sequence_length)
    below = facts.layers - backward_layers(facts)
    costs = []
    for index, (parameters, idle) in enumerate(zip(facts.layer_parameters, facts.layer_idle_parameters, strict=True)):
        used = parameters - idle
        trained = facts.layer_trained_parameters[index] if facts.layer_trained_parameters else used
        is_reached = index >= below
        costs.append(2.0 * ((1 + is_reached) * used + trained) + (attention if is_reached else attention / 3))
    costs[-1] += (6.0 if facts.trains_head else 4.0) * head_parameters(facts)
    return costs


def backward_layers(facts: ModelFacts) -> int:
    """Returns the number of layers that the backward pass reaches: from the first trained one on."""
    if facts.trained_parameters is None or facts.trains_embedding:
        return facts.layers
    below = next((n for n, trained in enumerate(facts.layer_trained_parameters) if trained), facts.layers)
    return facts.layers - below


def attention_flops(facts: ModelFacts, sequence_length: int) -> int:
    """Returns the FLOPs of one layer's attention per token, forward and backward."""
    return 12 * facts.heads * facts.head_dim * sequence_length


def head_parameters(facts: ModelFacts) -> int:
    """Returns the number of elements of the output projection, tied or not."""
    return facts.outputs * facts.hidden_size


def table_parameters(facts: ModelFacts) -> int:
    """Returns the number of elements of the embedding, without positions."""
    return facts.vocab_size * facts.hidden_size
