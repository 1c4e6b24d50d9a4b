"""Translates the main settings of torchtitan's TOML."""

from __future__ import annotations

from typing import Any

from llmtrain.plan.migrate.completion import NOTHING, complete, recipe_name
from llmtrain.plan.migrate.program import Given, Program
from llmtrain.plan.migrate.translation import Setting, Settings, Translation

TITLE = "torchtitan"
AXES = {"tensor": "tensor", "sequence": "context", "pipeline": "pipeline", "expert": "expert"}
"""Field of `parallel` → what the degree is called."""
CORPORA = {"c4": ("allenai/c4", "en"), "c4_test": (NOTHING, None)}
"""`training.dataset` → hub data set and its configuration."""

SETTINGS = (
    Setting(key="model.hf_assets_path", field="model.pretrained", joint="also data.tokenizer"),
    Setting(key="model.tokenizer_path", field="data.tokenizer", joint="a folder", older=True),
    Setting(key="model.name", joint="the architecture; the weights and their sizes are those of model.pretrained"),
    Setting(key="model.flavor", joint="the size; the weights and their sizes are those of model.pretrained"),
    Setting(key="optimizer.name", field="optim.name", default="AdamW", values={"AdamW": "adamw", "Adam": "adam"}),
    Setting(key="optimizer.lr", field="optim.lr", default=8e-4),
    Setting(key="optimizer.beta1", field="optim.betas", joint="0.9 by default"),
    Setting(key="optimizer.beta2", field="optim.betas", joint="0.95 by default"),
    Setting(key="optimizer.eps", field="optim.eps"),
    Setting(key="optimizer.weight_decay", field="optim.weight_decay", default=0.1),
    Setting(key="lr_scheduler.warmup_steps", field="optim.warmup_steps", default=200),
    Setting(key="lr_scheduler.decay_ratio", field="optim.decay_steps", joint="a share of the steps; else all"),
    Setting(key="lr_scheduler.decay_type", field="optim.schedule", joint="linear and cosine, or wsd with decay_ratio"),
    Setting(key="lr_scheduler.min_lr_factor", field="optim.min_lr_ratio", joint="of cosine and wsd"),
    Setting(key="training.local_batch_size", field="batch.micro_batch_size", joint="8 by default"),
    Setting(key="training.batch_size", field="batch.micro_batch_size", joint="as local_batch_size", older=True),
    Setting(key="training.global_batch_size", field="batch.global_batch_size", joint="else micro-batch × replicas"),
    Setting(key="training.seq_len", field="data.sequence_length", default=2048),
    Setting(key="training.max_norm", field="optim.clip_grad_norm", default=1.0),
    Setting(key="training.steps", field="train.max_steps", default=10000),
    Setting(key="training.dataset", field="data.sources", joint="c4; others have to be named"),
    Setting(key="training.dataset_path", field="data.sources", joint="a file, a folder or a hub data set"),
    Setting(key="training.mixed_precision_param", field="parallel.precision", joint="bfloat16 by default"),
    Setting(key="training.mixed_precision_reduce", harmless="gradients are reduced in fp32"),
    Setting(key="training.enable_cpu_offload", unsupported="parallel.offload_optimizer=cpu, with ZeRO"),
    Setting(key="training.gc_freq", harmless="has no effect on training"),
    Setting(key="training.seed", field="train.seed"),
    Setting(key="debug.seed", field="train.seed"),
    Setting(key="parallelism.data_parallel_shard_degree", field="parallel.accelerate", joint="fsdp2 unless it is 1"),
    Setting(
        key="parallelism.data_parallel_replicate_degree", joint="ZeRO-3 in groups: parallel.hierarchical_partition"
    ),
    Setting(key="parallelism.fsdp_reshard_after_forward", field="parallel.zero_stage", joint="never is 2, else 3"),
    Setting(key="parallelism.tensor_parallel_degree", field="parallel.tensor", joint="with ZeRO in place of FSDP2"),
    Setting(key="parallelism.context_parallel_degree", field="parallel.sequence", joint="with ZeRO in place of FSDP2"),
    Setting(key="parallelism.pipeline_parallel_degree", field="parallel.pipeline", joint="with ZeRO 1"),
    Setting(key="parallelism.expert_parallel_degree", field="parallel.expert", joint="with ZeRO in place of FSDP2"),
    Setting(key="parallelism.pipeline_parallel_schedule", unsupported="parallel.pipeline_schedule names another order"),
    Setting(key="parallelism.enable_async_tensor_parallel", harmless="has no effect on results"),
    Setting(key="parallelism.disable_loss_parallel", harmless="has no effect on results"),
    Setting(key="activation_checkpoint.mode", field="parallel.activation_checkpointing", joint="none, selective, full"),
    Setting(key="activation_checkpoint.selective_ac_option", joint="op; a number is parallel.checkpoint_every"),
    Setting(key="compile.enable", field="kernels.blocks", joint="compiled"),
    Setting(key="compile.components", harmless="each layer is compiled, and the loss is computed in parts"),
    Setting(key="checkpoint.enable", field="checkpoint.every_steps", joint="with interval"),
    Setting(key="checkpoint.enable_checkpoint", field="checkpoint.every_steps", joint="with interval", older=True),
    Setting(key="checkpoint.interval", field="checkpoint.every_steps", joint="500 by default"),
    Setting(key="checkpoint.keep_latest_k", field="checkpoint.keep_last", joint="0 keeps all"),
    Setting(key="checkpoint.folder", harmless="checkpoints are in the folder of the run"),
    Setting(key="checkpoint.async_mode", harmless="checkpoint.background copies and writes while training continues"),
    Setting(key="checkpoint.export_dtype", harmless="an export has the data type of the model"),
    Setting(key="checkpoint.last_save_model_only", harmless="the last checkpoint is complete; `export/` has the model"),
    Setting(key="metrics.log_freq", field="logging.every_steps", default=10),
    Setting(key="metrics.enable_tensorboard", field="logging.trackers", joint="tensorboard"),
    Setting(key="metrics.enable_wandb", field="logging.trackers", joint="wandb"),
    Setting(key="metrics.disable_color_printing", harmless="has no effect on training"),
    Setting(key="metrics.save_tb_folder", harmless="trackers write to the folder of the run"),
    Setting(key="validation.freq", field="evaluation.every_steps", joint="with validation.enable"),
    Setting(key="validation.enable", field="evaluation.every_steps", joint="with validation.freq"),
    Setting(key="job.description", field="name", joint="the name of the run"),
    Setting(key="job.dump_folder", harmless="the folder is runs/NAME, or --run-dir"),
    Setting(key="job.print_args", harmless="`llmtrain recipe show` prints them"),
    Setting(key="profiling.enable_profiling", harmless="`llmtrain profile RECIPE` records steps"),
    Setting(key="profiling.save_traces_folder", harmless="traces are in the folder of the run"),
    Setting(key="profiling.profile_freq", harmless="`llmtrain profile RECIPE` records steps"),
)
"""The main settings."""


