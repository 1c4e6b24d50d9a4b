"""Rules for optimizers, learning rate schedules and clipping."""

from __future__ import annotations

import reprlib
from collections.abc import Iterable, Iterator

from llmtrain_lint.document import Configuration
from llmtrain_lint.errors import did_you_mean
from llmtrain_lint.rules.rule import Fault, error, key_suggestion, warning
from llmtrain_lint.schema import REMOVED_OPTIMIZERS, KeyPath

_PARAMS: KeyPath = ("optimizer", "params")
_TESTED = ("adam", "adamw", "adagrad", "lion", "muon")
_MU = ("muadam", "muadamw", "musgd")
_WARMUPS = ("WarmupLR", "WarmupDecayLR", "WarmupCosineLR")


def _optimizer(document: Configuration) -> str:
    """Returns the optimizer's name as DeepSpeed reads it: its own in any case, torch's exactly."""
    name = document.word("optimizer", "type")
    own = (name.lower() in document.schema.optimizers and name.lower().islower()) or name.lower() in _MU
    return name.lower() if own else name


@error("optimizer", "refuses", "An optimizer or a schedule that neither DeepSpeed nor torch provides.")
def unknown_type(document: Configuration) -> Iterator[Fault]:
    """Reports unknown and removed optimizers and schedules."""
    known = document.schema
    name, schedule = _optimizer(document), document.word("scheduler", "type")
    if name.lower() in REMOVED_OPTIMIZERS and name not in known.optimizers:
        yield ("optimizer", "type"), f"{name} was removed", "AdamW; ZeRO++ compresses communication"
    elif name and name != "auto" and name not in known.optimizers and name not in _MU:
        hint = _similar(name, (*known.optimizers, *_MU))
        yield ("optimizer", "type"), f"{reprlib.repr(name)} is not an optimizer of DeepSpeed or torch{hint}", ""
    if schedule and schedule != "auto" and schedule not in known.schedulers:
        hint = _similar(schedule, known.schedulers)
        yield ("scheduler", "type"), f"{reprlib.repr(schedule)} is not a schedule of DeepSpeed or torch{hint}", ""


def _similar(name: str, known: Iterable[str]) -> str:
    """Returns `"; did you mean 'x'?"`, preferably a name that only differs in its capitals."""
    same = [one for one in known if one.lower() == name.lower()]
    return did_you_mean(name[:80], same or known, 0.0 if same else 0.6)


@error("type_missing", "ignores", "Without `type`, the optimizer or scheduler block is silently ignored.")
def type_missing(document: Configuration) -> Iterator[Fault]:
    """Reports blocks without a type."""
    for key in ("optimizer", "scheduler"):
        if document.block(key) and not document.has(key, "type"):
            yield (key, "type"), f"without it, nothing of the {key} block is read", "set it, or remove the block"


@error(
    "optimizer_params",
    "refuses",
    "An argument that the optimizer or the schedule does not accept, or a required one that is missing.",
)
def arguments(document: Configuration) -> Iterator[Fault]:
    """Checks arguments against those of the constructor."""
    known = document.schema
    for block, name, taken in (
        ("optimizer", _optimizer(document), known.optimizers),
        ("scheduler", document.word("scheduler", "type"), known.schedulers),
    ):
        for key in document.block(block, "params") if name in taken else ():
            if key not in taken[name] and (block, key) != ("optimizer", "max_grad_norm"):
                hint = key_suggestion(key, taken[name])
                yield (block, "params", key), f"{name} has no such argument{hint}", "" if hint else "remove it"


@error("max_grad_norm", "refuses", "Clipping is not an argument of the optimizer, and DeepSpeed rejects it.")
def max_grad_norm(document: Configuration) -> Iterator[Fault]:
    """Reports optimizer.params.max_grad_norm."""
    if document.has(*_PARAMS, "max_grad_norm"):
        yield (
            (*_PARAMS, "max_grad_norm"),
            "clipping is not an argument of the optimizer",
            "remove it, and set gradient_clipping",
        )


_RANGES = {
    "lr": (0.0, 1e3),
    "muon_lr": (0.0, 1e3),
    "adam_lr": (0.0, 1e3),
    "eps": (0.0, 1.0),
    "weight_decay": (0.0, 1e3),
}


