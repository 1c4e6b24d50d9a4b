"""How an axolotl configuration runs: precision, memory, devices, evaluations, checkpoints and trackers."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from llmtrain.plan.migrate.accelerate import apply_fsdp
from llmtrain.plan.migrate.axolotl.settings import names_in, number
from llmtrain.plan.migrate.deepspeed_json import apply_deepspeed
from llmtrain.plan.migrate.program import Given
from llmtrain.plan.migrate.translation import Settings, Translation
from llmtrain.system.untrusted import is_file

Values = Mapping[str, Any]


def translate_parallel(result: Translation, settings: Settings) -> None:
    """Translates precision, memory, devices and kernels."""
    deepspeed, sharded = settings.take("deepspeed"), settings.take("fsdp_config") or {}
    fsdp, version = settings.take("fsdp"), settings.take("fsdp_version")
    _precision(result, settings, bool(deepspeed))
    _recomputation(result, settings, sharded if isinstance(sharded, Mapping) else {})
    if not deepspeed and (fsdp or sharded or version):
        _fsdp(result, settings, sharded if isinstance(sharded, Mapping) else {}, fsdp or version or sharded)
    for key in ("context_parallel_size", "sequence_parallel_degree"):
        if (size := settings.take(key)) and size > 1:
            result.set("parallel.sequence", size, key)
            text = "devices divide the heads (Ulysses), and pass keys and values around a ring if these do not suffice"
            result.different(key, size, text, "parallel.sequence")
    if settings.take("torch_compile") is True:
        result.set("kernels.blocks", "compiled", "torch_compile")
        result.same("torch_compile", True, "kernels.blocks", "each decoder layer is compiled")
    attention = settings.take("attn_implementation")
    if attention in ("eager", "sdpa", "flex_attention"):
        result.set("model.attention", attention, "attn_implementation")
        result.same("attn_implementation", attention, "model.attention")
    elif attention in ("sage", "fp8"):
        result.unsupported(
            "attn_implementation", attention, "attention is exact; `auto` takes the fastest exact kernel"
        )
    elif attention:
        text = "model.attention=auto takes the fastest kernel measured on the device; all are exact"
        result.same("attn_implementation", attention, text=text)
    for plugin in names_in(settings.take("plugins") or []):
        name = plugin.rpartition(".")[2]
        if name in ("LigerPlugin", "CutCrossEntropyPlugin", "KernelsPlugin"):
            result.same("plugins", plugin, text="`kernels` chooses kernels; `liger` is one of them")
        elif name in ("ExpertParallelPlugin", "SpectrumPlugin", "SwanLabPlugin", "LMEvalPlugin"):
            result.same("plugins", plugin, text="see the settings of the plugin")
        else:
            text = "code of other programs is not run; `callbacks`, a loss or an optimizer of your own may do it"
            result.unsupported("plugins", plugin, text)


def _precision(result: Translation, settings: Settings, deepspeed: bool) -> None:
    half = {key: settings.take(key) for key in ("fp16", "float16", "bfloat16", "float32")}
    bf16 = settings.take("bf16", "auto")
    if half["bfloat16"] or (bf16 and not (bf16 == "auto" and (half["fp16"] or half["float16"]))):
        key, value, precision = ("bfloat16", True, "bf16") if half["bfloat16"] else ("bf16", bf16, "bf16")
    elif half["fp16"] or half["float16"]:
        key, value, precision = "fp16" if half["fp16"] else "float16", True, "fp16"
    else:
        key, value, precision = "float32" if half["float32"] else "bf16", half["float32"] or bf16, "fp32"
    result.set("parallel.precision", precision, key if key in settings else f"axolotl's default for {key}")
    whole = not settings.take("adapter") and not deepspeed
    if precision == "bf16" and whole:
        text = (
            "the optimizer has fp32 master weights and states; axolotl keeps weights and states in bf16 without "
            "DeepSpeed, so small updates are rounded away there, and a parameter takes 8 bytes less"
        )
        result.different(key, value, text, "parallel.precision")
    elif key in settings:
        result.same(key, value, "parallel.precision")
    for other, set_to in half.items():
        if set_to and other != key:
            result.same(other, set_to, text=f"`{key}` comes first, in axolotl too")
        elif set_to is False:
            result.same(other, set_to)


def _recomputation(result: Translation, settings: Settings, sharded: Values) -> None:
    whole, selective = settings.take("gradient_checkpointing"), settings.take("selective_checkpointing")
    offload = settings.take("activation_offloading")
    if whole or offload or sharded.get("activation_checkpointing"):
        kind = "selective" if selective and not offload else "full"
        result.set("parallel.activation_checkpointing", kind, "gradient_checkpointing")
        result.same("gradient_checkpointing", whole, "parallel.activation_checkpointing")
        if selective:
            text = "keeps the results of matrix products and of attention, whatever the list"
            result.different("selective_checkpointing", selective, text, "parallel.activation_checkpointing")
    if offload or whole in ("offload", "offload_disk"):
        result.set(
            "parallel.offload_activations", True, "activation_offloading" if offload else "gradient_checkpointing"
        )
        text = "the inputs of recomputed layers are kept in host memory, and nothing on a disk"
        key, value = ("activation_offloading", offload) if offload else ("gradient_checkpointing", whole)
        result.different(key, value, text, "parallel.offload_activations")


PRESETS: dict[str, dict[str, Any]] = {
    "zero1.json": {"zero_stage": 1},
    "zero1_torch_compile.json": {"zero_stage": 1},
    "zero2.json": {"zero_stage": 2},
    "zero2_torch_compile.json": {"zero_stage": 2},
    "zero3.json": {"zero_stage": 3},
    "zero3_bf16.json": {"zero_stage": 3},
    "zero3_bf16_cpuoffload_all.json": {"zero_stage": 3, "offload_optimizer": "cpu", "offload_param": "cpu"},
    "zero3_bf16_cpuoffload_params.json": {"zero_stage": 3, "offload_param": "cpu"},
}
"""File in axolotl's `deepspeed_configs/`, which `axolotl fetch` writes → fields of `parallel`."""


