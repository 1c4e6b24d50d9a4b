"""Formats a plan as lines for people."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import Any

from llmtrain.plan.axes import AXES
from llmtrain.plan.kernels import CHUNK_TOKENS, chunks_loss, is_one_chunk, recomputes_loss
from llmtrain.plan.plan import KernelChoice, Plan, StagePlan
from llmtrain.system.quantities import readable_bytes


def model_line(plan: Plan) -> str:
    """Describes the model."""
    model = plan.model
    active = f" ({model.active_parameters:,} active)" if model.active_parameters != model.parameters else ""
    line = f"{plan.recipe.name}: {model.model_type}, {model.parameters:,} parameters{active}"
    if model.trained_parameters is None:
        return line
    frozen = model.parameters - model.trained_parameters
    share = model.trained_parameters / model.parameters
    return f"{line}; {model.trained_parameters:,} trained ({share:.2%}), {frozen:,} frozen"


def split_lines(plan: Plan) -> list[str]:
    """Describes the devices, the layout, the batch, and the stages of a pipeline."""
    cluster, degrees = plan.cluster, [f"{axis.name} {plan.degree(axis)}" for axis in AXES if axis.has_ranks]
    workers = "worker" if cluster.world_size == 1 else "workers"
    if plan.workers != cluster.world_size:
        workers = f"devices, {plan.workers} worker"
    return [
        f"cluster  {cluster.nodes} × {cluster.devices_per_node} {cluster.device} = {cluster.world_size} {workers}",
        f"layout   {' × '.join(degrees)}, expert {plan.parallel.expert}, {sharding(plan)}, {plan.parallel.precision}",
        *_sequence_lines(plan),
        *_residual_lines(plan),
        f"batch    {triangle(plan)}; {plan.batch.tokens_per_step:,} tokens a step{_examples(plan)}",
        *_objective_lines(plan),
        *describe_stages(plan.stages),
        *kernel_lines(plan),
    ]


def _objective_lines(plan: Plan) -> list[str]:
    """Names a loss of the user's own, and what it is a mean over."""
    objective = plan.recipe.objective
    return [f"loss     {objective.name}, a mean over each {objective.item}"] if objective.is_own else []


def _sequence_lines(plan: Plan) -> list[str]:
    """Says how attention divides its work among sequence parallel ranks, if they form a ring, and why."""
    if plan.sequence_ring == 1:
        return []
    heads, tensor = plan.model.heads // plan.parallel.tensor, plan.parallel.tensor
    chosen = f"{plan.parallel.sequence} do not divide the {heads} heads{' of a rank' if tensor > 1 else ''}"
    why = chosen if plan.parallel.sequence_ring is None else "parallel.sequence_ring"
    divided = f" × {plan.head_ranks} that divide the heads (Ulysses)" if plan.head_ranks > 1 else ""
    return [f"sequence {plan.parallel.sequence} ranks = a ring of {plan.sequence_ring}{divided}: {why}"]


def _residual_lines(plan: Plan) -> list[str]:
    """Says what tensor parallel ranks hold between attention and feed-forward."""
    if plan.parallel.tensor == 1:
        return []
    held = "a slice of each sequence" if plan.megatron_sp_ranks > 1 else "each sequence whole"
    return [f"residual {held} on each of {plan.parallel.tensor} tensor parallel ranks"]


def kernel_lines(plan: Plan) -> list[str]:
    """Describes the kernels that differ from the defaults of `transformers`."""
    if plan.kernels is not None:
        return kernel_choice_lines(plan.kernels)
    kernels = plan.recipe.kernels
    attention = plan.recipe.model.attention_kernel
    labels = {
        f"attention {attention}": attention != "sdpa",
        "layers compiled": kernels.blocks == "compiled",
        "Liger's norms, rotary positions and gated activations": kernels.blocks == "liger",
        f"products of the layers in fp8, {kernels.fp8}": kernels.fp8 != "off",
        _loss(plan): chunks_loss(plan),
    }
    return [f"kernels  {'; '.join(line for line, holds in labels.items() if holds)}"] if any(labels.values()) else []


