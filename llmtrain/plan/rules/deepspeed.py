"""Rules against plans that DeepSpeed does not run correctly. Other engines have rules of their own."""

from __future__ import annotations

import math
from collections.abc import Iterator

from llmtrain.plan.axes import EXPERT, PIPELINE, TENSOR, used
from llmtrain.plan.draft import Draft, divisors
from llmtrain.plan.facts.families import EXPERT_TENSOR_FAMILIES, SLICED_FAMILIES
from llmtrain.plan.rules.rule import Fault, assignment, rule
from llmtrain.plan.schedules import PipelineSchedule
from llmtrain.plan.stages import stage_bounds


@rule("precision.fp16_cpu", "run")
def precision_fp16_cpu(draft: Draft) -> Iterator[Fault]:
    """Refuses fp16 weights on a CPU, as the engine does."""
    if draft.parallel.precision == "fp16" and draft.cluster.spec.on_cpu:
        message = "'fp16' is not supported by DeepSpeed on CPUs"
        yield Fault("parallel.precision", message, assignment(parallel__precision="fp32"))


@rule("precision.stage0", "run")
def precision_stage0(draft: Draft) -> Iterator[Fault]:
    """Refuses low-precision weights at ZeRO 0; ZeRO 1 on one rank trains them correctly. Without ZeRO the engine's
    optimizer wrapper takes a spurious first step: Adam's first real update is about a quarter too small. With fp32
    accumulation it does not start at all."""
    if draft.parallel.zero_stage == 0 and draft.weight_dtype != "fp32":
        message = f"0 is not supported with {draft.parallel.precision}: the engine's first update would be wrong"
        yield Fault("parallel.zero_stage", message, assignment(parallel__zero_stage=1))


@rule("precision.grad_accum", "run")
def precision_grad_accum(draft: Draft) -> Iterator[Fault]:
    """Refuses gradient accumulation in a type that is neither fp32 nor that of the weights. Gradients have the data
    type of the weights. A coarser accumulator loses precision, or the engine ignores it."""
    given, weights = draft.parallel.grad_accum_dtype, draft.weight_dtype
    if given in ("fp32", weights):
        return
    allowed = "fp32" if weights == "fp32" else f"fp32 or {weights}"
    message = f"must be {allowed} for {weights} weights ({draft.parallel.precision}), not '{given}'"
    yield Fault("parallel.grad_accum_dtype", message, assignment(parallel__grad_accum_dtype="fp32"))


@rule("precision.autocast_fp16_zero", "run")
def precision_autocast_fp16_zero(draft: Draft) -> Iterator[Fault]:
    """Refuses fp16 autocast under ZeRO, which computes and clips the gradient norm before autocast's loss scale is
    divided out."""
    if draft.parallel.precision == "autocast_fp16" and draft.parallel.zero_stage:
        message = (
            "'autocast_fp16' is not supported with ZeRO: the gradient norm that is reported and used to clip "
            "would be too large by the loss scale"
        )
        fix = f"{assignment(parallel__precision='autocast_bf16')}, or {assignment(parallel__zero_stage=0)}"
        yield Fault("parallel.precision", message, fix)


WITHOUT_HPZ = assignment(parallel__hierarchical_partition=1)


@rule("zero.offload_optimizer_stage", "run")
def zero_offload_optimizer_stage(draft: Draft) -> Iterator[Fault]:
    """Refuses optimizer offload at ZeRO 0, where it is ignored, because nothing is sharded."""
    parallel = draft.parallel
    if parallel.offload_optimizer != "none" and parallel.zero_stage == 0:
        message = f"'{parallel.offload_optimizer}' has no effect at ZeRO 0: the optimizer states stay on the device"
        yield Fault("parallel.offload_optimizer", message, assignment(parallel__zero_stage=1))


@rule("zero.offload_param_stage", "run")
def zero_offload_param_stage(draft: Draft) -> Iterator[Fault]:
    """Refuses parameter offload below ZeRO 3, where it is ignored, because only ZeRO 3 shards parameters."""
    parallel = draft.parallel
    if parallel.offload_param != "none" and parallel.zero_stage < 3:
        message = (
            f"'{parallel.offload_param}' needs ZeRO 3: at ZeRO {parallel.zero_stage} parameters stay on the device"
        )
        fix = _zero_3_or(draft, assignment(parallel__offload_param="none"))
        yield Fault("parallel.offload_param", message, fix)


