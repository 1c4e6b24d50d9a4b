"""Rules for what the program that reads the file does with it before DeepSpeed sees it.

The keys that are filled in are those of transformers' `integrations/deepspeed.py`, of Accelerate's
`utils/dataclasses.py` and `accelerator.py`, and of Lightning's `strategies/deepspeed.py`. The Trainer builds an
Accelerate plugin from the file, and fills in what Accelerate does, too.
"""

from __future__ import annotations

import reprlib
from collections.abc import Iterator
from typing import Any

from llmtrain_lint.document import READERS, Configuration, Reader
from llmtrain_lint.rules.rule import Fault, error, warning
from llmtrain_lint.schema import KeyPath

_SIZES = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
_ZERO = "zero_optimization"
_OFFLOADS = tuple(
    (_ZERO, what, key) for what in ("offload_optimizer", "offload_param") for key in ("device", "nvme_path")
)
_BY_ACCELERATE: frozenset[KeyPath] = frozenset(
    {
        *((size,) for size in _SIZES),
        *(("gradient_clipping",), ("fp16", "enabled"), ("bf16", "enabled"), ("steps_per_print",)),
        *((_ZERO, "stage"), *_OFFLOADS),
        *((_ZERO, key) for key in ("reduce_bucket_size", "stage3_gather_16bit_weights_on_model_save")),
        *((_ZERO, f"stage3_{key}") for key in ("prefetch_bucket_size", "param_persistence_threshold")),
        *(("optimizer", "params", key) for key in ("lr", "weight_decay")),
        *(("scheduler", "params", f"warmup_{key}") for key in ("min_lr", "max_lr", "num_steps")),
        ("scheduler", "params", "total_num_steps"),
    }
)
_TRAINER_ALONE: frozenset[KeyPath] = frozenset({("optimizer", "params", "betas"), ("optimizer", "params", "eps")})
_FILLED: dict[Reader, frozenset[KeyPath]] = {
    "trainer": _BY_ACCELERATE | _TRAINER_ALONE,
    "accelerate": _BY_ACCELERATE,
    "lightning": frozenset(),
    "deepspeed": frozenset(),
}
_BLOCKS = (("expert_parallel",), ("autotuning",))
_OWN = (
    *(*_BLOCKS, ("data_types", "keep_in_fp32_modules"), (_ZERO, "zenflow")),
    *(("pipeline", "stages"), ("datastates_ckpt",)),
)
"""Keys, and blocks of keys, for which DeepSpeed itself gives "auto" a meaning."""


def guess(document: Configuration) -> Reader:
    """Guesses the program that a file was written for, from its "auto" values."""
    autos = set(_autos(document))
    if autos & _TRAINER_ALONE:
        return "trainer"
    if autos & {(_ZERO, "stage"), *_OFFLOADS, ("steps_per_print",)}:
        return "accelerate"
    if autos & _BY_ACCELERATE:
        return "trainer"
    missing = not any(document.has(size) for size in _SIZES)
    return "lightning" if missing and document.block(_ZERO) else "deepspeed"


def _autos(document: Configuration, own: tuple[KeyPath, ...] = _OWN) -> Iterator[KeyPath]:
    open_: list[tuple[KeyPath, Any]] = [((str(key),), value) for key, value in document.values.items()]
    while open_:
        where, value = open_.pop()
        if isinstance(value, dict):
            open_.extend(((*where, str(key)), inner) for key, inner in value.items())
        elif value == "auto" and (where in _BLOCKS or not any(where[: len(one)] == one for one in own)):
            yield where


@error(
    "strict_json", "refuses", "Only DeepSpeed itself reads comments and trailing commas; others need strict JSON.", True
)
def strict_json(document: Configuration) -> Iterator[Fault]:
    """Reports what Python's json module does not parse."""
    if document.strict_json_fault and document.reader != "deepspeed":
        line, _, reason = document.strict_json_fault
        yield ("file",), f"line {line} is not strict JSON: {reason}", "no comments, trailing commas or byte order mark"


@error("auto", "refuses", 'An "auto" that the reader does not fill in.', True)
def auto(document: Configuration) -> Iterator[Fault]:
    """Reports "auto" if no program replaces it."""
    for where in _autos(document, own=() if document.filled else _OWN):
        if where in _FILLED[document.reader]:
            continue
        others = [READERS[one] for one in ("accelerate", "trainer") if where in _FILLED[one]]
        hint = f"; {others[0]} does, see --for" if others else ""
        node, block = document.schema.node(*where), document.schema.node(where[0])
        if document.filled:
            yield where, "it does not fill in this 'auto'", f"write the value{hint}"
        elif len(where) > 1 and block and block.validated:
            yield where, "an 'auto' here becomes the default", f"write the value{hint}", "changes"
        elif node and node.types in (("bool",), ("str",)):
            what = "is true" if node.types == ("bool",) else "is the value"
            yield where, f"it does not fill in 'auto', and the text {what}", f"write the value{hint}", "misreads"
        else:
            yield where, "it does not fill in 'auto'", f"write the value{hint}"


