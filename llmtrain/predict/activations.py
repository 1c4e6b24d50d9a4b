"""Estimates by arithmetic the tensors that are kept for the backward pass, for layers of `transformers`.

The method is that of arXiv 2205.05198 (section 4.1), which counts what autograd saves for each operation; its figure of
34·s·b·h bytes is for a fused GPT layer with dropout. Here the operations are those of `transformers`: norms in fp32,
gated feed-forward, keys and values repeated for grouped queries. A test compares the estimate with the tensors that
autograd really saves.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from llmtrain.plan.axes import CHOSEN
from llmtrain.plan.kernels import CHUNK_TOKENS, LOGIT_BYTES, chunks_loss, is_one_chunk, liger_chunk, recomputes_loss
from llmtrain.plan.plan import Plan
from llmtrain.plan.stages import head_parameters, reached_layers
from llmtrain.plan.weights import Weight, Weights
from llmtrain.predict.flat import SPLIT_COLUMNS, SPLIT_ROWS, sliced

STATISTICS = 4
"""Bytes per token that a norm keeps of its variance."""
INDICES = 32
"""Bytes per token and expert that it is routed to: sorted positions and their inverse, the weight of the expert."""


@dataclass(frozen=True)
class Widths:
    """Bytes per element of saved tensors, by precision."""

    stream: int
    """The residual stream."""
    computed: int
    """Outputs of matrix products."""
    norm: int
    """A norm and the input of the projections after it: fp32 copy, normalised, scaled. Autocast casts the last one
    again for each projection: three times and twice."""


WIDTHS = {
    "fp32": Widths(4, 4, 12),
    "bf16": Widths(2, 2, 8),
    "fp16": Widths(2, 2, 8),
    "autocast_bf16": Widths(4, 2, 13),
    "autocast_fp16": Widths(4, 2, 13),
}


@dataclass(frozen=True)
class Activations:
    """Bytes on a rank, for all micro-batches in flight."""

    saved: int
    """What is kept until the backward pass."""
    working: int
    """What the backward pass of a layer adds to that, when the tensors of the loss are gone."""
    logits: int
    """Logits of finished micro-batches, and those of the last one with the tensors of its loss."""
    gradient: int
    """The logits' gradient, when the loss is done, and logits of finished micro-batches."""
    sent: int
    """Tensors between pipeline stages."""


def activations_of(plan: Plan, weights: Weights, stage: int, traced: tuple[int, ...] | None = None) -> Activations:
    """Returns the activations of a pipeline stage at the beginning of the last micro-batch's backward pass.

    traced: the bytes that each layer of the model was observed to save (`models.trace`); otherwise they are estimated.
    """
    recipe = plan.recipe
    widths = WIDTHS[recipe.parallel.precision]
    tokens = plan.batch.micro_batch_size * recipe.data.sequence_length // plan.parts("tokens")
    # Below the first trained layer nothing is kept.
    layers = _layers_of(plan, stage)
    layers = range(max(layers.start, plan.model.layers - reached_layers(plan.model)), layers.stop)
    each = _of_each(plan, weights, layers, tokens)
    if traced:
        each = [
            estimate * traced[index] // _whole(plan, weights, index)
            for estimate, index in zip(each, layers, strict=True)
        ]
    stream = widths.stream * plan.model.hidden_size * tokens
    flying = in_flight(plan, stage)
    if recipe.parallel.activation_checkpointing == "full":
        # Until the end of a forward pass, autocast holds the copies of all layers.
        copies = sum(lower_copies(plan, weights, weights.layer(index)) for index in layers)
        saved, working = flying * stream * len(layers) + copies, max([0, *(size - copies for size in each)])
    else:
        saved, working = flying * sum(each), 0
    # Gradients of the three products of a feed-forward layer, less the saved one that is used by then.
    working += max((2 * widths.computed * _inner(plan, weights.layer(index)) * tokens for index in layers), default=0)
    is_last = stage == plan.parallel.pipeline - 1
    if is_last:
        norm = [weight for weight in weights.outside if weight.shape == (plan.model.hidden_size,)]
        last = _of_norm(plan, widths, any(one.trained for one in norm)) + _input(widths) * plan.model.trains_head
        saved += last * plan.model.hidden_size * tokens + lower_copies(plan, weights, weights.head)
    if recipe.model.attention_kernel in ("sdpa", "eager") and _has_mask(plan):
        saved += flying * _mask(plan) * (1 if recipe.model.attention_kernel == "sdpa" else widths.computed)
    kept = passed(plan) if is_last else Passed(0, 0)
    loss = _loss(plan, tokens) if is_last else 0
    gradient = 0 if chunks_loss(plan) else widths.computed * plan.model.vocab_size * tokens
    return Activations(
        saved=saved,
        working=working,
        logits=loss + kept.logits,
        gradient=min(loss, gradient) + kept.logits,
        # Each micro-batch's output waits for its gradient, and one gradient is received.
        sent=kept.streams or ((flying + 1) * stream if plan.parallel.pipeline > 1 else 0),
    )


