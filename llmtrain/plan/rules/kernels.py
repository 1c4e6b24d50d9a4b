"""Kernels that run on some devices, and under some splits, only."""

from __future__ import annotations

from collections.abc import Iterator

from llmtrain.plan.draft import Draft
from llmtrain.plan.kernels import needs_whole_loss, recomputes_loss
from llmtrain.plan.rules.rule import Fault, assignment, rule

WITHOUT_FP8 = {
    "cpu": "a CPU multiplies no fp8",
    "a100": "an A100 multiplies no fp8: that takes compute capability 8.9",
    "mi300x": "torchao's conversion was read for NVIDIA's fp8 only",
}
"""Devices that fp8 is refused on, and why; a GPU that is in no table is asked when the run starts."""
ROWS = 16
"""Numbers by which each side of a product in fp8 must divide (`torch._scaled_mm`)."""


@rule(
    "kernels.compiled_experts",
    "How many rows of a product each expert takes only the data tell, which a graph of fixed shapes cannot follow.",
    "run",
)
def compiled_experts(draft: Draft) -> Iterator[Fault]:
    """Compiled layers with experts (`transformers/integrations/moe.py:grouped_mm_experts_forward`)."""
    facts = draft.facts
    if facts is not None and facts.experts and draft.recipe.kernels.blocks == "compiled":
        message = f"'compiled' was given, but the layers of '{facts.model_type}' have experts"
        yield Fault("kernels.blocks", message, assignment(kernels__blocks="eager"))


@rule(
    "kernels.compiled_copies",
    "nn.DataParallel copies modules to each device, and a copy would call the compiled layer of the first.",
    "read",
)
def compiled_copies(draft: Draft) -> Iterator[Fault]:
    """Compiled layers that are copied (`torch/nn/parallel/replicate.py`)."""
    if draft.parallel.strategy == "data_parallel" and draft.recipe.kernels.blocks == "compiled":
        message = "'compiled' was given, but nn.DataParallel copies layers without what they are compiled to"
        yield Fault("kernels.blocks", message, assignment(kernels__blocks="eager"))


@rule("kernels.liger_device", "Liger's kernels are written in Triton, which compiles for GPUs.", "read")
def liger_device(draft: Draft) -> Iterator[Fault]:
    """Liger's kernels on CPUs."""
    kernels = draft.recipe.kernels
    for field, instead in (("blocks", "eager"), ("loss", "chunked")):
        if getattr(kernels, field) == "liger" and draft.cluster.spec.on_cpu:
            message = "liger was given, whose kernels are Triton's: they run on GPUs"
            yield Fault(f"kernels.{field}", message, assignment(**{f"kernels__{field}": instead}))


@rule(
    "kernels.liger_blocks",
    "nn.DataParallel copies a module's attributes, and so the methods in the place of its own, which keep to the first "
    "device's weights.",
    "read",
)
def liger_blocks(draft: Draft) -> Iterator[Fault]:
    """Liger's layers where modules are copied."""
    if draft.recipe.kernels.blocks == "liger" and draft.parallel.strategy == "data_parallel":
        message = "liger was given, whose methods nn.DataParallel does not copy right"
        yield Fault("kernels.blocks", message, assignment(kernels__blocks="eager"))


@rule(
    "kernels.liger_loss",
    "Liger's loss reads the head's weight itself, whole, and takes its gradient in the forward pass.",
    "read",
)
def liger_loss(draft: Draft) -> Iterator[Fault]:
    """Liger's loss where the head is sharded or cut, or gradients must be scaled before they are taken."""
    if draft.recipe.kernels.loss != "liger" or needs_whole_loss(draft.recipe):  # `kernels.loss` refuses the latter
        return
    reasons = []
    if draft.parallel.zero_stage == 3:
        reasons.append("ZeRO-3 has the head's weight whole only while its module runs")
    elif recomputes_loss(draft.recipe):
        reasons.append(f"the loss scale of {draft.parallel.precision} comes after its gradients are taken")
    if draft.parallel.tensor > 1:
        reasons.append("tensor parallel ranks have slices of the head")
    if reasons:
        yield Fault(
            "kernels.loss", f"liger was given, but {', and '.join(reasons)}", assignment(kernels__loss="chunked")
        )


@rule(
    "kernels.fp8",
    "torchao replaces the linear layers of whole or staged models in bf16; it saves weights for the backward pass as "
    "they are in the forward pass, and multiplies matrices whose sides divide by 16.",
    "read",
)
def fp8(draft: Draft) -> Iterator[Fault]:
    """Products in fp8 where the device, the precision or the split has none."""
    kind, parallel, facts = draft.recipe.kernels.fp8, draft.parallel, draft.facts
    if kind == "off":
        return
    reasons = [why for name, why in WITHOUT_FP8.items() if name == draft.cluster.device]
    if parallel.precision != "bf16":
        reasons.append(f"the weights are to be in bf16, and parallel.precision is '{parallel.precision}'")
    if parallel.strategy not in ("deepspeed", "horovod"):
        reasons.append(f"{parallel.strategy} wraps weights in its own way, which was not compared")
    if parallel.zero_stage == 3:
        reasons.append("ZeRO-3's whole weights would be kept from the forward pass to the backward pass")
    if parallel.tensor > 1:
        reasons.append("tensor parallelism replaces or wraps the linear layers itself")
    if facts is not None and facts.experts:
        reasons.append("in a mixture of experts it would convert routers, and not the experts")
    if tokens := _uneven_tokens(draft):
        reasons.append(f"the {tokens:,} tokens of a micro-batch do not divide by {ROWS}")
    if reasons:
        yield Fault("kernels.fp8", f"{kind} was given, but {'; '.join(reasons)}", assignment(kernels__fp8="off"))


def _uneven_tokens(draft: Draft) -> int:
    """Tokens of a micro-batch on one device; 0 where they divide."""
    recipe = draft.recipe
    tokens = recipe.batch.micro_batch_size * recipe.data.sequence_length // recipe.parallel.sequence
    return tokens if tokens % ROWS else 0


RULES = (compiled_experts, compiled_copies, liger_device, liger_blocks, liger_loss, fp8)