@rule("zero.nvme_stage", "run")
def zero_nvme_stage(draft: Draft) -> Iterator[Fault]:
    """Refuses NVMe offload of the optimizer at ZeRO 1 and 2. Only ZeRO 3 offloads to disk; stages 1 and 2 silently use
    host memory instead."""
    parallel = draft.parallel
    if parallel.offload_optimizer == "nvme" and parallel.zero_stage in (1, 2):
        message = f"'nvme' needs ZeRO 3: at ZeRO {parallel.zero_stage} the states would stay in host memory"
        fix = _zero_3_or(draft, assignment(parallel__offload_optimizer="cpu"))
        yield Fault("parallel.offload_optimizer", message, fix)


@rule("zero.nvme_path", "run")
def zero_nvme_path(draft: Draft) -> Iterator[Fault]:
    """Refuses NVMe offload without a folder, and a folder without NVMe offload."""
    parallel = draft.parallel
    wanted = "nvme" in (parallel.offload_optimizer, parallel.offload_param)
    if wanted and not parallel.nvme_path:
        message = "is required for nvme offload: name a folder on a local disk of each node"
        yield Fault("parallel.nvme_path", message, assignment(parallel__nvme_path="/local_nvme"))
    if parallel.nvme_path and not wanted:
        message = f"'{parallel.nvme_path}' has no effect: nothing is offloaded to nvme"
        yield Fault("parallel.nvme_path", message, assignment(parallel__nvme_path="null"))


@rule("zero.hierarchical_stage", "run")
def zero_hierarchical_stage(draft: Draft) -> Iterator[Fault]:
    """Refuses hpZ below ZeRO 3, where it is ignored, because only ZeRO 3 gathers parameters."""
    parallel = draft.parallel
    if parallel.hierarchical_partition > 1 and parallel.zero_stage < 3:
        message = f"{parallel.hierarchical_partition} has no effect: ZeRO {parallel.zero_stage} gathers no parameters"
        yield Fault("parallel.hierarchical_partition", message, _zero_3_or(draft, WITHOUT_HPZ))


def _zero_3_or(draft: Draft, other: str) -> str:
    """Returns the fix that chooses ZeRO 3, which pipelines do not have, or another one."""
    return other if draft.parallel.pipeline > 1 else f"{assignment(parallel__zero_stage=3)}, or {other}"


@rule("zero.hierarchical_groups", "run")
def zero_hierarchical_groups(draft: Draft) -> Iterator[Fault]:
    """Refuses hpZ groups that do not divide the ranks, save nothing, or do not hold the same weights. hpZ forms equal
    groups of neighbouring ranks; each group keeps a second copy of all parameters. DeepSpeed has no such groups for
    experts, or for tensor parallel ranks, whose neighbours hold different slices."""
    parallel, size, ranks = draft.parallel, draft.parallel.hierarchical_partition, draft.cluster.world_size
    if size == 1:
        return
    for axis in (TENSOR, EXPERT):
        if axis in used(parallel):
            other = f"{axis.name} parallelism ({axis.degree(parallel)} ranks)"
            message = f"must be 1, not {size}: hpZ does not support {other}"
            yield Fault("parallel.hierarchical_partition", message, WITHOUT_HPZ)
    if ranks % size or size >= ranks:
        message = f"must be a proper divisor of the {ranks} ranks, not {size}"
        per_node = draft.cluster.devices_per_node
        fix = assignment(parallel__hierarchical_partition=per_node) if 1 < per_node < ranks else WITHOUT_HPZ
        yield Fault("parallel.hierarchical_partition", message, fix)


@rule("zero.hierarchical_nvme", "read")
def zero_hierarchical_nvme(draft: Draft) -> Iterator[Fault]:
    """Refuses hpZ with parameters offloaded to a disk (`partition_parameters.py:_partition_param_sec`). hpZ allocates
    its copies on the device to which parameters are offloaded, and torch has no tensors on disks."""
    parallel = draft.parallel
    if parallel.hierarchical_partition > 1 and parallel.offload_param == "nvme":
        message = (
            f"{parallel.hierarchical_partition} is not supported with parameters on nvme: hpZ would keep its copies "
            "there, but torch has no tensors on disks"
        )
        fix = f"{WITHOUT_HPZ}, or {assignment(parallel__offload_param='cpu')}"
        yield Fault("parallel.hierarchical_partition", message, fix)


