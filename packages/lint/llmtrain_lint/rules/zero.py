"""Rules for ZeRO: which setting needs which stage, has no effect, or fails an assertion."""

from __future__ import annotations

import math
from collections.abc import Iterator

from llmtrain_lint.document import Configuration
from llmtrain_lint.rules.precision import model_dtype
from llmtrain_lint.rules.rule import Fault, error, warning

ZERO = "zero_optimization"
LARGEST_BUCKET = 2e9
"""Elements of the largest bucket without a warning: four times DeepSpeed's own, 4 GB in 16 bits."""


@error("zero_stage_missing", "ignores", "Without `stage`, ZeRO is off, and the rest of the block has no effect.")
def stage_missing(document: Configuration) -> Iterator[Fault]:
    """Reports a block without a stage."""
    if document.block(ZERO) and not document.has(ZERO, "stage"):
        yield (ZERO, "stage"), "without it, the stage is 0, and the block has no effect", '"stage": 1, 2 or 3'


@error(
    "offload_param",
    "ignores",
    "Parameters are only offloaded at ZeRO-3; at lower stages the block is silently ignored.",
)
def offload_param(document: Configuration) -> Iterator[Fault]:
    """Reports offload_param below stage 3."""
    if document.stage < 3 and document.offload("offload_param") != "none":
        key = "offload_param" if document.has(ZERO, "offload_param") else "cpu_offload_param"
        message = f"at stage {document.stage} no parameters are offloaded"
        yield (ZERO, key), message, "remove it, or stage 3"


@error("offload_optimizer", "ignores", "Without ZeRO there is no partitioned optimizer to offload.")
def offload_optimizer(document: Configuration) -> Iterator[Fault]:
    """Reports offload_optimizer at stage 0."""
    if document.stage == 0 and document.offload("offload_optimizer") != "none":
        key = "offload_optimizer" if document.has(ZERO, "offload_optimizer") else "cpu_offload"
        yield (ZERO, key), "at stage 0 nothing is offloaded", "stage 1, 2 or 3"


@error("offload_nvme", "changes", "At ZeRO-1 and 2, an optimizer offloaded to NVMe goes to CPU memory instead.")
def offload_nvme(document: Configuration) -> Iterator[Fault]:
    """Reports NVMe below stage 3."""
    if document.stage in (1, 2) and document.offload("offload_optimizer") == "nvme":
        message = f"at stage {document.stage} 'nvme' becomes CPU memory"
        yield (ZERO, "offload_optimizer", "device"), message, "stage 3, or 'cpu'"


@error("nvme_path", "refuses", "Offloading to NVMe needs a folder; DeepSpeed checks it only when the engine is built.")
def nvme_path(document: Configuration) -> Iterator[Fault]:
    """Reports NVMe without a path."""
    for what in ("offload_optimizer", "offload_param"):
        if document.offload(what) == "nvme" and document.at(ZERO, what, "nvme_path") is None:
            yield (ZERO, what, "nvme_path"), "it is missing, but 'device' is 'nvme'", "a folder on the local NVMe drive"


@error("offload_ratio", "refuses", "An optimizer can only be offloaded in part at ZeRO-3.")
def offload_ratio(document: Configuration) -> Iterator[Fault]:
    """Reports a ratio below 1 below stage 3."""
    ratio = document.number(ZERO, "offload_optimizer", "ratio")
    if ratio is not None and 0 <= ratio < 1 and not (document.stage == 3 or math.isnan(document.stage)):
        yield (ZERO, "offload_optimizer", "ratio"), f"{ratio:g} < 1 needs stage 3", "1.0"


@error("super_offload", "ignores", "SuperOffload only works at ZeRO-3, and is silently ignored elsewhere.")
def super_offload(document: Configuration) -> Iterator[Fault]:
    """Reports super_offload below stage 3."""
    if document.on(ZERO, "offload_optimizer", "super_offload") and document.stage < 3:
        yield (
            (ZERO, "offload_optimizer", "super_offload"),
            f"stage {document.stage} has no SuperOffload",
            "remove it, or stage 3",
        )


