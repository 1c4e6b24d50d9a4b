"""Rules for pipelines, tensor and expert parallelism, checkpoints, compilation and profilers."""

from __future__ import annotations

import reprlib
from collections.abc import Iterator

from llmtrain_lint.document import Configuration
from llmtrain_lint.rules.precision import model_dtype
from llmtrain_lint.rules.rule import Fault, error, warning
from llmtrain_lint.schema import KeyPath

_PIPELINE_DEFAULTS = {"stages": "auto", "partition": "best", "seed_layers": False}


@error(
    "pipeline_unread",
    "ignores",
    "The number of stages and the partition come from PipelineModule; the keys are never read.",
)
def pipeline_unread(document: Configuration) -> Iterator[Fault]:
    """Reports keys of the pipeline block that nothing reads."""
    for key, default in _PIPELINE_DEFAULTS.items():
        if document.has("pipeline", key) and document.at("pipeline", key) != default:
            yield ("pipeline", key), "PipelineModule(num_stages=, partition_method=) decides", "remove it"


@warning(
    "pipeline_conflict",
    "refuses",
    "Settings that cannot be combined with a PipelineModule; DeepSpeed fails after the launch.",
)
def pipeline_conflict(document: Configuration) -> Iterator[Fault]:
    """Reports settings that a pipeline excludes."""
    if not document.pipeline:
        return
    conflicts: dict[KeyPath, bool] = {
        ("zero_optimization", "stage"): document.stage >= 2,
        ("wall_clock_breakdown",): document.on("wall_clock_breakdown"),
        ("flops_profiler", "enabled"): document.on("flops_profiler", "enabled"),
        ("tensor_parallel", "autotp_size"): document.tensor_parallel > 1,
        ("sequence_parallel_size",): (document.count("sequence_parallel_size") or 1) > 1,
        ("compile", "deepcompile"): document.on("compile", "deepcompile"),
        ("managed_gradient_accumulation",): document.off("managed_gradient_accumulation"),
    }
    for where, there in conflicts.items():
        if there:
            yield (
                where,
                "it cannot be combined with a PipelineModule, and the file has a pipeline block",
                "remove it, or the pipeline block if the model is no PipelineModule",
            )


@warning("pipeline_clipping", "ignores", "A pipeline at ZeRO-0 in fp32 clips each stage separately, or not at all.")
def pipeline_clipping(document: Configuration) -> Iterator[Fault]:
    """Reports clipping that a pipeline does not apply."""
    clipping = document.number("gradient_clipping") if document.has("gradient_clipping") else 1.0
    if document.pipeline and document.stage == 0 and model_dtype(document) == "fp32" and clipping:
        yield ("gradient_clipping",), "a PipelineModule in fp32 at ZeRO-0 is not clipped as a whole", "ZeRO-1, or 0"


@warning(
    "pipeline_checkpoint",
    "refuses",
    "Reentrant checkpointing fails in a pipeline whose first input is integers (issue 4274).",
)
def pipeline_checkpoint(document: Configuration) -> Iterator[Fault]:
    """Warns about activation_checkpoint_interval with use_reentrant."""
    where = ("pipeline", "activation_checkpoint_interval")
    if document.count(*where) and not document.off("pipeline", "use_reentrant"):
        yield where, "reentrant checkpointing, the default, fails on token ids", '"use_reentrant": false'


@warning(
    "activation_checkpointing",
    "ignores",
    "The block only has an effect if the model calls deepspeed.checkpointing; models of transformers do not.",
)
def activation_checkpointing(document: Configuration) -> Iterator[Fault]:
    """Warns about the activation_checkpointing block."""
    if any(value not in (False, None, 0) for value in document.block("activation_checkpointing").values()):
        message = "models of transformers do not call deepspeed.checkpointing; only a script that does is affected"
        yield ("activation_checkpointing",), message, "model.gradient_checkpointing_enable()"


@error(
    "tensor_size",
    "refuses",
    "AutoTP uses autotp_size; a different tp_size is rejected, and tp_size alone has no effect.",
)
def tensor_size(document: Configuration) -> Iterator[Fault]:
    """Checks tp_size against autotp_size."""
    size = document.count("tensor_parallel", "autotp_size") or 0
    for inner in ("tp", "tensor_parallel"):
        where = ("tensor_parallel", inner, "tp_size")
        given = document.count(*where)
        if given and given > 1 and given != size:
            refused = size and document.since("0.18.6")
            message = "autotp_size differs" if size else "it is not read without autotp_size"
            yield where, message, f'"autotp_size": {given}', "refuses" if refused else "ignores"


@error("expert_tensor", "refuses", "AutoEP does not split experts: expert_tensor_parallel_size must be 1.")
def expert_tensor(document: Configuration) -> Iterator[Fault]:
    """Reports expert_tensor_parallel_size."""
    where = ("expert_parallel", "expert_tensor_parallel_size")
    if (document.count(*where) or 1) > 1:
        yield where, "experts are not split", "1"


