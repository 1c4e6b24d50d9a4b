"""Reads Accelerate's own configuration (`default_config.yaml`) as `accelerate launch` and its DeepSpeed plugin do.

The sources are `commands/launch.py`, `utils/launch.py:prepare_deepspeed_cmd_env` and `utils/dataclasses.py:
DeepSpeedPlugin` of Accelerate 1.15.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from llmtrain_lint.schema import KeyPath

BLOCK = "deepspeed_config"
FILE = "deepspeed_config_file"
ZERO = "zero_optimization"
PLUGIN: dict[str, KeyPath] = {
    "gradient_accumulation_steps": ("gradient_accumulation_steps",),
    "gradient_clipping": ("gradient_clipping",),
    "zero_stage": (ZERO, "stage"),
    "offload_optimizer_device": (ZERO, "offload_optimizer", "device"),
    "offload_param_device": (ZERO, "offload_param", "device"),
    "zero3_save_16bit_model": (ZERO, "stage3_gather_16bit_weights_on_model_save"),
}
"""Keys of `deepspeed_config`, and what each becomes in DeepSpeed's configuration."""
NVME_PATHS: dict[str, KeyPath] = {
    "offload_optimizer_nvme_path": (ZERO, "offload_optimizer", "nvme_path"),
    "offload_param_nvme_path": (ZERO, "offload_param", "nvme_path"),
}
"""Keys that the plugin would read from variables which `accelerate launch` does not set."""
OTHERS = (
    *(FILE, "zero3_init_flag", "deepspeed_hostfile", "deepspeed_multinode_launcher"),
    *("deepspeed_exclusion_filter", "deepspeed_inclusion_filter", "deepspeed_moe_layer_cls_names"),
)
"""Other keys of `deepspeed_config`."""
KNOWN = (*PLUGIN, *NVME_PATHS, *OTHERS)
TOP_LEVEL = frozenset(
    (
        *("compute_environment", "distributed_type", "mixed_precision", "use_cpu", "debug", "num_processes"),
        *("machine_rank", "num_machines", "gpu_ids", "main_process_ip", "main_process_port", "rdzv_backend"),
        *("same_network", "main_training_function", "enable_cpu_affinity", "fp8_config", "deepspeed_config"),
        *("fsdp_config", "parallelism_config", "megatron_lm_config", "mpirun_config", "downcast_bf16", "tpu_name"),
        *("tpu_zone", "tpu_use_cluster", "tpu_use_sudo", "command_file", "commands", "tpu_vm", "tpu_env"),
        *("dynamo_config", "fp16", "dynamo_backend"),
    )
)
"""Keys of a configuration: those of `ClusterConfig`, and two of older versions that are converted."""
DEFAULT_STAGE = 2


def block_of(own: Mapping[str, Any]) -> Mapping[str, Any]:
    """Returns the block `deepspeed_config`, or an empty one."""
    block = own.get(BLOCK)
    return block if isinstance(block, dict) else {}


def file_of(own: Mapping[str, Any]) -> str | None:
    """Returns the file with DeepSpeed's configuration that a configuration names, if it names one."""
    name = block_of(own).get(FILE)
    return name if isinstance(name, str) and name not in ("", "none") else None


def ranks_of(own: Mapping[str, Any]) -> int | None:
    """Returns the number of ranks that it starts, if it says so."""
    ranks = own.get("num_processes")
    return ranks if type(ranks) is int and ranks > 0 else None


def deepspeed_values(own: Mapping[str, Any]) -> dict[str, Any]:
    """Returns what the plugin hands to DeepSpeed for a configuration that names no file.

    Sizes that only the training program knows are "auto".
    """
    block = block_of(own)
    precision = str(own.get("mixed_precision")).lower()

    def given(key: str, default: Any) -> Any:
        value = block.get(key)
        return default if value is None else value

    return {
        "train_batch_size": "auto",
        "train_micro_batch_size_per_gpu": "auto",
        "gradient_accumulation_steps": given("gradient_accumulation_steps", "auto"),
        "gradient_clipping": given("gradient_clipping", "auto"),
        ZERO: {
            "stage": given("zero_stage", DEFAULT_STAGE),
            "offload_optimizer": _offload(given("offload_optimizer_device", "none")),
            "offload_param": _offload(given("offload_param_device", "none")),
            "stage3_gather_16bit_weights_on_model_save": given("zero3_save_16bit_model", False),
        },
        "bf16": {"enabled": precision in ("bf16", "fp8")},
        "fp16": {"enabled": precision == "fp16"},
    }


def _offload(device: Any) -> dict[str, Any]:
    return {"device": device, **({"nvme_path": "none"} if device == "nvme" else {})}


def places_of(own: Mapping[KeyPath, list[tuple[int, int]]]) -> dict[KeyPath, list[tuple[int, int]]]:
    """Returns the places of a configuration's keys, also under the names that they have in DeepSpeed's."""
    places = dict(own)
    for key, where in {**PLUGIN, **NVME_PATHS}.items():
        if (BLOCK, key) in own:
            places[where] = own[BLOCK, key]
    if ("mixed_precision",) in own:
        places[("bf16",)] = places[("fp16",)] = own[("mixed_precision",)]
    return places
