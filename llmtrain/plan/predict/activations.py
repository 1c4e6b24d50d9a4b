"""Estimates by arithmetic the tensors that are kept for the backward pass, for layers of `transformers`.

The method is that of arXiv 2205.05198 (section 4.1), which counts what autograd saves for each operation; its figure of
34·s·b·h bytes is for a fused GPT layer with dropout. Here the operations are those of `transformers`: norms in fp32,
gated feed-forward, keys and values repeated for grouped queries. Fused layers (compiled, or Liger's) save the inputs of
norms and activations, and compute in the backward pass what is between them and the products. A test compares the
estimate with the tensors that autograd really saves.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeVar

from llmtrain.plan.axes import CHOSEN
from llmtrain.plan.facts.weights import Weight, Weights
from llmtrain.plan.flops import backward_layers, head_parameters
from llmtrain.plan.kernels import (
    CHUNK_TOKENS,
    LOGIT_BYTES,
    chunks_loss,
    feeds_in_tiles,
    is_one_chunk,
    liger_chunk,
    overwrites_logits,
    recomputes_loss,
)
from llmtrain.plan.plan import Plan
from llmtrain.plan.predict.flat import split_of, tensor_parallel_elements
from llmtrain.plan.schedules import PipelineSchedule
from llmtrain.plan.stages import is_recomputed

T = TypeVar("T")

FIRST_PRODUCTS = {"gate_up_proj", "up_proj"}
"""Stacks of the experts' matrices that are multiplied with the input of the experts."""
STATISTICS = 4
"""Bytes per token that a norm keeps of its variance."""
INDICES = 32
"""Bytes per token and expert that it is routed to: sorted positions and their inverse, the weight of the expert."""


@dataclass(frozen=True)
class ElementBytes:
    """Bytes per element of saved tensors, by precision."""

    stream: int
    """The residual stream."""
    computed: int
    """Outputs of matrix products."""
    norm: int
    """A norm and the input of the projections after it: fp32 copy, normalised, scaled. Autocast casts the last one
    again for each projection: three times before attention, twice before feed-forward."""


ELEMENT_BYTES = {
    "fp32": ElementBytes(4, 4, 12),
    "bf16": ElementBytes(2, 2, 8),
    "fp16": ElementBytes(2, 2, 8),
    "autocast_bf16": ElementBytes(4, 2, 13),
    "autocast_fp16": ElementBytes(4, 2, 13),
}


@dataclass(frozen=True)
class Activations:
    """Bytes on a rank, for all micro-batches in flight."""

    saved: int
    """Activations that are kept until the backward pass."""
    lowest: int
    """Largest memory in the last layer of the backward pass: the saved activations that are left, and additional
    memory. If `lowest_kept_layer` returns that layer, at the end of its feed-forward part."""
    others: int
    """Saved activations that are left at the end of the pass, because they belong to other passes."""
    working: int
    """Additional memory for the backward pass of a layer, after the tensors of the loss are freed."""
    casts: int
    """Copies that autocast makes of the weights of layers that are computed again, and holds until the end of the
    forward pass."""
    logits: int
    """Logits of a micro-batch, with the tensors of its loss."""
    gradient: int
    """The gradient of the logits, after the loss is computed."""
    head: int
    """The head's gradient from one micro-batch, before it is accumulated."""
    sent: int
    """Tensors between pipeline stages."""
    host: int
    """Inputs of layers in host memory."""


