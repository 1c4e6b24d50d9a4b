"""Pipelines, tensor and expert parallelism, checkpoints, compilation, profilers."""

from __future__ import annotations

import reprlib
from collections.abc import Iterator

from llmtrain.plan.lint.document import Document, Where
from llmtrain.plan.lint.rules.precision import model_dtype
from llmtrain.plan.lint.rules.rule import Fault, error, warning

_PIPELINE_DEFAULTS = {"stages": "auto", "partition": "best", "seed_layers": False}


@error("pipeline_unread", "The number of stages and the partition come from PipelineModule; the keys are never read.")
def pipeline_unread(document: Document) -> Iterator[Fault]:
    """Keys of the pipeline block that nothing reads."""
    for key, default in _PIPELINE_DEFAULTS.items():
        if document.has("pipeline", key) and document.at("pipeline", key) != default:
            yield (
                ("pipeline", key),
                "is never read: PipelineModule(num_stages=, partition_method=) decides",
                "remove it",
            )


@error("pipeline_conflict", "What a pipeline does not go with; DeepSpeed asserts it, or fails, after the launch.")
def pipeline_conflict(document: Document) -> Iterator[Fault]:
    """The pipeline block beside what excludes it."""
    if not document.pipeline:
        return
    conflicts: dict[Where, bool] = {
        ("zero_optimization", "stage"): document.stage >= 2,
        ("wall_clock_breakdown",): document.on("wall_clock_breakdown"),
        ("flops_profiler", "enabled"): document.on("flops_profiler", "enabled"),
        ("tensor_parallel", "autotp_size"): (document.count("tensor_parallel", "autotp_size") or 1) > 1,
        ("sequence_parallel_size",): (document.count("sequence_parallel_size") or 1) > 1,
        ("compile", "deepcompile"): document.on("compile", "deepcompile"),
        ("managed_gradient_accumulation",): document.off("managed_gradient_accumulation"),
    }
    for where, there in conflicts.items():
        if there:
            yield where, "does not go with a pipeline", "remove it, or the pipeline block where there is no pipeline"


@error("pipeline_clipping", "A pipeline at ZeRO-0 in fp32 clips each stage by itself, or not at all.")
def pipeline_clipping(document: Document) -> Iterator[Fault]:
    """Clipping of pipelines."""
    clipping = document.number("gradient_clipping") if document.has("gradient_clipping") else 1.0
    if document.pipeline and document.stage == 0 and model_dtype(document) == "fp32" and clipping:
        yield ("gradient_clipping",), "is silently not applied to a pipeline in fp32 at ZeRO-0", "ZeRO-1, or 0"


@warning(
    "pipeline_checkpoint",
    "Reentrant checkpointing fails in a pipeline whose first input is whole numbers (issue 4274).",
)
def pipeline_checkpoint(document: Document) -> Iterator[Fault]:
    """activation_checkpoint_interval with use_reentrant."""
    where = ("pipeline", "activation_checkpoint_interval")
    if document.count(*where) and not document.off("pipeline", "use_reentrant"):
        yield where, "fails on token ids with reentrant checkpoints, the default", '"use_reentrant": false'


@warning(
    "activation_checkpointing",
    "The block acts only where the model calls deepspeed.checkpointing; transformers do not.",
)
def activation_checkpointing(document: Document) -> Iterator[Fault]:
    """The activation_checkpointing block."""
    if document.block("activation_checkpointing"):
        message = "has no effect on models of transformers, which do not call deepspeed.checkpointing"
        yield ("activation_checkpointing",), message, "model.gradient_checkpointing_enable()"


@error("tensor_size", "AutoTP goes by autotp_size; another tp_size is refused, and alone it does nothing.")
def tensor_size(document: Document) -> Iterator[Fault]:
    """tp_size against autotp_size."""
    size = document.count("tensor_parallel", "autotp_size") or 0
    for inner in ("tp", "tensor_parallel"):
        where = ("tensor_parallel", inner, "tp_size")
        given = document.count(*where)
        if given and given > 1 and given != size:
            message = "is refused beside another autotp_size" if size else "does nothing without autotp_size"
            yield where, message, f'"autotp_size": {given}'


@error("expert_tensor", "AutoEP does not cut experts: expert_tensor_parallel_size must be 1.")
def expert_tensor(document: Document) -> Iterator[Fault]:
    """expert_tensor_parallel_size."""
    where = ("expert_parallel", "expert_tensor_parallel_size")
    if (document.count(*where) or 1) > 1:
        yield where, "is not supported yet", "1"


