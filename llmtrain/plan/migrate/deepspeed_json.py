"""Translates a configuration of DeepSpeed, alone or beside the arguments that fill in its "auto"."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from llmtrain.plan.migrate.completion import complete, name_run
from llmtrain.plan.migrate.files import ForeignFile
from llmtrain.plan.migrate.program import Given, Program
from llmtrain.plan.migrate.translation import Setting, Settings, Translation

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


def translate(given: Given) -> Translation:
    """Translates a configuration of DeepSpeed that stands alone: the model and the data are left to fill in."""
    translation = Translation("DeepSpeed")
    settings = Settings(given.file.values, file=given.file)
    apply_deepspeed(translation, given.file, given, alone=True)
    fields = translation.fields
    name_run(translation, settings)
    if "optim.lr" not in fields:
        translation.set("optim.lr", 1e-4, "FILL IN: the peak learning rate")
        translation.missing("optim.lr", "the settings do not name the learning rate", 1e-4)
    if "train.max_steps" not in fields:
        translation.set("train.epochs", 1, "FILL IN: train.epochs or train.max_steps")
        translation.missing("train.epochs", "the settings do not say how long a run is", 1)
    translation.set("data.eval_fraction", 0.0, "every row is trained on")
    complete(translation)
    return translation


def apply_deepspeed(translation: Translation, file: ForeignFile, given: Given, *, alone: bool = False) -> None:
    """Translates a configuration of DeepSpeed.

    alone: whether nothing fills in "auto". Otherwise the fields that the arguments determine have been set before, and
    the configuration has to agree with them, as it has to for the Trainer.
    """
    _Configuration(translation, file, given, alone).translate()


class _Configuration:
    def __init__(self, translation: Translation, file: ForeignFile, given: Given, alone: bool) -> None:
        self.to, self.given, self.alone = translation, given, alone
        own = dict(file.values)
        if "bfloat16" in own and "bf16" not in own:
            own["bf16"] = own.pop("bfloat16")
        values, auto = _without_auto(own)
        self.auto = [".".join(path) for path in auto]
        prefix = "" if alone else f"{file.path.name}: " if file.path != given.file.path else "deepspeed."
        self.settings = Settings(values, prefix, file)

    def translate(self) -> None:
        before = dict(self.to.fields)
        self._optimizer(before)
        self._schedule(before)
        self._batch(before)
        self._precision()
        self._unusual()
        self._trackers()
        for table in TABLES.values():
            self.to.apply(self.settings, table)
        self.to.fields.setdefault("parallel.zero_stage", 0)
        if self.alone:
            self._clipping(before)
        self._conflicts(before)
        self._resolve_auto()
        self.to.report_untaken(self.settings, "DeepSpeed")

    def _set(self, field: str, value: Any, key: str, text: str = "") -> None:
        shown = self.settings.shown(key)
        self.to.set(field, value, shown, self.settings.place(key))
        self.to.same(shown, self.settings.take(key), field, text)

    def _optimizer(self, before: Mapping[str, Any]) -> None:
        take = self.settings.take
        kind = take("optimizer.type")
        shown = self.settings.shown("optimizer.type")
        if kind is None:
            return
        name = str(kind).lower()
        decoupled = take("optimizer.params.adam_w_mode", True)
        known = ("adamw" if decoupled else "adam") if name in ("adam", "fusedadam") else OPTIMIZERS.get(name)
        if known is None:
            text = "is not here: name a class of any package in optim.name, as in package.module:Class"
            self.to.unsupported(shown, kind, text)
        else:
            text = "DeepSpeed's Adam decouples the weight decay" if name == "adam" and decoupled else ""
            self._set("optim.name", known, "optimizer.type", text)
        if "optimizer.params.adam_w_mode" in self.settings:
            self.to.same(self.settings.shown("optimizer.params.adam_w_mode"), decoupled, "optim.name")
        betas = take("optimizer.params.betas")
        momentum = take("optimizer.params.momentum")
        if name == "sgd":
            self.to.set("optim.betas", [momentum or 0.0, 0.999], "the momentum of SGD, 0 by default")
            if momentum is not None:
                self.to.same(self.settings.shown("optimizer.params.momentum"), momentum, "optim.betas")
        elif betas is not None:
            self._set("optim.betas", betas, "optimizer.params.betas")
        elif self.alone:
            self.to.set("optim.betas", [0.9, 0.99] if name == "lion" else [0.9, 0.999], "DeepSpeed's default")
        decay = take("optimizer.params.weight_decay")
        if decay is not None:
            self._set("optim.weight_decay", decay, "optimizer.params.weight_decay")
        elif self.alone:
            default = 0.01 if name == "adamw" else 0.0
            self.to.set("optim.weight_decay", default, f"DeepSpeed's default for {kind}")
        if self.alone:
            text = "biases and norms are not decayed here; DeepSpeed decays every weight of model.parameters()"
            self.to.different("", None, text, "optim.weight_decay")
        if (corrected := take("optimizer.params.bias_correction")) is not None:
            shown = self.settings.shown("optimizer.params.bias_correction")
            if corrected:
                self.to.same(shown, True, text="is what happens here")
            else:
                self.to.unsupported(shown, False, "the moments' bias is always corrected")

    def _schedule(self, before: Mapping[str, Any]) -> None:
        take, shown = self.settings.take, self.settings.shown
        kind = take("scheduler.type")
        if kind is None:
            if self.alone:
                self.to.set("optim.schedule", "constant", "DeepSpeed's default: no scheduler")
            return
        name = SCHEDULES.get(str(kind).lower())
        if name is None:
            self.to.unsupported(shown("scheduler.type"), kind, "name a function of yours in optim.schedule")
            return
        text = "" if self.alone else "replaces the arguments' own schedule, as DeepSpeed does"
        self._set("optim.schedule", name, "scheduler.type", text)
        steps = take("scheduler.params.warmup_num_steps")
        if steps is not None:
            self._set("optim.warmup_steps", _whole(steps), "scheduler.params.warmup_num_steps")
        elif self.alone:
            self.to.set("optim.warmup_steps", 1000, "DeepSpeed's default")
        form = take("scheduler.params.warmup_type", "log")
        if form == "linear":
            self.to.same(shown("scheduler.params.warmup_type"), form, text="is what happens here")
        else:
            text = "DeepSpeed's warm-up is logarithmic, so its learning rate rises faster; here it is linear"
            self.to.different(shown("scheduler.params.warmup_type"), form, text, "optim.warmup_steps")
        peak = take("scheduler.params.warmup_max_lr")
        if peak is not None:
            self._set("optim.lr", peak, "scheduler.params.warmup_max_lr")
        for key in ("scheduler.params.warmup_min_lr", "scheduler.params.warmup_min_ratio"):
            if (lowest := take(key)) is not None:
                if lowest:
                    self.to.different(shown(key), lowest, "the warm-up starts at 0")
                else:
                    self.to.same(shown(key), lowest, text="is what happens here")
        total = take("scheduler.params.total_num_steps")
        if total is not None and "train.epochs" not in self.to.fields:
            self._set("train.max_steps", _whole(total), "scheduler.params.total_num_steps")
        elif total is not None:
            text = "the schedule ends with the run"
            self.to.different(shown("scheduler.params.total_num_steps"), total, text)
        if name == "cosine":
            key = "scheduler.params.cos_min_ratio"
            lowest = take(key, 0.0001)
            self.to.set("optim.min_lr_ratio", lowest, shown(key) if key in self.settings else "DeepSpeed's default")
            if key in self.settings:
                self.to.same(shown(key), lowest, "optim.min_lr_ratio")

    def _batch(self, before: Mapping[str, Any]) -> None:
        total, micro, accumulated = (
            self.settings.take(key)
            for key in ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
        )
        if not self.alone:
            for key, value, field in (
                ("train_batch_size", total, "batch.global_batch_size"),
                ("train_micro_batch_size_per_gpu", micro, "batch.micro_batch_size"),
            ):
                if value is not None and before.get(field) == value:
                    self.to.same(self.settings.shown(key), value, field)
                elif value is not None:
                    self.to.different(self.settings.shown(key), value, _refused(before.get(field)), field)
            if accumulated is not None:
                text = "the global batch follows from the arguments"
                self.to.same(self.settings.shown("gradient_accumulation_steps"), accumulated, text=text)
            return
        if isinstance(total, int) and not isinstance(micro, int) and not isinstance(accumulated, int):
            micro = total // self.given.world_size(self.to)
        elif not isinstance(total, int) or not isinstance(micro, int):
            world = self.given.world_size(self.to)
            if isinstance(micro, int):
                total = micro * (accumulated or 1) * world
            elif isinstance(total, int) and isinstance(accumulated, int):
                micro = total // (accumulated * world)
        for key, value, field in (
            ("train_batch_size", total, "batch.global_batch_size"),
            ("train_micro_batch_size_per_gpu", micro, "batch.micro_batch_size"),
        ):
            if isinstance(value, int) and value > 0:
                if key in self.settings:
                    self._set(field, value, key)
                else:
                    self.to.set(field, value, "follows from the other sizes and the devices")
            else:
                self.to.set(field, 1, "FILL IN: rows per step, or per forward pass on a device")
                self.to.missing(field, "the settings do not say it", 1)
        if accumulated is not None:
            shown = self.settings.shown("gradient_accumulation_steps")
            self.to.same(shown, accumulated, "batch.global_batch_size", "follows from the sizes and the devices")

    def _clipping(self, before: Mapping[str, Any]) -> None:
        clip = self.settings.take("gradient_clipping")
        if clip is not None:
            self._set("optim.clip_grad_norm", clip, "gradient_clipping")

    def _precision(self) -> None:
        take, field = self.settings.take, "parallel.precision"
        for kind in ("bf16", "fp16"):
            key = f"{kind}.enabled"
            enabled = take(key)
            if enabled is True:
                self._set(field, kind, key, "16-bit weights, and fp32 master weights")
            elif enabled is not None:
                self.to.same(self.settings.shown(key), enabled, text="off")
        if take("torch_autocast.enabled"):
            half = (
                "fp16"
                if str(take("torch_autocast.dtype")).endswith("float16")
                and "bfloat" not in str(take("torch_autocast.dtype"))
                else "bf16"
            )
            self._set(field, f"autocast_{half}", "torch_autocast.enabled")
        elif "torch_autocast.enabled" in self.settings:
            self.to.same(self.settings.shown("torch_autocast.enabled"), False, text="off")
        if (dtype := take("torch_autocast.dtype")) is not None:
            self.to.same(self.settings.shown("torch_autocast.dtype"), dtype, text="with torch_autocast.enabled")
        scale = take("fp16.loss_scale")
        if scale:
            self.to.different(self.settings.shown("fp16.loss_scale"), scale, LOSS_SCALE)
        elif scale is not None:
            self.to.same(self.settings.shown("fp16.loss_scale"), scale, text=LOSS_SCALE)

    def _unusual(self) -> None:
        """Switches whose value decides whether anything is lost."""
        for key, text in (
            ("bf16.bf16_master_weights_and_grads", "master weights and gradients stay in fp32: more memory"),
            ("bf16.bf16_optimizer_states", "the optimizer's states stay in fp32: more memory"),
            ("fp16.fp16_master_weights_and_grads", "master weights and gradients stay in fp32: more memory"),
            ("zero_optimization.zero_quantized_weights", "weights are gathered in their own precision: more traffic"),
            ("zero_optimization.zero_quantized_gradients", "gradients are not quantized: more traffic, more accurate"),
            (
                "zero_optimization.zero_quantized_nontrainable_weights",
                "model.quantize=nf4 stores frozen weights in 4 bits",
            ),
        ):
            self._switch(key, text)
        for key, field in (("cpu_offload", "offload_optimizer"), ("cpu_offload_param", "offload_param")):
            name = f"zero_optimization.{key}"
            if self.settings.take(name):
                self._set(f"parallel.{field}", "cpu", name)
            elif name in self.settings:
                self.to.same(self.settings.shown(name), False, text="off")
        name = "zero_optimization.mics_shard_size"
        size = self.settings.take(name)
        if isinstance(size, int) and size > 0:
            self.to.set("parallel.hierarchical_partition", size, self.settings.shown(name))
            text = "the nearest to MiCS: groups of this size keep a second copy of the parameters, not the only one"
            self.to.different(self.settings.shown(name), size, text, "parallel.hierarchical_partition")
        elif size is not None:
            self.to.same(self.settings.shown(name), size, text="off")
        name = "zero_optimization.offload_optimizer.ratio"
        ratio = self.settings.take(name)
        if ratio not in (None, 1, 1.0):
            self.to.different(self.settings.shown(name), ratio, "all of the states are offloaded: more host memory")

    def _switch(self, key: str, text: str) -> None:
        value = self.settings.take(key)
        if value:
            self.to.unsupported(self.settings.shown(key), value, text)
        elif value is not None:
            self.to.same(self.settings.shown(key), value, text="off")

    def _trackers(self) -> None:
        names = []
        for name in ("tensorboard", "wandb"):
            key = f"{name}.enabled"
            if self.settings.take(key):
                names.append(name)
                self.to.same(self.settings.shown(key), True, "logging.trackers")
            elif key in self.settings:
                self.to.same(self.settings.shown(key), False, text="off")
        known = self.to.fields.get("logging.trackers", [])
        if self.alone or names:
            self.to.set("logging.trackers", [*known, *(name for name in names if name not in known)])

    def _conflicts(self, before: Mapping[str, Any]) -> None:
        """Notes where the arguments say something else, with the arguments' value, as the Trainer refuses this."""
        for field in ("optim.lr", "optim.betas", "optim.eps", "optim.weight_decay", "optim.clip_grad_norm"):
            given = before.get(field)
            if given is not None and self.to.fields[field] != given:
                key = self.to.comments[field]
                self.to.different(key, self.to.fields[field], _refused(given), field)
                self.to.set(field, given, "the arguments' value")
        clip = self.settings.take("gradient_clipping")
        if not self.alone and clip is not None:
            known = before.get("optim.clip_grad_norm", 1.0)
            if known == clip:
                self.to.same(self.settings.shown("gradient_clipping"), clip, "optim.clip_grad_norm")
            else:
                self.to.different(
                    self.settings.shown("gradient_clipping"), clip, _refused(known), "optim.clip_grad_norm"
                )

    def _resolve_auto(self) -> None:
        if not self.auto:
            return
        if not self.alone:
            text = f"{', '.join(self.auto)}: filled in from the arguments, as the Trainer does, or chosen for the plan"
            self.to.same(f'{self.settings.prefix}"auto"', None, text=text)
            return
        fields = {row.key: row.field for table in TABLES.values() for row in table}
        for key in self.auto:
            field = fields.get(key, "")
            if field and field not in self.to.fields:
                self.to.missing(field, f"{key} is filled in by the program that reads the file: say its value")
            elif field:
                self.to.same(key, AUTO, field, self.to.comments.get(field, "chosen for the plan"))
            else:
                self.to.same(key, AUTO, text="chosen for the plan")