def activations_of(plan: Plan, weights: Weights, rank: int, traced: tuple[int, ...] | None = None) -> Activations:
    """Returns the activations of a rank of the pipe at the beginning of the last micro-batch's backward pass.

    traced: the bytes that each layer of the model was observed to save (`models.trace`); otherwise they are estimated.
    """
    recipe = plan.recipe
    widths = ELEMENT_BYTES[recipe.parallel.precision]
    tokens = plan.batch.micro_batch_size * recipe.data.sequence_length // plan.divisor("tokens")
    stages = _backward_layers_of_stages(plan, rank)
    layers = [index for stage in stages for index in stage]
    each = _per_layer(plan, weights, layers, tokens, layer_bytes)
    if traced:
        each = [
            estimate * traced[index] // _unsharded_estimate(plan, weights, index)
            for estimate, index in zip(each, layers, strict=True)
        ]
    stream = widths.stream * plan.model.hidden_size * tokens // plan.megatron_sp_ranks
    # Each pass in flight holds the layers of one stage.
    passes, chunks = in_flight(plan, rank), plan.parallel.pipeline_chunks
    recomputed = [index for index in layers if is_recomputed(plan.parallel, index)]
    again = dict(zip(recomputed, _per_layer(plan, weights, recomputed, tokens, kept_bytes), strict=True))
    whole = dict(zip(layers, each, strict=True))
    saved = passes * sum(again[index].size if index in again else size for index, size in whole.items()) // chunks
    host = 0
    if plan.parallel.offload_activations:
        # The device holds two inputs: that of the newest layer, and the one that is being copied back.
        inputs = passes * len(again) // chunks
        saved -= max(0, inputs - 2) * stream
        host = inputs * (stream if plan.cluster.spec.on_cpu else pinned(stream))
    working = max([0, *(whole[index] - recomputed_layer.used for index, recomputed_layer in again.items())])
    gradients = _per_layer(plan, weights, layers, tokens, _feed_forward_gradients)
    working += max([_ring_gradients(plan) * tokens, *gradients])
    is_last = rank == PipelineSchedule.of(plan.parallel).rank_of(plan.parallel.stages - 1)
    if is_last:
        norm = [weight for weight in weights.outside if weight.shape == (plan.model.hidden_size,)]
        elements = plan.model.hidden_size * tokens
        saved += _of_norm(plan, widths, any(weight.trained for weight in norm)) * elements // plan.megatron_sp_ranks
        saved += _input(widths) * plan.model.trains_head * elements + autocast_copies(plan, weights, weights.head)
    if not any("wpe" in weight.name for weight in weights.outside):
        # The cosines and sines that rotate queries and keys, which all layers share.
        saved += passes * 2 * widths.stream * plan.model.head_dim * tokens
    saved += _tower(plan, weights, widths, tokens)
    if recipe.model.attention_kernel in ("sdpa", "eager") and recipe.data.has_document_mask:
        saved += passes * _mask_elements(plan) * (1 if recipe.model.attention_kernel == "sdpa" else widths.computed)
    lowest, others = saved + working, saved
    if not plan.parallel.offload_activations:
        kept = whole | {index: recomputed_layer.size for index, recomputed_layer in again.items()}
        lowest -= min(sum(kept[index] for index in stage[1:]) for stage in stages)
        others = saved * (passes - 1) // passes
        if (index := lowest_kept_layer(plan, rank)) is not None:
            # Gradients of the inputs of two projections, and that of the layer's output, which the residual passes on.
            lowest += stream + 2 * widths.computed * plan.model.hidden_size * tokens
            lowest -= _feed_forward(plan, weights.layer(index), widths) * tokens
    loss, head = _loss(plan, tokens) if is_last else 0, _head(plan)
    gradient = 0 if chunks_loss(plan) else widths.computed * plan.model.outputs * tokens
    return Activations(
        saved=saved,
        lowest=lowest,
        others=others,
        working=working,
        casts=sum(autocast_copies(plan, weights, weights.layer(index)) for index in again),
        logits=loss,
        gradient=min(loss, gradient),
        # With a loss in chunks, the loss counts it.
        head=widths.computed * head if is_last and plan.model.trains_head and not chunks_loss(plan) else 0,
        # The output of each pass waits for its gradient, and one message is received meanwhile.
        sent=(passes + 1) * stream if plan.stages else 0,
        host=host,
    )


def _tower(plan: Plan, weights: Weights, widths: ElementBytes, tokens: int) -> int:
    """Returns the largest number of bytes that a vision tower saves: if all tokens stand for images.

    An estimate: its layers are taken as those of a text model with biases, without grouped queries.
    """
    tower = plan.model.tower
    if tower is None or not any(w.trained and w.name.startswith(tower.prefixes) for w in weights.outside):
        return 0
    stream, norms = 2 * widths.stream * tower.hidden_size, 2 * widths.norm * tower.hidden_size
    products = widths.computed * (5 * tower.hidden_size + 2 * tower.intermediate_size)
    return tokens * tower.patches_per_token * tower.layers * (stream + norms + products)


