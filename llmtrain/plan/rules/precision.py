"""Types of weights, gradients and arithmetic that the engine does not run, or runs as something else."""

from __future__ import annotations

from collections.abc import Iterator

from llmtrain.plan.draft import Draft
from llmtrain.plan.rules.rule import Fault, assignment, rule


@rule("precision.fp16_cpu", "The engine refuses fp16 weights on a CPU.", "run")
def fp16_cpu(draft: Draft) -> Iterator[Fault]:
    """fp16 weights without a GPU."""
    if draft.parallel.precision == "fp16" and draft.cluster.spec.on_cpu:
        message = "'fp16' was given, which DeepSpeed does not run on CPUs"
        yield Fault("parallel.precision", message, assignment(parallel__precision="fp32"))


@rule(
    "precision.stage0",
    "Without ZeRO the engine wraps the optimizer in one that takes a phantom step first: Adam's first real update "
    "comes out about a quarter too small. With fp32 accumulation it does not start at all.",
    "run",
)
def stage0(draft: Draft) -> Iterator[Fault]:
    """Low precision weights at ZeRO 0, outside what ZeRO 1 on one rank does correctly."""
    if draft.parallel.zero_stage == 0 and draft.weight_dtype != "fp32":
        message = f"0 was given with {draft.parallel.precision}: the engine's first update would be wrong without ZeRO"
        yield Fault("parallel.zero_stage", message, assignment(parallel__zero_stage=1))


@rule(
    "precision.grad_accum",
    "Gradients come in the type of the weights. A coarser accumulator loses them, or the engine ignores it.",
    "run",
)
def grad_accum(draft: Draft) -> Iterator[Fault]:
    """Accumulators that are neither fp32 nor the type of the weights."""
    given, weights = draft.parallel.grad_accum_dtype, draft.weight_dtype
    if given in ("fp32", weights):
        return
    message = f"'{given}' was given for gradients of {weights} weights ({draft.parallel.precision})"
    allowed = "fp32" if weights == "fp32" else f"fp32, or {weights}"
    yield Fault("parallel.grad_accum_dtype", f"{message}: use {allowed}", assignment(parallel__grad_accum_dtype="fp32"))


@rule(
    "precision.autocast_fp16_zero",
    "ZeRO takes the norm of the gradients, and clips them, before autocast's loss scale is taken out.",
    "run",
)
def autocast_fp16_zero(draft: Draft) -> Iterator[Fault]:
    """fp16 autocast under ZeRO, whose gradient norm is too large by the loss scale."""
    if draft.parallel.precision == "autocast_fp16" and draft.parallel.zero_stage:
        message = "'autocast_fp16' was given with ZeRO: gradients would be clipped, and reported, times the loss scale"
        fix = f"{assignment(parallel__precision='autocast_bf16')}, or {assignment(parallel__zero_stage=0)}"
        yield Fault("parallel.precision", message, fix)


RULES = (fp16_cpu, stage0, grad_accum, autocast_fp16_zero)
