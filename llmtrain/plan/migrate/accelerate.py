"""Translates a configuration of Accelerate's launcher, and the settings of FSDP, which the Trainer has, too."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from llmtrain.plan.migrate.completion import complete, name_run
from llmtrain.plan.migrate.deepspeed_json import apply_deepspeed
from llmtrain.plan.migrate.files import ForeignFile
from llmtrain.plan.migrate.program import Given, Program
from llmtrain.plan.migrate.translation import Setting, Settings, Translation

LAUNCH = "a launcher of its own starts the workers: `llmtrain train --nodes 2`, or Slurm, or torchrun"
WRAPPED = "each layer is sharded on its own"
OVERLAPPED = "gathering overlaps with computing"
PARTS = {
    "full_shard": 3,
    "shard_grad_op": 2,
    "hybrid_shard": 3,
    "hybrid_shard_zero2": 2,
    "no_shard": 0,
    "1": 3,
    "2": 2,
    "3": 0,
    "4": 3,
    "5": 2,
}
"""`fsdp_sharding_strategy` in lower case → `parallel.zero_stage`; 0 is DistributedDataParallel."""

MACHINES = (
    Setting(
        key="distributed_type",
        field="parallel.backend",
        joint="DEEPSPEED: deepspeed; FSDP: accelerate with fsdp2; the others: the default, which keeps whole weights",
    ),
    Setting(key="mixed_precision", field="parallel.precision", joint="autocast_bf16; bf16 with DeepSpeed and FSDP"),
    Setting(key="num_processes", field="batch.global_batch_size", joint="the number of devices"),
    Setting(key="gradient_accumulation_steps", field="batch.global_batch_size", joint="if the arguments do not say it"),
    Setting(key="num_machines", harmless="`--nodes` of `llmtrain train`"),
    Setting(key="use_cpu", harmless="the cluster says on what a run trains"),
    Setting(key="parallelism_config", field="parallel.tensor", joint="see the Trainer"),
    Setting(key="downcast_bf16", joint="of TPUs"),
    Setting(key="fp8_config", unsupported="kernels.fp8 has torchao's kernels for the layers"),
    Setting(key="dynamo_config", field="kernels.blocks", joint="inductor: compiled"),
    Setting(key="megatron_lm_config", unsupported="parallel.tensor and parallel.pipeline split models"),
    Setting(key="ipex_config", harmless="torch itself has what IPEX had for CPUs"),
    Setting(key="mpirun_config", harmless=LAUNCH),
    Setting(key="tpu_env", harmless="of TPUs"),
    Setting(key="tpu_name", unsupported="TPUs are not supported"),
    *(
        Setting(key=key, harmless=LAUNCH)
        for key in (
            *("compute_environment", "machine_rank", "main_process_ip", "main_process_port", "same_network"),
            *("main_training_function", "rdzv_backend", "gpu_ids", "debug", "enable_cpu_affinity", "commands"),
            *(
                "command_file",
                "tpu_use_cluster",
                "tpu_use_sudo",
                "tpu_zone",
                "tpu_cluster",
                "tpu_vm",
                "deepspeed_hostfile",
            ),
            *("num_cpu_threads_per_process", "monitor_interval", "max_restarts", "rdzv_conf", "log_dir", "multi_gpu"),
        )
    ),
)
DEEPSPEED = (
    Setting(key="deepspeed_config.deepspeed_config_file", joint="the file is translated, too"),
    Setting(key="deepspeed_config.zero_stage", field="parallel.zero_stage", joint="the default is 2"),
    Setting(
        key="deepspeed_config.offload_optimizer_device",
        field="parallel.offload_optimizer",
        values={"none": "none", "cpu": "cpu", "nvme": "nvme"},
    ),
    Setting(
        key="deepspeed_config.offload_param_device",
        field="parallel.offload_param",
        values={"none": "none", "cpu": "cpu", "nvme": "nvme"},
    ),
    Setting(key="deepspeed_config.offload_optimizer_nvme_path", field="parallel.nvme_path", joint="as given"),
    Setting(key="deepspeed_config.offload_param_nvme_path", field="parallel.nvme_path", joint="as given"),
    Setting(
        key="deepspeed_config.gradient_clipping", field="optim.clip_grad_norm", joint="if the arguments say nothing"
    ),
    Setting(
        key="deepspeed_config.gradient_accumulation_steps",
        field="batch.global_batch_size",
        joint="if the arguments do not say it",
    ),
    Setting(key="deepspeed_config.zero3_init_flag", harmless="weights are sharded while they are read"),
    Setting(key="deepspeed_config.zero3_save_16bit_model", harmless="`llmtrain export` writes the weights"),
    *(
        Setting(key=f"deepspeed_config.deepspeed_{key}", harmless=LAUNCH)
        for key in ("hostfile", "multinode_launcher", "inclusion_filter", "exclusion_filter")
    ),
    Setting(
        key="deepspeed_config.deepspeed_moe_layer_cls_names",
        harmless="layers of experts are found; each is gathered as a whole",
    ),
    Setting(key="deepspeed_config", unsupported="write it to a DeepSpeed JSON; deepspeed_config_file names it"),
)
SHARDING = (
    Setting(key="version", joint="FSDP2, of both versions"),
    Setting(
        key="sharding_strategy",
        field="parallel.zero_stage",
        joint="FULL_SHARD: 3; SHARD_GRAD_OP: 2; NO_SHARD: ddp; HYBRID_SHARD: 3, over all devices",
    ),
    Setting(key="reshard_after_forward", field="parallel.zero_stage", joint="true: 3; false: 2"),
    Setting(key="offload_params", joint="not supported with FSDP2; parallel.offload_param=cpu with DeepSpeed's ZeRO 3"),
    Setting(
        key="activation_checkpointing", field="parallel.activation_checkpointing", joint="full; selective is cheaper"
    ),
    Setting(key="auto_wrap_policy", harmless=WRAPPED),
    Setting(key="transformer_layer_cls_to_wrap", harmless=WRAPPED),
    Setting(key="min_num_params", harmless=WRAPPED),
    Setting(key="backward_prefetch", harmless=OVERLAPPED),
    Setting(key="backward_prefetch_policy", harmless=OVERLAPPED),
    Setting(key="forward_prefetch", harmless=OVERLAPPED),
    Setting(key="limit_all_gathers", harmless=OVERLAPPED),
    Setting(key="use_orig_params", harmless="parameters keep their names"),
    Setting(key="sync_module_states", harmless="every rank starts from the same weights"),
    Setting(key="cpu_ram_efficient_loading", harmless="each rank reads its shards only"),
    Setting(key="state_dict_type", harmless="a checkpoint continues under every layout"),
    Setting(key="xla", unsupported="TPUs are not supported"),
    Setting(key="xla_fsdp_settings", unsupported="TPUs are not supported"),
    Setting(key="xla_fsdp_v2", unsupported="TPUs are not supported"),
    Setting(key="xla_fsdp_grad_ckpt", unsupported="TPUs are not supported"),
)
"""Keys of FSDP's block, which Accelerate writes with `fsdp_` before them."""
TABLES: dict[str, tuple[Setting, ...]] = {
    "Machines and precision": MACHINES,
    "DeepSpeed's block": DEEPSPEED,
    "FSDP's block, with `fsdp_` before each key": SHARDING,
}
DEGREES = {
    "tp_size": "parallel.tensor",
    "cp_size": "parallel.sequence",
    "sp_size": "parallel.sequence",
    "dp_shard_size": "",
    "dp_replicate_size": "",
}
"""Key of `parallelism_config` → the field of the degree."""