_ONLY_3 = (
    *("zero_hpz_partition_size", "zero_quantized_weights", "zero_quantized_nontrainable_weights"),
    *("zero_quantized_gradients", "gather_16bit_weights_on_model_save", "gather_fp16_weights_on_model_save"),
    *("pipeline_loading_checkpoint", "save_muon_momentum_buffer_in_memory", "leaf_module"),
)
_OFFLOADS = ("offload_optimizer", "offload_param", "cpu_offload", "cpu_offload_param")
_GATHER = tuple(
    f"{prefix}gather_{name}_weights_on_model_save" for prefix in ("stage3_", "") for name in ("16bit", "fp16")
)
_TUNES_3 = (
    *("prefetch_bucket_size", "param_persistence_threshold", "model_persistence_threshold", "max_live_parameters"),
    *("max_reuse_distance", "module_granularity_threshold", "use_all_reduce_for_fetch_params"),
    *("allgather_sequential", "sub_group_size"),
)
_TUNES_12 = (
    *("allgather_partitions", "allgather_bucket_size", "use_multi_rank_bucket_allreduce"),
    *("round_robin_gradients", "parameter_alignment", "ignore_unused_parameters"),
)


def _changed(document: Configuration, keys: tuple[str, ...]) -> Iterator[str]:
    """Yields those of the keys whose value is not their default."""
    for key, value in document.block(ZERO).items():
        known = key.removeprefix("stage3_") in keys and document.has(ZERO, key)
        if known and value not in ("auto", document.schema.default(ZERO, key)):
            yield key


@error("zero3_only", "ignores", "A feature of ZeRO-3, silently ignored at lower stages.")
def zero3_only(document: Configuration) -> Iterator[Fault]:
    """Reports features of stage 3 at lower stages."""
    gathered = document.tensor_parallel > 1  # which AutoTP's weights are, too
    for key in _changed(document, _ONLY_3) if document.stage < 3 else ():
        if gathered and key in _GATHER:
            continue
        yield (ZERO, key), f"it is a feature of stage 3, and this is stage {document.stage}", "remove it, or stage 3"


@warning("zero3_tuning", "ignores", "A size that tunes ZeRO-3 and has no effect at lower stages.")
def zero3_tuning(document: Configuration) -> Iterator[Fault]:
    """Warns about tuning of stage 3 at lower stages."""
    for key in _changed(document, _TUNES_3) if document.stage in (1, 2) else ():
        yield (ZERO, key), f"it has no effect at stage {document.stage}", "remove it"


@warning("zero0_tuning", "ignores", "At stage 0 ZeRO is off, and the settings of its block have no effect.")
def zero0_tuning(document: Configuration) -> Iterator[Fault]:
    """Warns about settings of ZeRO at stage 0."""
    if document.stage or not document.has(ZERO, "stage"):
        return
    known = document.schema.root.keys or {}
    own_rules = {*_ONLY_3, *_OFFLOADS, "stage", "zenflow", "compute_grad_norm", "legacy_stage1"}
    tuning = tuple(key.removeprefix("stage3_") for key in known[ZERO].keys or {} if key not in own_rules)
    for key in _changed(document, tuple(key for key in tuning if key not in own_rules)):
        yield (ZERO, key), "at stage 0 ZeRO is off", "remove it, or stage 1, 2 or 3"


@warning("zero12_tuning", "ignores", "A setting of ZeRO-1 and 2 that has no effect at ZeRO-3.")
def zero12_tuning(document: Configuration) -> Iterator[Fault]:
    """Warns about tuning of the lower stages at stage 3."""
    for key in _changed(document, _TUNES_12) if document.stage == 3 else ():
        yield (ZERO, key), "it has no effect at stage 3", "remove it"


@error(
    "zenflow",
    "misreads",
    "ZenFlow corrupts every matrix at ZeRO-1 and 2, needs the optimizer on the CPU, and replaces accumulation.",
)
def zenflow(document: Configuration) -> Iterator[Fault]:
    """Reports ZenFlow where it corrupts weights or fails."""
    where = (ZERO, "zenflow")
    if not isinstance(document.at(*where), dict):
        return
    if document.stage in (1, 2):
        yield where, f"at stage {document.stage} it stores matrices transposed, which corrupts the weights", "remove it"
    elif document.stage == 0:
        yield where, "it needs ZeRO", "remove it", "ignores"
    if document.offload("offload_optimizer") != "cpu":
        yield where, "it needs the optimizer on the CPU", "offload_optimizer.device 'cpu'", "refuses"
    steps = document.count("gradient_accumulation_steps") or 1
    if steps > 1:
        message = f"its update_interval replaces the {steps} gradient_accumulation_steps"
        yield where, message, "gradient_accumulation_steps 1", "changes"


