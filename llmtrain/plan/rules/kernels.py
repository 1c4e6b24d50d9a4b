"""Rules for kernels, and for recomputation in the backward pass (activation checkpointing)."""

from __future__ import annotations

from collections.abc import Iterator

from llmtrain.plan.axes import TENSOR, used
from llmtrain.plan.draft import Draft
from llmtrain.plan.kernels import TRACED, needs_whole_loss, recomputes_loss
from llmtrain.plan.rules.rule import Fault, assignment, rule

WITHOUT_FP8 = {
    "cpu": "CPUs do not multiply in fp8",
    "a100": "an A100 does not multiply in fp8, which needs compute capability 8.9",
    "mi300x": "torchao's conversion has only been checked for NVIDIA's fp8",
}
"""Device on which fp8 is refused → the reason. GPUs that are in no table are queried when the run starts."""
ROWS = 16
"""Each dimension of a matrix product in fp8 must be a multiple of this (`torch._scaled_mm`)."""


@rule("kernels.compiled_experts", "run")
def compiled_experts(draft: Draft) -> Iterator[Fault]:
    """Refuses compiled layers with experts (`transformers/integrations/moe.py:grouped_mm_experts_forward`). The number
    of rows that each expert multiplies depends on the data, but a compiled graph has fixed shapes."""
    facts = draft.facts
    if facts is not None and facts.experts and draft.recipe.kernels.blocks == "compiled":
        message = f"'compiled' is not supported for '{facts.model_type}': its layers have experts"
        yield Fault("kernels.blocks", message, assignment(kernels__blocks="eager"))


@rule("kernels.compiled_copies", "read")
def compiled_copies(draft: Draft) -> Iterator[Fault]:
    """Refuses compiled layers under nn.DataParallel (`torch/nn/parallel/replicate.py`): the copy of a module would call
    the compiled layer of the first device."""
    if draft.parallel.strategy == "data_parallel" and draft.recipe.kernels.blocks == "compiled":
        message = "'compiled' is not supported with nn.DataParallel, which does not copy the compiled code of a layer"
        yield Fault("kernels.blocks", message, assignment(kernels__blocks="eager"))


@rule("kernels.liger_device", "read")
def liger_device(draft: Draft) -> Iterator[Fault]:
    """Refuses Liger's kernels on CPUs. They are written in Triton, which compiles for GPUs."""
    kernels = draft.recipe.kernels
    for field, instead in (("blocks", "eager"), ("loss", "chunked")):
        if getattr(kernels, field) == "liger" and draft.cluster.spec.on_cpu:
            message = "'liger' needs a GPU: its kernels are written in Triton"
            yield Fault(f"kernels.{field}", message, assignment(**{f"kernels__{field}": instead}))


@rule("kernels.liger_blocks", "read")
def liger_blocks(draft: Draft) -> Iterator[Fault]:
    """Refuses Liger's layers under nn.DataParallel, which copies a module's attributes, including the methods that
    Liger replaces, which stay bound to the first device's weights."""
    if draft.recipe.kernels.blocks == "liger" and draft.parallel.strategy == "data_parallel":
        message = (
            "'liger' is not supported with nn.DataParallel, which does not correctly copy the methods "
            "that Liger replaces"
        )
        yield Fault("kernels.blocks", message, assignment(kernels__blocks="eager"))


@rule("kernels.loss", "read")
def loss_in_chunks(draft: Draft) -> Iterator[Fault]:
    """Refuses a chunked loss if the engine needs all logits. Some engines need the logits themselves, or never hold the
    whole head."""
    loss = draft.recipe.kernels.loss
    if loss not in ("auto", "whole") and (why := needs_whole_loss(draft.recipe)):
        message = f"'{loss}' is not supported with {draft.parallel.strategy}: {why}"
        yield Fault("kernels.loss", message, assignment(kernels__loss="whole"))


@rule("kernels.liger_loss", "read")
def liger_loss(draft: Draft) -> Iterator[Fault]:
    """Refuses Liger's loss if the head is sharded or split, or if its gradients depend on a weight not yet known.
    Liger's loss reads the whole weight of the head, and computes gradients during the forward pass."""
    if draft.recipe.kernels.loss != "liger" or needs_whole_loss(draft.recipe):  # `kernels.loss` refuses the latter
        return
    reasons = []
    if draft.parallel.zero_stage == 3:
        reasons.append("ZeRO-3 gathers the head's weight only while its module runs")
    if draft.recipe.objective.is_preference:
        reasons.append("the weight of a token is only known once all tokens of its completion are")
    elif draft.parallel.zero_stage < 3 and recomputes_loss(draft.recipe):
        reasons.append(f"the loss scale of {draft.parallel.precision} is applied after its gradients are computed")
    if TENSOR in used(draft.parallel):
        reasons.append("tensor parallel ranks hold slices of the head")
    if reasons:
        message = f"'liger' cannot be used: {'; '.join(reasons)}"
        yield Fault("kernels.loss", message, assignment(kernels__loss="chunked"))