@error("expert_conflict", "What AutoEP does not go with.")
def expert_conflict(document: Document) -> Iterator[Fault]:
    """expert_parallel beside what excludes it."""
    if not document.on("expert_parallel", "enabled"):
        return
    tensor = (document.count("tensor_parallel", "autotp_size") or 1) > 1
    zero3 = document.stage == 3
    conflicts: dict[Where, bool] = {
        ("sequence_parallel_size",): (document.count("sequence_parallel_size") or 1) > 1 and (zero3 or tensor),
        ("zero_optimization", "zero_quantized_gradients"): zero3
        and document.on("zero_optimization", "zero_quantized_gradients"),
        ("zero_optimization", "zero_hpz_partition_size"): zero3
        and (document.count("zero_optimization", "zero_hpz_partition_size") or 1) > 1,
        ("zero_optimization", "offload_optimizer"): tensor and document.offload("offload_optimizer") != "none",
        ("zero_optimization", "offload_param"): tensor and document.offload("offload_param") != "none",
        ("compile", "deepcompile"): tensor and document.on("compile", "deepcompile"),
    }
    for where, there in conflicts.items():
        if there:
            yield where, f"does not go with AutoEP{' under AutoTP' if tensor else ' at ZeRO-3'}", "remove one"


@error(
    "checkpoint_writer",
    "checkpoint.writer fails under torchrun and at ZeRO ≤ 2, and its files do not load (issue 8500).",
)
def checkpoint_writer(document: Document) -> Iterator[Fault]:
    """The writer block."""
    if document.at("checkpoint", "writer") is not None:
        yield (
            ("checkpoint", "writer"),
            "fails under torchrun and at ZeRO ≤ 2; what it writes cannot be loaded",
            "remove it",
        )


@error("deepcompile", "Passes of DeepCompile that exclude each other or fall back silently.")
def deepcompile(document: Document) -> Iterator[Fault]:
    """The compile block."""
    passes = document.at("compile", "passes")
    chosen = {one for one in passes if isinstance(one, str)} if isinstance(passes, list) else set()
    if "autosp" in chosen and document.stage >= 2:
        yield (
            ("compile", "passes"),
            f"'autosp' silently falls back to torch.compile at stage {document.stage}",
            "ZeRO ≤ 1",
        )
    if "autotp" in chosen and chosen & {"autosp", "z1", "z3"}:
        yield ("compile", "passes"), "'autotp' cannot be combined with other passes", "remove the others"
    for one in sorted(chosen - {"z1", "z3", "autosp", "autotp"}):
        yield ("compile", "passes"), f"{reprlib.repr(one)} is no pass: must be one of z1, z3, autosp, autotp", ""
    exclusive = ("offload_activation", "offload_parameters", "offload_opt_states")
    on = [key for key in exclusive if document.on("compile", key)]
    for key in on[1:]:
        yield ("compile", key), f"excludes {on[0]}", "keep one"


@warning("deepcompile_call", "DeepCompile is experimental, and acts only after engine.compile() is called.")
def deepcompile_call(document: Document) -> Iterator[Fault]:
    """compile.deepcompile."""
    if document.on("compile", "deepcompile"):
        yield ("compile", "deepcompile"), "acts only after engine.compile(), and needs CUDA and nvcc", ""


@error(
    "managed_accumulation",
    "Unmanaged accumulation does not go with overlapping at stages below 2, nor with DeepCompile.",
)
def managed_accumulation(document: Document) -> Iterator[Fault]:
    """managed_gradient_accumulation false."""
    where = ("managed_gradient_accumulation",)
    if document.off(*where):
        if document.stage < 2 and document.on("zero_optimization", "overlap_comm"):
            yield where, "false is asserted not to meet overlap_comm below stage 2", "overlap_comm false"
        if document.on("compile", "deepcompile"):
            yield where, "false is asserted not to meet DeepCompile", "true"


@warning(
    "profiler_sync", "The flops profiler switches wall_clock_breakdown on, which synchronises at every micro-batch."
)
def profiler_sync(document: Document) -> Iterator[Fault]:
    """flops_profiler."""
    if document.on("flops_profiler", "enabled") and not document.on("wall_clock_breakdown"):
        yield ("flops_profiler", "enabled"), "also switches wall_clock_breakdown on, which slows every step", ""


@warning("aio_unused", "The aio block is read where something is offloaded to NVMe.")
def aio_unused(document: Document) -> Iterator[Fault]:
    """aio without NVMe."""
    offloads = {document.offload(what) for what in ("offload_optimizer", "offload_param")}
    if document.block("aio") and "nvme" not in offloads:
        yield ("aio",), "has no effect: nothing is offloaded to NVMe", "remove it"


@warning("secret", "A key of a service in a file that is copied, logged and printed by DeepSpeed.")
def secret(document: Document) -> Iterator[Fault]:
    """Secrets."""
    if document.word("comet", "api_key"):
        yield (
            ("comet", "api_key"),
            "is a secret, and DeepSpeed prints the configuration",
            "COMET_API_KEY in the environment",
        )


RULES = (
    *(pipeline_unread, pipeline_conflict, pipeline_clipping, pipeline_checkpoint, activation_checkpointing),
    *(tensor_size, expert_tensor, expert_conflict, checkpoint_writer, deepcompile, deepcompile_call),
    *(managed_accumulation, profiler_sync, aio_unused, secret),
)