def _refused(value: Any) -> str:
    return f"the arguments say {value!r}, and the Trainer refuses two values; the arguments' is used"


def _whole(value: Any) -> Any:
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _without_auto(values: Mapping[str, Any]) -> tuple[dict[str, Any], list[tuple[str, ...]]]:
    """Returns the values without those that another program fills in, and the paths of these."""
    paths = list(_auto_paths(values, ()))
    return _pruned(values, (), set(paths)), paths


def _auto_paths(values: Mapping[str, Any], path: tuple[str, ...]) -> Iterator[tuple[str, ...]]:
    for key, value in values.items():
        if value == AUTO:
            yield (*path, key)
        elif isinstance(value, Mapping):
            yield from _auto_paths(value, (*path, key))


def _pruned(values: Mapping[str, Any], path: tuple[str, ...], gone: set[tuple[str, ...]]) -> dict[str, Any]:
    return {
        key: _pruned(value, (*path, key), gone) if isinstance(value, Mapping) else value
        for key, value in values.items()
        if (*path, key) not in gone
    }


PROGRAM = Program(
    name="deepspeed",
    title="DeepSpeed",
    marks=frozenset(
        {
            *(
                "train_micro_batch_size_per_gpu",
                "train_batch_size",
                "zero_optimization",
                "zero_allow_untested_optimizer",
            ),
            *("steps_per_print", "wall_clock_breakdown"),
        }
    ),
    translate=translate,
    tables=TABLES,
    page="deepspeed",
    beside=True,
)