def _loss(plan: Plan, tokens: int) -> int:
    """Returns the bytes of so many tokens' logits and of the loss's tensors at their maximum."""
    if not chunks_loss(plan) or is_one_chunk(plan):
        return LOGIT_BYTES * plan.model.vocab_size * tokens
    widths = WIDTHS[plan.recipe.parallel.precision]
    logits = LOGIT_BYTES * plan.model.vocab_size * min(tokens, CHUNK_TOKENS)
    if plan.recipe.kernels.loss == "liger":  # their gradient overwrites them
        chunk = liger_chunk(tokens, plan.model.hidden_size, plan.model.vocab_size)
        logits = widths.computed * plan.model.vocab_size * chunk
    elif recomputes_loss(plan.recipe):
        return logits
    head = head_parameters(plan.model) // plan.parts("matrices") if plan.model.trains_head else 0
    # The gradient of the head in fp32 with a part to add to it, and that of the hidden states.
    return logits + (4 + widths.computed) * head + widths.stream * plan.model.hidden_size * tokens


@dataclass(frozen=True)
class Passed:
    """Bytes that the last stage of a pipeline keeps of finished micro-batches."""

    streams: int
    """Inputs, their gradients, and a buffer."""
    logits: int


def passed(plan: Plan) -> Passed:
    """Returns the bytes that the last stage keeps.

    All other stages free outputs after the backward pass (`pipe/engine.py:_exec_backward_pass`). The last one keeps the
    logits of two micro-batches, with the inputs that they were computed from. With a loss in chunks the outputs are
    scalars.
    """
    if plan.parallel.pipeline == 1:
        return Passed(0, 0)
    widths, buffers = WIDTHS[plan.recipe.parallel.precision], min(2, plan.batch.gradient_accumulation_steps)
    tokens = plan.batch.micro_batch_size * plan.recipe.data.sequence_length // plan.parts("tokens")
    return Passed(
        streams=(2 * buffers + 1) * widths.stream * plan.model.hidden_size * tokens,
        logits=0 if chunks_loss(plan) else buffers * widths.computed * plan.model.vocab_size * tokens,
    )


def in_flight(plan: Plan, stage: int) -> int:
    """Returns the number of micro-batches whose activations a stage of 1F1B holds (arXiv 2104.04473, section 2.2)."""
    return min(plan.parallel.pipeline - stage, plan.batch.gradient_accumulation_steps)


def layer_bytes(plan: Plan, weights: Weights, index: int, tokens: int) -> int:
    """Returns the bytes that autograd saves in one decoder layer, for so many tokens of a rank."""
    layer, widths = weights.layer(index), WIDTHS[plan.recipe.parallel.precision]
    per_token = _norms(plan, layer, widths) + _attention(plan, layer, widths) + _feed_forward(plan, layer, widths)
    per_token += _adapters(plan, layer, widths)
    of_layer = lower_copies(plan, weights, layer)
    if plan.recipe.model.attention_kernel == "sdpa" and _has_mask(plan):
        of_layer += widths.computed * _mask(plan)  # the boolean mask as numbers to add, computed again in each layer
    return per_token * tokens + of_layer


def lower_copies(plan: Plan, weights: Weights, used: Iterable[Weight]) -> int:
    """Returns the bytes of the copies of weights that autocast makes in each pass for use in the backward pass."""
    if not plan.recipe.parallel.precision.startswith("autocast"):
        return 0
    return 2 * sum(sliced(plan, weights, one) for one in used if one.is_matrix)