@error("no_value", "refuses", "A key for which DeepSpeed accepts no value that a file can have.")
def no_value(document: Configuration) -> Iterator[Fault]:
    """Reports keys that are for scripts, or not implemented."""
    for where, allowed in ((("tensor_parallel", "dtype"), "auto"), (("expert_parallel", "load_balance_coeff"), None)):
        if document.has(*where) and document.at(*where) != allowed:
            yield where, "no value is accepted", "remove it"


@error("expert_conflict", "refuses", "Settings that cannot be combined with AutoEP.")
def expert_conflict(document: Configuration) -> Iterator[Fault]:
    """Reports settings that expert_parallel excludes."""
    if not document.on("expert_parallel", "enabled"):
        return
    tensor, zero3 = document.tensor_parallel > 1, document.stage == 3
    conflicts: dict[KeyPath, bool] = {
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
            yield where, f"it cannot be combined with AutoEP{' under AutoTP' if tensor else ' at ZeRO-3'}", "remove one"


@error(
    "checkpoint_writer",
    "refuses",
    "checkpoint.writer fails under torchrun and at ZeRO ≤ 2, and its files do not load (issue 8500).",
)
def checkpoint_writer(document: Configuration) -> Iterator[Fault]:
    """Reports the writer block."""
    if document.at("checkpoint", "writer") is not None:
        yield (
            ("checkpoint", "writer"),
            "it fails under torchrun and at ZeRO ≤ 2, and what it writes cannot be loaded",
            "remove it",
        )


@error("deepcompile", "refuses", "DeepCompile passes that exclude each other or silently fall back.")
def deepcompile(document: Configuration) -> Iterator[Fault]:
    """Reports passes that cannot be combined."""
    passes = document.at("compile", "passes")
    chosen = {one for one in passes if isinstance(one, str)} if isinstance(passes, list) else set()
    if "autosp" in chosen and document.stage >= 2:
        yield (
            ("compile", "passes"),
            f"at stage {document.stage}, 'autosp' silently falls back to torch.compile",
            "ZeRO ≤ 1",
            "ignores",
        )
    if "autotp" in chosen and chosen & {"autosp", "z1", "z3"}:
        yield ("compile", "passes"), "'autotp' cannot be combined with other passes", "remove the others"
    known = ("z1", "z3", "autosp", *(("autotp",) if document.since("0.19.6") else ()))
    for one in sorted(chosen.difference(known)):
        yield ("compile", "passes"), f"{reprlib.repr(one)} is not a pass", f"one of {', '.join(known)}"
    exclusive = ("offload_activation", "offload_parameters", "offload_opt_states")
    on = [key for key in exclusive if document.on("compile", key)] if document.since("0.19.4") else []
    for key in on[1:]:
        yield ("compile", key), f"it cannot be combined with {on[0]}", "keep one"


@warning(
    "deepcompile_call",
    "ignores",
    "DeepCompile is experimental, and only has an effect after engine.compile() is called.",
)
def deepcompile_call(document: Configuration) -> Iterator[Fault]:
    """Warns about compile.deepcompile."""
    if document.on("compile", "deepcompile"):
        message = "it has no effect until the script calls engine.compile(), and needs CUDA and nvcc"
        yield ("compile", "deepcompile"), message, ""


@error(
    "managed_accumulation",
    "refuses",
    "Unmanaged accumulation cannot be combined with overlapping at stages below 2, or with DeepCompile.",
)
def managed_accumulation(document: Configuration) -> Iterator[Fault]:
    """Reports managed_gradient_accumulation false."""
    where = ("managed_gradient_accumulation",)
    if document.off(*where):
        if document.stage < 2 and document.on("zero_optimization", "overlap_comm"):
            yield where, "false cannot be combined with overlap_comm below stage 2", "overlap_comm false"
        if document.on("compile", "deepcompile"):
            yield where, "false cannot be combined with DeepCompile", "true"
        for what in ("offload_optimizer", "offload_param"):
            if document.offload(what) != "none" and not document.since("0.19.5"):
                yield where, f"false cannot be combined with {what} before DeepSpeed 0.19.5", "true"


@warning(
    "profiler_sync",
    "allows",
    "The flops profiler also enables wall_clock_breakdown, which synchronises at every micro-batch.",
)
def profiler_sync(document: Configuration) -> Iterator[Fault]:
    """Warns about flops_profiler."""
    if document.on("flops_profiler", "enabled") and not document.on("wall_clock_breakdown"):
        yield ("flops_profiler", "enabled"), "it also enables wall_clock_breakdown, which slows every step", ""


@warning("aio_unused", "ignores", "The aio block is only read if something is offloaded to NVMe.")
def aio_unused(document: Configuration) -> Iterator[Fault]:
    """Warns about an aio block without NVMe."""
    offloads = {document.offload(what) for what in ("offload_optimizer", "offload_param")}
    if document.block("aio") and "nvme" not in offloads:
        yield ("aio",), "nothing is offloaded to NVMe", "remove it"


@warning("secret", "allows", "A service's API key in a file that is copied, logged and printed by DeepSpeed.")
def secret(document: Configuration) -> Iterator[Fault]:
    """Warns about secrets."""
    if document.word("comet", "api_key"):
        yield (
            ("comet", "api_key"),
            "it is a secret, and DeepSpeed prints the configuration",
            "COMET_API_KEY in the environment",
        )
