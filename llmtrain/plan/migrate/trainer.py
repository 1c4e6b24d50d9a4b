"""Translates `TrainingArguments` of `transformers`, and the arguments of its language modelling scripts."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from llmtrain.plan.migrate.accelerate import apply_accelerate, apply_degrees, apply_fsdp, launched, mixed
from llmtrain.plan.migrate.completion import complete, name_run
from llmtrain.plan.migrate.deepspeed_json import apply_deepspeed
from llmtrain.plan.migrate.model_arguments import apply_model
from llmtrain.plan.migrate.program import Given, Program
from llmtrain.plan.migrate.trainer_settings import (
    CHECKPOINTS,
    OF_SCRIPTS,
    OPTIMIZERS,
    OPTIMIZERS_DIFFER,
    OWN_SCHEDULE,
    PLACEHOLDER_STEPS,
    PUSH,
    ROWS,
    SCHEDULES,
    TABLES,
    TRACKERS,
)
from llmtrain.plan.migrate.translation import Settings, Translation


def translate(given: Given) -> Translation:
    """Translates `TrainingArguments`, and the arguments of a script beside them."""
    translation = Translation("the Trainer")
    settings = Settings(given.file.values, file=given.file)
    dtype = apply_model(translation, settings, adapter_defaults=False)
    rows = _rows(translation, settings)
    apply_arguments(translation, settings, given, dtype=dtype)
    _evaluation_data(translation, rows)
    name_run(translation, settings, "run_name", "output_dir")
    translation.report_untaken(settings)
    complete(translation)
    return translation


def apply_arguments(
    translation: Translation,
    settings: Settings,
    given: Given,
    *,
    dtype: str = "",
    defaults: Mapping[str, Any] | None = None,
) -> None:
    """Translates the fields of `TrainingArguments`.

    dtype: the data type in which the weights are loaded. defaults: values where a subclass has other defaults.
    """
    own = defaults or {}
    for table in TABLES.values():
        translation.apply(settings, (replace(row, default=own.get(row.key, row.default)) for row in table))
    _Arguments(translation, settings, given, dtype, own).translate()


class _Arguments:
    """The fields that are translated together with others."""

    def __init__(
        self, translation: Translation, settings: Settings, given: Given, dtype: str, defaults: Mapping[str, Any]
    ) -> None:
        self.to, self.settings, self.given, self.dtype, self.defaults = translation, settings, given, dtype, defaults

    def translate(self) -> None:
        """Translates them."""
        self._length()
        self._batch()
        self._optimizer()
        self._schedule()
        self._engine()
        self._precision()
        self._evaluation()
        self._checkpoints()
        self._logging()

    def take(self, key: str, default: Any = None) -> Any:
        """Returns a setting."""
        return self.settings.take(key, self.defaults.get(key, default))

    def set(self, field: str, value: Any, key: str, text: str = "") -> None:
        """Sets a field from a setting, and notes it if the file has it."""
        given = key in self.settings
        shown = self.settings.shown(key)
        self.to.set(field, value, shown if given else f"default of {shown}", self.settings.place(key))
        if given:
            self.to.same(shown, self.settings.take(key), field, text)

    def note(
        self,
        key: str,
        *,
        unless: tuple[Any, ...] = (None, False),
        different: str = "",
        unsupported: str = "",
        harmless: str = "",
    ) -> Any:
        """Takes a setting, notes what becomes of it, and returns it. unless: values that have no consequence."""
        value = self.take(key)
        if key not in self.settings or value is None:
            return value
        shown = self.settings.shown(key)
        if value in unless or harmless:
            self.to.same(shown, value, text=harmless or "is what happens here")
        elif different:
            self.to.different(shown, value, different)
        else:
            self.to.unsupported(shown, value, unsupported)
        return value

    def _length(self) -> None:
        steps = self.take("max_steps", -1)
        epochs = self.take("num_train_epochs", 3.0)
        if isinstance(steps, (int, float)) and steps > 0:
            self.set("train.max_steps", int(steps), "max_steps")
            if "num_train_epochs" in self.settings:
                self.to.same(self.settings.shown("num_train_epochs"), epochs, text="max_steps replaces it")
            return
        if "max_steps" in self.settings:
            self.to.same(self.settings.shown("max_steps"), steps, text="the epochs decide")
        whole = isinstance(epochs, float) and epochs.is_integer()
        self.set("train.epochs", int(epochs) if whole else epochs, "num_train_epochs")

    def _batch(self) -> None:
        key = (
            "per_gpu_train_batch_size" if "per_gpu_train_batch_size" in self.settings else "per_device_train_batch_size"
        )
        micro, accumulated = self.take(key, 8), self.take("gradient_accumulation_steps", 1)
        world = self.given.world_size(self.to)
        self.set("batch.micro_batch_size", micro, key)
        shown = self.settings.shown("gradient_accumulation_steps")
        counts = (micro, accumulated)
        if all(isinstance(count, int) for count in counts):
            comment = f"{micro} × {accumulated} × {world}: per device × accumulation × devices"
            # A wrong count is reported as it was given; that of a device already is, as the micro-batch.
            total = accumulated if accumulated < 1 else max(micro, 1) * accumulated * world
            self.to.set("batch.global_batch_size", total, comment, self.settings.place(shown))
        if "gradient_accumulation_steps" in self.settings:
            text = (
                f"{micro} × {accumulated} × {world} devices; the accumulation follows from it on any number of devices"
            )
            self.to.same(shown, accumulated, "batch.global_batch_size", text)
        self.note(
            "average_tokens_across_devices",
            unless=(True,),
            different="the loss is a mean over the tokens of the global batch: devices with fewer tokens weigh less",
        )

    def _optimizer(self) -> None:
        name = self.take("optim", "adamw_torch")
        if self.take("adafactor"):
            name = "adafactor"
            self.to.same(self.settings.shown("adafactor"), True, "optim.name")
        shown = self.settings.shown("optim")
        if name not in OPTIMIZERS:
            text = "is not here: name a class of any package in optim.name, as in package.module:Class"
            self.to.unsupported(shown, name, text)
        else:
            self.set("optim.name", OPTIMIZERS[name], "optim")
            if name in OPTIMIZERS_DIFFER:
                self.to.different(shown, name, OPTIMIZERS_DIFFER[name], "optim.name")
        betas = [self.take("adam_beta1", 0.9), self.take("adam_beta2", 0.999)]
        if name == "sgd":
            betas[0] = 0.0  # the Trainer's has no momentum
            self.to.set("optim.betas", betas, "the Trainer's SGD has no momentum")
        else:
            comment = "adam_beta1, adam_beta2" if "adam_beta1" in self.settings or "adam_beta2" in self.settings else ""
            self.to.set("optim.betas", betas, comment or "the defaults", self.settings.place("adam_beta1"))
        for key, value in (("adam_beta1", betas[0]), ("adam_beta2", betas[1])):
            if key in self.settings:
                self.to.same(self.settings.shown(key), value, "optim.betas")
        self.note("optim_args", unless=(None, ""), unsupported="write the optimizer's arguments to optim.options")
        self.note(
            "label_smoothing_factor",
            unless=(None, 0, 0.0),
            unsupported="the loss has no smoothing; a function of yours in objective.name may have it",
        )

    def _schedule(self) -> None:
        name = self.take("lr_scheduler_type", "linear")
        options = self.take("lr_scheduler_kwargs", {}) or {}
        shown = self.settings.shown("lr_scheduler_type")
        if name not in SCHEDULES:
            self.to.unsupported(shown, name, OWN_SCHEDULE)
        else:
            self.set("optim.schedule", SCHEDULES[name], "lr_scheduler_type")
        self._warmup(str(name))
        if not isinstance(options, Mapping):
            self.to.unsupported(self.settings.shown("lr_scheduler_kwargs"), options, "is not a mapping")
            return
        for key, value in options.items():
            self._schedule_option(str(name), key, value)
        if name == "warmup_stable_decay" and options.get("decay_type", "cosine") != "linear":
            self.to.different(shown, name, "the final decay is linear, the Trainer's is a cosine", "optim.schedule")

    def _schedule_option(self, name: str, key: str, value: Any) -> None:
        shown = f"{self.settings.shown('lr_scheduler_kwargs')}.{key}"
        rate = self.to.fields.get("optim.lr")
        if key in ("min_lr_rate", "min_lr_ratio") and name in ("cosine_with_min_lr", "warmup_stable_decay"):
            self.to.set("optim.min_lr_ratio", value, shown)
            self.to.same(shown, value, "optim.min_lr_ratio")
        elif key == "min_lr" and isinstance(rate, float) and isinstance(value, (int, float)):
            self.to.set("optim.min_lr_ratio", value / rate, f"{shown} / learning_rate")
            self.to.same(shown, value, "optim.min_lr_ratio", "relative to the learning rate")
        elif key == "num_decay_steps" and name == "warmup_stable_decay":
            self.to.set("optim.decay_steps", value, shown)
            self.to.same(shown, value, "optim.decay_steps")
        elif key == "num_stable_steps" and name == "warmup_stable_decay":
            self.to.same(shown, value, text="follows from the other steps")
        elif key in ("decay_type", "warmup_type"):
            self.to.same(shown, value, text="is linear here")
        elif key == "num_cycles" and value == 0.5:
            self.to.same(shown, value, text="is the form of the schedule here")
        else:
            self.to.unsupported(shown, value, OWN_SCHEDULE)

    def _warmup(self, schedule: str) -> None:
        steps, ratio = self.take("warmup_steps", 0), self.take("warmup_ratio", 0.0)
        key = "warmup_steps" if steps else "warmup_ratio"
        if not (steps or ratio):
            for name in ("warmup_steps", "warmup_ratio"):
                self.note(name, unless=(0, 0.0))
            return
        if steps and "warmup_ratio" in self.settings:
            self.to.same(self.settings.shown("warmup_ratio"), ratio, text="warmup_steps replaces it")
        if schedule == "constant":
            text = "the Trainer's `constant` has no warm-up, so there is none; `constant_with_warmup` has one"
            self.to.same(self.settings.shown(key), steps or ratio, text=text)
        elif steps and isinstance(steps, (int, float)) and steps >= 1:
            self.set("optim.warmup_steps", int(steps), key)
        else:
            self.set("optim.warmup_ratio", steps or ratio, key, "a share of the run's steps, rounded up")

    def _engine(self) -> None:
        field = "parallel.activation_checkpointing"
        for key in ("activation_checkpointing", "gradient_checkpointing"):
            value = self.take(key)
            if value and field not in self.to.fields:
                self.set(field, "full", key)
            elif key in self.settings and value is not None:
                text = "as activation_checkpointing" if value else "nothing is recomputed"
                self.to.same(self.settings.shown(key), value, text=text)
        self._kernels()
        self._strategy()
        for key in ("accelerator_config", "split_batches"):
            value = self.take(key)
            if value is None:
                continue
            split = value.get("split_batches") if isinstance(value, Mapping) else value
            if split:
                text = "per_device_train_batch_size is the batch of all devices there: correct both batch sizes"
                self.to.unsupported(self.settings.shown(key), value, text)
            else:
                self.to.same(self.settings.shown(key), value, text="each device has rows of its own")

    def _strategy(self) -> None:
        """DeepSpeed, FSDP, the degrees, and what a configuration of Accelerate beside the arguments says of them."""
        if named := self.take("deepspeed"):
            shown = self.settings.shown("deepspeed")
            self.to.same(shown, named if isinstance(named, str) else "{…}", "parallel.zero_stage")
            if configuration := self.given.companion(self.to, "deepspeed", named, shown):
                apply_deepspeed(self.to, configuration, self.given)
        elif (configuration := self.given.beside.get("deepspeed")) and "accelerate" not in self.given.beside:
            apply_deepspeed(self.to, configuration, self.given)
        self._fsdp()
        apply_degrees(self.to, self.take("parallelism_config"), self.settings.shown("parallelism_config"))
        options = self.given.file.launcher
        file = self.given.companion(self.to, "accelerate", options.get("config_file"), "--config_file")
        if file := launched(self.given.file.path, options, file):
            apply_accelerate(self.to, file, self.given)
        self._replicas()

    def _replicas(self) -> None:
        """Counts devices that share the same rows once."""
        fields = self.to.fields
        shared = math.prod(
            degree
            for name in ("parallel.tensor", "parallel.sequence")
            if isinstance(degree := fields.get(name, 1), int) and degree > 1
        )
        total = fields.get("batch.global_batch_size")
        if shared > 1 and isinstance(total, int) and total % shared == 0:
            comment = f"{self.to.comments['batch.global_batch_size']}, of which {shared} read the same rows"
            self.to.set("batch.global_batch_size", total // shared, comment)

    def _fsdp(self) -> None:
        kind, block = self.take("fsdp"), self.take("fsdp_config")
        shown = self.settings.shown("fsdp_config")
        if isinstance(block, str) and kind:
            file = self.given.companion(self.to, "fsdp", block, shown)
            block = file.values if file else {}
        words = str(kind or "").replace("[", " ").replace("]", " ").replace(",", " ").replace("'", " ").split()
        if not words or words == ["False"]:
            self.note("fsdp", unless=(None, "", False, []))
            self.note("fsdp_config", harmless="has no effect without fsdp")
            return
        self.to.same(self.settings.shown("fsdp"), kind, "parallel.accelerate")
        values = (
            {key.removeprefix("fsdp_"): value for key, value in block.items()} if isinstance(block, Mapping) else {}
        )
        names = ("full_shard", "shard_grad_op", "no_shard", "hybrid_shard", "hybrid_shard_zero2")
        for word in words:
            if word in names:
                values.setdefault("sharding_strategy", word)
            elif word == "offload":
                values.setdefault("offload_params", True)
        apply_fsdp(self.to, Settings(values, f"{shown}."))

    def _kernels(self) -> None:
        compiled = self.take("torch_compile")
        backend, mode = self.take("torch_compile_backend"), self.take("torch_compile_mode")
        if compiled or backend or mode:
            key = "torch_compile" if compiled else "torch_compile_backend" if backend else "torch_compile_mode"
            self.set("kernels.blocks", "compiled", key, "each layer is compiled on its own")
        else:
            self.note("torch_compile", unless=(False,))
        self.note("torch_compile_backend", unless=(None, "inductor"), unsupported="inductor compiles")
        self.note("torch_compile_mode", unless=(None, "default"), unsupported="inductor's default mode is used")
        if self.take("use_liger_kernel"):
            self.set("kernels.blocks", "liger", "use_liger_kernel")
            self.to.set("kernels.loss", "liger", "use_liger_kernel")
        else:
            self.note("use_liger_kernel", unless=(False,))
        self.note("liger_kernel_config", unless=(None,), unsupported="set kernels.blocks and kernels.loss")

    def _precision(self) -> None:
        bf16, fp16 = self.take("bf16"), self.take("fp16")
        loaded = {"bfloat16": "bf16", "float16": "fp16", "bf16": "bf16", "fp16": "fp16"}.get(self.dtype, "")
        key, field = ("bf16" if bf16 else "fp16"), "parallel.precision"
        for name in ("bf16", "fp16"):
            if not self.take(name):
                self.note(name, unless=(False,))
        for name in ("bf16_full_eval", "fp16_full_eval"):
            self.note(name, different="evaluations have the precision of the run")
        if not (bf16 or fp16):
            if loaded and field not in self.to.fields:
                text = "weights of 16 bits alone lose small updates; here fp32 master weights are kept beside them"
                self.to.set(field, loaded, f"weights in {self.dtype}")
                named = "torch_dtype" if "torch_dtype" in self.settings else "dtype"
                self.to.different(self.settings.shown(named), self.dtype, text, field)
            return
        half = "bf16" if bf16 else "fp16"
        chosen = mixed(self.to, half)
        if chosen == half:
            self.set(field, half, key, "16-bit weights, and fp32 master weights")
            self._no_loss_scale(half)
        elif loaded:
            self.set(field, loaded, key)
            text = "the Trainer updates 16-bit weights themselves; here fp32 master weights are kept beside them"
            self.to.different(self.settings.shown(key), True, text, field)
        else:
            self.set(field, chosen, key, "fp32 weights, products in 16 bits")
            if not self.dtype:
                text = "weights are fp32; transformers 5 loads them in the type of their files unless dtype is float32"
                self.to.different(self.settings.shown(key), True, text, field)

    def _no_loss_scale(self, half: str) -> None:
        if half == "fp16" and self.to.fields.get("parallel.accelerate") == "fsdp2":
            for name in ("parallel.backend", "parallel.accelerate"):
                self.to.fields.pop(name)
            text = "FSDP2 with fp16 is not supported: DeepSpeed's ZeRO shards in its place"
            self.to.different(self.settings.shown("fp16"), True, text, "parallel.zero_stage")

    def _interval(self, strategy: Any, key: str, steps: Any, field: str) -> int | None:
        """Returns the steps of an interval; None, with a line about what to fill in, if they are not known yet."""
        total = self.to.fields.get("train.max_steps")
        if strategy == "epoch":
            text = "once per epoch: set it to the steps of an epoch, which `llmtrain data RECIPE` prints"
            self.to.missing(field, text)
            return None
        if isinstance(steps, float) and 0 < steps < 1:
            if isinstance(total, int):
                return max(1, int(-(-total * steps // 1)))
            text = f"{self.settings.shown(key)} is {steps} of the run's steps, which `llmtrain data RECIPE` prints"
            self.to.missing(field, text)
            if key in self.settings:
                self.to.same(self.settings.shown(key), steps, field, "a share of the run's steps")
            return None
        return int(steps) if isinstance(steps, (int, float)) else steps

    def _evaluation(self) -> None:
        key = "eval_strategy" if "eval_strategy" in self.settings else "evaluation_strategy"
        strategy = str(self.take(key, "no")).lower()
        steps = self.take("eval_steps") or self.take("logging_steps", 500)
        at_start = self.take("eval_on_start", False)
        if strategy == "no":
            for name in (key, "eval_steps", "eval_on_start"):
                self.note(name, unless=(None, False, "no"), different="without eval_strategy, nothing is evaluated")
            return
        every = self._interval(strategy, "eval_steps", steps, "evaluation.every_steps")
        if every is None:
            self.to.set(
                "evaluation.every_steps", PLACEHOLDER_STEPS, "FILL IN: the steps of an epoch, or a share of all"
            )
        else:
            self.set("evaluation.every_steps", every, "eval_steps" if "eval_steps" in self.settings else key)
        if key in self.settings and ("eval_steps" in self.settings or every is None):
            self.to.same(self.settings.shown(key), strategy, "evaluation.every_steps")
        self.set("evaluation.at_start", bool(at_start), "eval_on_start")

    def _checkpoints(self) -> None:
        strategy = str(self.take("save_strategy", "steps")).lower()
        steps = self.take("save_steps", 500)
        field = "checkpoint.every_steps"
        if strategy == "no":
            self.note(
                "save_strategy", different="the last step is saved, so that the run can be continued and exported"
            )
            self.note("save_steps", harmless="save_strategy is no")
        elif strategy == "best":
            self.note("save_strategy", different="set checkpoint.every_steps to evaluation.every_steps")
        else:
            every = self._interval(strategy, "save_steps", steps, field)
            if every is not None:
                self.set(field, every, "save_steps")
            if "save_strategy" in self.settings:
                self.to.same(self.settings.shown("save_strategy"), strategy, field)
        if self.take("load_best_model_at_end"):
            best = "`llmtrain export RUN OUT --best` writes it"
            if "checkpoint.keep_last" in self.to.fields:
                self.set("checkpoint.keep_best", 1, "load_best_model_at_end", best)
            else:
                self.note("load_best_model_at_end", harmless=f"all checkpoints are kept; {best}")
            self._best_metric()
        else:
            for name in ("load_best_model_at_end", "metric_for_best_model", "greater_is_better"):
                self.note(name, harmless="only used with load_best_model_at_end")
        self.note(
            "save_only_model", different="checkpoints have the optimizer's state, so that runs continue: more disk"
        )
        pushed = self.take("push_to_hub")
        for row in CHECKPOINTS:
            value = self.take(row.key) if row.joint == PUSH else None
            if value is not None and row.key in self.settings:
                note = self.to.unsupported if pushed else self.to.same
                note(self.settings.shown(row.key), value, text=PUSH)

    def _best_metric(self) -> None:
        metric = self.take("metric_for_best_model", "loss")
        name = str(metric).removeprefix("eval_")
        if name == "loss":
            self.note("metric_for_best_model", harmless="eval_loss is the default")
        else:
            self.set("checkpoint.best_metric", name, "metric_for_best_model", "a metric of evaluation.metrics")
        greater = self.take("greater_is_better", not name.endswith("loss"))
        if greater:
            self.set("checkpoint.best_mode", "max", "greater_is_better")
        else:
            self.note("greater_is_better", unless=(False,))

    def _logging(self) -> None:
        steps = self.take("logging_steps", 500)
        strategy = str(self.take("logging_strategy", "steps")).lower()
        if strategy == "steps":
            every = self._interval(strategy, "logging_steps", steps, "logging.every_steps")
            if every is not None:
                self.set("logging.every_steps", max(1, every) if isinstance(every, int) else every, "logging_steps")
            self.note("logging_strategy", unless=("steps",))
        else:
            self.note("logging_strategy", different="lines are written every logging.every_steps steps")
            self.note("logging_steps", harmless="logging_strategy decides")
        self.note("logging_nan_inf_filter", unless=(None, True, False))
        self._trackers()
        order = "rows are read in a random order, and data.packing=best_fit saves the padding"
        self.note("train_sampling_strategy", unless=("random",), unsupported=order)
        self.note("group_by_length", unless=(False,), unsupported=order)
        for name in ("project", "trackio_space_id", "trackio_bucket_id", "trackio_static_space_id"):
            self.note(
                name,
                unless=(None, "huggingface", "trackio", False),
                unsupported="Trackio is not here; a class of yours may be one of logging.trackers",
            )
        self.note("debug", unless=(None, "", []), unsupported="`llmtrain profile` records steps")

    def _trackers(self) -> None:
        given = self.take("report_to", "none")
        names = given if isinstance(given, list) else [given]
        known = [name for name in names if name in TRACKERS]
        if "all" in names:
            known = ["tensorboard"]
            self.to.different(self.settings.shown("report_to"), given, "name the trackers in logging.trackers")
        self.set("logging.trackers", known, "report_to")
        for name in names:
            if name not in (*TRACKERS, "all", "none"):
                text = "is no tracker here; a class of yours may be one of logging.trackers"
                self.to.unsupported(self.settings.shown("report_to"), name, text)


def _rows(translation: Translation, settings: Settings) -> bool:
    """Translates the data of the Trainer's scripts. Returns whether they name data for evaluations."""
    translation.apply(settings, ROWS)
    subset = settings.take("dataset_config_name") or settings.take("dataset_config")
    split = settings.take("dataset_train_split")
    for key in ("dataset_name", "train_file", "data_files"):
        if name := settings.take(key):
            source = {"name": name} | ({"subset": subset} if subset and key == "dataset_name" else {})
            source |= {"split": split} if split not in (None, "train") and key == "dataset_name" else {}
            translation.set("data.sources", [source], settings.shown(key), settings.place(key))
            translation.same(settings.shown(key), name, "data.sources")
    for key in ("dataset_config_name", "dataset_config", "dataset_train_split"):
        if (value := settings.take(key)) is not None:
            translation.same(settings.shown(key), value, "data.sources")
    for key in ("block_size", "max_seq_length", "max_length", "model_max_length"):
        if length := settings.take(key):
            translation.set("data.sequence_length", length, settings.shown(key), settings.place(key))
            translation.same(settings.shown(key), length, "data.sequence_length")
            if key == "block_size":
                translation.set("data.packing", "concat", "texts are joined and cut, as run_clm.py does")
                translation.set("data.mask_documents", False, "run_clm.py lets texts of a block attend to each other")
            else:
                translation.set("data.packing", "none", "the Trainer reads one row per sequence")
    for key in ("max_train_samples", "max_eval_samples"):
        if (count := settings.take(key)) is not None:
            text = (
                "counts rows; name files with as many"
                if "train" in key
                else "evaluation.max_sequences counts sequences"
            )
            translation.unsupported(settings.shown(key), count, text)
    file, percentage = settings.take("validation_file"), settings.take("validation_split_percentage")
    if file:
        translation.set("evaluation.sources", [{"name": file}], settings.shown("validation_file"))
        translation.same(settings.shown("validation_file"), file, "evaluation.sources")
    if isinstance(percentage, (int, float)):
        translation.set("data.eval_fraction", percentage / 100, settings.shown("validation_split_percentage"))
        text = "rows are held out by the hash of their text, so these are others"
        translation.different(settings.shown("validation_split_percentage"), percentage, text, "data.eval_fraction")
    return bool(file) or percentage is not None


def _evaluation_data(translation: Translation, named: bool) -> None:
    """Holds out nothing unless the settings say so, and says what is missing for evaluations."""
    if named:
        return
    if translation.fields.get("evaluation.every_steps"):
        text = "the settings do not say what is evaluated: name evaluation.sources, or a share of the rows"
        translation.missing("data.eval_fraction", text, 0.01)
        translation.set("data.eval_fraction", 0.01, "FILL IN: the share of the rows to evaluate on")
    else:
        translation.set("data.eval_fraction", 0.0, "nothing is evaluated, so every row is trained on")


PROGRAM = Program(
    name="trainer",
    title="the Trainer",
    marks=frozenset(
        {
            *("per_device_train_batch_size", "per_device_eval_batch_size", "per_gpu_train_batch_size"),
            *("num_train_epochs", "lr_scheduler_type", "lr_scheduler_kwargs", "logging_strategy"),
        }
    ),
    translate=translate,
    tables=TABLES | OF_SCRIPTS,
    page="trainer",
    command=r"TrainingArguments$|run_clm|\btrain\.py",
)