def translate(given: Given) -> Translation:
    """Returns the recipe that torchtitan's settings become."""
    settings, result = Settings(given.file.values, file=given.file), Translation(TITLE)
    take = settings.take
    degrees = " ".join(f"parallelism.{name}_parallel_degree" for name in AXES.values())
    given.file.check(
        mapping="job model training optimizer lr_scheduler parallelism checkpoint",
        number="training.global_batch_size lr_scheduler.decay_ratio lr_scheduler.min_lr_factor checkpoint.interval "
        "parallelism.data_parallel_shard_degree parallelism.data_parallel_replicate_degree",
        count=f"training.local_batch_size training.batch_size training.steps {degrees}",
        text="training.dataset training.dataset_path model.hf_assets_path activation_checkpoint.mode",
    )
    description = take("job.description")
    result.set("name", recipe_name(str(description))[:60] if description else recipe_name(settings.stem))
    if description:
        result.same("job.description", description, "name")
    _model(result, settings)
    _data(result, settings)
    devices = given.world_size(result)
    replicas = _parallel(result, settings, devices)
    micro = take("training.local_batch_size") or take("training.batch_size") or 8
    total = take("training.global_batch_size")
    if total in (None, -1):
        total = micro * replicas
    result.set("batch.micro_batch_size", micro, "training.local_batch_size")
    result.set("batch.global_batch_size", total, f"training.global_batch_size, else {micro} × {replicas} replicas")
    result.same("training.local_batch_size", micro, "batch.micro_batch_size")
    if "training.batch_size" in settings:
        result.same("training.batch_size", micro, "batch.micro_batch_size")
    if "training.global_batch_size" in settings:
        result.same("training.global_batch_size", total, "batch.global_batch_size")
    result.set("optim.betas", [take("optimizer.beta1", 0.9), take("optimizer.beta2", 0.95)], f"{TITLE}'s default")
    for key in ("optimizer.beta1", "optimizer.beta2"):
        if key in settings:
            result.same(key, take(key), "optim.betas")
    _schedule(result, settings)
    _saves(result, settings)
    result.apply(settings, SETTINGS)
    result.report_untaken(settings)
    complete(result)
    return result


