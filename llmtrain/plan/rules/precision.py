"""Rules against data types that the engine does not run, or silently replaces."""

from __future__ import annotations

from collections.abc import Iterator

from llmtrain.plan.draft import Draft
from llmtrain.plan.rules.rule import Fault, assignment, rule


@rule("precision.fp16_cpu", "The engine refuses fp16 weights on a CPU.", "run")
def fp16_cpu(draft: Draft) -> Iterator[Fault]:
    """Refuses fp16 weights without a GPU."""
    if draft.parallel.precision == "fp16" and draft.cluster.spec.on_cpu:
        message = "'fp16' is not supported by DeepSpeed on CPUs"
        yield Fault("parallel.precision", message, assignment(parallel__precision="fp32"))


@rule(
    "precision.stage0",
    "Without ZeRO the engine's optimizer wrapper takes a spurious first step: Adam's first real "
    "update is about a quarter too small. With fp32 accumulation it does not start at all.",
    "run",
)
def stage0(draft: Draft) -> Iterator[Fault]:
    """Refuses low-precision weights at ZeRO 0; ZeRO 1 on one rank trains them correctly."""
    if draft.parallel.zero_stage == 0 and draft.weight_dtype != "fp32":
        message = f"0 is not supported with {draft.parallel.precision}: the engine's first update would be wrong"
        yield Fault("parallel.zero_stage", message, assignment(parallel__zero_stage=1))


@rule(
    "precision.grad_accum",
    "Gradients have the data type of the weights. A coarser accumulator loses precision, or the engine ignores it.",
    "run",
)
def grad_accum(draft: Draft) -> Iterator[Fault]:
    """Refuses gradient accumulation in a type that is neither fp32 nor that of the weights."""
    given, weights = draft.parallel.grad_accum_dtype, draft.weight_dtype
    if given in ("fp32", weights):
        return
    allowed = "fp32" if weights == "fp32" else f"fp32 or {weights}"
    message = f"must be {allowed} for {weights} weights ({draft.parallel.precision}), not '{given}'"
    yield Fault("parallel.grad_accum_dtype", message, assignment(parallel__grad_accum_dtype="fp32"))


@rule(
    "precision.autocast_fp16_zero",
    "ZeRO computes and clips the gradient norm before autocast's loss scale is divided out.",
    "run",
)
def autocast_fp16_zero(draft: Draft) -> Iterator[Fault]:
    """Refuses fp16 autocast under ZeRO, because the gradient norm is too large by the loss scale."""
    if draft.parallel.precision == "autocast_fp16" and draft.parallel.zero_stage:
        message = (
            "'autocast_fp16' is not supported with ZeRO: the gradient norm that is reported and used to clip "
            "would be too large by the loss scale"
        )
        fix = f"{assignment(parallel__precision='autocast_bf16')}, or {assignment(parallel__zero_stage=0)}"
        yield Fault("parallel.precision", message, fix)


RULES = (fp16_cpu, stage0, grad_accum, autocast_fp16_zero)
