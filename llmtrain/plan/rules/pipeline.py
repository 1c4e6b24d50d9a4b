"""Rules against plans that the pipeline engine does not support or silently computes wrong."""

from __future__ import annotations

import math
from collections.abc import Iterator

from llmtrain.plan.axes import PIPELINE
from llmtrain.plan.draft import Draft, divisors
from llmtrain.plan.rules.rule import Fault, assignment, rule
from llmtrain.plan.schedules import PipelineSchedule


@rule(
    "pipeline.zero_stage",
    "The pipeline engine asserts ZeRO stage 0 or 1, after launch. It reduces gradients once a step, but ZeRO 2 has to "
    "reduce them after each pass, and otherwise fails at the second one. At stage 0 the engine clips by the norm of "
    "the first pipeline stage alone.",
    "run",
    axis=PIPELINE,
)
def zero_stage(draft: Draft) -> Iterator[Fault]:
    """Refuses ZeRO 2 and 3 under pipelines, and ZeRO 0 in fp32 with clipping, which would use only part of the norm."""
    parallel, clip = draft.parallel, draft.recipe.optim.clip_grad_norm
    if parallel.zero_stage >= 2:
        message = (
            f"must be at most 1 with pipelines, not {parallel.zero_stage}: their stages keep whole gradients, "
            "reduced once a step"
        )
        yield Fault("parallel.zero_stage", message, assignment(parallel__zero_stage=1))
    if parallel.zero_stage == 0 and clip:
        message = (
            f"0 is not supported in pipelines with clip_grad_norm = {clip:g}: the engine would clip by the norm of the "
            "first stage alone"
        )
        yield Fault("parallel.zero_stage", message, assignment(parallel__zero_stage=1))


@rule("pipeline.layers", "A stage without a layer has nothing to run.", "arithmetic")
def layers(draft: Draft) -> Iterator[Fault]:
    """Refuses more stages than layers."""
    parallel, facts = draft.parallel, draft.facts
    if facts is None or parallel.stages <= facts.layers:
        return
    if parallel.pipeline > facts.layers:
        message = f"must be at most {facts.layers}, the model's number of layers, not {parallel.pipeline}"
        yield Fault("parallel.pipeline", message, assignment(parallel__pipeline=facts.layers))
    else:
        message = (
            f"{parallel.pipeline_chunks} is too large: {parallel.pipeline} × {parallel.pipeline_chunks} stages exceed "
            f"the model's {facts.layers} layers"
        )
        yield Fault("parallel.pipeline_chunks", message, "use fewer devices, or fewer stages on each device")


@rule(
    "pipeline.chunks",
    "1F1B has one stage on each device. Interleaving needs several. The stages of the zero bubble schedule run back "
    "and forth over the devices, so that the first device also has the last stage.",
    "arithmetic",
)
def chunks(draft: Draft) -> Iterator[Fault]:
    """Refuses numbers of stages that a schedule does not support, and schedules without a pipeline."""
    parallel = draft.parallel
    name, given = parallel.pipeline_schedule, parallel.pipeline_chunks
    if parallel.pipeline == 1:
        if (name, given) != ("1f1b", 1):
            message = f"'{name}' with pipeline_chunks = {given} has no effect: parallel.pipeline is 1"
            fix = assignment(parallel__pipeline_schedule="1f1b", parallel__pipeline_chunks=1)
            yield Fault("parallel.pipeline_schedule", message, fix)
    elif name == "1f1b" and given != 1:
        message = f"must be 1, not {given}: 1f1b has one stage on each device"
        yield Fault("parallel.pipeline_chunks", message, f"{assignment(parallel__pipeline_schedule='interleaved')}")
    elif name == "interleaved" and given == 1:
        message = "must be at least 2, not 1: interleaved needs several stages on each device"
        yield Fault("parallel.pipeline_chunks", message, assignment(parallel__pipeline_chunks=2))
    elif name == "zero_bubble" and given % 2:
        message = f"must be even, not {given}: the stages of zero_bubble run back and forth over the devices"
        yield Fault("parallel.pipeline_chunks", message, assignment(parallel__pipeline_chunks=given + 1))


@rule(
    "pipeline.interleaved",
    "Interleaved stages process micro-batches in groups as large as the number of devices. With a smaller last "
    "group, the devices can wait for each other forever.",
    "arithmetic",
    axis=PIPELINE,
)
def interleaved(draft: Draft) -> Iterator[Fault]:
    """Refuses numbers of micro-batches that interleaved stages cannot divide."""
    parallel, micro_batches = draft.parallel, draft.accumulation
    if parallel.pipeline_schedule == "interleaved" and micro_batches and micro_batches % parallel.pipeline:
        message = f"{micro_batches} micro-batches in a step are not a multiple of pipeline = {parallel.pipeline}"
        yield Fault("parallel.pipeline_schedule", message, assignment(parallel__pipeline_schedule="1f1b"))


