"""What the backend `accelerate` does not run, or would run as something else."""

from __future__ import annotations

from collections.abc import Iterator

from llmtrain.plan.draft import Draft
from llmtrain.plan.rules.rule import Fault, assignment, rule

STAGES = {"ddp": (0,), "fsdp2": (3, 2)}
"""ZeRO stages that a strategy has; the usual one first."""
PRECISIONS = {"ddp": ("fp32", "autocast_bf16"), "fsdp2": ("fp32", "bf16", "autocast_bf16")}


@rule("accelerate.backend", "What accelerate would run says nothing where another backend runs.", "arithmetic")
def backend(draft: Draft) -> Iterator[Fault]:
    """`parallel.accelerate` under another backend."""
    parallel = draft.parallel
    if parallel.backend != "accelerate" and parallel.accelerate != "ddp":
        message = f"'{parallel.accelerate}' was given, but parallel.backend is '{parallel.backend}'"
        fix = f"{assignment(parallel__backend='accelerate')}, or {assignment(parallel__accelerate='ddp')}"
        yield Fault("parallel.accelerate", message, fix)


@rule("accelerate.degrees", "Accelerate is handed the whole model: each of its processes is a replica.", "read")
def degrees(draft: Draft) -> Iterator[Fault]:
    """Degrees other than that of data parallelism (`Accelerator.prepare`)."""
    parallel = draft.parallel
    if parallel.backend != "accelerate":
        return
    for name in ("pipeline", "tensor", "sequence", "expert"):
        degree = getattr(parallel, name)
        if degree > 1:
            message = f"{degree} was given: the backend accelerate has data parallelism only"
            fix = f"{assignment(**{f'parallel__{name}': 1})}, or {assignment(parallel__backend='deepspeed')}"
            yield Fault(f"parallel.{name}", message, fix)


@rule("accelerate.zero_stage", "DistributedDataParallel shards nothing, FSDP2 always shards parameters.", "read")
def zero_stage(draft: Draft) -> Iterator[Fault]:
    """Stages that DistributedDataParallel and FSDP2 do not have."""
    strategy, stage = draft.parallel.strategy, draft.parallel.zero_stage
    allowed = STAGES.get(strategy)
    if allowed and stage not in allowed:
        message = f"{stage} was given: {strategy} has {' and '.join(map(str, allowed))}"
        other = "fsdp2" if strategy == "ddp" and stage in STAGES["fsdp2"] else "deepspeed"
        fix = f"{assignment(parallel__zero_stage=allowed[0])}, or {assignment(parallel__accelerate=other)}"
        yield Fault("parallel.zero_stage", message, fix)


@rule(
    "accelerate.precision",
    "DistributedDataParallel trains the weights that it is given: in bf16, without fp32 master weights, small updates "
    "are lost. fp16 Accelerate ignores on CPUs, and elsewhere it keeps the loss scale in no checkpoint of ours.",
    "run",
)
def precision(draft: Draft) -> Iterator[Fault]:
    """Precisions that DistributedDataParallel and FSDP2 do not train as the reference does."""
    parallel = draft.parallel
    allowed = PRECISIONS.get(parallel.strategy)
    if allowed and parallel.precision not in allowed:
        message = f"'{parallel.precision}' was given: {parallel.strategy} trains in {', '.join(allowed)}"
        other = "fsdp2" if parallel.precision == "bf16" else "deepspeed"
        instead = assignment(parallel__accelerate=other, parallel__zero_stage=3 if other == "fsdp2" else 1)
        yield Fault("parallel.precision", message, f"{assignment(parallel__precision='autocast_bf16')}, or {instead}")


@rule("accelerate.grad_accum", "Gradients of fp32 weights are summed in fp32; another type would be ignored.", "read")
def grad_accum(draft: Draft) -> Iterator[Fault]:
    """Accumulators below fp32 under DistributedDataParallel and FSDP2."""
    parallel = draft.parallel
    if parallel.strategy in STAGES and parallel.grad_accum_dtype != "fp32":
        message = f"'{parallel.grad_accum_dtype}' was given: {parallel.strategy} sums gradients in fp32"
        yield Fault("parallel.grad_accum_dtype", message, assignment(parallel__grad_accum_dtype="fp32"))


@rule(
    "accelerate.offload",
    "DistributedDataParallel has no offload. FSDP2's moves parameters, gradients and optimizer together, which has not "
    "been compared with the reference.",
    "read",
)
def offload(draft: Draft) -> Iterator[Fault]:
    """Offload under DistributedDataParallel and FSDP2."""
    parallel = draft.parallel
    if parallel.strategy not in STAGES:
        return
    for name, unused in (("offload_optimizer", "none"), ("offload_param", "none"), ("nvme_path", None)):
        given = getattr(parallel, name)
        if given != unused:
            message = f"'{given}' was given: {parallel.strategy} offloads nothing here"
            fix = assignment(**{f"parallel__{name}": unused or "null"})
            yield Fault(f"parallel.{name}", message, f"{fix}, or {assignment(parallel__accelerate='deepspeed')}")


RULES = (backend, degrees, zero_stage, precision, grad_accum, offload)
