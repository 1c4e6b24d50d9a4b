"""Rules for adapters: strategies that would train them differently from PEFT."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from llmtrain.errors import did_you_mean
from llmtrain.plan.axes import TENSOR, used
from llmtrain.plan.draft import Draft
from llmtrain.plan.facts.families import CONV1D_FAMILIES
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


@rule("adapter.conv1d", "run")
def conv1d(draft: Draft) -> Iterator[Fault]:
    """Refuses adapters of GPT-2's layers on tensor parallel ranks. PEFT gives the adapter of a `Conv1D` the shape of
    the rank's slice of it, not that of the layer (`peft/tuners/tuners_utils.py:_get_in_out_features`)."""
    facts = draft.facts
    if draft.recipe.model.adapter is None or TENSOR not in used(draft.parallel) or facts is None:
        return
    if facts.text_type in CONV1D_FAMILIES:
        message = f"must be 1, not {draft.parallel.tensor}: adapters of the layers of '{facts.text_type}' are not split"
        yield Fault("parallel.tensor", message, assignment(parallel__tensor=1))


@rule("adapter.parameters", "read")
def parameters(draft: Draft) -> Iterator[Fault]:
    """Refuses DoRA and dropout with adapters of parameters, as PEFT does (`peft/tuners/lora/layer.py:ParamWrapper`).
    PEFT adds such an adapter to its parameter, so there is no product with the input whose rows could be scaled, or
    whose input could be dropped."""
    adapter = draft.recipe.model.adapter
    if adapter is None or not adapter.target_parameters:
        return
    for name, value, off in (("dora", adapter.dora, "false"), ("dropout", adapter.dropout, "0")):
        if value:
            message = f"is not defined for adapters of parameters ({', '.join(adapter.target_parameters)})"
            fix = f"--set model.adapter.{name}={off}, or leave out model.adapter.target_parameters"
            yield Fault(f"model.adapter.{name}", message, fix)


@rule("adapter.targets", "run")
def targets(draft: Draft) -> Iterator[Fault]:
    """Refuses patterns that match nothing, before workers do (`llmtrain/models/adapter.py:_adapted_modules`), and
    adapters without any matrix. A run would train less than its recipe says, or nothing."""
    adapter, weights = draft.recipe.model.adapter, draft.facts.weights if draft.facts else None
    if adapter is None or weights is None:
        return
    own = {name: weight for name, weight in weights.in_layers() if weight.is_matrix and not weight.is_adapter}
    layers = {name.removesuffix(".weight") for name, weight in own.items() if weight.kind == "layer"}
    stacks = {name for name, weight in own.items() if weight.kind != "layer"}
    outside = (*weights.embedding, *weights.outside, *weights.head)
    ends = {weight.name.removesuffix(".weight") for weight in outside} | {"lm_head"}
    patterns = () if adapter.targets == "all-linear" else adapter.targets
    missed = list(_unmatched("model.adapter.targets", "linear layer", patterns, layers, ends, 1))
    others = {weight.name for weight in outside}
    field, what = "model.adapter.target_parameters", "parameter of fused experts or their router"
    missed += _unmatched(field, what, adapter.target_parameters, stacks, others | own.keys() - stacks, 2)
    yield from missed
    if not missed and not any(weight.is_adapter for _, weight in weights.in_layers()):
        message, fix = "adapts nothing", "name linear layers in model.adapter.targets, or use 'all-linear'"
        yield Fault("model.adapter", message, fix)


def _unmatched(
    field: str, what: str, patterns: Sequence[str], named: set[str], others: set[str], parts: int
) -> Iterator[Fault]:
    """Yields patterns that match no name. others: names that workers refuse. parts: those of a name that are shown."""
    known = sorted({".".join(name.split(".")[-parts:]) for name in named})
    for pattern in patterns:
        if not any(matches(name, [pattern]) for name in named | others):
            message = f"'{pattern}' matches no {what}{did_you_mean(pattern, known)}"
            yield Fault(field, message, f"there are {', '.join(known)}" if known else "leave it out")


@rule("adapter.without_experts", "run", refuses=False)
def without_experts(draft: Draft) -> Iterator[Fault]:
    """Gives a note if adapters leave out the experts. `all-linear` means linear layers, and experts that a model stores
    as one tensor for each layer are none. In some families, PEFT's `all-linear` also means experts and routers, because
    these were linear layers once (`peft/utils/transformers_weight_conversion.py:_convert_peft_config_moe`)."""
    adapter, facts = draft.recipe.model.adapter, draft.facts
    if adapter is None or adapter.pretrained or adapter.targets != "all-linear" or facts is None or not facts.weights:
        return
    fused = {name: weight for name, weight in facts.weights.in_layers() if weight.is_expert and len(weight.shape) > 2}
    if fused and not any(weight.is_adapter for weight in fused.values()):
        experts = sum(weight.elements for weight in fused.values())
        names = ",".join(sorted({f'"experts.{name.rpartition(".")[2]}"' for name in fused}))
        message = (
            f"'all-linear' adapts no expert: {experts:,} of {facts.parameters:,} parameters are experts; "
            f"--set 'model.adapter.target_parameters=[{names}]' adapts them"
        )
        yield Fault("model.adapter.targets", message)


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
    if parallel.strategy == "fsdp2":
        message = "FSDP2 shards parameters only, so every rank would hold all 4-bit weights"
        yield Fault(field, message, f"{assignment(parallel__accelerate='ddp')}, or {WHOLE}")
    elif parallel.strategy == "deepspeed" and parallel.zero_stage == 3:
        message = "ZeRO-3 shards parameters only, so every rank would hold all 4-bit weights"
        yield Fault(field, message, f"{assignment(parallel__zero_stage=2)}, or {WHOLE}")
    if draft.recipe.kernels.fp8 != "off":
        message = "products with 4-bit weights are computed in the model's data type, not in fp8"
        yield Fault(field, message, f"{assignment(kernels__fp8='off')}, or {WHOLE}")
    if facts is not None and facts.text_type in CONV1D_FAMILIES:
        yield Fault(
            field, f"the layers of '{facts.text_type}' have no nn.Linear, and 'nf4' quantizes only these", WHOLE
        )


WHOLE = assignment(model__quantize="none")