@rule(
    "pipeline.compiled",
    "A compiled layer computes the gradients of its weights in its backward pass, which the schedule would delay.",
    "arithmetic",
)
def compiled(draft: Draft) -> Iterator[Fault]:
    """Refuses compiled layers under the zero bubble schedule."""
    if draft.parallel.pipeline_schedule == "zero_bubble" and draft.recipe.kernels.blocks == "compiled":
        message = (
            "'compiled' is not supported with zero_bubble, which cannot split the backward pass of compiled layers"
        )
        yield Fault("kernels.blocks", message, assignment(kernels__blocks="eager"))


@rule("pipeline.chain", "A stage is a part of one sequence of decoder layers.", "arithmetic", axis=PIPELINE)
def chain(draft: Draft) -> Iterator[Fault]:
    """Refuses models without a single list of decoder layers."""
    if draft.facts is not None and not draft.facts.layer_parameters:
        message = (
            f"must be 1, not {draft.parallel.pipeline}: '{draft.facts.model_type}' has no single list of decoder layers"
        )
        yield Fault("parallel.pipeline", message, assignment(parallel__pipeline=1))


@rule(
    "pipeline.autocast_fp16",
    "The backward pass of the pipeline engine does not apply autocast's loss scale, and the "
    "scaler fails at the first step.",
    "run",
    axis=PIPELINE,
)
def autocast_fp16(draft: Draft) -> Iterator[Fault]:
    """Refuses fp16 autocast under pipelines."""
    if draft.parallel.precision == "autocast_fp16":
        message = "'autocast_fp16' is not supported with pipelines: their engine does not apply its loss scale"
        yield Fault("parallel.precision", message, assignment(parallel__precision="autocast_bf16"))


@rule(
    "pipeline.tied_accumulation",
    "Gradients that are accumulated in separate buffers skip the reduction of tied weights: the copies drift apart.",
    "run",
    axis=PIPELINE,
)
def tied_accumulation(draft: Draft) -> Iterator[Fault]:
    """Refuses tied embeddings whose gradients have another data type, unless the bf16 optimizer reduces them."""
    parallel, facts = draft.parallel, draft.facts
    if facts is None or not facts.tied_embeddings or draft.weight_dtype == parallel.grad_accum_dtype:
        return
    takes_them = parallel.precision == "bf16" and parallel.zero_stage == 1 and parallel.offload_optimizer == "none"
    if not takes_them:
        message = (
            f"'{parallel.grad_accum_dtype}' for {draft.weight_dtype} weights would let the copies of the tied "
            "embedding on the first and the last stage drift apart"
        )
        yield Fault("parallel.grad_accum_dtype", message, assignment(parallel__grad_accum_dtype=draft.weight_dtype))


MOST_IDLE = 0.2
"""Fraction of the time that a pipeline may be idle without a note."""


@rule(
    "pipeline.bubble",
    "Under 1F1B, devices idle (p−1)/(m+p−1) of the time.",
    "arithmetic",
    axis=PIPELINE,
    refuses=False,
)
def bubble(draft: Draft) -> Iterator[Fault]:
    """Gives a note for pipelines that are idle for more than `MOST_IDLE` of the time.

    With one micro-batch, only one stage works at a time.
    """
    parallel, micro_batches = draft.parallel, draft.accumulation
    refusals = (layers, chunks, interleaved)
    if micro_batches is None or any(any(refusal.faults(draft)) for refusal in refusals):
        return
    idle = PipelineSchedule.of(parallel).bubble(micro_batches)
    if idle <= MOST_IDLE:
        return
    count = "1 micro-batch" if micro_batches == 1 else f"{micro_batches} micro-batches"
    is_1f1b = parallel.pipeline_schedule == "1f1b"
    formula = f" ({parallel.pipeline} − 1) / ({micro_batches} + {parallel.pipeline} − 1) =" if is_1f1b else ""
    message = f"{count} per step in {parallel.stages} stages: each device idles{formula} {idle:.0%} of the time"
    if micro_batches == 1:
        message += ", since only one stage works at a time"
    yield Fault("parallel.pipeline", message, _less_idle(draft))


def _less_idle(draft: Draft) -> str:
    """Suggests the largest micro-batch size that keeps the idle time within `MOST_IDLE`, else a global batch size."""
    assert draft.data_parallel_size is not None, "there are micro-batches"
    stages, batch = draft.parallel.pipeline, draft.recipe.batch
    needed = math.ceil((stages - 1) * (1 - MOST_IDLE) / MOST_IDLE - 1e-9)
    share = batch.global_batch_size // draft.data_parallel_size
    smaller = max((size for size in divisors(share) if size <= share // needed), default=None)
    if smaller is not None:
        return f"{assignment(batch__micro_batch_size=smaller)} gives {share // smaller} micro-batches"
    larger = assignment(batch__global_batch_size=needed * draft.data_parallel_size, batch__micro_batch_size=1)
    return f"{needed} micro-batches need {larger}, or use fewer stages"


RULES = (zero_stage, layers, chunks, interleaved, compiled, chain, autocast_fp16, tied_accumulation, bubble)