@error(
    "zenflow_interval",
    "refuses",
    "ZenFlow's select_interval must be a number unless select_strategy is auto, and only then.",
)
def zenflow_interval(document: Configuration) -> Iterator[Fault]:
    """Checks select_interval against select_strategy."""
    block = document.block(ZERO, "zenflow")
    strategy, interval = block.get("select_strategy", "auto"), block.get("select_interval", "auto")
    where = (ZERO, "zenflow", "select_interval")
    if strategy == "auto" and type(interval) is int:
        yield where, "select_strategy is 'auto'", "select_strategy 'step' or 'epoch'"
    if strategy in ("step", "epoch") and interval == "auto":
        yield where, f"select_strategy is '{strategy}', which needs a number", "a number"


@error(
    "predivide", "refuses", "ZeRO-2 and 3 with reduce_scatter reject gradients that are scaled before the reduction."
)
def predivide(document: Configuration) -> Iterator[Fault]:
    """Checks prescale_gradients and gradient_predivide_factor."""
    scattered = document.stage >= 2 and not document.off(ZERO, "reduce_scatter")
    summed = document.stage == 2 and document.word("gradient_allreduce_op").lower() == "sum"
    factor = document.number("gradient_predivide_factor") or 1.0
    if scattered and not summed and document.on("prescale_gradients"):
        yield ("prescale_gradients",), f"it cannot be combined with reduce_scatter at stage {document.stage}", "false"
    if scattered and not summed and factor != 1.0:
        message = f"stage {document.stage} with reduce_scatter does not support {factor:g}"
        yield ("gradient_predivide_factor",), message, "1.0"
    if document.on("prescale_gradients") and factor != 1.0:
        message = "prescale_gradients is on, and divides by the number of ranks"
        yield ("gradient_predivide_factor",), message, "remove one of them", "ignores"


@error("allreduce_sum", "refuses", "Summed gradients are rejected at ZeRO-3, with ZenFlow and with DeepCompile.")
def allreduce_sum(document: Configuration) -> Iterator[Fault]:
    """Reports gradient_allreduce_op sum where it is rejected."""
    if document.word("gradient_allreduce_op").lower() == "sum":
        others = {
            "at ZeRO-3": document.stage == 3,
            "with ZenFlow": document.at(ZERO, "zenflow") is not None,
            "with DeepCompile": document.on("compile", "deepcompile"),
        }
        for other, there in others.items():
            if there:
                yield ("gradient_allreduce_op",), f"'sum' is not possible {other}", "'mean'"


@warning(
    "allreduce_sum_scale",
    "changes",
    "Summed gradients grow with the number of ranks, and so does the norm that clipping uses.",
)
def allreduce_sum_scale(document: Configuration) -> Iterator[Fault]:
    """Warns about gradient_allreduce_op sum elsewhere."""
    if document.word("gradient_allreduce_op").lower() == "sum" and document.stage < 3:
        yield ("gradient_allreduce_op",), "with 'sum', gradients and their norm grow with the number of ranks", "'mean'"


@error(
    "compute_grad_norm",
    "refuses",
    "The gradient norm can only be left out at ZeRO-1 and 2, with gradient_clipping explicitly 0 and no offload.",
)
def compute_grad_norm(document: Configuration) -> Iterator[Fault]:
    """Reports compute_grad_norm false where it is rejected."""
    where = (ZERO, "compute_grad_norm")
    if not document.off(*where):
        return
    if document.stage in (0, 3):
        yield where, "false needs stage 1 or 2", "true"
    if document.number("gradient_clipping") != 0:
        yield ("gradient_clipping",), "compute_grad_norm is false, which needs an explicit 0", "0"
    if document.offload("offload_optimizer") != "none" or document.at(ZERO, "zenflow") is not None:
        yield where, "false cannot be combined with an offloaded optimizer", "true"
    summed = document.word("data_types", "grad_accum_dtype").removeprefix("torch.") in ("fp32", "float", "float32")
    if document.stage == 1 and model_dtype(document) == "bf16" and summed:
        yield where, "at stage 1, false cannot be combined with bf16 and gradients accumulated in fp32", "true"


