"""The kernels of a plan for the choices that its recipe leaves open; pure."""

from __future__ import annotations

import math

from llmtrain.plan.facts.model import ModelFacts
from llmtrain.plan.flops import head_parameters
from llmtrain.plan.plan import Plan
from llmtrain.recipe import Recipe

CHUNK_TOKENS = 1024
"""Tokens whose logits are held at once: enough for the head's product to be compute bound, not memory bound."""
LOGIT_BYTES = 12
"""Bytes per logit when the loss's backward pass begins: log-softmax, and the gradients of both, in fp32."""
LARGE_LOSS = 2**30
"""Size in bytes of a micro-batch's logits from which on they are not held at once."""
SMALL_HEAD = 0.03
"""Largest share of a token's parameters that the head may have for its product to be worth computing twice."""
WHOLE_GRAPH = ("eager", "sdpa", "varlen")
"""Attention implementations that are known not to break the graph of a compiled layer."""
TRACED = (*WHOLE_GRAPH, "flex_attention")
"""Attention implementations that are compiled with their layer. Flash kernels of other packages would have the number
of documents and their lengths compiled in."""
WHOLE_LOSS = {
    "data_parallel": "nn.DataParallel copies the model, but not a replacement of its forward method",
    "fsdp2": "FSDP2 decides when the head's weights are whole: to compute their product again in the backward pass "
    "ends in a segmentation fault, and Liger's loss reads them without calling the head",
}
"""Strategies that need the logits, and why."""


def chunks_loss(plan: Plan) -> bool:
    """Whether the loss is computed without the logits of all tokens at once."""
    recipe, facts = plan.recipe, plan.model
    if recipe.kernels.loss != "auto":
        return recipe.kernels.loss != "whole"
    if needs_whole_loss(recipe, facts) or LOGIT_BYTES * facts.outputs * tokens_of_loss(plan) <= LARGE_LOSS:
        return False
    return not recomputes_loss(recipe) or head_parameters(facts) <= SMALL_HEAD * facts.active_parameters


def overwrites_logits(plan: Plan) -> bool:
    """Whether the gradient of logits is written over them, by the kernel for CPUs."""
    return plan.recipe.kernels.loss == "compiled" and plan.cluster.spec.on_cpu


def is_one_chunk(plan: Plan) -> bool:
    """Whether a micro-batch has no more tokens than a chunk, so that autograd treats it like a loss without chunks."""
    return plan.recipe.kernels.loss != "liger" and tokens_of_loss(plan) <= CHUNK_TOKENS


def tokens_of_loss(plan: Plan) -> int:
    """Returns the number of tokens of a micro-batch on one rank."""
    return plan.batch.micro_batch_size * plan.recipe.data.sequence_length // plan.divisor("tokens")


def feeds_in_tiles(plan: Plan) -> bool:
    """Whether feed-forward layers run tile by tile: if a rank's part of a sequence is longer than the model is wide."""
    length = plan.recipe.data.sequence_length // plan.parallel.sequence
    return plan.parallel.tiled_mlp and length > plan.model.hidden_size


def liger_chunk(tokens: int, width: int, vocabulary: int) -> int:
    """Returns the number of tokens whose logits Liger's loss holds at once.

    Their logits are at least as large as the hidden states.
    """
    each = math.ceil(tokens / math.ceil(vocabulary / width))
    return min(tokens, 1 << (each - 1).bit_length())


def needs_whole_loss(recipe: Recipe, facts: ModelFacts | None) -> str:
    """Returns why the loss, the model or the engine needs all logits, or an empty string if they do not."""
    objective, labels = recipe.objective, recipe.model.num_labels
    if labels is not None:
        return f"a head of {labels} outputs has no logits of a vocabulary to compute in parts"
    if objective.hidden_states:
        return f"{objective.name} computes logits itself"
    if objective.is_own and objective.reads_whole_documents:
        return f"{objective.name} is given the logits of all tokens of a {objective.unit}"
    if facts is not None and facts.trials is not None and facts.trials.chunks:
        return facts.trials.chunks
    return WHOLE_LOSS.get(recipe.parallel.strategy, "")


def recomputes_loss(recipe: Recipe) -> bool:
    """Whether a chunk's logits are computed again in the backward pass (`llmtrain.models.chunked`).

    In an objective of completions, the weight of a token is only known once all tokens of its completion are. A user's
    own loss returns several sums.
    """
    scaled = recipe.parallel.precision in ("fp16", "autocast_fp16")
    return recipe.parallel.zero_stage == 3 or scaled or recipe.objective.name != "language_model"