@error("zero_missing", "refuses", "The Trainer and Accelerate read no file without a zero_optimization block.", True)
def zero_missing(document: Configuration) -> Iterator[Fault]:
    """Reports a file without zero_optimization."""
    if document.filled and not document.has(_ZERO):
        yield (_ZERO,), "it is missing", '"zero_optimization": {"stage": 0}'


@error(
    "stage_text",
    "misreads",
    "The Trainer and Accelerate compare the stage with numbers, and do not recognise ZeRO-3 in a string.",
    True,
)
def stage_text(document: Configuration) -> Iterator[Fault]:
    """Reports a stage that is written as text."""
    stage = document.word(_ZERO, "stage")
    if document.filled and stage in ("0", "1", "2", "3"):
        yield (_ZERO, "stage"), f"it does not recognise the text '{stage}' as a stage", stage


@error("accumulation_twice", "refuses", "Lightning takes gradient accumulation from its own Trainer.", True)
def accumulation_twice(document: Configuration) -> Iterator[Fault]:
    """Reports gradient_accumulation_steps in a file for Lightning."""
    if document.reader == "lightning" and document.has(_SIZES[2]):
        yield (_SIZES[2],), "Trainer(accumulate_grad_batches=) decides", "remove it"


@warning("scheduler_overrides", "allows", "A scheduler block replaces the Trainer's own schedule.", True)
def scheduler_overrides(document: Configuration) -> Iterator[Fault]:
    """Warns about a scheduler block in a file for the Trainer."""
    name = document.word("scheduler", "type")
    if document.reader != "trainer" or not name:
        return
    shape = {"WarmupLR": ", which never decays", "WarmupDecayLR": ", which decays linearly to 0"}.get(name, "")
    log = name.startswith("Warmup") and not document.has("scheduler", "params", "warmup_type")
    message = f"ignores lr_scheduler_type for {name}{shape}{'; the warmup is logarithmic' if log else ''}"
    yield ("scheduler",), message, "remove the block, and set lr_scheduler_type and warmup_steps"


@error(
    "frozen_recompute",
    "refuses",
    "ZeRO-3 released frozen parameters while a checkpoint was recomputed, so that training with LoRA ended in a "
    "CheckpointError.",
    before="0.19.3",
)
def frozen_recompute(document: Configuration) -> Iterator[Fault]:
    """Reports adapters with gradient checkpointing at stage 3 (transformers issue 47254, DeepSpeed PR 8148)."""
    given = document.arguments
    adapts = given.get("use_peft") is True or any(given.get(name) for name in ("lora_r", "lora_rank"))
    kwargs = given.get("gradient_checkpointing_kwargs")
    reentrant = isinstance(kwargs, dict) and kwargs.get("use_reentrant") is True
    if document.stage == 3 and adapts and given.get("gradient_checkpointing") is True and not reentrant:
        message = "before DeepSpeed 0.19.3, frozen weights are released while layers are recomputed: a CheckpointError"
        yield (_ZERO, "stage"), message, "DeepSpeed 0.19.3, or gradient_checkpointing_kwargs={'use_reentrant': true}"


_ARGUMENTS: dict[str, KeyPath] = {
    "per_device_train_batch_size": ("train_micro_batch_size_per_gpu",),
    "gradient_accumulation_steps": ("gradient_accumulation_steps",),
    "max_grad_norm": ("gradient_clipping",),
    "learning_rate": ("optimizer", "params", "lr"),
    "adam_epsilon": ("optimizer", "params", "eps"),
    "weight_decay": ("optimizer", "params", "weight_decay"),
    "fp16": ("fp16", "enabled"),
    "bf16": ("bf16", "enabled"),
    "warmup_steps": ("scheduler", "params", "warmup_num_steps"),
    "max_steps": ("scheduler", "params", "total_num_steps"),
}
"""TrainingArguments, and the keys that the Trainer compares with them (`HfTrainerDeepSpeedConfig.fill_match`)."""


@error(
    "mismatch",
    "refuses",
    "A value that differs from the Trainer's argument; it compares them when training starts.",
    True,
)
def mismatch(document: Configuration) -> Iterator[Fault]:
    """Compares the file with the arguments that were given."""
    given = dict(document.arguments)
    pairs = [(where, name, given[name]) for name, where in _ARGUMENTS.items() if name in given]
    if "learning_rate" in given:
        pairs.append((("scheduler", "params", "warmup_max_lr"), "learning_rate", given["learning_rate"]))
    if {"adam_beta1", "adam_beta2"} <= given.keys():
        betas = [given["adam_beta1"], given["adam_beta2"]]
        pairs.append((("optimizer", "params", "betas"), "adam_beta1 and adam_beta2", betas))
    for where, name, value in pairs:
        found = document.at(*where)
        if found not in (None, "auto") and found != value:
            yield where, f"{reprlib.repr(found)} is not {name}={reprlib.repr(value)}", '"auto"'
