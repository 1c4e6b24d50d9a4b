"""Rules for number formats: which exclude each other, and in which one gradients are accumulated."""

from __future__ import annotations

from collections.abc import Iterator

from llmtrain_lint.document import Configuration, Effect
from llmtrain_lint.rules.rule import Fault, error, warning

_BF16_NAMES = ("bf16", "bfloat16")
_CANONICAL = {"half": "fp16", "float16": "fp16", "float": "fp32", "float32": "fp32", "bfloat16": "bf16"}


def bf16_key(document: Configuration) -> str:
    """Returns the block that DeepSpeed reads: `bf16`, else its old name."""
    return "bfloat16" if "bfloat16" in document.values and document.at("bf16") is None else "bf16"


def model_dtype(document: Configuration) -> str:
    """Returns the data type that DeepSpeed casts the model to, or "" if the reader decides it."""
    if document.on("fp16", "enabled"):
        return "fp16"
    if document.on(bf16_key(document), "enabled"):
        return "bf16"
    return "fp32" if document.reader == "deepspeed" else ""


def _canonical(name: str) -> str:
    name = name.removeprefix("torch.")
    return _CANONICAL.get(name, name)


def _dtype(document: Configuration, key: str) -> str:
    return _canonical(document.word("data_types", key))


@error("two_precisions", "refuses", "fp16 and bf16 exclude each other.")
def two_precisions(document: Configuration) -> Iterator[Fault]:
    """Reports more than one precision."""
    bf16 = bf16_key(document)
    if document.on("fp16", "enabled") and document.on(bf16, "enabled"):
        yield ("fp16", "enabled"), f"{bf16} is enabled, too", "disable one"


@warning("autocast_casts", "changes", "With fp16 or bf16, weights are cast once, and again under torch_autocast.")
def autocast_casts(document: Configuration) -> Iterator[Fault]:
    """Warns about torch_autocast to another type than that of the weights."""
    made, asked = model_dtype(document), _canonical(document.word("torch_autocast", "dtype"))
    if document.on("torch_autocast", "enabled") and made in ("fp16", "bf16") and asked and asked != made:
        yield ("torch_autocast", "dtype"), f"the weights are {made}, but torch_autocast computes in {asked}", made


@error("bfloat16_twice", "ignores", "`bfloat16` is the old name of `bf16`, and is ignored if both are present.")
def bfloat16_twice(document: Configuration) -> Iterator[Fault]:
    """Reports a block with both names."""
    if all(document.at(name) is not None for name in _BF16_NAMES):
        yield ("bfloat16",), "bf16 is present, too", "remove it"


@error("not_enabled", "ignores", "A block without `enabled` is off, whatever its other settings.")
def not_enabled(document: Configuration) -> Iterator[Fault]:
    """Reports blocks with settings that are not enabled."""
    blocks = ("fp16", *_BF16_NAMES, "torch_autocast", "flops_profiler", "tensorboard", "wandb", "csv_monitor", "comet")
    for key in (*blocks, "comms_logger", "expert_parallel", "data_efficiency", "hybrid_engine"):
        if document.block(key) and not document.has(key, "enabled"):
            yield (key, "enabled"), f"without it, {key} is off", "true, or remove the block"


@warning("autocast_dtype", "changes", "torch_autocast without a dtype uses the device's default.")
def autocast_dtype(document: Configuration) -> Iterator[Fault]:
    """Warns about torch_autocast without dtype."""
    if document.on("torch_autocast", "enabled") and document.at("torch_autocast", "dtype") is None:
        yield ("torch_autocast", "dtype"), "without it, the device's default is used", '"bfloat16"'


@error("param_dtype", "refuses", "data_types.param_dtype must be the data type that fp16 or bf16 sets for the model.")
def param_dtype(document: Configuration) -> Iterator[Fault]:
    """Checks param_dtype against the precision blocks."""
    asked, made = _dtype(document, "param_dtype"), model_dtype(document)
    if asked in ("fp16", "bf16", "fp32") and made not in ("", asked):
        yield ("data_types", "param_dtype"), f"it is {asked}, but the precision blocks set {made}", made


@error(
    "accumulate_unpartitioned",
    "refuses",
    "Without ZeRO, DeepSpeed only accumulates in the model's own data type; before 0.18.5, also the gradients of a bf16"
    " model in fp32, and before 0.17.6 these in fp32 only.",
)
def accumulate_unpartitioned(document: Configuration) -> Iterator[Fault]:
    """Checks grad_accum_dtype at stage 0 (`DeepSpeedEngine._do_optimizer_sanity_check`)."""
    asked, made = _dtype(document, "grad_accum_dtype"), model_dtype(document)
    if not asked or asked == "auto" or document.stage != 0 or not made:
        return
    possible = {made} if document.since("0.17.6") or made != "bf16" or document.pipeline else set()
    if made == "bf16" and not document.since("0.18.5"):
        possible.add("fp32")
    if asked not in possible:
        message = f"at ZeRO-0, a {made} model cannot accumulate in {asked}"
        yield ("data_types", "grad_accum_dtype"), message, "ZeRO-1, or remove it"