def _model(result: Translation, settings: Settings) -> None:
    folder = settings.take("model.hf_assets_path")
    tokenizer = settings.take("model.tokenizer_path")
    name, flavor = settings.take("model.name"), settings.take("model.flavor")
    result.set("model.pretrained", folder or NOTHING, "model.hf_assets_path")
    result.set("data.tokenizer", tokenizer or folder or NOTHING, "that of the model")
    text = (
        "training starts from the weights of model.pretrained; for a new model, set model.architecture and model.config"
    )
    result.missing("model.name", text, f"{name} {flavor}")
    result.different("model.flavor", flavor, "the size is that of the weights in model.pretrained", "model.pretrained")
    for key, value in (("model.hf_assets_path", folder), ("model.tokenizer_path", tokenizer)):
        if value:
            result.same(key, value, "model.pretrained" if "assets" in key else "data.tokenizer")


def _data(result: Translation, settings: Settings) -> None:
    dataset, path = settings.take("training.dataset", "c4_test"), settings.take("training.dataset_path")
    name, subset = (path, None) if path else CORPORA.get(str(dataset), (NOTHING, None))
    source = {"name": name, "format": "text", **({"subset": subset} if subset else {})}
    result.set("data.sources", [source], "training.dataset")
    if name == NOTHING:
        result.missing("data.sources", "name the texts: a file, a folder or a hub data set", dataset)
    else:
        result.same("training.dataset", dataset, "data.sources")
        if path:
            result.same("training.dataset_path", path, "data.sources")
    result.set("data.packing", "concat", f"as in {TITLE}")
    result.set("data.mask_documents", False, f"as in {TITLE}")
    evaluates = settings.take("validation.enable")
    result.set("data.eval_fraction", 0.01 if evaluates else 0.0, "FILL IN: the share" if evaluates else "no evaluation")
    if evaluates:
        result.set("evaluation.every_steps", settings.take("validation.freq", 5), "validation.freq")
        result.different("validation.enable", True, "texts are held out of the training data", "data.eval_fraction")