def translate_deepspeed(result: Translation, settings: Settings, given: Given) -> None:
    """Translates DeepSpeed's configuration, after the settings that its "auto" stands for."""
    value = settings.take("deepspeed")
    known = PRESETS.get(Path(value).name) if isinstance(value, str) else None
    here = dict(result.fields)
    if known is not None and not is_file(given.file.path.parent / value) and not is_file(Path(value)):
        for name, setting in known.items():
            result.set(f"parallel.{name}", setting, f"deepspeed: {value}")
        result.same("deepspeed", value, "parallel.zero_stage", "what axolotl's own file of this name says")
    elif value and (file := given.companion(result, "deepspeed", value, "deepspeed")):
        apply_deepspeed(result, file, given)
        result.same("deepspeed", value if isinstance(value, str) else "…", "parallel.zero_stage")
    if here.get("model.quantize") == "nf4" and result.fields.get("parallel.zero_stage") == 3:
        result.fields.pop("parallel.offload_param", None)
        result.set("parallel.zero_stage", 2, WHOLE_ON_EACH)
        result.different("deepspeed", value, QUANTIZED, "parallel.zero_stage")


WHOLE_ON_EACH = "quantized weights are whole on each device"
QUANTIZED = (
    f"{WHOLE_ON_EACH}, so the packed weights have to fit on one; parallel.zero_stage=2 shards the gradients and states "
    "of the adapter"
)


def _fsdp(result: Translation, settings: Settings, sharded: Values, value: Any) -> None:
    """Translates FSDP's settings, which are Accelerate's; those in `fsdp` come first where both say the same."""
    names = {key.removeprefix("fsdp_"): inner for key, inner in sharded.items()}
    names.setdefault("version", settings.take("fsdp_version") or 1)
    if "shard_grad_op" in str(value):
        names.setdefault("sharding_strategy", "SHARD_GRAD_OP")
    apply_fsdp(result, Settings(names, "fsdp_config."))
    if "fsdp" in settings:
        result.same("fsdp", settings.take("fsdp"), "parallel.accelerate")
    if "fsdp_version" in settings:
        result.same("fsdp_version", names["version"], "parallel.accelerate")
    if result.fields.get("model.quantize") == "nf4":
        for name in ("backend", "accelerate"):
            result.fields.pop(f"parallel.{name}")
        result.set("parallel.zero_stage", 2, WHOLE_ON_EACH)
        result.different("fsdp", value, QUANTIZED, "parallel.zero_stage")


