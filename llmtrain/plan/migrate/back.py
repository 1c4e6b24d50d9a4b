"""The way back: a plan as `TrainingArguments` with DeepSpeed's JSON, or as a configuration of Accelerate's launcher."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from llmtrain.plan.ds_config import render
from llmtrain.plan.migrate.translation import Line
from llmtrain.plan.plan import Plan
from llmtrain.recipe import Recipe

OPTIMIZERS = {
    "adamw": "adamw_torch",
    "adamw_8bit": "adamw_bnb_8bit",
    "lion": "lion_32bit",
    "sgd": "sgd",
    "schedule_free_adamw": "schedule_free_adamw",
    "torch.optim:Adagrad": "adagrad",
    "torch.optim:RMSprop": "rmsprop",
}
"""`optim.name` → `optim`."""
OF_SCRIPTS = ("model.", "data.", "objective.", "evaluation.sources", "evaluation.sets")
"""What a script around the Trainer says, and not its arguments."""
SCRIPT = "belongs to the script, not to these settings"
OF_DEEPSPEED = (
    *("zero_stage", "offload_optimizer", "offload_param", "nvme_path", "hierarchical_partition", "tensor"),
    *("grad_accum_dtype", "backend"),
)
"""Fields of `parallel` that DeepSpeed's JSON expresses."""
MIXED = {"fp32": "no", "bf16": "bf16", "fp16": "fp16", "autocast_bf16": "bf16", "autocast_fp16": "fp16"}


@dataclass
class Rendered:
    """A plan as settings of another program."""

    settings: dict[str, Any] = field(default_factory=dict)
    lines: list[Line] = field(default_factory=list)
    """The fields of the recipe that the settings do not express."""
    expressed: set[str] = field(default_factory=set)

    def put(self, key: str, value: Any, *fields: str) -> None:
        """Adds a setting. fields: those of the recipe that it expresses."""
        self.settings[key] = value
        self.expressed.update(fields)

    def miss(self, name: str, value: Any, text: str) -> None:
        """Notes a field that the settings do not express."""
        self.expressed.add(name)
        self.lines.append(Line("unsupported", name, value, "", text))

    def finish(self, recipe: Recipe, others: str) -> None:
        """Notes every other field that the recipe sets. others: why, unless it belongs to a script."""
        for name, value in recipe.dotted(exclude_defaults=True).items():
            if not any(name == known or name.startswith(f"{known}.") for known in self.expressed):
                self.miss(name, value, SCRIPT if name.startswith(OF_SCRIPTS) else others)


def as_trainer(plan: Plan) -> Rendered:
    """Returns a plan as `TrainingArguments`, in which `deepspeed` is the configuration itself."""
    made, recipe = Rendered(), plan.recipe
    made.put("output_dir", f"runs/{recipe.name}", "name")
    made.put("run_name", recipe.name)
    made.put("per_device_train_batch_size", plan.batch.micro_batch_size, "batch.micro_batch_size")
    made.put("gradient_accumulation_steps", plan.batch.gradient_accumulation_steps, "batch.global_batch_size")
    if recipe.train.max_steps is not None:
        made.put("max_steps", recipe.train.max_steps, "train.max_steps", "train.epochs")
    else:
        made.put("num_train_epochs", float(recipe.train.epochs or 1), "train.epochs")
    made.put("seed", recipe.train.seed, "train.seed")
    _optimizer(made, recipe)
    _schedule(made, recipe)
    _engine(made, plan)
    _evaluation(made, recipe)
    _checkpoints(made, recipe)
    made.put("logging_steps", recipe.logging.every_steps, "logging.every_steps")
    known = [name for name in recipe.logging.trackers if name in ("tensorboard", "wandb", "mlflow")]
    made.put("report_to", known or "none", "logging.trackers")
    for name in recipe.logging.trackers:
        if name not in known:
            made.miss("logging.trackers", name, "a tracker of your own is a callback there")
    if plan.cluster.spec.on_cpu:
        made.put("use_cpu", True)
    made.finish(recipe, "the Trainer has nothing like it")
    return made