def _parallel(result: Translation, settings: Settings, devices: int) -> int:
    """Translates how the work is divided; returns the number of replicas, each of which reads rows of its own."""
    degrees = {name: settings.take(f"parallelism.{key}_parallel_degree", 1) for name, key in AXES.items()}
    experts = degrees["expert"]
    shards = settings.take("parallelism.data_parallel_shard_degree", -1)
    replicated = settings.take("parallelism.data_parallel_replicate_degree", 1)
    split = 1
    for name, degree in degrees.items():
        key = f"parallelism.{AXES[name]}_parallel_degree"
        if degree > 1:
            result.set(f"parallel.{name}", degree, key)
            split *= degree if name != "expert" else 1
        if key in settings:
            result.same(key, degree, f"parallel.{name}")
    stage = 2 if settings.take("parallelism.fsdp_reshard_after_forward") == "never" else 3
    if split == 1 and experts == 1 and shards != 1:
        for field, value in (("backend", "accelerate"), ("accelerate", "fsdp2"), ("zero_stage", stage)):
            result.set(f"parallel.{field}", value, "parallelism.data_parallel_shard_degree")
        result.same("parallelism.data_parallel_shard_degree", shards, "parallel.accelerate", "fsdp2, over all devices")
    elif shards != 1:
        result.set("parallel.zero_stage", 1, "parallelism.data_parallel_shard_degree")
        text = "DeepSpeed's ZeRO shards in place of FSDP2, which is not combined with other axes; stage 1 always can be"
        result.different("parallelism.data_parallel_shard_degree", shards, text, "parallel.zero_stage")
    if replicated == 1:
        result.same("parallelism.data_parallel_replicate_degree", replicated)
    else:
        text = "all replicas share the shards; parallel.hierarchical_partition keeps copies in groups, with ZeRO-3"
        result.unsupported("parallelism.data_parallel_replicate_degree", replicated, text)
    dtype = settings.take("training.mixed_precision_param", "bfloat16")
    result.set("parallel.precision", {"float32": "fp32"}.get(str(dtype), "bf16"), "training.mixed_precision_param")
    mode = settings.take("activation_checkpoint.mode", "selective")
    result.set("parallel.activation_checkpointing", mode, "activation_checkpoint.mode")
    result.same("activation_checkpoint.mode", mode, "parallel.activation_checkpointing")
    option = settings.take("activation_checkpoint.selective_ac_option")
    if option and str(option).isdecimal():
        result.set("parallel.checkpoint_every", int(option), "activation_checkpoint.selective_ac_option")
        result.set("parallel.activation_checkpointing", "full", "every k-th layer is recomputed whole")
    if option:
        result.same("activation_checkpoint.selective_ac_option", option, "parallel.activation_checkpointing")
    if settings.take("compile.enable") or settings.take("training.compile"):
        result.set("kernels.blocks", "compiled", "compile.enable")
        result.same("compile.enable", True, "kernels.blocks")
    return max(1, devices // split)


def _schedule(result: Translation, settings: Settings) -> None:
    kind, share = settings.take("lr_scheduler.decay_type", "linear"), settings.take("lr_scheduler.decay_ratio")
    factor = settings.take("lr_scheduler.min_lr_factor", 0.0)
    steps = settings.take("training.steps", 10000)
    if share:
        result.set("optim.schedule", "wsd", "lr_scheduler.decay_ratio")
        result.set("optim.decay_steps", round(share * steps), f"{share} of {steps} steps")
        result.same("lr_scheduler.decay_ratio", share, "optim.decay_steps")
        if kind == "linear":
            result.same("lr_scheduler.decay_type", kind, "optim.schedule")
        else:
            text = "the final decay is linear"
            result.different("lr_scheduler.decay_type", kind, text, "optim.schedule")
    else:
        result.set("optim.schedule", "cosine" if kind == "cosine" else "linear", "lr_scheduler.decay_type")
        result.same("lr_scheduler.decay_type", kind, "optim.schedule")
    if factor and result.fields["optim.schedule"] != "linear":
        result.set("optim.min_lr_ratio", factor, "lr_scheduler.min_lr_factor")
        result.same("lr_scheduler.min_lr_factor", factor, "optim.min_lr_ratio")
    elif factor:
        result.different(
            "lr_scheduler.min_lr_factor", factor, "linear decays to 0; cosine has a minimum", "optim.schedule"
        )


def _saves(result: Translation, settings: Settings) -> None:
    saves = settings.take("checkpoint.enable") or settings.take("checkpoint.enable_checkpoint")
    interval: Any = settings.take("checkpoint.interval", 500)
    if saves:
        result.set("checkpoint.every_steps", interval, "checkpoint.interval")
        for key in ("checkpoint.enable", "checkpoint.enable_checkpoint"):
            if settings.take(key):
                result.same(key, True, "checkpoint.every_steps")
    result.same("checkpoint.interval", interval, "checkpoint.every_steps", "" if saves else "only the end is saved")
    kept = settings.take("checkpoint.keep_latest_k")
    if kept:
        result.set("checkpoint.keep_last", kept, "checkpoint.keep_latest_k")
        result.same("checkpoint.keep_latest_k", kept, "checkpoint.keep_last")
    trackers = [name for name in ("tensorboard", "wandb") if settings.take(f"metrics.enable_{name}")]
    result.set("logging.trackers", trackers, "metrics.enable_…")
    for name in trackers:
        result.same(f"metrics.enable_{name}", True, "logging.trackers")


PROGRAM = Program(
    name="torchtitan",
    title=TITLE,
    marks=frozenset({"parallelism", "activation_checkpoint", "lr_scheduler"}),
    translate=translate,
    tables={"Settings": SETTINGS},
    page="torchtitan",
    recognise=lambda file: isinstance(file.values.get("training"), dict) and isinstance(file.values.get("model"), dict),
    command=r"\btorchtitan\b",
)