@error("optimizer_value", "refuses", "Arguments of the optimizer that are not numbers, or out of range.")
def values(document: Configuration) -> Iterator[Fault]:
    """Checks lr, eps, weight_decay and betas."""
    for key, (low, high) in _RANGES.items():
        value, number = document.at(*_PARAMS, key), document.number(*_PARAMS, key)
        if value not in (None, "auto") and (number is None or not low <= number <= high):
            yield (*_PARAMS, key), f"{reprlib.repr(value)} is not a number in range", "a number ≥ 0"
    betas = document.at(*_PARAMS, "betas")
    if betas is not None and betas != "auto" and not _are_betas(betas):
        yield (*_PARAMS, "betas"), f"{reprlib.repr(betas)} is not two numbers in [0, 1)", "[0.9, 0.95]"


def _are_betas(betas: object) -> bool:
    return (
        isinstance(betas, list) and len(betas) in (2, 3) and all(type(b) in (int, float) and 0 <= b < 1 for b in betas)
    )


@warning(
    "adam_is_adamw",
    "changes",
    'DeepSpeed\'s "Adam" is AdamW, with decoupled weight decay, unless adam_w_mode is false.',
)
def adam_is_adamw(document: Configuration) -> Iterator[Fault]:
    """Warns about Adam with weight decay."""
    decay = document.at(*_PARAMS, "weight_decay")
    if _optimizer(document) == "adam" and decay not in (None, 0) and not document.has(*_PARAMS, "adam_w_mode"):
        message = "'Adam' is AdamW here, with decoupled weight decay"
        yield ("optimizer", "type"), message, '"AdamW", or "adam_w_mode": false for L2 decay'


@error("adamw_mode", "ignores", "adam_w_mode false is ignored for AdamW, and the fused kernels do not support amsgrad.")
def adamw_mode(document: Configuration) -> Iterator[Fault]:
    """Reports switches of Adam that have no effect."""
    name = _optimizer(document)
    if name == "adamw" and document.off(*_PARAMS, "adam_w_mode"):
        yield (*_PARAMS, "adam_w_mode"), "AdamW always decouples the weight decay", '"type": "Adam"'
    fused = name in ("adam", "adamw") and not document.on(*_PARAMS, "torch_adam")
    if fused and document.on(*_PARAMS, "amsgrad"):
        yield (*_PARAMS, "amsgrad"), "DeepSpeed's Adam has no amsgrad", '"torch_adam": true', "refuses"


@error(
    "muon_zero",
    "refuses",
    "Muon needs whole gradients: ZeRO-3 only keeps them without reduce_scatter and quantized gradients, and not at all"
    " before 0.18.9; from 0.19.3 to 0.19.7, an offloaded optimizer also excludes reduce_scatter.",
)
def muon_zero(document: Configuration) -> Iterator[Fault]:
    """Reports Muon where gradients are split."""
    if _optimizer(document) != "muon":
        return
    where, scattered = ("optimizer", "type"), not document.off("zero_optimization", "reduce_scatter")
    if document.stage == 3 and not document.since("0.18.9"):
        yield where, "Muon excludes stage 3 before DeepSpeed 0.18.9", "stage 2"
    elif document.stage == 3 and scattered:
        message = "Muon needs whole gradients, which stage 3 only has without reduce_scatter"
        yield where, message, "stage 2, or zero_optimization.reduce_scatter false"
    elif document.stage == 3 and document.on("zero_optimization", "zero_quantized_gradients"):
        yield where, "Muon excludes zero_quantized_gradients", "remove zero_quantized_gradients"
    offloaded = document.stage in (1, 2) and document.offload("offload_optimizer") != "none"
    if offloaded and scattered and document.since("0.19.3") and not document.since("0.19.8"):
        message = "until DeepSpeed 0.19.7, Muon with an offloaded optimizer excludes reduce_scatter"
        yield where, message, "zero_optimization.reduce_scatter false"


@error(
    "muon_init", "ignores", "Under zero.Init, all parameters look flat to Muon, and Adam trains them.", before="0.19.7"
)
def muon_init(document: Configuration) -> Iterator[Fault]:
    """Reports Muon at stage 3 in programs that build the model with zero.Init (DeepSpeed pull request 8438)."""
    if _optimizer(document) == "muon" and document.stage == 3 and document.filled and document.since("0.18.9"):
        message = (
            "the model is built with zero.Init, and before DeepSpeed 0.19.7 Adam then trains all of its parameters"
        )
        yield ("optimizer", "type"), message, "stage 2, or DeepSpeed 0.19.7"


