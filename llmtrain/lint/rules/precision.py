"""Rules for number formats: which exclude each other, and in which one gradients are accumulated."""

from __future__ import annotations

from collections.abc import Iterator

from llmtrain.lint.document import Configuration
from llmtrain.lint.rules.rule import Fault, error, warning

_BF16_NAMES = ("bf16", "bfloat16")
_CANONICAL = {"half": "fp16", "float16": "fp16", "float": "fp32", "float32": "fp32", "bfloat16": "bf16"}


def bf16_key(document: Configuration) -> str:
    """Returns the block that DeepSpeed reads: `bf16`, else its old name."""
    return "bfloat16" if "bfloat16" in document.values and document.at("bf16") is None else "bf16"


def model_dtype(document: Configuration) -> str:
    """Returns the data type that DeepSpeed casts the model to."""
    if document.on("fp16", "enabled"):
        return "fp16"
    return "bf16" if document.on(bf16_key(document), "enabled") else "fp32"


def _dtype(document: Configuration, key: str) -> str:
    name = document.word("data_types", key).removeprefix("torch.")
    return _CANONICAL.get(name, name)


@error("two_precisions", "fp16, bf16 and torch_autocast exclude each other; DeepSpeed only rejects fp16 with bf16.")
def two_precisions(document: Configuration) -> Iterator[Fault]:
    """Reports more than one precision."""
    bf16 = bf16_key(document)
    if document.on("fp16", "enabled") and document.on(bf16, "enabled"):
        yield ("fp16", "enabled"), f"fp16 and {bf16} are both enabled", "disable one"
    for key in (bf16, "fp16"):
        if document.on(key, "enabled") and document.on("torch_autocast", "enabled"):
            message = f"torch_autocast and {key} are both enabled: weights are cast, and cast again under autocast"
            yield ("torch_autocast", "enabled"), message, f"disable {key} to keep fp32 weights, or torch_autocast"


@error("bfloat16_twice", "`bfloat16` is the old name of `bf16`, and is ignored if both are present.")
def bfloat16_twice(document: Configuration) -> Iterator[Fault]:
    """Reports a block with both names."""
    if all(document.at(name) is not None for name in _BF16_NAMES):
        yield ("bfloat16",), "is silently ignored, since bf16 is present", "remove it"


@error("not_enabled", "A block without `enabled` is off, whatever its other settings.")
def not_enabled(document: Configuration) -> Iterator[Fault]:
    """Reports blocks with settings that are not enabled."""
    blocks = ("fp16", *_BF16_NAMES, "torch_autocast", "flops_profiler", "tensorboard", "wandb", "csv_monitor", "comet")
    for key in (*blocks, "comms_logger", "expert_parallel", "data_efficiency", "hybrid_engine"):
        if document.block(key) and not document.has(key, "enabled"):
            yield (key, "enabled"), f"is missing: {key} is off, and its settings have no effect", "true"


@warning("autocast_dtype", "torch_autocast without a dtype uses the device's default.")
def autocast_dtype(document: Configuration) -> Iterator[Fault]:
    """Warns about torch_autocast without dtype."""
    if document.on("torch_autocast", "enabled") and document.at("torch_autocast", "dtype") is None:
        yield ("torch_autocast", "dtype"), "is missing: the device's default is used", '"bfloat16"'


@error("param_dtype", "data_types.param_dtype must be the data type that fp16 or bf16 sets for the model.")
def param_dtype(document: Configuration) -> Iterator[Fault]:
    """Checks param_dtype against the precision blocks."""
    asked, made = _dtype(document, "param_dtype"), model_dtype(document)
    if asked in ("fp16", "bf16", "fp32") and asked != made:
        yield ("data_types", "param_dtype"), f"{asked} is rejected: the precision blocks set {made}", made


@error("accumulate_unpartitioned", "Without ZeRO, DeepSpeed only accumulates in the model's own data type.")
def accumulate_unpartitioned(document: Configuration) -> Iterator[Fault]:
    """Checks grad_accum_dtype at stage 0."""
    asked, made = _dtype(document, "grad_accum_dtype"), model_dtype(document)
    if asked and asked != "auto" and document.stage == 0 and asked != made:
        message = f"{asked} is not implemented for a {made} model at ZeRO-0"
        yield ("data_types", "grad_accum_dtype"), message, "ZeRO-1, or remove it"


@warning(
    "accumulate_bf16",
    "bf16 accumulates micro-batches in bf16 by default, which loses small gradients (issues 1800, 2352).",
)
def accumulate_bf16(document: Configuration) -> Iterator[Fault]:
    """Warns about accumulation in bf16."""
    steps = document.count("gradient_accumulation_steps") or 1
    if model_dtype(document) == "bf16" and steps > 1 and document.stage and not _dtype(document, "grad_accum_dtype"):
        message = f"is missing: {steps} micro-batches are accumulated in bf16"
        yield ("data_types", "grad_accum_dtype"), message, '"fp32"'


@warning("unpartitioned_16bit", "16-bit training at ZeRO-0 uses another optimizer, whose first update is too small.")
def unpartitioned_16bit(document: Configuration) -> Iterator[Fault]:
    """Warns about bf16 or fp16 at stage 0."""
    made = model_dtype(document)
    if made != "fp32" and document.stage == 0:
        key = "fp16" if made == "fp16" else bf16_key(document)
        message = f"{made} at ZeRO-0: Adam's first update is about a quarter smaller than at ZeRO-1"
        yield (key, "enabled"), message, "zero_optimization.stage 1"


@error("master_weights", "16-bit master weights need ZeRO, and 16-bit optimizer states need 16-bit master weights.")
def master_weights(document: Configuration) -> Iterator[Fault]:
    """Checks the options of the master weights."""
    bf16 = bf16_key(document)
    for where in (("fp16", "fp16_master_weights_and_grads"), (bf16, "bf16_master_weights_and_grads")):
        if document.on(*where) and document.stage == 0:
            yield where, "is rejected at ZeRO-0", "stage 1, 2 or 3"
    states = (bf16, "bf16_optimizer_states")
    if document.on(*states) and not document.on(bf16, "bf16_master_weights_and_grads"):
        yield states, "needs bf16_master_weights_and_grads", ""


@error("loss_scale", "The loss scale of fp16 must be finite and not negative, its window and its minimum positive.")
def loss_scale(document: Configuration) -> Iterator[Fault]:
    """Checks the numbers of the loss scaler."""
    scale = document.number("fp16", "loss_scale")
    if scale is not None and scale < 0:
        yield ("fp16", "loss_scale"), f"{scale:g} was given: must be ≥ 0 (0 is dynamic)", "0"
    for key in ("loss_scale_window", "min_loss_scale", "hysteresis"):
        value = document.number("fp16", key)
        if value is not None and value <= 0:
            yield ("fp16", key), f"{value:g} was given: must be > 0", ""


RULES = (
    *(two_precisions, bfloat16_twice, not_enabled, autocast_dtype, param_dtype, accumulate_unpartitioned),
    *(accumulate_bf16, unpartitioned_16bit, master_weights, loss_scale),
)