@rule("pipeline.zero_stage", "run", axis=PIPELINE)
def pipeline_zero_stage(draft: Draft) -> Iterator[Fault]:
    """Refuses ZeRO 2 and 3 under pipelines, and ZeRO 0 in fp32 with clipping, which would use only part of the norm.
    The pipeline engine asserts ZeRO stage 0 or 1, after launch. It reduces gradients once a step, but ZeRO 2 has to
    reduce them after each pass, and otherwise fails at the second one. At stage 0 the engine clips by the norm of the
    first pipeline stage alone."""
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


@rule("pipeline.layers", "arithmetic")
def pipeline_layers(draft: Draft) -> Iterator[Fault]:
    """Refuses more stages than layers. A stage without a layer has nothing to run."""
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


@rule("pipeline.chunks", "arithmetic")
def pipeline_chunks(draft: Draft) -> Iterator[Fault]:
    """Refuses numbers of stages that a schedule does not support, and schedules without a pipeline. 1F1B has one stage
    on each device. Interleaving needs several. The stages of the zero bubble schedule run back and forth over the
    devices, so that the first device also has the last stage."""
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
        yield Fault("parallel.pipeline_chunks", message, _chunks_or_1f1b(draft, 2))
    elif name == "zero_bubble" and given % 2:
        message = f"must be even, not {given}: the stages of zero_bubble run back and forth over the devices"
        yield Fault("parallel.pipeline_chunks", message, _chunks_or_1f1b(draft, given + 1))


def _chunks_or_1f1b(draft: Draft, chunks: int) -> str:
    """Returns the fix that chooses a number of stages on each device, or 1F1B for a model with fewer layers."""
    if draft.facts is not None and draft.parallel.pipeline * chunks > draft.facts.layers:
        return assignment(parallel__pipeline_schedule="1f1b", parallel__pipeline_chunks=1)
    return assignment(parallel__pipeline_chunks=chunks)


@rule("pipeline.interleaved", "arithmetic", axis=PIPELINE)
def pipeline_interleaved(draft: Draft) -> Iterator[Fault]:
    """Refuses numbers of micro-batches that are not a multiple of the number of devices. Interleaved stages process
    micro-batches in groups of that size. With a smaller last group, the devices can wait for each other forever."""
    parallel, micro_batches = draft.parallel, draft.accumulation
    if parallel.pipeline_schedule == "interleaved" and micro_batches and micro_batches % parallel.pipeline:
        message = f"{micro_batches} micro-batches in a step are not a multiple of pipeline = {parallel.pipeline}"
        yield Fault("parallel.pipeline_schedule", message, assignment(parallel__pipeline_schedule="1f1b"))


@rule("pipeline.compiled", "arithmetic")
def pipeline_compiled(draft: Draft) -> Iterator[Fault]:
    """Refuses compiled layers under the zero bubble schedule. A compiled layer computes the gradients of its weights in
    its backward pass, which the schedule would delay."""
    if draft.parallel.pipeline_schedule == "zero_bubble" and draft.recipe.kernels.blocks == "compiled":
        message = (
            "'compiled' is not supported with zero_bubble, which cannot split the backward pass of compiled layers"
        )
        yield Fault("kernels.blocks", message, assignment(kernels__blocks="eager"))


@rule("pipeline.chain", "arithmetic", axis=PIPELINE)
def pipeline_chain(draft: Draft) -> Iterator[Fault]:
    """Refuses models without a single list of decoder layers. A stage is a part of one sequence of decoder layers."""
    if draft.facts is not None and not draft.facts.layer_parameters:
        message = (
            f"must be 1, not {draft.parallel.pipeline}: '{draft.facts.model_type}' has no single list of decoder layers"
        )
        yield Fault("parallel.pipeline", message, assignment(parallel__pipeline=1))


