"""FLOPs of a training step, with the convention of published MFU figures."""

from __future__ import annotations

from llmtrain.plan.plan import ModelFacts


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
    Recomputation under activation checkpointing does not count.
    """
    return float(6 * matmul_parameters(facts) + facts.layers * attention_flops(facts, sequence_length))


def attention_flops(facts: ModelFacts, sequence_length: int) -> int:
    """Returns the FLOPs of one layer's attention per token, forward and backward."""
    return 12 * facts.heads * facts.head_dim * sequence_length


def head_parameters(facts: ModelFacts) -> int:
    """Returns the number of elements of the output projection, tied or not."""
    return facts.vocab_size * facts.hidden_size