def as_accelerate(plan: Plan) -> Rendered:
    """Returns a plan as a configuration of Accelerate's launcher, for a script with a loop of its own."""
    made, recipe = Rendered(), plan.recipe
    parallel, cluster = recipe.parallel, plan.cluster
    made.put("compute_environment", "LOCAL_MACHINE")
    if parallel.strategy == "fsdp2":
        made.put("distributed_type", "FSDP", "parallel.backend", "parallel.accelerate")
        made.put("fsdp_config", _fsdp(plan, "fsdp_"), "parallel.zero_stage")
        if parallel.activation_checkpointing == "full":
            made.expressed.add("parallel.activation_checkpointing")
    elif parallel.strategy in ("deepspeed", "ddp") and not plan.parallel.zero_stage:
        several = "MULTI_CPU" if cluster.spec.on_cpu else "MULTI_GPU"
        made.put("distributed_type", several if cluster.world_size > 1 else "NO", "parallel.backend")
    elif parallel.strategy == "deepspeed":
        made.put("distributed_type", "DEEPSPEED", "parallel.backend", "parallel.accelerate")
        block: dict[str, Any] = {
            "zero_stage": plan.parallel.zero_stage,
            "offload_optimizer_device": plan.parallel.offload_optimizer,
            "offload_param_device": plan.parallel.offload_param,
            "gradient_accumulation_steps": plan.batch.gradient_accumulation_steps,
            "gradient_clipping": recipe.optim.clip_grad_norm,
            "zero3_init_flag": plan.parallel.zero_stage == 3,
            "zero3_save_16bit_model": plan.parallel.zero_stage == 3,
        }
        for name in ("optimizer", "param"):
            if parallel.nvme_path and getattr(parallel, f"offload_{name}") == "nvme":
                block[f"offload_{name}_nvme_path"] = parallel.nvme_path
        expressed = ("zero_stage", "offload_optimizer", "offload_param", "nvme_path")
        made.put("deepspeed_config", block, *(f"parallel.{name}" for name in expressed), "optim.clip_grad_norm")
    else:
        made.miss("parallel.backend", parallel.backend, "Accelerate does not run it")
        made.put("distributed_type", "NO")
    if recipe.parallel.precision.startswith("autocast") and made.settings["distributed_type"] in ("DEEPSPEED", "FSDP"):
        made.miss("parallel.precision", parallel.precision, "mixed precision has 16-bit weights there")
    made.put("mixed_precision", MIXED[parallel.precision], "parallel.precision")
    made.put("num_machines", cluster.nodes)
    made.put("num_processes", cluster.world_size)
    made.put("machine_rank", 0)
    made.put("main_training_function", "main")
    made.put("use_cpu", cluster.spec.on_cpu)
    if plan.recipe.kernels.blocks == "compiled":
        made.put("dynamo_config", {"dynamo_backend": "INDUCTOR"}, "kernels.blocks")
    made.finish(recipe, SCRIPT)
    return made


RENDERERS: dict[str, Callable[[Plan], Rendered]] = {"trainer": as_trainer, "accelerate": as_accelerate}
"""Program → function that renders a plan as its settings."""


def _optimizer(made: Rendered, recipe: Recipe) -> None:
    optim = recipe.optim
    made.put("learning_rate", optim.lr, "optim.lr")
    made.put("weight_decay", optim.weight_decay, "optim.weight_decay")
    made.put("adam_epsilon", optim.eps, "optim.eps")
    made.put("max_grad_norm", optim.clip_grad_norm, "optim.clip_grad_norm")
    for number, beta in enumerate(optim.betas, 1):
        made.put(f"adam_beta{number}", beta, "optim.betas")
    name = OPTIMIZERS.get(optim.name)
    if name is None or (optim.name == "sgd" and optim.betas[0]):
        value = optim.name if name is None else {"name": optim.name, "betas": optim.betas}
        made.miss("optim.name", value, "the Trainer has no such optimizer: pass yours to it (optimizer_cls_and_kwargs)")
        name = "adamw_torch"
    made.put("optim", name, "optim.name")


def _schedule(made: Rendered, recipe: Recipe) -> None:
    optim = recipe.optim
    warmup = optim.warmup_steps or getattr(optim, "warmup_ratio", None) or 0
    options: dict[str, Any] = {}
    name = str(optim.schedule)
    if name == "constant" and warmup:
        name = "constant_with_warmup"
    elif name == "cosine" and optim.min_lr_ratio:
        name, options = "cosine_with_min_lr", {"min_lr_rate": optim.min_lr_ratio}
    elif name == "wsd":
        name = "warmup_stable_decay"
        options = {"num_decay_steps": optim.decay_steps, "min_lr_ratio": optim.min_lr_ratio, "decay_type": "linear"}
    elif name not in ("constant", "linear", "cosine", "inverse_sqrt"):
        made.miss("optim.schedule", name, "the Trainer has no such schedule: pass yours to it (optimizers)")
        name = "constant_with_warmup"
    expressed = ("schedule", "warmup_steps", "warmup_ratio", "min_lr_ratio", "decay_steps")
    made.put("lr_scheduler_type", name, *(f"optim.{part}" for part in expressed))
    made.put("warmup_steps", warmup)
    if options:
        made.put("lr_scheduler_kwargs", options)