def lowest_kept_layer(plan: Plan, rank: int) -> int | None:
    """Returns the last layer of a backward pass; None if it may be computed again or in tiles."""
    lowest = [stage[0] for stage in _backward_layers_of_stages(plan, rank) if stage]
    are_kept = not feeds_in_tiles(plan) and not any(is_recomputed(plan.parallel, index) for index in lowest)
    return lowest[0] if lowest and are_kept else None


def pinned(size: int) -> int:
    """Returns the bytes of pinned memory that torch takes for a tensor: the next power of two."""
    return 1 << (size - 1).bit_length()


def _head(plan: Plan) -> int:
    """Returns the elements of the head on a rank: tensor parallel ranks split that over the vocabulary."""
    return head_parameters(plan.model) // (plan.divisor("matrices") if plan.model.num_labels is None else 1)


def _loss(plan: Plan, tokens: int) -> int:
    """Returns the largest number of bytes of the logits of that many tokens and of the loss's tensors."""
    widths = ELEMENT_BYTES[plan.recipe.parallel.precision]
    head = _head(plan) if plan.model.trains_head else 0
    of_logit = LOGIT_BYTES
    if overwrites_logits(plan):  # in lower precision, there are a copy in fp32 and a gradient besides
        of_logit = 4 if widths.computed == 4 else 4 + 2 * widths.computed
    if not chunks_loss(plan) or is_one_chunk(plan):
        return of_logit * plan.model.outputs * tokens + overwrites_logits(plan) * widths.computed * head
    logits = of_logit * plan.model.outputs * min(tokens, CHUNK_TOKENS)
    if plan.recipe.kernels.loss == "liger":  # their gradient overwrites them
        chunk = liger_chunk(tokens, plan.model.hidden_size, plan.model.outputs)
        logits = widths.computed * plan.model.outputs * chunk
    elif recomputes_loss(plan.recipe):
        return logits
    # The gradient of the head in fp32, a part to be added to it, and the gradient of the hidden states.
    return logits + (4 + widths.computed) * head + widths.stream * plan.model.hidden_size * tokens


def in_flight(plan: Plan, rank: int) -> int:
    """Returns the largest number of passes whose activations a rank of the pipe holds at once."""
    return PipelineSchedule.of(plan.parallel).in_flight(rank, plan.batch.gradient_accumulation_steps)


def layer_bytes(plan: Plan, weights: Weights, index: int, tokens: int) -> int:
    """Returns the bytes that autograd saves in one decoder layer, for that many tokens of a rank."""
    if plan.model.trials and (saved := dict(plan.model.trials.saved).get(plan.recipe.parallel.precision)):
        layer_saved = saved[index]
        per_token = layer_saved.per_token + layer_saved.per_pair * plan.recipe.data.sequence_length
        return int(layer_saved.fixed + per_token * tokens)
    layer, widths = weights.layer(index), ELEMENT_BYTES[plan.recipe.parallel.precision]
    of_norms, of_adapters = _norms(plan, layer, widths), _adapters(plan, layer, widths)
    per_token = of_norms.replicated + _attention(plan, layer, widths) + of_adapters.replicated
    if not feeds_in_tiles(plan):
        per_token += _feed_forward(plan, layer, widths)
    of_slice = (of_norms.sequence_sharded + of_adapters.sequence_sharded) * tokens // plan.megatron_sp_ranks
    of_layer = autocast_copies(plan, weights, layer)
    if plan.recipe.model.attention_kernel == "sdpa" and plan.recipe.data.has_document_mask:
        of_layer += widths.computed * _mask_elements(
            plan
        )  # the boolean mask as numbers to add, computed again in each layer
    return per_token * tokens + of_slice + of_layer


