"""Translates a configuration of DeepSpeed, alone or beside the arguments that fill in its "auto"."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from llmtrain.plan.migrate.completion import complete, name_run
from llmtrain.plan.migrate.deepspeed_settings import AUTO, LOSS_SCALE, OPTIMIZERS, SCHEDULES, TABLES
from llmtrain.plan.migrate.files import ForeignFile
from llmtrain.plan.migrate.program import Given, Program
from llmtrain.plan.migrate.translation import Settings, Translation


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