def _readers(plan: Plan, layer: tuple[Weight, ...], *modules: str) -> int:
    """Returns how many of some projections keep their input: for the gradient of their weight, or of an adapter's A.

    The gradient of an input only needs the weight. With dropout, an adapter keeps an input of its own.
    """
    adapter = plan.recipe.model.adapter
    drops = adapter is not None and adapter.dropout > 0
    kept = (one for one in layer if one.trained and one.is_matrix and not (drops and one.is_adapter))
    return len({one.module for one in kept} & set(modules))


def _of_norm(plan: Plan, widths: Widths, is_trained: bool) -> int:
    """Returns the bytes per element that an RMSNorm keeps: its input in fp32, and what a trained weight multiplies."""
    return 4 + (widths.stream + _unrounded(plan, widths) if is_trained else 0)


def _input(widths: Widths) -> int:
    """Returns the bytes per element of the input of the projections after a norm."""
    return widths.norm - 4 - widths.stream


def _norms(plan: Plan, layer: tuple[Weight, ...], widths: Widths) -> int:
    """Returns the bytes of the residual stream's norms, and of the inputs of the projections after them.

    A LayerNorm always saves its input only.
    """
    width = plan.model.hidden_size
    if any(one.name.startswith("ln_1") for one in layer):
        inputs = _readers(plan, layer, "c_attn", "c_fc")
        return 2 * (widths.stream * width + STATISTICS) + inputs * widths.computed * width
    norms = [one for one in layer if one.shape == (width,) and one.module.endswith("layernorm")]
    readers = [_readers(plan, layer, "q_proj", "k_proj", "v_proj"), _readers(plan, layer, "gate_proj", "up_proj")]
    if any((one.is_expert or one.module == "gate") and one.trained for one in layer):
        readers[1] = 2
    if plan.recipe.parallel.precision.startswith("autocast"):
        inputs = widths.computed * sum(readers)
    else:
        inputs = _input(widths) * sum(map(bool, readers))
    scaled = inputs * len(norms) // 2 * width
    return sum(_of_norm(plan, widths, one.trained) * width + STATISTICS for one in norms) + scaled


def _unrounded(plan: Plan, widths: Widths) -> int:
    """Returns the additional bytes per element that a norm saves if it is scaled in fp32 before it is rounded."""
    return 2 if plan.model.model_type in ("gemma", "gemma2", "olmo2") and widths.stream < 4 else 0