@rule("pipeline.autocast_fp16", "run", axis=PIPELINE)
def pipeline_autocast_fp16(draft: Draft) -> Iterator[Fault]:
    """Refuses fp16 autocast under pipelines. The backward pass of the pipeline engine does not apply autocast's loss
    scale, and the scaler fails at the first step."""
    if draft.parallel.precision == "autocast_fp16":
        message = "'autocast_fp16' is not supported with pipelines: their engine does not apply its loss scale"
        yield Fault("parallel.precision", message, assignment(parallel__precision="autocast_bf16"))


@rule("pipeline.tied_accumulation", "run", axis=PIPELINE)
def pipeline_tied_accumulation(draft: Draft) -> Iterator[Fault]:
    """Refuses tied embeddings whose gradients are accumulated in another data type than that of the weights, unless the
    bf16 optimizer reduces them. Gradients in separate buffers skip the reduction of tied weights: the copies drift
    apart."""
    parallel, facts = draft.parallel, draft.facts
    if facts is None or not facts.tied_embeddings or draft.weight_dtype == parallel.grad_accum_dtype:
        return
    is_reduced = parallel.precision == "bf16" and parallel.zero_stage == 1 and parallel.offload_optimizer == "none"
    if not is_reduced:
        message = (
            f"'{parallel.grad_accum_dtype}' for {draft.weight_dtype} weights would let the copies of the tied "
            "embedding on the first and the last stage drift apart"
        )
        yield Fault("parallel.grad_accum_dtype", message, assignment(parallel__grad_accum_dtype=draft.weight_dtype))


MAX_IDLE = 0.2
"""Fraction of the time that a pipeline may be idle without a note."""


@rule("pipeline.bubble", "arithmetic", axis=PIPELINE, refuses=False)
def pipeline_bubble(draft: Draft) -> Iterator[Fault]:
    """Gives a note for pipelines that are idle for more than a fifth of the time. Under 1F1B, devices idle
    (p−1)/(m+p−1) of the time; with one micro-batch, only one stage works at a time."""
    parallel, micro_batches = draft.parallel, draft.accumulation
    refusals = (pipeline_layers, pipeline_chunks, pipeline_interleaved)
    if micro_batches is None or any(any(refusal.faults(draft)) for refusal in refusals):
        return
    idle = PipelineSchedule.of(parallel).bubble(micro_batches)
    if idle <= MAX_IDLE:
        return
    count = "1 micro-batch" if micro_batches == 1 else f"{micro_batches} micro-batches"
    is_1f1b = parallel.pipeline_schedule == "1f1b"
    formula = f" ({parallel.pipeline} − 1) / ({micro_batches} + {parallel.pipeline} − 1) =" if is_1f1b else ""
    message = f"{count} per step in {parallel.stages} stages: each device idles{formula} {idle:.0%} of the time"
    if micro_batches == 1:
        message += ", since only one stage works at a time"
    yield Fault("parallel.pipeline", message, _less_idle(draft))


