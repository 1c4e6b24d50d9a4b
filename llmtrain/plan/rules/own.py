"""Rules for code of the user's own: models, from what trials on a tiny copy have shown, and changes of gradients."""

from __future__ import annotations

from collections.abc import Iterator

from llmtrain.plan.axes import PIPELINE, SEQUENCE, TENSOR
from llmtrain.plan.draft import Draft
from llmtrain.plan.rules.rule import Fault, assignment, rule


@rule("own.documents", "run")
def documents(draft: Draft) -> Iterator[Fault]:
    """Refuses packed documents with masks for a user's own model in which they influence each other. Its attention has
    to be `scaled_dot_product_attention` with `is_causal=True`, and its positions have to be `position_ids`."""
    facts = draft.facts
    if facts is None or facts.trials is None or not facts.trials.documents or not draft.recipe.data.has_document_mask:
        return
    message = f"'{facts.model_type}' lets packed documents influence each other: {facts.trials.documents}"
    fix = f"{assignment(data__packing='none')}, or {assignment(data__mask_documents='false')}"
    yield Fault("data.mask_documents", message, fix)


@rule("own.stages", "run", axis=PIPELINE)
def stages(draft: Draft) -> Iterator[Fault]:
    """Refuses pipelines for a user's own model whose tiny copy computes something else in two stages."""
    facts = draft.facts
    if facts is not None and facts.trials is not None and facts.trials.stages:
        message = f"must be 1, not {draft.parallel.pipeline}: {facts.trials.stages}"
        yield Fault("parallel.pipeline", message, assignment(parallel__pipeline=1))


@rule("own.sequence", "run", axis=SEQUENCE)
def sequence(draft: Draft) -> Iterator[Fault]:
    """Refuses slices of sequences for a user's own model in which something other than its attention mixes tokens, or
    whose own loss is computed from all tokens of a micro-batch."""
    facts = draft.facts
    if facts is not None and facts.trials is not None and facts.trials.sequence:
        message = f"must be 1, not {draft.parallel.sequence}: {facts.trials.sequence}"
        yield Fault("parallel.sequence", message, assignment(parallel__sequence=1))


@rule("own.tensor", "run", axis=TENSOR)
def tensor(draft: Draft) -> Iterator[Fault]:
    """Refuses tensor parallelism for a user's own model that has no plan for it (`model.tp_plan`), or whose tiny copy
    computes something else when it is split by that plan."""
    facts = draft.facts
    if facts is not None and facts.trials is not None and facts.trials.tensor:
        message = f"must be 1, not {draft.parallel.tensor}: {facts.trials.tensor}"
        yield Fault("parallel.tensor", message, assignment(parallel__tensor=1))


@rule("own.gradients", "run")
def gradients(draft: Draft) -> Iterator[Fault]:
    """Refuses a callback that changes gradients where a rank does not hold whole ones in fp32 before they are clipped.
    FSDP2, ZeRO 1 to 3 and tensor, expert and pipeline parallelism divide them; a loss scaler has scaled them."""
    if not draft.recipe.gradient_callbacks:
        return
    parallel, names = draft.parallel, ", ".join(callback.object for callback in draft.recipe.gradient_callbacks)
    for name in ("pipeline", "tensor", "expert"):
        if (degree := getattr(parallel, name)) > 1:
            message = f"must be 1, not {degree}: {names} changes whole gradients, of which each rank would have a part"
            yield Fault(f"parallel.{name}", message, assignment(**{f"parallel__{name}": 1}))
    if parallel.strategy == "fsdp2":
        message = f"'fsdp2' divides gradients, but {names} changes whole ones"
        yield Fault("parallel.accelerate", message, assignment(parallel__accelerate="ddp", parallel__zero_stage=0))
    elif parallel.zero_stage:
        message = f"must be 0, not {parallel.zero_stage}: ZeRO divides gradients, but {names} changes whole ones"
        yield Fault("parallel.zero_stage", message, assignment(parallel__zero_stage=0))
    if parallel.precision == "autocast_fp16":
        message = f"'autocast_fp16' scales gradients, but {names} changes those of the loss"
        yield Fault("parallel.precision", message, assignment(parallel__precision="autocast_bf16"))


@rule("own.data_parallel", "read")
def data_parallel(draft: Draft) -> Iterator[Fault]:
    """Refuses `nn.DataParallel` for a user's own model. It copies modules in each pass; those of the user's module
    would be the original ones, on the first device."""
    if draft.recipe.model.build is not None and draft.parallel.strategy == "data_parallel":
        message = (
            "'data_parallel' copies a model for each device, and the copies of a model of your own would share one"
        )
        yield Fault("parallel.backend", message, assignment(parallel__backend="deepspeed"))