def _loss(plan: Plan) -> str:
    """Describes how a loss without all logits is computed."""
    if plan.recipe.kernels.loss == "liger":
        return "Liger's fused loss"
    how = ", compiled" if plan.recipe.kernels.loss == "compiled" else ""
    is_twice = recomputes_loss(plan.recipe) and not is_one_chunk(plan)
    twice = ", logits recomputed in the backward pass" if is_twice else ""
    return f"loss in chunks of {CHUNK_TOKENS:,} tokens{how}{twice}"


def chosen_line(choice: KernelChoice) -> str:
    """Describes the kernels of a choice, and its origin."""
    values = ", ".join(f"{field}={value}" for field, value in choice.values.items())
    return f"kernels  {values or 'the defaults'} ({choice.why})"


def kernel_choice_lines(choice: KernelChoice) -> list[str]:
    """Describes a choice with all its measurements."""
    lines = [chosen_line(choice), f"         on {choice.device}"]
    for field, taken in choice.milliseconds.items():
        unit = f" for {next(iter(taken))} sequences" if field == "batch.micro_batch_size" else ""
        lines.append(f"         {field}: " + ", ".join(f"{value} {ms:.1f} ms" for value, ms in taken.items()) + unit)
    return lines + [f"         {field}: not measured, {why}" for field, why in choice.failed.items()]


def triangle(plan: Plan) -> str:
    """Formats the batch as a product."""
    batch = plan.batch
    return (
        f"{batch.global_batch_size} = micro {batch.micro_batch_size} × accumulation "
        f"{batch.gradient_accumulation_steps} × data {plan.data_parallel_size}"
    )


def _examples(plan: Plan) -> str:
    """Describes the number of pairs or completions of a step, of which a packed sequence may hold several."""
    objective = plan.recipe.objective
    if not objective.reads_completions:
        return ""
    what = "pairs" if objective.compares_pairs else "completions"
    least = "" if plan.recipe.data.packing == "none" else "at least "
    return f", {least}{plan.batch.global_batch_size:,} {what}"


def sharding(plan: Plan) -> str:
    """Names what shards the states of data parallelism, and its stage."""
    parallel = plan.recipe.parallel
    stage = f"ZeRO-{plan.parallel.zero_stage}"
    if parallel.backend == "deepspeed":
        return stage
    return f"accelerate {parallel.strategy} {stage}" if parallel.backend == "accelerate" else parallel.backend


def describe_stages(stages: Sequence[StagePlan]) -> list[str]:
    """Returns a line for each stage; neighbouring stages that are equal share one."""
    shown = [(stage.layers[1] - stage.layers[0] + 1, stage.parameters, f"{stage.cost_share:.1%}") for stage in stages]
    lines = []
    for name, first, last in _equal_stages(shown):
        layers, parameters, work = shown[first]
        each = "" if first == last else f"; each {layers} layers"
        held = f"layers {stages[first].layers[0]} to {stages[last].layers[1]}{each}, {parameters:,} parameters"
        lines.append(f"{name:<15} {held}, {work} of the work")
    return lines


def volume_lines(volumes: Sequence[dict[str, int]]) -> list[str]:
    """Lists the bytes that a rank of each stage sends in a step; neighbouring stages with equal values share a line."""
    lines = []
    for name, first, _ in _equal_stages(volumes):
        sent = sorted(volumes[first].items(), key=lambda item: -item[1])
        labels = ", ".join(f"{kind.replace('_', '-')} {readable_bytes(size)}" for kind, size in sent)
        where = f"on {name}: " if len(volumes) > 1 else ""
        lines.append(f"{'sends':<9}{where}{labels or 'nothing'}")
    return lines


def _equal_stages(values: Sequence[Any]) -> Iterator[tuple[str, int, int]]:
    """Yields the name of each group of neighbouring stages with equal values, its first stage and its last one."""
    for _, alike in groupby(enumerate(values), key=lambda item: item[1]):
        numbers = [number for number, _ in alike]
        first, last = numbers[0], numbers[-1]
        yield f"stage {first}" if first == last else f"stages {first} to {last}", first, last