@warning(
    "accumulate_bf16",
    "allows",
    "bf16 accumulates micro-batches in bf16 by default, which loses small gradients (issues 1800, 2352).",
)
def accumulate_bf16(document: Configuration) -> Iterator[Fault]:
    """Warns about accumulation in bf16."""
    steps = document.count("gradient_accumulation_steps") or 1
    if model_dtype(document) == "bf16" and steps > 1 and document.stage and not _dtype(document, "grad_accum_dtype"):
        message = f"without it, {steps} micro-batches are accumulated in bf16, which loses small gradients"
        yield ("data_types", "grad_accum_dtype"), message, '"fp32"'


@warning(
    "unpartitioned_16bit",
    "changes",
    "16-bit training at ZeRO-0 uses another optimizer, whose first update is too small; before 0.17.6, only in fp16.",
)
def unpartitioned_16bit(document: Configuration) -> Iterator[Fault]:
    """Warns about bf16 or fp16 at stage 0."""
    made = model_dtype(document)
    if made in ("fp16", "bf16") and document.stage == 0 and (made == "fp16" or document.since("0.17.6")):
        key = "fp16" if made == "fp16" else bf16_key(document)
        message = f"with {made} at ZeRO-0, Adam's first update is smaller than at ZeRO-1 by a quarter or more"
        yield (key, "enabled"), message, "zero_optimization.stage 1"


@error(
    "master_weights",
    "refuses",
    "16-bit master weights need ZeRO, and the optimizer on the CPU unless its states have 16 bits, too; 16-bit"
    " optimizer states need 16-bit master weights.",
)
def master_weights(document: Configuration) -> Iterator[Fault]:
    """Checks the options of the master weights."""
    bf16 = bf16_key(document)
    half = ("fp16", "fp16_master_weights_and_grads")
    for where in (half, (bf16, "bf16_master_weights_and_grads")):
        if document.on(*where) and document.stage == 0:
            yield where, "it needs ZeRO", "stage 1, 2 or 3"
    if document.on(*half) and document.stage in (1, 3) and not document.since("0.18.3"):
        yield half, f"it needs stage 2 before DeepSpeed 0.18.3, and this is stage {document.stage}", "stage 2"
    states = (bf16, "bf16_optimizer_states")
    whole = (bf16, "bf16_master_weights_and_grads")
    for where in (half, *(() if document.on(*states) else (whole,))):
        if document.on(*where) and document.stage and document.offload("offload_optimizer") == "none":
            yield where, "it needs the optimizer on the CPU", "offload_optimizer.device 'cpu', or remove it"
    if document.on(*states) and not document.on(bf16, "bf16_master_weights_and_grads"):
        yield states, "it needs bf16_master_weights_and_grads", "set both"


@error(
    "loss_scale", "refuses", "The loss scale of fp16 is not negative; a dynamic one has a positive window and minimum."
)
def loss_scale(document: Configuration) -> Iterator[Fault]:
    """Checks the numbers of the loss scaler."""
    scale = document.number("fp16", "loss_scale")
    if scale is not None and scale < 0:
        effect: Effect = "refuses" if document.since("0.18.8") else "misreads"
        yield ("fp16", "loss_scale"), f"{scale:g} is negative; 0 is dynamic", "0", effect
    if _fp16(document) is True:
        yield from _not_positive(document, "and the loss scale is dynamic")


@warning(
    "loss_scale_if_fp16",
    "refuses",
    "A dynamic loss scale needs a positive window and minimum, if the reader enables fp16.",
)
def loss_scale_if_fp16(document: Configuration) -> Iterator[Fault]:
    """Warns about numbers of the loss scaler that are refused in fp16 only."""
    if _fp16(document) is None:
        yield from _not_positive(document, "and the loss scale is dynamic if fp16 is enabled")


def _fp16(document: Configuration) -> bool | None:
    """Whether fp16 is on, or None if the reader decides it."""
    if document.filled and document.at("fp16", "enabled") == "auto":
        given = document.arguments.get("fp16")
        return given if isinstance(given, bool) else None
    return document.on("fp16", "enabled")


def _not_positive(document: Configuration, why: str) -> Iterator[Fault]:
    checked = {"loss_scale_window": "1000", "min_loss_scale": "1"}
    for key, fix in checked.items() if not document.number("fp16", "loss_scale") else ():
        value = document.number("fp16", key)
        if value is not None and value <= 0 and (key != "min_loss_scale" or document.since("0.19.3")):
            yield ("fp16", key), f"{value:g} is not positive, {why}", fix


@warning(
    "loss_scale_start", "allows", "fp16 overflows at a scale above 2^24, and small gradients underflow without a scale."
)
def loss_scale_start(document: Configuration) -> Iterator[Fault]:
    """Warns about loss scales with which fp16 trains badly."""
    if document.off("fp16", "enabled"):
        return
    power = document.number("fp16", "initial_scale_power")
    if power is not None and power > 24 and not document.number("fp16", "loss_scale"):
        message = (
            f"from 2^{power:g} on, the first steps overflow and are skipped until the scale has been halved enough"
        )
        yield ("fp16", "initial_scale_power"), message, "16"
    if document.number("fp16", "loss_scale") == 1:
        yield (
            ("fp16", "loss_scale"),
            "with a static scale of 1, small gradients of fp16 become 0",
            "0, for a dynamic one",
        )
