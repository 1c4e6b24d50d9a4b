"""Rules for adapters: strategies that would train them differently from PEFT."""

from __future__ import annotations

from collections.abc import Iterator
from fnmatch import fnmatchcase

from llmtrain.errors import did_you_mean
from llmtrain.plan.axes import EXPERT, TENSOR, used
from llmtrain.plan.draft import Draft
from llmtrain.plan.facts.trained import matches
from llmtrain.plan.rules.rule import Fault, assignment, rule


@rule("adapter.dora", "run")
def dora(draft: Draft) -> Iterator[Fault]:
    """Refuses DoRA if ranks do not hold whole matrices (`peft/tuners/lora/dora.py:forward`). DoRA reads the whole
    matrix of a layer in each pass. ZeRO-3 has freed it by then, and tensor parallel ranks hold only a part, whose rows
    have other norms."""
    adapter, parallel = draft.recipe.model.adapter, draft.parallel
    if adapter is None or not adapter.dora:
        return
    if TENSOR in used(parallel):
        message = "DoRA computes norms of whole matrices, which tensor parallel ranks split"
        yield Fault("model.adapter.dora", message, f"{assignment(parallel__tensor=1)}, or train without DoRA")
    if parallel.strategy == "deepspeed" and parallel.zero_stage == 3:
        message = "DoRA reads matrices outside of their layers, where ZeRO-3 has not gathered them"
        yield Fault("model.adapter.dora", message, f"{assignment(parallel__zero_stage=2)}, or train without DoRA")


@rule("adapter.experts", "run", axis=EXPERT)
def experts(draft: Draft) -> Iterator[Fault]:
    """Refuses frozen experts under AutoEP at ZeRO 1 and 2 (`stage_1_and_2.py:_configure_moe_settings`). DeepSpeed's
    ZeRO requires a group of trained experts wherever experts are distributed."""
    model, parallel, facts = draft.recipe.model, draft.parallel, draft.facts
    if parallel.zero_stage not in (1, 2) or not model.is_partly_frozen:
        return
    if facts is None or facts.weights is None:
        return
    names = (name for name, weight in facts.weights.in_layers() if weight.is_expert)
    patterns = [f"*{module}.*" for module in model.adapter.modules_to_save] if model.adapter else model.trainable
    if not any(fnmatchcase(name, pattern) for name in names for pattern in patterns):
        message = f"ZeRO-{parallel.zero_stage} cannot be set up if all distributed experts are frozen"
        yield Fault("parallel.zero_stage", message, STAGES)


@rule("adapter.targets", "run")
def targets(draft: Draft) -> Iterator[Fault]:
    """Refuses patterns that match no linear layer, before workers do (`llmtrain/models/adapter.py:_adapted_modules`).
    If no pattern matches, nothing is trained."""
    adapter, weights = draft.recipe.model.adapter, draft.facts.weights if draft.facts else None
    if adapter is None or weights is None or adapter.targets == "all-linear":
        return
    layers = {
        name.removesuffix(".weight")
        for name, weight in weights.in_layers()
        if len(weight.shape) == 2 and not weight.is_adapter
    }
    ends = {weight.name.removesuffix(".weight") for weight in (*weights.embedding, *weights.outside, *weights.head)}
    known = sorted({name.rpartition(".")[2] for name in layers})
    for pattern in adapter.targets:
        if not any(matches(name, [pattern]) for name in layers | ends | {"lm_head"}):
            message = f"'{pattern}' matches no linear layer{did_you_mean(pattern, known)}"
            yield Fault("model.adapter.targets", message, f"its linear layers are {', '.join(known)}")


@rule("adapter.without_experts", "run", refuses=False)
def without_experts(draft: Draft) -> Iterator[Fault]:
    """Gives a note if the default targets leave out the experts. Adapters are added to linear layers. Experts that a
    model stores as one tensor for each layer are none, so they stay as they are; PEFT's `all-linear` adapts them."""
    adapter, facts = draft.recipe.model.adapter, draft.facts
    if adapter is None or adapter.pretrained or adapter.targets != "all-linear" or facts is None or not facts.weights:
        return
    weights = (weight for _, weight in facts.weights.in_layers())
    experts = sum(weight.elements for weight in weights if weight.is_expert and len(weight.shape) > 2)
    if experts:
        message = f"'all-linear' adapts no expert: {experts:,} of {facts.parameters:,} parameters are experts"
        yield Fault("model.adapter.targets", message, "train other layers, or the experts as a whole (model.trainable)")


@rule("adapter.nf4", "run")
def nf4(draft: Draft) -> Iterator[Fault]:
    """Refuses 4-bit weights if the engine would split them, or if they are multiplied in fp8. 4-bit weights are blocks
    of a whole matrix, with scales for 64 and for 16,384 elements, in buffers. ZeRO-3 and FSDP2 shard parameters only,
    so every rank would hold all buffers, as at ZeRO-2. The slice of a tensor parallel rank would have other blocks,
    with other values."""
    model, parallel, facts = draft.recipe.model, draft.parallel, draft.facts
    if model.quantize == "none":
        return
    field = "model.quantize"
    if TENSOR in used(parallel):
        message = "slices of tensor parallel ranks would have other quantization blocks than the whole matrix"
        yield Fault(field, message, f"{assignment(parallel__tensor=1)}, or {WHOLE}")
    if EXPERT in used(parallel):
        message = "distributed experts have not been tested with 4-bit weights"
        yield Fault(field, message, f"{assignment(parallel__expert=1)}, or {WHOLE}")
    if parallel.strategy == "fsdp2":
        message = "FSDP2 shards parameters only, so every rank would hold all 4-bit weights"
        yield Fault(field, message, f"{assignment(parallel__accelerate='ddp')}, or {WHOLE}")
    elif parallel.strategy == "deepspeed" and parallel.zero_stage == 3:
        message = "ZeRO-3 shards parameters only, so every rank would hold all 4-bit weights"
        yield Fault(field, message, f"{assignment(parallel__zero_stage=2)}, or {WHOLE}")
    if draft.recipe.kernels.fp8 != "off":
        message = "products with 4-bit weights are computed in the model's data type, not in fp8"
        yield Fault(field, message, f"{assignment(kernels__fp8='off')}, or {WHOLE}")
    if facts is not None and facts.model_type == "gpt2":
        yield Fault(field, "GPT-2's layers have no nn.Linear, and 'nf4' quantizes only these", WHOLE)


WHOLE = assignment(model__quantize="none")
STAGES = f"{assignment(parallel__zero_stage=3)}, or {assignment(parallel__expert=1)}"