def _engine(made: Rendered, plan: Plan) -> None:
    recipe, parallel = plan.recipe, plan.parallel
    precision = recipe.parallel.precision
    made.put("bf16", "bf16" in precision, "parallel.precision")
    made.put("fp16", "fp16" in precision)
    if recipe.parallel.strategy == "fsdp2":
        made.put("fsdp", "full_shard" if parallel.zero_stage == 3 else "shard_grad_op", "parallel.backend")
        made.put("fsdp_config", _fsdp(plan, ""), "parallel.accelerate", "parallel.zero_stage")
        if precision.startswith("autocast"):
            made.miss("parallel.precision", precision, "mixed precision has 16-bit weights there")
    elif recipe.parallel.strategy == "deepspeed" and not _is_plain(plan):
        made.put("deepspeed", _ds_config(plan), *(f"parallel.{name}" for name in OF_DEEPSPEED))
    elif recipe.parallel.strategy in ("ddp", "deepspeed"):
        made.expressed.update(("parallel.backend", "parallel.accelerate"))
    for name in ("pipeline", "expert", "sequence"):
        if (degree := getattr(parallel, name)) > 1:
            made.miss(f"parallel.{name}", degree, "the Trainer does not divide a model in this way")
    recompute = recipe.parallel.activation_checkpointing
    made.put("gradient_checkpointing", recompute != "none", "parallel.activation_checkpointing")
    if recompute == "selective":
        made.miss("parallel.activation_checkpointing", recompute, "the Trainer recomputes whole layers")
    blocks = recipe.kernels.blocks
    if blocks in ("compiled", "liger"):
        key = "torch_compile" if blocks == "compiled" else "use_liger_kernel"
        made.put(key, True, "kernels.blocks", *(("kernels.loss",) if recipe.kernels.loss == "liger" else ()))
    if (alpha := getattr(recipe.train, "neftune_alpha", None)) is not None:
        made.put("neftune_noise_alpha", alpha, "train.neftune_alpha")


def _is_plain(plan: Plan) -> bool:
    """Whether the Trainer's own loop does what DeepSpeed does here: it keeps whole weights, of 32 bits."""
    whole = not plan.parallel.zero_stage and plan.parallel.tensor == 1
    return whole and plan.recipe.parallel.precision not in ("bf16", "fp16")


def _ds_config(plan: Plan) -> dict[str, Any]:
    """Returns the plan's configuration of DeepSpeed, in which the arguments fill in what they also say."""
    config = render(plan)
    auto = ("train_micro_batch_size_per_gpu", "train_batch_size", "gradient_accumulation_steps", "gradient_clipping")
    config |= dict.fromkeys((name for name in auto if name in config), "auto")
    config.pop("optimizer", None)  # the Trainer's own, with its groups of decayed weights
    config["zero_allow_untested_optimizer"] = True
    if plan.parallel.tensor > 1:
        config["tensor_parallel"] = {"autotp_size": plan.parallel.tensor}
    for kind in ("bf16", "fp16"):
        config[kind] = {"enabled": "auto"}
    return config


def _fsdp(plan: Plan, prefix: str) -> dict[str, Any]:
    block: dict[str, Any] = {"version": 2, "reshard_after_forward": plan.parallel.zero_stage == 3}
    block["auto_wrap_policy"] = "TRANSFORMER_BASED_WRAP"
    if prefix:
        block["activation_checkpointing"] = plan.recipe.parallel.activation_checkpointing != "none"
    return {f"{prefix}{name}": value for name, value in block.items()}


def _evaluation(made: Rendered, recipe: Recipe) -> None:
    every = recipe.evaluation.every_steps
    made.put("eval_strategy", "steps" if every else "no", "evaluation.every_steps")
    if every:
        made.put("eval_steps", every)
        made.put("eval_on_start", recipe.evaluates_at_start, "evaluation.at_start")


def _checkpoints(made: Rendered, recipe: Recipe) -> None:
    saved = recipe.checkpoint
    made.put("save_strategy", "steps" if saved.every_steps else "no", "checkpoint.every_steps")
    if saved.every_steps:
        made.put("save_steps", saved.every_steps)
    if saved.keep_last is not None:
        made.put("save_total_limit", saved.keep_last, "checkpoint.keep_last")
    if saved.keep_best is None:
        return
    if saved.keep_best > 1 or saved.every_steps % max(1, recipe.evaluation.every_steps):
        made.miss("checkpoint.keep_best", saved.keep_best, "the Trainer keeps one, if it saves when it evaluates")
        return
    made.put("load_best_model_at_end", True, "checkpoint.keep_best")
    made.put("metric_for_best_model", saved.best_metric, "checkpoint.best_metric")
    made.put("greater_is_better", saved.best_mode == "max", "checkpoint.best_mode")