@error("legacy_checkpoint", "refuses", "Old ways to run ZeRO-1 and to save ZeRO-3, which were removed.")
def legacy(document: Configuration) -> Iterator[Fault]:
    """Reports legacy_stage1 and elastic_checkpoint."""
    if document.on(ZERO, "legacy_stage1"):
        yield (ZERO, "legacy_stage1"), "the old ZeRO-1 was removed", "remove it"
    if document.on(ZERO, "elastic_checkpoint") and document.stage == 3:
        yield (ZERO, "elastic_checkpoint"), "stage 3 does not read it", "checkpoint.load_universal", "ignores"


@warning("quantized", "changes", "ZeRO++ quantizes what it sends: results differ, and it needs CUDA kernels.")
def quantized(document: Configuration) -> Iterator[Fault]:
    """Warns about quantized communication at stage 3."""
    for key in ("zero_quantized_weights", "zero_quantized_gradients", "zero_quantized_nontrainable_weights"):
        if document.on(ZERO, key) and document.stage == 3:
            yield (ZERO, key), "it sends quantized values, which loses precision and needs CUDA kernels", ""


@error("quantized_autocast", "refuses", "Quantized weights are rejected under torch_autocast.")
def quantized_autocast(document: Configuration) -> Iterator[Fault]:
    """Reports quantized weights (qwZ) with autocast."""
    if document.on(ZERO, "zero_quantized_weights") and document.on("torch_autocast", "enabled"):
        yield (ZERO, "zero_quantized_weights"), "it cannot be combined with torch_autocast", "bf16 or fp16"


@warning(
    "save_16bit",
    "allows",
    "Weights that ZeRO-3 or AutoTP has split are only gathered for saving if the configuration says so.",
)
def save_16bit(document: Configuration) -> Iterator[Fault]:
    """Warns if stage3_gather_16bit_weights_on_model_save is off."""
    split = document.stage == 3 or (document.filled and document.tensor_parallel > 1)
    if split and not any(document.on(ZERO, name) for name in _GATHER):
        key = next((name for name in _GATHER if document.has(ZERO, name)), _GATHER[0])
        if document.filled:
            off = "'auto' becomes false, and" if document.at(ZERO, key) == "auto" else "without it,"
            yield (ZERO, key), f"{off} no weights are saved that from_pretrained can read", "true"
        elif document.at(ZERO, key) != "auto":
            yield (ZERO, key), "without it, save_16bit_model writes nothing", "true, or save checkpoints"


@warning("max_live_parameters", "changes", "Without a budget of live parameters, ZeRO-3 prefetches nothing.")
def max_live(document: Configuration) -> Iterator[Fault]:
    """Warns about max_live_parameters 0."""
    for key in ("stage3_max_live_parameters", "max_live_parameters"):
        if document.stage == 3 and document.number(ZERO, key) == 0:
            yield (ZERO, key), "with 0, nothing is prefetched, and every layer waits for its parameters", "1e9"


@warning("bucket_memory", "allows", "Buffers for a whole bucket are allocated, whatever the size of the model.")
def bucket_memory(document: Configuration) -> Iterator[Fault]:
    """Warns about buckets that are larger than most models."""
    size = document.number(ZERO, "reduce_bucket_size") or 0
    if document.stage > 0 and size > LARGEST_BUCKET and not document.off(ZERO, "contiguous_gradients"):
        buffers = 2 if document.stage < 3 and document.on(ZERO, "overlap_comm") else 1
        width = 4 if model_dtype(document) == "fp32" else 2
        taken = f"{buffers * width * size / 1e9:,.0f} GB on each device"
        yield (ZERO, "reduce_bucket_size"), f"a bucket of this size takes {taken}", "5e8"
