"""The keys of DeepSpeed's configuration, and what each becomes."""

from __future__ import annotations

from typing import Any

from llmtrain.plan.migrate.translation import Setting

AUTO = "auto"
BUFFERS = "buffers and buckets are chosen for the plan; the result does not depend on them"
PATHS = "how states are saved and gathered is chosen for the plan; `llmtrain export` writes the weights"
LOADED = "a checkpoint continues under every layout"
REPORTS = "metrics.jsonl has times and memory; `llmtrain profile` records steps"
LOSS_SCALE = "the loss scale of fp16 is dynamic"
OF_MODEL = "DeepSpeed's block does nothing for models of `transformers`: set parallel.activation_checkpointing"
PINNED = "host memory is pinned where that helps"
ON = {True: "on", False: "off"}

OPTIMIZERS = {
    "adamw": "adamw",
    "fusedadam": "adamw",
    "lion": "lion",
    "sgd": "sgd",
    "muon": "muon",
    "adagrad": "torch.optim:Adagrad",
}
"""`optimizer.type` in lower case → `optim.name`; Adam depends on `adam_w_mode`."""
SCHEDULES = {"warmuplr": "constant", "warmupdecaylr": "linear", "warmupcosinelr": "cosine"}
"""`scheduler.type` in lower case → `optim.schedule`."""
DTYPES = {"fp32": "fp32", "bf16": "bf16", "fp16": "fp16"}