def _less_idle(draft: Draft) -> str:
    """Suggests the largest micro-batch size that keeps 1F1B's idle time within `MAX_IDLE`, else a global batch size.

    Other schedules idle less.
    """
    assert draft.data_parallel_size is not None, "there are micro-batches"
    devices, batch = draft.parallel.pipeline, draft.recipe.batch
    multiple = devices if draft.parallel.pipeline_schedule == "interleaved" else 1
    needed = math.ceil((devices - 1) * (1 - MAX_IDLE) / MAX_IDLE - 1e-9)
    needed = -(-needed // multiple) * multiple
    share = batch.global_batch_size // draft.data_parallel_size
    sizes = (size for size in divisors(share) if share // size >= needed and share // size % multiple == 0)
    if (smaller := max(sizes, default=None)) is not None:
        return f"{assignment(batch__micro_batch_size=smaller)} gives {share // smaller} micro-batches"
    larger = assignment(batch__global_batch_size=needed * draft.data_parallel_size, batch__micro_batch_size=1)
    return f"{needed} micro-batches need {larger}, or use fewer stages"


@rule("tensor.family", "run", axis=TENSOR)
def tensor_family(draft: Draft) -> Iterator[Fault]:
    """Refuses families whose tiny copy fails or deviates if it is split (`docs/reference/families_tensor.md`). Modules
    are split by the family's own tp_plan, or without one by the usual names of matrices; if these lose a gradient, the
    model would compute something else."""
    parallel, facts = draft.parallel, draft.facts
    if facts is None or facts.trials is not None:  # a user's own model has its own rule
        return
    if facts.model_type not in (EXPERT_TENSOR_FAMILIES if EXPERT in used(parallel) else SLICED_FAMILIES):
        message = f"must be 1, not {parallel.tensor}: '{facts.model_type}' cannot be split correctly"
        yield Fault("parallel.tensor", message, assignment(parallel__tensor=1))


@rule("tensor.divides", "run", axis=TENSOR)
def tensor_divides(draft: Draft) -> Iterator[Fault]:
    """Refuses feed-forward layers and experts whose width is not a multiple of the degree. Each tensor parallel rank
    holds an equal part of every split weight; distributed experts are not split."""
    ranks, facts, distributes = draft.parallel.tensor, draft.facts, EXPERT in used(draft.parallel)
    if facts is None or facts.weights is None:
        return
    own = (weight for run in facts.weights.runs for weight in run.weights if not weight.is_adapter)
    own = (weight for weight in own if not (weight.is_expert and distributes))
    down_projections = {weight for weight in own if "down_proj" in weight.name}
    uneven = sorted({weight.shape[-1] for weight in down_projections if weight.shape[-1] % ranks})
    if uneven:
        widths = " and ".join(str(width) for width in uneven)
        message = f"{ranks} does not divide the width {widths} of feed-forward layers"
        yield Fault("parallel.tensor", message, assignment(parallel__tensor=1))


@rule("expert.stages", "run", axis=EXPERT)
def expert_stages(draft: Draft) -> Iterator[Fault]:
    """Refuses stages without experts beside others that have them. Ranks take the norm of the gradients of experts
    together with those of all other stages (`runtime/utils.py:get_norm_with_moe_layers`)."""
    facts = draft.facts
    if PIPELINE not in used(draft.parallel) or facts is None or facts.weights is None:
        return
    if draft.parallel.stages > facts.layers:
        return  # another rule's
    schedule, bounds = (
        PipelineSchedule.of(draft.parallel),
        stage_bounds(facts, draft.parallel.stages, draft.recipe.data.sequence_length),
    )
    for rank in range(schedule.ranks):
        own = [bounds[stage] for stage in schedule.stages_of(rank)]
        layers = [number for stage in own for number in range(stage.first, stage.end)]
        if not any(weight.is_expert for number in layers for weight in facts.weights.layer(number)):
            message = f"must be 1, not {draft.parallel.expert}: rank {rank} of the pipe has no layer with experts"
            yield Fault("parallel.expert", message, f"{assignment(parallel__expert=1)}, or use fewer stages")
            return


@rule("expert.loss_scale", "run", axis=EXPERT)
def expert_loss_scale(draft: Draft) -> Iterator[Fault]:
    """Refuses fp16 autocast, whose scaler only sees a rank's own gradients (`runtime/engine.py:_take_model_step`): each
    rank would lower its loss scale after overflows in its own experts only."""
    if draft.parallel.precision == "autocast_fp16":
        message = (
            "'autocast_fp16' is not supported with expert parallelism: ranks hold different experts, "
            "and would skip different steps"
        )
        yield Fault("parallel.precision", message, assignment(parallel__precision="autocast_bf16"))


@rule("expert.modules", "run")
def expert_modules(draft: Draft) -> Iterator[Fault]:
    """Refuses models whose experts are separate modules; `transformers` stores the experts of a layer in one tensor. An
    expert that receives no token in a step has no gradient, and plain PyTorch does not update it; the engines reduce
    zeros for it, and apply weight decay."""
    facts = draft.facts
    if facts is not None and facts.expert_modules:
        message = (
            f"each expert of '{facts.model_type}' is a separate module: an expert that receives no "
            "token in a step has no gradient, but weight decay would be applied to it, unlike in plain "
            "PyTorch"
        )
        fix = assignment(parallel__backend="accelerate", parallel__accelerate="ddp", parallel__zero_stage=0)
        yield Fault("model", message, f"{fix}, or store the experts of a layer in one tensor")