@error("muon_plain", "changes", "Without ZeRO, Muon does not make its updates orthogonal.", before="0.19.7")
def muon_plain(document: Configuration) -> Iterator[Fault]:
    """Reports Muon at stage 0, where it was SGD (DeepSpeed pull request 8442)."""
    if _optimizer(document) == "muon" and document.stage == 0:
        message = "at stage 0, Muon is SGD before DeepSpeed 0.19.7"
        yield ("optimizer", "type"), message, "stage 1 or 2, or DeepSpeed 0.19.7"


@error("lamb_scale", "refuses", "DeepSpeed's Lamb needs a dynamic loss scale, even if fp16 is off.")
def lamb_scale(document: Configuration) -> Iterator[Fault]:
    """Reports a static scale with Lamb (`DeepSpeedEngine._do_sanity_check`)."""
    scale = document.number("fp16", "loss_scale")
    if _optimizer(document) in ("lamb", "onebitlamb") and scale:
        yield ("fp16", "loss_scale"), f"Lamb needs a dynamic loss scale, and this is {scale:g}", "0"


@error(
    "zero_excludes",
    "refuses",
    "Apex AMP and the optimizers with compressed communication, which were removed later, exclude ZeRO.",
    before="0.19.8",
)
def zero_excludes(document: Configuration) -> Iterator[Fault]:
    """Reports features of older releases that exclude ZeRO."""
    if document.stage and _optimizer(document) in REMOVED_OPTIMIZERS:
        yield ("optimizer", "type"), f"{document.word('optimizer', 'type')} excludes ZeRO", "AdamW, or stage 0"
    if document.stage and document.on("amp", "enabled"):
        yield ("amp", "enabled"), "amp excludes ZeRO", "bf16 or fp16, or stage 0"


@error(
    "untested_optimizer",
    "refuses",
    "ZeRO accepts Adam, AdamW, Adagrad, Lion and, from 0.18.5 on, Muon; others need zero_allow_untested_optimizer.",
)
def untested_optimizer(document: Configuration) -> Iterator[Fault]:
    """Reports optimizers that ZeRO does not accept."""
    name = _optimizer(document)
    known = name in document.schema.optimizers or name in _MU
    tested = (*REMOVED_OPTIMIZERS, *(one for one in _TESTED if one != "muon" or document.since("0.18.5")))
    if known and document.stage and name not in tested and not document.on("zero_allow_untested_optimizer"):
        message = f"ZeRO has not tested {name}"
        yield ("optimizer", "type"), message, '"zero_allow_untested_optimizer": true'


@error(
    "scheduler_steps",
    "refuses",
    "A schedule's numbers of steps: required ones are present, and all are positive integers; before 0.19.3, any number"
    " was accepted.",
)
def scheduler_steps(document: Configuration) -> Iterator[Fault]:
    """Checks total_num_steps and warmup_num_steps."""
    name, params = document.word("scheduler", "type"), ("scheduler", "params")
    if name in ("WarmupDecayLR", "WarmupCosineLR") and not document.has(*params, "total_num_steps"):
        yield (*params, "total_num_steps"), f"it is missing, and {name} needs it", "set it"
    if name == "OneCycle":
        for key in ("cycle_min_lr", "cycle_max_lr"):
            if not document.has(*params, key):
                yield (*params, key), "it is missing, and OneCycle needs it", "set it"
    if name in document.schema.schedulers and document.at(*params) is None:
        yield params, f"it is missing, and {name} fails without it", "{}"
    for key in ("warmup_num_steps", "total_num_steps") if name in _WARMUPS else ():
        value = document.at(*params, key)
        known = document.since("0.19.3")
        allowed = type(value) is int and value > 0 if known else type(value) in (int, float)
        if value is not None and value != "auto" and not allowed:
            yield (*params, key), f"{reprlib.repr(value)} is not a positive integer", "a positive integer"