def translate(given: Given) -> Translation:
    """Translates a configuration that stands alone: the model, the data and the batch are left to fill in."""
    translation = Translation("Accelerate")
    settings = Settings(given.file.values, file=given.file)
    world = replace(given, beside={"accelerate": given.file}).world_size(translation)
    apply_accelerate(translation, given.file, given)
    name_run(translation, settings)
    size = "batch.micro_batch_size"
    accumulated = translation.fields.pop("accumulation", 1)
    translation.set(size, 1, "FILL IN: rows per forward pass on a device")
    translation.missing(size, "the script says it", 1)
    translation.set("batch.global_batch_size", accumulated * world, f"FILL IN: 1 × {accumulated} × {world} devices")
    translation.missing("batch.global_batch_size", "micro-batch × accumulation × devices", accumulated * world)
    translation.set("optim.lr", 1e-4, "FILL IN: the peak learning rate")
    translation.missing("optim.lr", "the script says it", 1e-4)
    translation.set("train.epochs", 1, "FILL IN: train.epochs or train.max_steps")
    translation.missing("train.epochs", "the script says it", 1)
    translation.set("data.eval_fraction", 0.0, "every row is trained on")
    complete(translation)
    return translation


def apply_accelerate(translation: Translation, file: ForeignFile, given: Given) -> None:
    """Translates a configuration of Accelerate, alone or beside arguments, whose fields have been set before."""
    prefix = "" if file is given.file else f"{file.path.name}: "
    settings = Settings(file.values, prefix, file)
    kind = str(settings.take("distributed_type", "NO")).upper()
    shown = settings.shown("distributed_type")
    count = settings.take("num_processes")  # the batch notes it
    if file is given.file and given.devices is not None and count is not None:
        translation.same("num_processes", count, text="--devices replaces it")
    _deepspeed(translation, settings, file, given, kind)
    if kind == "FSDP":
        block = settings.take("fsdp_config", {})
        if isinstance(block, Mapping):
            apply_fsdp(translation, Settings(_unprefixed(block), f"{prefix}fsdp_config.fsdp_", file))
        translation.same(shown, kind, "parallel.accelerate")
    else:
        if (block := settings.take("fsdp_config")) is not None:
            translation.same(settings.shown("fsdp_config"), block, text=f"has no effect with {kind}")
        if kind in ("NO", "MULTI_GPU", "MULTI_CPU", "MULTI_XPU", "TP"):
            translation.same(shown, kind, text="each device keeps whole weights, as by default here")
        elif kind != "DEEPSPEED":
            translation.unsupported(shown, kind, "DeepSpeed, DistributedDataParallel and FSDP2 are here")
        else:
            translation.same(shown, kind, "parallel.backend")
    apply_degrees(
        translation, settings.take("parallelism_config"), f"{prefix}parallelism_config", "parallelism_config_"
    )
    _precision(translation, settings)
    _dynamo(translation, settings)
    if (steps := settings.take("gradient_accumulation_steps")) is not None:
        _accumulation(translation, settings.shown("gradient_accumulation_steps"), steps, alone=file is given.file)
    if (downcast := settings.take("downcast_bf16")) is not None:
        translation.same(settings.shown("downcast_bf16"), downcast, text="of TPUs")
    for table in (MACHINES, DEEPSPEED):
        translation.apply(settings, table)
    translation.report_untaken(settings, "Accelerate")


