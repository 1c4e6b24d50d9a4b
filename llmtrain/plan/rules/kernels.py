"""Rules for kernels, and for recomputation in the backward pass (activation checkpointing)."""

from __future__ import annotations

from collections.abc import Iterator

from llmtrain.plan.axes import TENSOR, ring_degree, used
from llmtrain.plan.draft import Draft
from llmtrain.plan.kernels import TRACED, WHOLE_LOSS, needs_whole_loss, recomputes_loss
from llmtrain.plan.rules.rule import Fault, assignment, fault_for, rule

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
    """Refuses a chunked loss if all logits are needed, and kernels that compute another loss. Some engines need the
    logits themselves, or never hold the whole head. A user's own loss of documents is given all of their logits;
    compiled and Liger's kernels compute the cross-entropy."""
    loss, objective = draft.recipe.kernels.loss, draft.recipe.objective
    if loss not in ("auto", "whole") and (why := needs_whole_loss(draft.recipe, draft.facts)):
        of_documents = objective.is_own and objective.reads_whole_documents
        what = f"objective.unit={objective.unit}" if of_documents else draft.parallel.strategy
        if objective.hidden_states:
            what = "objective.hidden_states"
        if (labels := draft.recipe.model.num_labels) is not None:
            what = f"model.num_labels={labels}"
        elif draft.recipe.model.build and draft.parallel.strategy not in WHOLE_LOSS and not of_documents:
            what = draft.recipe.model.build
        message = f"'{loss}' is not supported with {what}: {why}"
        yield Fault("kernels.loss", message, assignment(kernels__loss="whole"))
    elif objective.is_own and loss in ("compiled", "liger"):
        message = f"'{loss}' computes the cross-entropy, not {objective.name}"
        yield Fault("kernels.loss", message, assignment(kernels__loss="chunked"))


@rule("kernels.liger_loss", "read")
def liger_loss(draft: Draft) -> Iterator[Fault]:
    """Refuses Liger's loss if the head is sharded or split, or if its gradients depend on a weight not yet known.
    Liger's loss reads the whole weight of the head, and computes gradients during the forward pass."""
    recipe = draft.recipe
    if recipe.kernels.loss != "liger" or needs_whole_loss(recipe, draft.facts) or recipe.objective.is_own:
        return  # `kernels.loss` refuses the last two
    is_preference, is_zero3 = draft.recipe.objective.is_preference, draft.parallel.zero_stage == 3
    is_scaled = recomputes_loss(draft.recipe) and not is_preference and not is_zero3
    reasons = {
        "ZeRO-3 gathers the head's weight only while its module runs": is_zero3,
        "the weight of a token is only known once all tokens of its completion are": is_preference,
        f"the loss scale of {draft.parallel.precision} is applied after its gradients are computed": is_scaled,
        "tensor parallel ranks hold slices of the head": TENSOR in used(draft.parallel),
    }
    yield from fault_for(reasons, "kernels.loss", "'liger' cannot be used", assignment(kernels__loss="chunked"))


@rule("kernels.fp8", "read")
def fp8(draft: Draft) -> Iterator[Fault]:
    """Refuses fp8 if the device, the precision or the layout does not support it. torchao replaces the linear layers of
    whole models or pipeline stages in bf16. It saves the weights of the forward pass for the backward pass, and
    multiplies matrices whose dimensions are multiples of 16."""
    kind, parallel, facts = draft.recipe.kernels.fp8, draft.parallel, draft.facts
    if kind == "off":
        return
    recipe, precision, is_zero3 = draft.recipe, parallel.precision, parallel.zero_stage == 3
    is_wrapped = parallel.strategy not in ("deepspeed", "horovod")
    tokens = recipe.batch.micro_batch_size * recipe.data.sequence_length // parallel.sequence
    reasons = {
        WITHOUT_FP8.get(draft.cluster.device, ""): draft.cluster.device in WITHOUT_FP8,
        f"the weights must be in bf16, but parallel.precision is '{precision}'": precision != "bf16",
        f"{parallel.strategy} wraps weights in its own way, which has not been compared": is_wrapped,
        "the weights that ZeRO-3 gathers would be kept from the forward pass to the backward pass": is_zero3,
        "tensor parallelism replaces or wraps the linear layers itself": TENSOR in used(parallel),
        "in a mixture of experts it would convert the routers, but not the experts": bool(facts and facts.experts),
        f"the {tokens:,} tokens of a micro-batch are not a multiple of {ROWS}": tokens % ROWS > 0,
    }
    yield from fault_for(reasons, "kernels.fp8", f"'{kind}' cannot be used", assignment(kernels__fp8="off"))


@rule("kernels.matmul", "read")
def matmul(draft: Draft) -> Iterator[Fault]:
    """Refuses a choice of matrix products that would have no effect. oneDNN's products replace those of torch in fp32
    on CPUs; torch uses oneDNN itself in bf16."""
    if draft.recipe.kernels.matmul == "onednn":
        reasons = {
            f"the device is '{draft.cluster.device}'": not draft.cluster.spec.on_cpu,
            f"parallel.precision is '{draft.parallel.precision}'": draft.parallel.precision != "fp32",
        }
        fix = assignment(kernels__matmul="auto")
        yield from fault_for(reasons, "kernels.matmul", "'onednn' needs fp32 on a CPU", fix)


FULL = assignment(parallel__activation_checkpointing="full")
_NOT_COPIED = "nn.DataParallel does not copy the replaced methods of layers correctly"


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
    kernels, attention = draft.recipe.kernels, draft.recipe.model.attention_kernel
    ring = ring_degree(draft.parallel, draft.facts)
    reasons = {
        "Liger's rotation overwrites the products that are kept (kernels.blocks=liger)": kernels.blocks == "liger",
        f"'{attention}' breaks the graph of a compiled layer": kernels.blocks == "compiled" and attention not in TRACED,
        "a ring breaks the graph of a compiled layer": kernels.blocks == "compiled" and ring > 1,
        _NOT_COPIED: draft.parallel.strategy == "data_parallel",
    }
    yield from fault_for(reasons, "parallel.activation_checkpointing", "'selective' cannot be used", FULL)


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
    reasons = {
        "routers choose experts for all tokens of a micro-batch together": bool(draft.facts and draft.facts.experts),
        "the graph of a compiled layer would contain each tile": draft.recipe.kernels.blocks == "compiled",
        "selective checkpoints would keep the products of all tiles": parallel.activation_checkpointing == "selective",
        _NOT_COPIED: parallel.strategy == "data_parallel",
    }
    fix = assignment(parallel__tiled_mlp="false")
    yield from fault_for(reasons, "parallel.tiled_mlp", "cannot be used", fix)