def _attention(plan: Plan, layer: tuple[Weight, ...], widths: Widths) -> int:
    """Returns the bytes of queries, keys, values and output; without a fused kernel, of the probabilities, too."""
    facts, recipe = plan.model, plan.recipe
    queries = facts.heads * facts.head_dim // plan.parts("matrices")
    keys = max(facts.kv_heads * facts.head_dim // plan.parts("matrices"), 1)
    repeated = recipe.model.attention_kernel == "eager" or (recipe.model.attention_kernel == "sdpa" and _has_mask(plan))
    inner = queries + (2 * queries if repeated else 2 * keys) + queries
    saved, heads = widths.computed * inner, facts.heads // plan.parts("matrices")
    if any("q_norm" in one.name for one in layer):
        is_trained = any("q_norm" in one.name and one.trained for one in layer)
        normalised = 4 + (widths.computed + _unrounded(plan, widths) if is_trained else 0)
        saved += normalised * (queries + keys) + STATISTICS * (queries + keys) // facts.head_dim
    if recipe.parallel.precision.startswith("autocast") and any("o_proj.lora_A" in one.name for one in layer):
        saved += widths.computed * queries  # PEFT casts the input of A to fp32, and autocast back
    if recipe.model.attention_kernel == "eager":
        probabilities = 4 + (widths.computed if widths.computed < 4 else 0)
        if not _readers(plan, layer, "o_proj"):
            saved -= widths.computed * queries  # a fused kernel keeps its output itself
        return saved + probabilities * heads * recipe.data.sequence_length // plan.parts("tokens")
    return saved + 4 * heads  # log-sum-exp


def _inner(plan: Plan, layer: tuple[Weight, ...]) -> int:
    """Returns the elements per token of a product within a feed-forward layer; of experts, of all that it meets."""
    tensor, width = plan.parts("matrices"), plan.model.hidden_size
    experts = [one for one in layer if one.is_expert and one.is_matrix]
    if experts:
        inner = min(one.shape[-1] for one in experts if one.name.endswith("down_proj")) if _is_fused(experts) else 0
        return (inner or min(min(one.shape) for one in experts)) * plan.model.experts_per_token
    fused = next((one for one in layer if "c_fc" in one.name and one.is_matrix), None)
    if fused:
        return fused.elements // width // tensor
    dense = (max(one.shape) for one in layer if "attn" not in one.name and one.is_matrix)
    return max(dense, default=4 * width) // tensor


def _feed_forward(plan: Plan, layer: tuple[Weight, ...], widths: Widths) -> int:
    """Returns the bytes of both projections, the activation and the product, for each expert of a token."""
    width, inner = plan.model.hidden_size, _inner(plan, layer)
    experts = [one for one in layer if one.is_expert and one.is_matrix]
    if experts:
        met = plan.model.experts_per_token
        router = 3 * 4 * plan.model.experts
        inputs = met * width + inner if any(one.trained for one in experts) else 0
        return (met * width + 3 * inner + inputs) * widths.computed + met * INDICES + router
    if any("c_fc" in one.name for one in layer):  # gelu_new: its input, half of it, tanh, one more; the product
        kept = 4 + any(one.trained and one.name.startswith("mlp.c_proj") and one.is_matrix for one in layer)
        return kept * widths.computed * inner
    return (3 + _readers(plan, layer, "down_proj")) * widths.computed * inner


def _adapters(plan: Plan, layer: tuple[Weight, ...], widths: Widths) -> int:
    """Returns the bytes that adapters keep beside their layers' inputs.

    That is what A returns; with dropout its own input and a mask; with DoRA the results of the layer and of B, which
    the trained norms multiply.
    """
    adapter, total = plan.recipe.model.adapter, 0
    for one in layer:
        if ".lora_A." in one.name:
            rank, inputs = one.shape
            inputs //= plan.parts("matrices") if one.module in SPLIT_COLUMNS else 1
            total += widths.computed * rank
            total += inputs * (widths.computed + 1) if adapter is not None and adapter.dropout else 0
        elif ".lora_magnitude_vector." in one.name:
            slices = plan.parts("matrices") if one.module in SPLIT_ROWS else 1
            total += 2 * widths.computed * one.elements // slices
    return total


def _is_fused(experts: list[Weight]) -> bool:
    return any(one.name.endswith("down_proj") for one in experts)


def _has_mask(plan: Plan) -> bool:
    """Whether a mask separates packed documents; without one, attention is causal and needs none."""
    return plan.recipe.data.keeps_apart


def _mask(plan: Plan) -> int:
    """Returns the elements of a mask: every query against every key, regardless of sequence parallelism."""
    return plan.batch.micro_batch_size * plan.recipe.data.sequence_length**2


def _of_each(plan: Plan, weights: Weights, layers: range, tokens: int) -> list[int]:
    """Returns the bytes of some layers, computed once for equal ones."""
    alike = {id(weights.layer(index)): index for index in layers}
    known = {layer: layer_bytes(plan, weights, index, tokens) for layer, index in alike.items()}
    return [known[id(weights.layer(index))] for index in layers]


def _layers_of(plan: Plan, stage: int) -> range:
    first, last = plan.stages[stage].layers if plan.stages else (0, plan.model.layers - 1)
    return range(first, last + 1)


def _whole(plan: Plan, weights: Weights, index: int) -> int:
    """Returns the estimate of a layer without tensor or sequence parallelism, which a trace corrects."""
    whole = {axis.name: 1 for axis in CHOSEN if axis.divides & {"matrices", "tokens"}}
    parallel = plan.parallel.model_copy(update=whole)
    alone = plan.model_copy(update={"recipe": plan.recipe.model_copy(update={"parallel": parallel})})
    tokens = plan.batch.micro_batch_size * plan.recipe.data.sequence_length
    return layer_bytes(alone, weights, index, tokens)