def _deepspeed(translation: Translation, settings: Settings, file: ForeignFile, given: Given, kind: str) -> None:
    block = "deepspeed_config"
    if kind != "DEEPSPEED":
        if (value := settings.take(block)) not in (None, {}):
            translation.same(settings.shown(block), value, text=f"has no effect with {kind}")
        return
    key = f"{block}.deepspeed_config_file"
    if named := settings.take(key):
        translation.same(settings.shown(key), named)
        if configuration := given.companion(translation, "deepspeed", named, settings.shown(key), file):
            apply_deepspeed(translation, configuration, given)
        return
    key = f"{block}.zero_stage"
    stage = settings.take(key, 2)
    translation.set("parallel.zero_stage", stage, settings.shown(key), settings.place(key))
    translation.same(settings.shown(key), stage, "parallel.zero_stage")
    for name in ("offload_optimizer_nvme_path", "offload_param_nvme_path"):
        key = f"{block}.{name}"
        if (path := settings.take(key)) not in (None, "none"):
            translation.set("parallel.nvme_path", path, settings.shown(key))
            translation.same(settings.shown(key), path, "parallel.nvme_path")
    key = f"{block}.gradient_clipping"
    if (clip := settings.take(key)) is not None:
        known = translation.fields.get("optim.clip_grad_norm")
        if known is None:
            translation.set("optim.clip_grad_norm", clip, settings.shown(key), settings.place(key))
            translation.same(settings.shown(key), clip, "optim.clip_grad_norm")
        else:
            translation.same(settings.shown(key), clip, text=f"max_grad_norm replaces it: {known}")
    key = f"{block}.gradient_accumulation_steps"
    if (steps := settings.take(key)) is not None:
        _accumulation(translation, settings.shown(key), steps, alone=file is given.file)


