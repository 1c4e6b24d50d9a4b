"""Rules for Accelerate's own configuration, and for how `accelerate launch` joins it with a file for DeepSpeed.

Each rule was compared with Accelerate 1.15, which a test runs on the same files.
"""

from __future__ import annotations

from collections.abc import Iterator

from llmtrain_lint.accelerate import BLOCK, DEFAULT_STAGE, FILE, KNOWN, NVME_PATHS, PLUGIN, TOP_LEVEL, block_of, file_of
from llmtrain_lint.document import Configuration
from llmtrain_lint.rules.rule import Fault, error, key_suggestion, warning


@error("accelerate_file", "refuses", f"`{FILE}` excludes the settings that DeepSpeed's file has.", True)
def accelerate_file(document: Configuration) -> Iterator[Fault]:
    """Reports what Accelerate refuses beside a file for DeepSpeed (`DeepSpeedPlugin._deepspeed_config_checks`)."""
    own = document.accelerate
    if own is None or file_of(own) is None:
        return
    for key, where in {**PLUGIN, **NVME_PATHS}.items():
        if key in block_of(own):
            yield (
                (BLOCK, key),
                f"it accepts no {key} beside {FILE}",
                f"remove it, and set {'.'.join(where)} in the file",
            )
    if own.get("mixed_precision") is not None:
        fix = "remove it, and set bf16.enabled or fp16.enabled in the file"
        yield ("mixed_precision",), f"it accepts no mixed_precision beside {FILE}", fix


@error(
    "accelerate_key", "refuses", "A key that Accelerate does not know; within `deepspeed_config` it is ignored.", True
)
def accelerate_key(document: Configuration) -> Iterator[Fault]:
    """Reports unknown keys (`commands/config/config_args.py`)."""
    for key in document.accelerate or ():
        if key not in TOP_LEVEL:
            yield (key,), f"it does not know this key{key_suggestion(key, TOP_LEVEL)}", "remove it"
    for key in block_of(document.accelerate or {}):
        if key not in KNOWN:
            message = f"{BLOCK} has no such key{key_suggestion(key, KNOWN)}"
            yield (BLOCK, key), message, f"remove it, or write a file for DeepSpeed and name it in {FILE}", "ignores"


@error("accelerate_nvme", "ignores", "`accelerate launch` does not pass the paths of NVMe offloading on.", True)
def accelerate_nvme(document: Configuration) -> Iterator[Fault]:
    """Reports paths for NVMe in Accelerate's configuration: states are swapped to a folder named `none`."""
    own = document.accelerate or {}
    if file_of(own) is None:
        for key, where in NVME_PATHS.items():
            if key in block_of(own):
                message = "it does not pass this path on, and DeepSpeed swaps to the folder 'none'"
                yield (BLOCK, key), message, f"write {'.'.join(where)} in a file, and name it in {FILE}"


@error("accelerate_unused", "ignores", "`deepspeed_config` is only read if `distributed_type` is DEEPSPEED.", True)
def accelerate_unused(document: Configuration) -> Iterator[Fault]:
    """Reports a block for DeepSpeed beside another type of distribution."""
    own = document.accelerate or {}
    if block_of(own) and own["distributed_type"] != "DEEPSPEED":
        yield (BLOCK,), f"distributed_type is {own['distributed_type']}", "distributed_type: DEEPSPEED"


@warning("accelerate_init", "changes", "`zero3_init_flag` only has an effect at stage 3.", True)
def accelerate_init(document: Configuration) -> Iterator[Fault]:
    """Warns about zero.Init without ZeRO-3."""
    own = document.accelerate or {}
    stage = block_of(own).get("zero_stage", DEFAULT_STAGE)
    if file_of(own) is None and block_of(own).get("zero3_init_flag") in (True, "true") and stage != 3:
        yield (BLOCK, "zero3_init_flag"), f"it sets this to false at stage {stage}", "zero3_init_flag: false"