def _feed_forward_gradients(plan: Plan, weights: Weights, index: int, tokens: int) -> int:
    """Returns the bytes of a feed-forward layer's backward pass in addition to what the layer saves.

    These are the gradients of its three products, less a saved tensor that is freed by then; or, for few tokens, the
    gradient of the last product's input and the new one of its weight. With tiles, they and the saved tensors are those
    of one tile; in addition, gradients of weights are summed in fp32, and the gradient of the input is written.
    """
    layer, widths, facts = weights.layer(index), ELEMENT_BYTES[plan.recipe.parallel.precision], plan.model
    gradients = 2 * widths.computed * _intermediate_size(plan, layer)
    dense = [weight for weight in layer if weight.is_matrix and weight.trained and "attn" not in weight.name]
    if not feeds_in_tiles(plan):
        largest = max(
            (tensor_parallel_elements(plan, weights, weight) for weight in dense if not weight.is_expert), default=0
        )
        return max(gradients * tokens, gradients // 2 * tokens + widths.computed * largest)
    tile = facts.hidden_size * plan.batch.micro_batch_size
    sums = (4 + widths.stream) * sum(tensor_parallel_elements(plan, weights, weight) for weight in dense)
    return (_feed_forward(plan, layer, widths) + gradients) * tile + sums + widths.computed * facts.hidden_size * tokens


def _ring_gradients(plan: Plan) -> int:
    """Returns the bytes per token of a ring's backward pass in addition to what the layer saves.

    These are the gradients of queries, and, three times, of keys and values, in fp32: computed, sent and received; the
    keys and values that a rank computes with, and the next ones; and the results of a kernel.
    """
    if plan.sequence_ring == 1:
        return 0
    widths, size = ELEMENT_BYTES[plan.recipe.parallel.precision], plan.model.head_dim
    queries, keys = plan.model.heads // plan.divisor("matrices"), _key_heads(plan) * _key_copies(plan)
    return size * ((4 + widths.computed) * queries + 2 * (3 * 4 + 3 * widths.computed) * keys)


class BytesPerToken(NamedTuple):
    """Bytes that are kept of a token."""

    replicated: int
    """On each rank that has the token's sequence."""
    sequence_sharded: int
    """On one tensor parallel rank, if Megatron's sequence parallelism shards the residual stream."""


@dataclass(frozen=True)
class Kept:
    """Bytes of a layer that is computed again."""

    size: int
    """Bytes that are kept until its backward pass begins."""
    used: int
    """The part of `size` that a layer also saves if it is not computed again."""


def kept_bytes(plan: Plan, weights: Weights, index: int, tokens: int) -> Kept:
    """Returns the bytes that are kept of a decoder layer that is computed again, in whole or in part."""
    layer, widths, facts = weights.layer(index), ELEMENT_BYTES[plan.recipe.parallel.precision], plan.model
    stream = widths.stream * facts.hidden_size // plan.megatron_sp_ranks
    if plan.parallel.activation_checkpointing == "full":
        return Kept(stream * tokens, 0)
    results = [
        _result(plan, weight) * (facts.experts_per_token if weight.is_expert else 1)
        for weight in layer
        if weight.is_matrix and (weight.is_adapter or not weight.is_expert)
    ]
    top_k = facts.experts_per_token if any(weight.is_expert for weight in layer) else 0
    intermediate, slices = _intermediate_size(plan, layer), plan.divisor("matrices")
    queries, keys = (heads * facts.head_dim // slices for heads in (facts.heads, facts.kv_heads))
    # With the rows that experts and their tokens' ranks receive, which `selective` keeps, too.
    rows = top_k * facts.hidden_size
    if plan.parallel.expert > 1:
        rows = 3 * rows // plan.parallel.tensor
    experts = 2 * intermediate + rows if top_k else 0
    attention = widths.computed * queries + 4 * facts.heads // slices
    if plan.recipe.model.attention_kernel == "eager":
        scores = facts.heads // slices * plan.recipe.data.sequence_length
        attention = widths.computed * (queries + scores)
    size = stream + widths.computed * (sum(results) + experts) + attention
    used = stream * (widths.stream == 4 or is_fused(plan)) + widths.computed * queries + 4 * facts.heads // slices
    is_gpt2 = any("c_fc" in weight.name for weight in layer)
    projected = 3 * queries if is_gpt2 else 0 if _repeats_keys(plan) else keys
    if plan.divisor("tokens") > 1:
        projected = 0  # attention saves what ranks have exchanged instead
    used += widths.computed * ((1 if is_gpt2 else 2) * intermediate + projected)
    return Kept(size * tokens, used * tokens)


def _result(plan: Plan, weight: Weight) -> int:
    """Returns the elements per token that a matrix's product gives a rank, if its result is kept."""
    slices, split = plan.divisor("matrices"), split_of(plan, weight.module)
    if ".lora_A." in weight.name:
        slices = 1
    if ".lora_B." in weight.name and split == "columns":
        return weight.shape[-2] // (1 if weight.is_expert else plan.megatron_sp_ranks)
    return weight.shape[-2] // (slices if split == "rows" else 1)


def _repeats_keys(plan: Plan) -> bool:
    """Whether keys and values are repeated for the queries that share them; one head for all takes no copies."""
    kernel, ranks = plan.recipe.model.attention_kernel, plan.head_ranks
    own = _key_heads(plan) * _key_copies(plan) // ranks
    return kernel == "eager" or (kernel == "sdpa" and plan.recipe.data.has_document_mask and own > 1)


def _key_heads(plan: Plan) -> int:
    """Returns the heads of keys that a rank projects."""
    return max(plan.model.kv_heads // plan.divisor("matrices"), 1)


def _key_copies(plan: Plan) -> int:
    """Returns how often keys are copied so that each of the ranks that divide the heads of a sequence has one."""
    ranks = plan.head_ranks
    return ranks // math.gcd(ranks, _key_heads(plan))


def autocast_copies(plan: Plan, weights: Weights, used: Iterable[Weight]) -> int:
    """Returns the bytes of the copies of weights that autocast makes in each pass for use in the backward pass."""
    if not plan.recipe.parallel.precision.startswith("autocast"):
        return 0
    return 2 * sum(tensor_parallel_elements(plan, weights, weight) for weight in used if weight.is_matrix)


def _saved_inputs(plan: Plan, layer: tuple[Weight, ...], *modules: str) -> int:
    """Returns how many of these modules save their input, for the gradient of their weight or of an adapter's A.

    The gradient of an input only needs the weight. With dropout, an adapter keeps an input of its own.
    """
    adapter = plan.recipe.model.adapter
    drops = adapter is not None and adapter.dropout > 0
    kept = (weight for weight in layer if weight.trained and weight.is_matrix and not (drops and weight.is_adapter))
    return len({weight.module for weight in kept} & set(modules))


def is_fused(plan: Plan) -> bool:
    """Whether the norms and activations of layers are parts of larger kernels."""
    return plan.recipe.kernels.blocks in ("compiled", "liger")


def _of_norm(plan: Plan, widths: ElementBytes, is_trained: bool) -> int:
    """Returns the bytes per element an RMSNorm keeps: its fp32 input; for a trained weight, the normalised one too."""
    return 4 + (widths.stream + _unrounded(plan, widths) if is_trained else 0)


def _input(widths: ElementBytes) -> int:
    """Returns the bytes per element of the input of the projections after a norm."""
    return widths.norm - 4 - widths.stream


def _norms(plan: Plan, layer: tuple[Weight, ...], widths: ElementBytes) -> BytesPerToken:
    """Returns the bytes of the residual stream's norms, and of the inputs of the projections after them.

    A LayerNorm always saves its input only.
    """
    width = plan.model.hidden_size
    # Both norms of a fused layer keep the layer's input, and what is added to it. Under autocast, the second norm's
    # input is computed again from the first one's, and from the product in between.
    fused = (widths.stream + widths.computed) * width if is_fused(plan) else None
    if any(weight.name.startswith("ln_1") for weight in layer):
        inputs = _saved_inputs(plan, layer, "c_attn", "c_fc")
        own = fused or 2 * widths.stream * width
        return BytesPerToken(inputs * widths.computed * width, own + 2 * STATISTICS)
    norms = [weight for weight in layer if weight.shape == (width,) and weight.module.endswith("layernorm")]
    copies = [
        _saved_inputs(plan, layer, "q_proj", "k_proj", "v_proj"),
        _saved_inputs(plan, layer, "gate_proj", "up_proj"),
    ]
    in_place = (weight for weight in layer if weight.trained and not (weight.is_expert and weight.is_adapter))
    if any(weight.is_expert or weight.module == "gate" for weight in in_place):
        copies[1] = 2
    if plan.recipe.kernels.blocks == "compiled":
        inputs = widths.computed * sum(map(bool, copies))
    elif plan.recipe.parallel.precision.startswith("autocast"):
        inputs = widths.computed * sum(copies)
    else:
        inputs = _input(widths) * sum(map(bool, copies))
    scaled = inputs * len(norms) // 2 * width
    own = fused * len(norms) // 2 if fused else sum(_of_norm(plan, widths, weight.trained) * width for weight in norms)
    return BytesPerToken(scaled, own + len(norms) * STATISTICS)


def _unrounded(plan: Plan, widths: ElementBytes) -> int:
    """Returns the additional bytes per element that a norm saves if it is scaled in fp32 before it is rounded."""
    return 2 if plan.model.model_type in ("gemma", "gemma2", "olmo2") and widths.stream < 4 else 0


def _attention(plan: Plan, layer: tuple[Weight, ...], widths: ElementBytes) -> int:
    """Returns the bytes of queries, keys, values and output; without a fused kernel, of the probabilities, too."""
    facts, recipe = plan.model, plan.recipe
    queries = facts.heads * facts.head_dim // plan.divisor("matrices")
    keys = max(facts.kv_heads * facts.head_dim // plan.divisor("matrices"), 1)
    intermediate = queries + 2 * (queries if _repeats_keys(plan) else keys * _key_copies(plan)) + queries
    if plan.head_ranks > 1 and recipe.model.attention_kernel != "eager":
        intermediate += queries  # the kernel's output, and the exchanged copy of it that the next projection reads
    saved, heads = widths.computed * intermediate, facts.heads // plan.divisor("matrices")
    if any("q_norm" in weight.name for weight in layer):
        is_trained = any("q_norm" in weight.name and weight.trained for weight in layer)
        normalised = 4 + (widths.computed + _unrounded(plan, widths) if is_trained else 0)
        if is_fused(plan):
            normalised = widths.computed
        saved += normalised * (queries + keys) + STATISTICS * (queries + keys) // facts.head_dim
    if recipe.parallel.precision.startswith("autocast") and any("o_proj.lora_A" in weight.name for weight in layer):
        saved += widths.computed * queries  # PEFT casts the input of A to fp32, and autocast back
    if recipe.model.attention_kernel == "eager":
        probabilities = 4 + (widths.computed if widths.computed < 4 else 0)
        if not _saved_inputs(plan, layer, "o_proj"):
            saved -= widths.computed * queries  # a fused kernel keeps its output itself
        return saved + probabilities * heads * recipe.data.sequence_length
    # torch has no fused kernel on GPUs in fp32 for keys that several queries share, without a mask.
    is_shared = facts.kv_heads < facts.heads and not recipe.data.has_document_mask
    is_sdpa = recipe.model.attention_kernel == "sdpa" and not plan.cluster.spec.on_cpu
    if is_sdpa and widths.computed == 4 and is_shared:
        return saved + widths.computed * heads * recipe.data.sequence_length
    return saved + 4 * heads  # log-sum-exp


def _intermediate_size(plan: Plan, layer: tuple[Weight, ...]) -> int:
    """Returns the elements per token of a product within a feed-forward layer; of all experts that a token visits."""
    tensor, width = plan.divisor("matrices"), plan.model.hidden_size
    experts = [weight for weight in layer if weight.is_expert and weight.is_matrix and not weight.is_adapter]
    if experts:
        intermediate = min((weight.shape[-1] for weight in experts if weight.name.endswith("down_proj")), default=0)
        intermediate = intermediate or min(min(weight.shape) for weight in experts)
        # Tensor parallel ranks split experts, or the tokens that they send to distributed experts.
        return intermediate // tensor * plan.model.experts_per_token
    fused = next((weight for weight in layer if "c_fc" in weight.name and weight.is_matrix), None)
    if fused:
        return fused.elements // width // tensor
    dense = (max(weight.shape) for weight in layer if "attn" not in weight.name and weight.is_matrix)
    return max(dense, default=4 * width) // tensor


def _feed_forward(plan: Plan, layer: tuple[Weight, ...], widths: ElementBytes) -> int:
    """Returns the bytes of both projections, the activation and the product, for each expert of a token."""
    width, intermediate = plan.model.hidden_size, _intermediate_size(plan, layer)
    experts = [weight for weight in layer if weight.is_expert and weight.is_matrix]
    if experts:
        # Each tensor parallel rank sends a part of the tokens to distributed experts.
        parts = plan.parallel.tensor if plan.parallel.expert > 1 else 1
        rows, router = plan.model.experts_per_token * width // parts, 3 * 4 * plan.model.experts
        trained = {weight.module for weight in experts if weight.trained}
        # Those of the first product, and of the second one.
        inputs = rows * bool(trained - {"down_proj"}) + intermediate * bool(trained - FIRST_PRODUCTS)
        indices = plan.model.experts_per_token * INDICES // parts
        return (rows + 3 * intermediate + inputs) * widths.computed + indices + router
    if any("c_fc" in weight.name for weight in layer):  # gelu_new: its input, half of it, tanh, one more; the product
        kept = any(weight.trained and weight.name.startswith("mlp.c_proj") and weight.is_matrix for weight in layer)
        return ((1 if is_fused(plan) else 4) + kept) * widths.computed * intermediate
    return ((2 if is_fused(plan) else 3) + _saved_inputs(plan, layer, "down_proj")) * widths.computed * intermediate


def _adapters(plan: Plan, layer: tuple[Weight, ...], widths: ElementBytes) -> BytesPerToken:
    """Returns the bytes that adapters keep in addition to their layers' inputs.

    These are the outputs of A; with dropout, also A's own input and a mask; with DoRA, also the outputs of the layer
    and of B, which are multiplied by the trained norms.
    """
    adapter, whole, sequence_sharded = plan.recipe.model.adapter, 0, 0
    for weight in layer:
        if ".lora_A." in weight.name:
            rank, inputs = weight.shape[-2:]
            is_split = split_of(plan, weight.module) == "columns"
            inputs //= plan.divisor("matrices") if is_split else 1
            whole += inputs * (widths.computed + 1) if adapter is not None and adapter.dropout else 0
            if is_split and not weight.is_expert:  # the result is scattered
                sequence_sharded += widths.computed * rank
            else:
                whole += widths.computed * rank * (plan.model.experts_per_token if weight.is_expert else 1)
        elif ".lora_magnitude_vector." in weight.name:
            slices = plan.divisor("matrices") if split_of(plan, weight.module) == "rows" else 1
            whole += 2 * widths.computed * weight.elements // slices
    return BytesPerToken(whole, sequence_sharded)


def _mask_elements(plan: Plan) -> int:
    """Returns the elements of a mask between packed documents: all queries by all keys, on every sequence rank."""
    return plan.batch.micro_batch_size * plan.recipe.data.sequence_length**2


def _per_layer(
    plan: Plan, weights: Weights, layers: Sequence[int], tokens: int, count: Callable[[Plan, Weights, int, int], T]
) -> list[T]:
    """Returns the bytes of some layers, computed once for equal ones."""
    runs = weights.runs_of_layers
    known = {
        run: count(plan, weights, index, tokens) for run, index in {runs[index]: index for index in layers}.items()
    }
    return [known[runs[index]] for index in layers]


def _backward_layers_of_stages(plan: Plan, rank: int) -> list[range]:
    """Returns the layers of each stage of a rank that a backward pass reaches; nothing is kept of those below them."""
    below, bounds = plan.model.layers - backward_layers(plan.model), [(0, plan.model.layers - 1)]
    if plan.stages:
        bounds = [plan.stages[stage].layers for stage in PipelineSchedule.of(plan.parallel).stages_of(rank)]
    return [range(max(first, below), last + 1) for first, last in bounds]


def _unsharded_estimate(plan: Plan, weights: Weights, index: int) -> int:
    """Returns the estimate of an eager layer without tensor or sequence parallelism, which a trace corrects."""
    whole = {axis.name: 1 for axis in CHOSEN if axis.divides & {"matrices", "tokens"}}
    changed = {
        "parallel": plan.parallel.model_copy(update=whole),
        "kernels": plan.recipe.kernels.model_copy(update={"blocks": "eager"}),
    }
    alone = plan.model_copy(update={"recipe": plan.recipe.model_copy(update=changed)})
    tokens = plan.batch.micro_batch_size * plan.recipe.data.sequence_length
    return layer_bytes(alone, weights, index, tokens)