def _accumulation(translation: Translation, key: str, steps: Any, *, alone: bool) -> None:
    if alone:
        translation.fields["accumulation"] = steps if isinstance(steps, int) else 1
        translation.same(key, steps, "batch.global_batch_size")
    else:
        translation.same(key, steps, text="the arguments decide")


OF_LAUNCHER = {
    "use_deepspeed": "DEEPSPEED",
    "use_fsdp": "FSDP",
    "multi_gpu": "MULTI_GPU",
}
"""Switch of `accelerate launch` → `distributed_type`."""


def launched(path: Path, options: Mapping[str, Any], file: ForeignFile | None) -> ForeignFile | None:
    """Returns the settings that options of `accelerate launch` make, over those of its configuration, if there is one.

    None if there are neither.
    """
    values = dict(file.values) if file else {}
    keys = {row.key.rpartition(".")[2] for row in DEEPSPEED}
    given = False
    for name, value in options.items():
        if name in OF_LAUNCHER and value:
            values["distributed_type"] = OF_LAUNCHER[name]
        elif name.startswith("fsdp_") or name in keys:
            block = "fsdp_config" if name.startswith("fsdp_") else "deepspeed_config"
            values[block] = {**values.get(block, {}), name: value}
        elif name in ("mixed_precision", "dynamo_backend"):
            values[name] = value
        else:
            continue
        given = True
    if not given:
        return file
    return ForeignFile(path=path, values=values, lines=file.lines if file and file.path == path else {})


def apply_fsdp(translation: Translation, settings: Settings) -> None:
    """Translates FSDP's settings, without a prefix before their keys."""
    take, shown = settings.take, settings.shown
    given = take("sharding_strategy")
    strategy = str(given if given is not None else "FULL_SHARD").lower().split(".")[-1]
    reshard = take("reshard_after_forward")
    if isinstance(reshard, str) and reshard.lower() in PARTS:  # FSDP1's name in FSDP2's key
        strategy, reshard = reshard.lower(), None
    stage = PARTS.get(strategy)
    if stage is None:
        translation.unsupported(shown("sharding_strategy"), given, f"these have a counterpart: {', '.join(PARTS)}")
        stage = 3
    if isinstance(reshard, bool):
        stage = 3 if reshard else 2
        translation.same(shown("reshard_after_forward"), reshard, "parallel.zero_stage")
    translation.set("parallel.backend", "accelerate", "FSDP")
    translation.set("parallel.accelerate", "fsdp2" if stage else "ddp", "FSDP")
    translation.set(
        "parallel.zero_stage", stage, shown("sharding_strategy" if given is not None else "reshard_after_forward")
    )
    if given is not None:
        if strategy.startswith("hybrid") or strategy in ("4", "5"):
            text = "weights are sharded over all devices: less memory, and more traffic between machines"
            translation.different(shown("sharding_strategy"), given, text, "parallel.zero_stage")
        else:
            translation.same(shown("sharding_strategy"), given, "parallel.zero_stage")
    if (version := take("version")) is not None:
        if str(version) == "2":
            translation.same(shown("version"), version, "parallel.accelerate")
        else:
            text = "FSDP2 shards each parameter, FSDP1 flat groups of them: the same results"
            translation.different(shown("version"), version, text, "parallel.accelerate")
    offload = take("offload_params")
    if offload:
        text = "is not supported with FSDP2; DeepSpeed's ZeRO 3 has parallel.offload_param=cpu"
        translation.unsupported(shown("offload_params"), offload, text)
    elif offload is not None:
        translation.same(shown("offload_params"), offload, text="off")
    recompute = take("activation_checkpointing")
    if recompute:
        field = "parallel.activation_checkpointing"
        translation.set(field, "full", shown("activation_checkpointing"))
        translation.same(shown("activation_checkpointing"), recompute, field)
    elif recompute is not None:
        translation.same(shown("activation_checkpointing"), recompute, text="nothing is recomputed")
    translation.apply(settings, SHARDING)
    translation.report_untaken(settings, "Accelerate")