@error("warmup_type", "misreads", "A warmup_type that DeepSpeed does not know is read as log.")
def warmup_type(document: Configuration) -> Iterator[Fault]:
    """Reports unknown warmup types."""
    value = document.at("scheduler", "params", "warmup_type")
    if value is not None and document.word("scheduler", "type") in _WARMUPS and value not in ("log", "linear"):
        where = ("scheduler", "params", "warmup_type")
        if document.word("scheduler", "type") == "WarmupCosineLR" and not document.since("0.19.4"):
            message = f"{reprlib.repr(value)} fails at the first step before DeepSpeed 0.19.4"
            yield where, message, '"linear" or "log"', "refuses"
        else:
            yield where, f"{reprlib.repr(value)} becomes 'log'", '"linear" or "log"'


@warning(
    "warmup_log",
    "changes",
    "Warmup is logarithmic by default: most of the learning rate is reached after a tenth of the steps.",
)
def warmup_log(document: Configuration) -> Iterator[Fault]:
    """Warns about a missing warmup_type."""
    where = ("scheduler", "params", "warmup_type")
    overridden = document.reader == "trainer"  # `scheduler_overrides` reports it
    if document.word("scheduler", "type") in _WARMUPS and not document.has(*where) and not overridden:
        yield where, "without it, the warmup is logarithmic", '"linear"'


@warning("scheduler_lr", "ignores", "The schedule sets the learning rate; that of the optimizer is overwritten.")
def scheduler_lr(document: Configuration) -> Iterator[Fault]:
    """Compares the optimizer's learning rate with the schedule's."""
    rate, peak = document.number(*_PARAMS, "lr"), document.number("scheduler", "params", "warmup_max_lr")
    name = document.word("scheduler", "type")
    fixed = name == "WarmupDecayLR" or (name == "WarmupLR" and not document.since("0.17.2"))
    if fixed and not document.has("scheduler", "params", "warmup_max_lr"):
        peak = 0.001  # DeepSpeed's default
    if rate is not None and peak is not None and name in _WARMUPS[:2] and rate != peak:
        yield (
            (*_PARAMS, "lr"),
            f"{name} sets the rate, and rises to {peak:g}, not {rate:g}",
            "set both to the same rate",
        )


@warning("scheduler_order", "allows", "A warmup longer than the run.")
def scheduler_order(document: Configuration) -> Iterator[Fault]:
    """Compares warmup_num_steps with total_num_steps."""
    params = ("scheduler", "params")
    warmup, total = document.count(*params, "warmup_num_steps"), document.count(*params, "total_num_steps")
    if warmup and total and warmup > total:
        yield (
            (*params, "warmup_num_steps"),
            f"{warmup} steps of warmup are more than the {total} steps of the run",
            "",
        )


@warning(
    "clipping_default", "changes", "Gradients are clipped to norm 1.0 if gradient_clipping is missing (issue 8068)."
)
def clipping_default(document: Configuration) -> Iterator[Fault]:
    """Warns about a missing gradient_clipping."""
    clips = document.schema.default("gradient_clipping")  # since 0.19.3
    if clips and not document.has("gradient_clipping") and document.reader != "lightning":
        fix = '"auto"' if document.filled else "1.0, or 0 for no clipping"
        yield ("gradient_clipping",), "without it, gradients are clipped to norm 1.0", fix


@warning("offloaded_torch_adam", "allows", "torch's Adam steps on the CPU several times more slowly than DeepSpeed's.")
def offloaded_torch_adam(document: Configuration) -> Iterator[Fault]:
    """Warns about torch_adam with an offloaded optimizer."""
    where = (*_PARAMS, "torch_adam")
    if document.on(*where) and document.offload("offload_optimizer") != "none" and document.stage != 0:
        yield where, "torch's Adam is several times slower on the CPU than DeepSpeedCPUAdam", "remove it"


@warning("offloaded_optimizer", "allows", "An offloaded optimizer of the script must be DeepSpeed's own for the CPU.")
def offloaded_optimizer(document: Configuration) -> Iterator[Fault]:
    """Warns about offloading without an optimizer in the file; Accelerate replaces the script's optimizer."""
    offloads = document.offload("offload_optimizer") != "none" and document.stage != 0
    own = document.block("optimizer") or document.off("zero_force_ds_cpu_optimizer")
    if offloads and not own and not document.filled:
        message = "the script must provide DeepSpeedCPUAdam, since the file has no optimizer"
        fix = 'an optimizer block, or "zero_force_ds_cpu_optimizer": false'
        yield ("zero_optimization", "offload_optimizer"), message, fix