def _every(result: Translation, settings: Settings, what: str, field: str) -> None:
    """Translates how often a run evaluates or saves. what: `eval` or `save`."""
    steps, strategy = settings.take(f"{what}_steps"), settings.take(f"{what}_strategy")
    per_epoch = settings.take(f"{what}s_per_epoch")
    total, epochs = settings.take("max_steps"), number(settings.take("num_epochs", 1.0))
    key = f"{what}s_per_epoch" if per_epoch else f"{what}_steps" if steps else f"{what}_strategy"
    given = per_epoch or steps or strategy
    if strategy == "no":
        result.set(field, 0, key)
        result.same(key, strategy, field)
    elif steps and number(steps) >= 1:
        result.set(field, int(steps), key)
        result.same(key, steps, field)
    elif given and total and (steps or per_epoch):
        share = number(steps) if steps else 1 / (per_epoch * epochs)
        result.set(field, max(1, round(share * total)), key)
        text = "of `max_steps`" if steps else f"of the {total} steps of {epochs:g} epochs"
        result.different(key, given, f"{text}: steps are counted, not epochs", field)
    elif given:
        never = "nothing is evaluated" if what == "eval" else "the run only saves at its end"
        text = f"set {field} to a number of steps; `llmtrain data RECIPE` prints those of an epoch. Until then, {never}"
        result.missing(key, text, given)


def translate_evaluation(result: Translation, settings: Settings) -> None:
    """Translates when a run evaluates and saves."""
    old = settings.take("evaluation_strategy")
    if old:
        result.same("evaluation_strategy", old, text="the earlier name of `eval_strategy`")
    has_data = bool(result.fields.get("data.eval_fraction")) or "evaluation.sources" in result.fields
    if has_data or settings.take("val_set_size"):
        _every(result, settings, "eval", "evaluation.every_steps")
    else:
        for key in ("eval_steps", "evals_per_epoch", "eval_strategy"):
            if value := settings.take(key):
                result.same(key, value, text="nothing is evaluated: there are no data for it")
    _every(result, settings, "save", "checkpoint.every_steps")
    patience = settings.take("early_stopping_patience")
    if settings.take("load_best_model_at_end") or patience:
        result.set("checkpoint.keep_best", 1, "load_best_model_at_end")
        if settings.take("load_best_model_at_end"):
            text = "`llmtrain export RUN OUT --best` writes it"
            result.different("load_best_model_at_end", True, text, "checkpoint.keep_best")
    if metric := settings.take("metric_for_best_model"):
        name = {"loss": "eval_loss", "eval_loss": "eval_loss", "perplexity": "perplexity"}.get(metric)
        if name:
            result.set("checkpoint.best_metric", name, "metric_for_best_model")
            result.same("metric_for_best_model", metric, "checkpoint.best_metric")
        else:
            result.unsupported(
                "metric_for_best_model", metric, "give a function in evaluation.metrics, and its name here"
            )


def translate_logging(result: Translation, settings: Settings) -> None:
    """Translates the trackers."""
    trackers = [name for name in ("wandb", "mlflow", "tensorboard") if settings.take(f"use_{name}")]
    project, experiment = settings.take("wandb_project"), settings.take("mlflow_experiment_name")
    mode = settings.take("wandb_mode")
    if project and mode != "disabled" and "wandb" not in trackers:
        trackers.append("wandb")
    if experiment and "mlflow" not in trackers:
        trackers.append("mlflow")
    result.set("logging.trackers", trackers, "use_wandb, use_mlflow, use_tensorboard")
    for name in trackers:
        result.same(f"use_{name}", True, "logging.trackers")
    if name := project or experiment:
        result.set("logging.project", name, "wandb_project" if project else "mlflow_experiment_name")
        result.same("wandb_project" if project else "mlflow_experiment_name", name, "logging.project")
    if mode and mode != "disabled":
        result.unsupported("wandb_mode", mode, f"set WANDB_MODE={mode} in the environment")