def apply_degrees(translation: Translation, degrees: Any, shown: str, prefix: str = "") -> None:
    """Translates Accelerate's `ParallelismConfig`."""
    if degrees is None:
        return
    if not isinstance(degrees, Mapping):
        translation.unsupported(shown, degrees, "is not a mapping of degrees")
        return
    for key, degree in degrees.items():
        name = key.removeprefix(prefix)
        if name not in DEGREES:
            if degree is not None:
                text = "how a sequence is divided follows from the model; parallel.sequence_ring chooses"
                translation.same(f"{shown}.{key}", degree, text=text)
        elif not DEGREES[name]:
            translation.same(f"{shown}.{key}", degree, text="data parallelism uses the devices that are left")
        else:
            if degree not in (None, 1):
                translation.set(DEGREES[name], degree, f"{shown}.{key}")
            translation.same(f"{shown}.{key}", degree, DEGREES[name])


def _precision(translation: Translation, settings: Settings) -> None:
    given = settings.take("mixed_precision")
    if given is None:
        return
    shown, kind = settings.shown("mixed_precision"), "no" if given is False else str(given).lower()
    if kind == "no":
        translation.same(
            shown, given, text="the arguments decide" if "parallel.precision" in translation.fields else "fp32"
        )
    elif kind == "fp8":
        translation.unsupported(shown, given, "kernels.fp8 has torchao's kernels for the layers")
    elif kind not in ("bf16", "fp16"):
        translation.unsupported(shown, given, "these have a counterpart: no, bf16, fp16")
    elif "parallel.precision" in translation.fields:
        translation.same(shown, given, text="the arguments decide")
    else:
        translation.set("parallel.precision", mixed(translation, kind), shown, settings.place("mixed_precision"))
        translation.same(shown, given, "parallel.precision")


def mixed(translation: Translation, kind: str) -> str:
    """Returns the precision that mixed precision is under the strategy: with 16-bit weights, or by autocast."""
    sharded = "parallel.zero_stage" in translation.fields
    if translation.fields.get("parallel.backend") == "accelerate" and translation.fields["parallel.zero_stage"] == 0:
        sharded = False
    return kind if sharded else f"autocast_{kind}"


def _dynamo(translation: Translation, settings: Settings) -> None:
    block = settings.take("dynamo_config")
    backend = block.get("dynamo_backend") if isinstance(block, Mapping) else settings.take("dynamo_backend")
    if backend is None:
        return
    shown = settings.shown("dynamo_config")
    if str(backend).lower() == "no":
        translation.same(shown, backend, text="nothing is compiled")
    elif str(backend).lower() == "inductor":
        translation.set("kernels.blocks", "compiled", shown)
        translation.same(shown, backend, "kernels.blocks", "each layer is compiled on its own")
    else:
        translation.unsupported(shown, backend, "inductor compiles: kernels.blocks=compiled")


def _unprefixed(block: Mapping[str, Any]) -> dict[str, Any]:
    return {key.removeprefix("fsdp_"): value for key, value in block.items()}


PROGRAM = Program(
    name="accelerate",
    title="Accelerate",
    marks=frozenset({"distributed_type", "compute_environment", "main_training_function"}),
    translate=translate,
    tables=TABLES,
    page="accelerate",
    beside=True,
)