def _count(value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or value != int(value):
        raise ValueError("is not a whole number")
    return int(value)


def _offload(value: Any) -> str:
    if value not in ("none", "cpu", "nvme"):
        raise ValueError("has no counterpart; these have: none, cpu, nvme")
    return str(value)


BATCH = (
    Setting(
        key="train_batch_size", field="batch.global_batch_size", joint="any two of the three sizes determine the third"
    ),
    Setting(key="train_micro_batch_size_per_gpu", field="batch.micro_batch_size", joint="rows of a forward pass"),
    Setting(
        key="gradient_accumulation_steps", field="batch.global_batch_size", joint="micro-batch × accumulation × devices"
    ),
    Setting(key="gradient_clipping", field="optim.clip_grad_norm", joint="DeepSpeed clips at 1.0 if it is missing"),
    Setting(key="prescale_gradients", harmless="gradients are averaged in either order"),
    Setting(key="gradient_predivide_factor", harmless="gradients are averaged in either order"),
    Setting(key="gradient_allreduce_op", harmless="gradients are averaged"),
    Setting(key="communication_data_type", harmless="gradients are reduced in parallel.grad_accum_dtype"),
    Setting(key="seq_parallel_communication_data_type", harmless="gradients are reduced in parallel.grad_accum_dtype"),
    Setting(
        key="data_types.grad_accum_dtype",
        field="parallel.grad_accum_dtype",
        values=DTYPES,
    ),
    Setting(key="data_types.param_dtype", unsupported="parallel.precision says in what weights are stored"),
    Setting(key="data_types.buffer_dtype", unsupported="buffers keep the data types of the model"),
    Setting(key="managed_gradient_accumulation", harmless="the engine accumulates"),
    Setting(key="data_parallel_size", harmless="the devices that are left are data parallel"),
    Setting(key="data_types.keep_in_fp32_modules", unsupported="all weights have one data type"),
)
OPTIMIZER = (
    Setting(
        key="optimizer.type",
        field="optim.name",
        joint='"Adam" is AdamW unless adam_w_mode is false',
        values={**OPTIMIZERS, "adam": "adamw"},
    ),
    Setting(key="optimizer.params.lr", field="optim.lr"),
    Setting(key="optimizer.params.betas", field="optim.betas", joint="the default is (0.9, 0.999)"),
    Setting(key="optimizer.params.eps", field="optim.eps"),
    Setting(key="optimizer.params.weight_decay", field="optim.weight_decay", joint="AdamW's default is 0.01, else 0"),
    Setting(key="optimizer.params.adam_w_mode", field="optim.name", joint="false: adam"),
    Setting(key="optimizer.params.momentum", field="optim.betas", joint="SGD: the first of the two"),
    Setting(key="optimizer.params.torch_adam", harmless="torch's kernels are used"),
    Setting(key="optimizer.params.fused", harmless="torch's fused kernels are used"),
    Setting(key="optimizer.params.bias_correction", joint="always on"),
    Setting(key="optimizer.params", unsupported="arguments of the optimizer are optim.options"),
    Setting(key="scheduler.params", unsupported="name a function of yours in optim.schedule"),
    Setting(key="optimizer.legacy_fusion", harmless="torch's fused kernels are used"),
    Setting(
        key="scheduler.type",
        field="optim.schedule",
        joint="DeepSpeed's schedules are in steps",
        values=SCHEDULES,
    ),
    Setting(key="scheduler.params.warmup_num_steps", field="optim.warmup_steps", joint="as given"),
    Setting(key="scheduler.params.warmup_max_lr", field="optim.lr", joint="the peak"),
    Setting(key="scheduler.params.warmup_min_lr", joint="the warm-up starts at 0"),
    Setting(key="scheduler.params.warmup_min_ratio", joint="the warm-up starts at 0"),
    Setting(key="scheduler.params.warmup_type", joint="linear; DeepSpeed's default is logarithmic"),
    Setting(key="scheduler.params.total_num_steps", field="train.max_steps", joint="as given"),
    Setting(key="scheduler.params.cos_min_ratio", field="optim.min_lr_ratio", joint="the default is 0.0001"),
    Setting(key="zero_allow_untested_optimizer", harmless="the plan knows which optimizers can be sharded"),
    Setting(key="zero_force_ds_cpu_optimizer", harmless="torch's optimizers are used, also for offload"),
)
PRECISION = (
    Setting(key="bf16.enabled", field="parallel.precision", joint="bf16, with fp32 master weights"),
    Setting(key="bfloat16", field="parallel.precision", joint="the older name of bf16", older=True),
    Setting(key="bf16.immediate_grad_update", harmless="the result is the same"),
    Setting(key="bf16.check_grad_overflow", harmless="what is not finite never changes the weights"),
    Setting(
        key="bf16.bf16_master_weights_and_grads",
        values={False: "off"},
        joint="master weights and gradients are always kept in fp32",
    ),
    Setting(key="bf16.bf16_optimizer_states", joint="states are always kept in fp32"),
    Setting(key="fp16.enabled", field="parallel.precision", joint="fp16, with fp32 master weights"),
    Setting(key="fp16.auto_cast", harmless="inputs are tokens"),
    Setting(key="fp16.loss_scale", joint="dynamic only: 0"),
    Setting(key="fp16.initial_scale_power", harmless=LOSS_SCALE),
    Setting(key="fp16.loss_scale_window", harmless=LOSS_SCALE),
    Setting(key="fp16.hysteresis", harmless=LOSS_SCALE),
    Setting(key="fp16.consecutive_hysteresis", harmless=LOSS_SCALE),
    Setting(key="fp16.min_loss_scale", harmless=LOSS_SCALE),
    Setting(key="fp16.fp16_master_weights_and_grads", joint="master weights and gradients are always kept in fp32"),
    Setting(key="torch_autocast.enabled", field="parallel.precision", joint="autocast_bf16 or autocast_fp16"),
    Setting(key="torch_autocast.dtype", field="parallel.precision", joint="with torch_autocast.enabled"),
    Setting(key="torch_autocast.lower_precision_safe_modules", harmless="gradients are reduced in fp32"),
)
ZERO = (
    Setting(key="zero_optimization.stage", field="parallel.zero_stage", convert=_count),
    Setting(key="zero_optimization.offload_optimizer.device", field="parallel.offload_optimizer", convert=_offload),
    Setting(key="zero_optimization.offload_optimizer.nvme_path", field="parallel.nvme_path"),
    Setting(
        key="zero_optimization.offload_optimizer.ratio",
        joint="only 1: all of the states are offloaded",
    ),
    Setting(key="zero_optimization.offload_optimizer", harmless=PINNED),
    Setting(key="zero_optimization.offload_param.device", field="parallel.offload_param", convert=_offload),
    Setting(key="zero_optimization.offload_param.nvme_path", field="parallel.nvme_path"),
    Setting(key="zero_optimization.offload_param", harmless=PINNED),
    Setting(key="zero_optimization.zero_hpz_partition_size", field="parallel.hierarchical_partition", convert=_count),
    Setting(
        key="zero_optimization.zero_quantized_weights",
        joint="not supported: weights are gathered in their own precision",
    ),
    Setting(
        key="zero_optimization.zero_quantized_gradients",
        joint="not supported: gradients are reduced in parallel.grad_accum_dtype",
    ),
    Setting(
        key="zero_optimization.zero_quantized_nontrainable_weights",
        joint="not supported; model.quantize=nf4 stores frozen weights in 4 bits",
    ),
    Setting(
        key="zero_optimization.mics_shard_size",
        field="parallel.hierarchical_partition",
        joint="the nearest to MiCS: a second copy of all parameters in each group",
    ),
    Setting(
        key="zero_optimization.mics_hierarchical_params_gather", harmless="groups gather among neighbours", older=True
    ),
    Setting(key="zero_optimization.cpu_offload", joint="offload_optimizer: cpu", older=True),
    Setting(key="zero_optimization.cpu_offload_param", joint="offload_param: cpu", older=True),
    Setting(key="zero_optimization.leaf_module", harmless="which modules are gathered as one is chosen for the model"),
    Setting(key="zero_optimization.zenflow", unsupported="the optimizer is not overlapped with the next step"),
    Setting(key="zero_optimization.pipeline_loading_checkpoint", harmless=LOADED),
    Setting(key="zero_optimization.override_module_apply", harmless="weights are sharded while they are read"),
    *(
        Setting(key=f"zero_optimization.{key}", harmless=BUFFERS)
        for key in (
            *("overlap_comm", "reduce_scatter", "contiguous_gradients", "reduce_bucket_size", "allgather_partitions"),
            *("allgather_bucket_size", "use_multi_rank_bucket_allreduce", "round_robin_gradients", "sub_group_size"),
            *("stage3_prefetch_bucket_size", "stage3_param_persistence_threshold", "stage3_max_live_parameters"),
            *("stage3_max_reuse_distance", "stage3_model_persistence_threshold", "max_reuse_distance"),
            *(
                "stage3_use_all_reduce_for_fetch_params",
                "stage3_module_granularity_threshold",
                "memory_efficient_linear",
            ),
            *("stage3_allgather_sequential", "allgather_sequential", "use_all_reduce_for_fetch_params"),
            *("module_granularity_threshold", "prefetch_bucket_size", "param_persistence_threshold"),
            *("model_persistence_threshold", "max_live_parameters", "ignore_unused_parameters"),
            *("log_trace_cache_warnings", "enable_sanity_checks", "save_muon_momentum_buffer_in_memory"),
        )
    ),
    *(
        Setting(key=f"zero_optimization.{key}", harmless=PATHS)
        for key in (
            *("stage3_gather_16bit_weights_on_model_save", "stage3_gather_fp16_weights_on_model_save"),
            *("gather_16bit_weights_on_model_save", "elastic_checkpoint", "load_from_fp32_weights"),
            *("legacy_stage1",),
        )
    ),
    Setting(key="zero_optimization.cpu_offload_use_pin_memory", harmless=PINNED, older=True),
    Setting(key="zero_optimization.compute_grad_norm", harmless="the norm is always computed"),
    Setting(key="zero_optimization.parameter_alignment", harmless=BUFFERS),
    Setting(key="aio", harmless="blocks and queues of NVMe offload are chosen"),
)
PARALLELISM = (
    Setting(key="tensor_parallel.autotp_size", field="parallel.tensor", convert=_count),
    Setting(key="tensor_parallel", harmless="parallel.tensor splits matrices as the model's family says"),
    Setting(key="sequence_parallel_size", field="parallel.sequence", convert=_count),
    Setting(key="expert_parallel.autoep_size", field="parallel.expert", convert=_count),
    Setting(key="expert_parallel", harmless="which layers are split follows from the model's family"),
    Setting(key="pipeline", unsupported="parallel.pipeline cuts the model into stages"),
    Setting(key="use_data_before_expert_parallelism", harmless="groups are chosen for the network"),
    Setting(key="compile", unsupported="kernels.blocks=compiled compiles each layer"),
    Setting(key="activation_checkpointing", harmless=OF_MODEL),
)
REPORTING = (
    Setting(key="steps_per_print", field="logging.every_steps", convert=_count),
    Setting(key="tensorboard.enabled", field="logging.trackers", joint="tensorboard"),
    Setting(key="tensorboard", harmless="logging.trackers write to the run's directory"),
    Setting(key="wandb.enabled", field="logging.trackers", joint="wandb"),
    Setting(key="wandb.project", field="logging.project"),
    Setting(key="wandb", harmless="logging.trackers use WANDB_ENTITY and W&B's other variables"),
    Setting(key="csv_monitor", harmless="metrics.jsonl has every value"),
    Setting(key="comet", unsupported="a class of yours may be one of logging.trackers"),
    *(
        Setting(key=key, harmless=REPORTS)
        for key in (
            *("wall_clock_breakdown", "memory_breakdown", "dump_state", "comms_logger", "flops_profiler"),
            *("timers", "vocabulary_size", "log_level"),
        )
    ),
)
OTHER = (
    *(Setting(key=key, harmless=LOADED) for key in ("checkpoint", "datastates_ckpt")),
    *(
        Setting(key=key, harmless="the result does not depend on it")
        for key in (
            *("disable_allgather", "sparse_gradients", "disable_python_gc", "graph_harvesting"),
            *("dataloader_drop_last", "weight_quantization"),
        )
    ),
    Setting(key="elasticity", unsupported="a run continues on any number of devices with the same global batch"),
    Setting(key="autotuning", unsupported="`llmtrain plan --search` ranks plans by predicted speed"),
    Setting(key="data_efficiency", unsupported="curricula and random token dropping are not here"),
    Setting(key="curriculum_learning", unsupported="curricula are not here"),
    Setting(key="compression_training", unsupported="compress the exported model with another tool"),
    Setting(key="quantize_training", unsupported="quantize the exported model with another tool"),
    Setting(key="eigenvalue", unsupported="it belongs to quantize_training"),
    Setting(key="progressive_layer_drop", unsupported="no layer is dropped"),
    Setting(key="sparse_attention", unsupported="model.attention has the kernels"),
    Setting(key="amp", unsupported="of Apex; parallel.precision has autocast_bf16 and autocast_fp16"),
    Setting(key="nebula", unsupported="checkpoints are files"),
    Setting(key="hybrid_engine", unsupported="there is no reinforcement learning with generation"),
)
TABLES: dict[str, tuple[Setting, ...]] = {
    "Batch and gradients": BATCH,
    "Optimizer and schedule": OPTIMIZER,
    "Precision": PRECISION,
    "ZeRO and offload": ZERO,
    "Parallelism": PARALLELISM,
    "Reports": REPORTING,
    "Others": OTHER,
}