@rule("kernels.fp8", "read")
def fp8(draft: Draft) -> Iterator[Fault]:
    """Refuses fp8 if the device, the precision or the layout does not support it. torchao replaces the linear layers of
    whole models or pipeline stages in bf16. It saves the weights of the forward pass for the backward pass, and
    multiplies matrices whose dimensions are multiples of 16."""
    kind, parallel, facts = draft.recipe.kernels.fp8, draft.parallel, draft.facts
    if kind == "off":
        return
    reasons = [why for name, why in WITHOUT_FP8.items() if name == draft.cluster.device]
    if parallel.precision != "bf16":
        reasons.append(f"the weights must be in bf16, but parallel.precision is '{parallel.precision}'")
    if parallel.strategy not in ("deepspeed", "horovod"):
        reasons.append(f"{parallel.strategy} wraps weights in its own way, which has not been compared")
    if parallel.zero_stage == 3:
        reasons.append("the weights that ZeRO-3 gathers would be kept from the forward pass to the backward pass")
    if TENSOR in used(parallel):
        reasons.append("tensor parallelism replaces or wraps the linear layers itself")
    if facts is not None and facts.experts:
        reasons.append("in a mixture of experts it would convert the routers, but not the experts")
    if tokens := _uneven_tokens(draft):
        reasons.append(f"the {tokens:,} tokens of a micro-batch are not a multiple of {ROWS}")
    if reasons:
        yield Fault("kernels.fp8", f"'{kind}' cannot be used: {'; '.join(reasons)}", assignment(kernels__fp8="off"))


def _uneven_tokens(draft: Draft) -> int:
    """Returns the tokens of a micro-batch on one device, or 0 if they are a multiple of `ROWS`."""
    recipe = draft.recipe
    tokens = recipe.batch.micro_batch_size * recipe.data.sequence_length // recipe.parallel.sequence
    return tokens if tokens % ROWS else 0


@rule("kernels.matmul", "read")
def matmul(draft: Draft) -> Iterator[Fault]:
    """Refuses a choice of matrix products that would have no effect. oneDNN's products replace those of torch in fp32
    on CPUs; torch uses oneDNN itself in bf16."""
    if draft.recipe.kernels.matmul != "onednn":
        return
    reasons = []
    if not draft.cluster.spec.on_cpu:
        reasons.append(f"the device is '{draft.cluster.device}'")
    if draft.parallel.precision != "fp32":
        reasons.append(f"parallel.precision is '{draft.parallel.precision}'")
    if reasons:
        message = f"'onednn' needs fp32 on a CPU, but {' and '.join(reasons)}"
        yield Fault("kernels.matmul", message, assignment(kernels__matmul="auto"))


FULL = assignment(parallel__activation_checkpointing="full")


@rule("recompute.every", "arithmetic")
def recompute_every(draft: Draft) -> Iterator[Fault]:
    """Refuses `checkpoint_every` without activation checkpointing, where there are no layers to choose from."""
    parallel = draft.parallel
    if parallel.checkpoint_every > 1 and parallel.activation_checkpointing == "none":
        message = f"{parallel.checkpoint_every} has no effect: activation_checkpointing is 'none'"
        yield Fault("parallel.checkpoint_every", message, f"{FULL}, or {assignment(parallel__checkpoint_every=1)}")


@rule("recompute.selective", "run")
def recompute_selective(draft: Draft) -> Iterator[Fault]:
    """Refuses selective checkpointing together with options that change or hide the results to be kept. Selective
    checkpoints keep what torch's own operations return. Liger's rotation overwrites it, a break in a compiled layer's
    graph hides it, and nn.DataParallel copies the layer's method, which stays bound to the original layer."""
    if draft.parallel.activation_checkpointing != "selective":
        return
    reasons, kernels, attention = [], draft.recipe.kernels, draft.recipe.model.attention_kernel
    if kernels.blocks == "liger":
        reasons.append("Liger's rotation overwrites the products that are kept (kernels.blocks=liger)")
    if kernels.blocks == "compiled" and attention not in TRACED:
        reasons.append(f"'{attention}' breaks the graph of a compiled layer")
    if draft.parallel.strategy == "data_parallel":
        reasons.append("nn.DataParallel does not copy the replaced methods of layers correctly")
    if reasons:
        yield Fault("parallel.activation_checkpointing", f"'selective' cannot be used: {'; '.join(reasons)}", FULL)


@rule("recompute.offload", "read")
def recompute_offload(draft: Draft) -> Iterator[Fault]:
    """Refuses activation offload without full checkpointing, which keeps layer inputs, or if threads run layers. Only
    the inputs of fully recomputed layers are few enough to be copied while layers compute. nn.DataParallel runs its
    copies of a layer in threads, which would share one stream of copies."""
    parallel = draft.parallel
    if not parallel.offload_activations:
        return
    if parallel.activation_checkpointing != "full":
        message = f"needs activation_checkpointing 'full', not '{parallel.activation_checkpointing}'"
        yield Fault("parallel.offload_activations", message, FULL)
    if parallel.strategy == "data_parallel":
        message = "is not supported with nn.DataParallel, which runs layers in threads"
        yield Fault("parallel.offload_activations", message, assignment(parallel__offload_activations="false"))


@rule("recompute.tiles", "run")
def recompute_tiles(draft: Draft) -> Iterator[Fault]:
    """Refuses tiled feed-forward layers for experts, and with options that change how a layer is called. Tiles call the
    feed-forward part of a layer, which must give each token's result alone. Each family is tried on a tiny copy when
    the engine is built."""
    parallel = draft.parallel
    if not parallel.tiled_mlp:
        return
    reasons = []
    if draft.facts is not None and draft.facts.experts:
        reasons.append("routers choose experts for all tokens of a micro-batch together")
    if draft.recipe.kernels.blocks == "compiled":
        reasons.append("the graph of a compiled layer would contain each tile")
    if parallel.activation_checkpointing == "selective":
        reasons.append("selective checkpoints would keep the products of all tiles")
    if parallel.strategy == "data_parallel":
        reasons.append("nn.DataParallel does not copy the replaced methods of layers correctly")
    if reasons:
        message = f"cannot be used: {'; '.join(reasons)}"
        yield Fault("parallel.tiled_mlp", message, assignment(parallel__tiled_mlp="false"))
