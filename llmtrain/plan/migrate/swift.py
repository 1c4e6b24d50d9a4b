"""Translates the main arguments of ms-swift. What is said of ms-swift was read in the sources of release 4.6.0."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from llmtrain.plan.migrate import trainer, trl
from llmtrain.plan.migrate.completion import complete, hold_pairs, name_run
from llmtrain.plan.migrate.files import ForeignFile
from llmtrain.plan.migrate.program import Given, Program
from llmtrain.plan.migrate.translation import Setting, Settings, Translation, without_counterpart

TITLE = "ms-swift"
DEFAULTS = {
    "per_device_train_batch_size": 1,
    "weight_decay": 0.1,
    "adam_beta2": 0.95,
    "lr_scheduler_type": "cosine",
    "gradient_checkpointing": True,
    "logging_steps": 5,
    "report_to": ["tensorboard"],
}
"""Arguments of the Trainer whose defaults are others in ms-swift."""
OBJECTIVES = {"dpo": "dpo", "orpo": "orpo", "kto": "kto", "rm": "llmtrain.objectives:reward_model"}
TOTAL_BATCH = 16
"""Rows of a step, from which ms-swift computes the accumulation if it is not given."""

SETTINGS = (
    Setting(key="model", field="model.pretrained", joint="also data.tokenizer"),
    Setting(key="model_revision", field="model.revision"),
    Setting(key="torch_dtype", field="parallel.precision", joint="bf16 by default; with an adapter, or DeepSpeed"),
    Setting(key="new_special_tokens", field="model.new_tokens"),
    Setting(key="attn_impl", field="model.attention", joint="sdpa, eager; auto chooses an exact kernel for others"),
    Setting(key="tuner_type", field="model.adapter", joint="lora is the default; full"),
    Setting(key="train_type", field="model.adapter", joint="as tuner_type", older=True),
    Setting(key="lora_rank", field="model.adapter.rank", joint="8 by default"),
    Setting(key="lora_alpha", field="model.adapter.alpha", joint="32 by default"),
    Setting(key="lora_dropout", field="model.adapter.dropout", joint="0.05 by default"),
    Setting(key="target_modules", field="model.adapter.targets", joint="all-linear by default"),
    Setting(key="target_parameters", field="model.adapter.target_parameters", joint="as named"),
    Setting(key="modules_to_save", field="model.adapter.modules_to_save", joint="as named"),
    Setting(key="use_dora", field="model.adapter.dora", joint="as given"),
    Setting(key="use_rslora", field="model.adapter.rslora", joint="as given"),
    Setting(key="adapters", field="model.adapter.pretrained", joint="one"),
    Setting(key="trainable_parameters", field="model.trainable", joint="what the names begin with, without an adapter"),
    Setting(key="quant_bits", field="model.quantize", joint="4 is nf4, with an adapter"),
    Setting(key="quant_method", joint="bnb"),
    Setting(key="dataset", field="data.sources", joint="files and hub data sets; #N after a name is not supported"),
    Setting(key="val_dataset", field="evaluation.sources", joint="files and hub data sets"),
    Setting(key="split_dataset_ratio", field="data.eval_fraction", joint="rows are chosen by the hash of their text"),
    Setting(key="max_length", field="data.sequence_length", joint="the model's context by default"),
    Setting(key="packing", field="data.packing", joint="best_fit; none by default"),
    Setting(key="packing_length", field="data.sequence_length", joint="with packing"),
    Setting(key="system", field="data.sources", joint="system of each source"),
    Setting(key="loss_scale", field="data.train_on", joint="default: assistant; last_round; all"),
    Setting(key="rlhf_type", field="objective.name", joint="dpo, orpo, kto, rm"),
    Setting(key="beta", field="objective.beta", joint="0.1 by default"),
    Setting(key="label_smoothing", field="objective.label_smoothing", joint="of dpo"),
    Setting(key="rpo_alpha", field="objective.sft_weight", joint="of dpo"),
    Setting(key="desirable_weight", field="objective.desirable_weight", joint="of kto"),
    Setting(key="undesirable_weight", field="objective.undesirable_weight", joint="of kto"),
    Setting(key="sequence_parallel_size", field="parallel.sequence"),
    Setting(key="deepspeed_autotp_size", field="parallel.tensor"),
    Setting(key="deepspeed", field="parallel.zero_stage", joint="zero0 to zero3, also _offload; or a file"),
)
"""The main arguments; those of the Trainer have the Trainer's names."""
WITHOUT_EFFECT = without_counterpart(
    {
        "the class and the template follow from the model's folder": "model_type use_hf task_type template_backend",
        "rows are read once, and their tokens are stored": (
            "dataset_num_proc load_from_cache_file streaming lazy_tokenize packing_num_proc dataset_shuffle "
            "train_dataloader_shuffle shuffle_buffer_size download_mode padding_free"
        ),
        "training does not depend on it": (
            "model_author model_name add_version create_checkpoint_symlink check_model load_args max_new_tokens "
            "temperature hub_token safe_serialization max_shard_size"
        ),
    },
    harmless=True,
)
NOT_SUPPORTED = without_counterpart(
    {
        "the tokenizer's own template is used; set data.chat_template for another": "template agent_template",
        "longer rows are dropped and counted, or cut after a turn: data.too_long=cut_turns": "truncation_strategy",
        "name the columns of a source: columns": "columns",
        "code of other programs is not run": "external_plugins custom_register_path custom_dataset_info",
        "only texts are trained on, unless model.images is set": (
            "freeze_vit freeze_aligner freeze_llm max_pixels vit_lr"
        ),
        "set model.trainable": "freeze_parameters freeze_parameters_ratio trainable_parameters_regex",
    }
)


def translate(given: Given) -> Translation:
    """Returns the recipe that the arguments become. Raises RecipeError for what cannot be trained here."""
    settings, result = Settings(given.file.values, file=given.file), Translation(TITLE)
    given.file.check(
        number="lora_alpha lora_dropout split_dataset_ratio beta",
        count="lora_rank max_length packing_length per_device_train_batch_size gradient_accumulation_steps",
        text="rlhf_type tuner_type train_type loss_scale torch_dtype attn_impl system optim lr_scheduler_type",
        names="model dataset val_dataset target_modules target_parameters modules_to_save adapters",
    )
    rlhf = settings.take("rlhf_type") or ("dpo" if "rlhf" in given.file.program else None)
    if rlhf in ("grpo", "ppo", "gkd"):
        message = f"is {rlhf}: there is no training on texts that the model generates"
        raise given.file.error("import.objective", "rlhf_type", message, "dpo, orpo and kto train on given texts")
    if model := settings.take("model"):
        result.set("model.pretrained", model, "model", settings.place("model"))
        result.same("model", model, "model.pretrained")
    adapts = _tuner(result, settings, given.file)
    _data(result, settings, rlhf)
    _objective(result, settings, rlhf)
    attention = settings.take("attn_impl")
    if attention in ("sdpa", "eager"):
        result.set("model.attention", attention, "attn_impl")
    if attention:
        result.same("attn_impl", attention, "model.attention", "auto takes the fastest exact kernel that was measured")
    rest = dict(settings.untaken())
    stage = rest.get("deepspeed")
    if isinstance(stage, str) and (known := _stage(stage)):
        settings.take("deepspeed")
        for name, value in known.items():
            result.set(f"parallel.{name}", value, f"deepspeed: {stage}")
        result.same("deepspeed", stage, "parallel.zero_stage", "what ms-swift's own file of this name says")
    rate = 1e-4 if adapts else 1e-5
    trainer.apply_arguments(result, settings, given, defaults={**DEFAULTS, "learning_rate": rate})
    if settings.take("gradient_accumulation_steps") is None:
        text = f"ms-swift accumulates until a step has {TOTAL_BATCH} rows on all devices"
        of_a_pass = result.fields.get("batch.global_batch_size", 1)
        result.set("batch.global_batch_size", max(TOTAL_BATCH, of_a_pass), text)
        result.different("", None, text, "batch.global_batch_size")
    dtype = settings.take("torch_dtype", "bfloat16")
    precision = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32"}.get(str(dtype))
    if precision:
        result.set("parallel.precision", precision, "torch_dtype")
        result.same("torch_dtype", dtype, "parallel.precision")
    name_run(result, settings, "output_dir")
    result.apply(settings, (*SETTINGS, *WITHOUT_EFFECT, *NOT_SUPPORTED))
    result.report_untaken(settings)
    complete(result)
    return result


def _listed(value: Any) -> list[str]:
    return value.split() if isinstance(value, str) else list(value or ())


def _stage(name: str) -> Mapping[str, Any] | None:
    """Returns the fields of `parallel` for the name of one of ms-swift's own DeepSpeed configurations."""
    stage, _, offload = name.partition("_")
    if stage not in ("zero0", "zero1", "zero2", "zero3") or offload not in ("", "offload"):
        return None
    fields: dict[str, Any] = {"zero_stage": int(stage[-1])}
    if offload:
        fields["offload_optimizer"] = "cpu"
        if stage == "zero3":
            fields["offload_param"] = "cpu"
    return fields


def _tuner(result: Translation, settings: Settings, file: ForeignFile) -> bool:
    """Translates the adapter; returns whether there is one. Raises RecipeError if there are several."""
    key = "train_type" if "train_type" in settings else "tuner_type"
    kind = settings.take(key, "lora")
    settings.take("tuner_type")
    result.same(key, kind, "model.adapter" if kind == "lora" else "")
    bits, trainable = settings.take("quant_bits"), _listed(settings.take("trainable_parameters"))
    settings.take("quant_method")
    rows = {
        "lora_rank": ("rank", 8),
        "lora_alpha": ("alpha", 32),
        "lora_dropout": ("dropout", 0.05),
        "target_modules": ("targets", ["all-linear"]),
        "target_parameters": ("target_parameters", None),
        "modules_to_save": ("modules_to_save", None),
        "use_dora": ("dora", None),
        "use_rslora": ("rslora", None),
    }
    values = {name: settings.take(name) for name in rows}
    adapters = _listed(settings.take("adapters"))
    if kind == "full":
        if trainable:
            result.set("model.trainable", [f"{name}*" for name in trainable], "trainable_parameters")
            result.same("trainable_parameters", trainable, "model.trainable")
        return False
    if kind != "lora":
        result.unsupported(key, kind, "LoRA with the same rank is taken; DoRA is model.adapter.dora")
    if bits == 4:
        result.set("model.quantize", "nf4", "quant_bits")
        result.same("quant_bits", bits, "model.quantize")
    elif bits:
        result.unsupported("quant_bits", bits, "the frozen weights stay in 16 bits; nf4 needs about 4")
    if len(adapters) > 1:
        text = "a run continues one adapter: merge the others into the model first (PEFT's merge_and_unload)"
        raise file.error("import.adapters", "adapters", f"names {len(adapters)} adapters", text)
    if adapters:
        result.set("model.adapter.pretrained", adapters[0], "adapters")
        result.same("adapters", adapters, "model.adapter.pretrained", "its configuration counts")
        return True
    for name, (field, default) in rows.items():
        value = default if values[name] is None else values[name]
        if field == "targets":
            value = "all-linear" if "all-linear" in _listed(value) else _listed(value)
        elif field in ("target_parameters", "modules_to_save") and value is not None:
            value = _listed(value)
        if value is not None:
            result.set(f"model.adapter.{field}", value, name if values[name] is not None else f"{TITLE}'s default")
            if values[name] is not None:
                result.same(name, values[name], f"model.adapter.{field}")
    return True


def _data(result: Translation, settings: Settings, rlhf: str | None) -> None:
    system = settings.take("system")
    for key, field in (("dataset", "data.sources"), ("val_dataset", "evaluation.sources")):
        names = _listed(settings.take(key))
        sources = []
        for name in names:
            path, _, rows = name.partition("#")
            if rows:
                result.unsupported(key, name, f"all rows are read, not {rows}; name a file with fewer rows")
            sources.append({"name": path.partition("::")[-1] or path, **({"system": system} if system else {})})
        if sources:
            result.set(field, sources, key)
            result.same(key, names, field, "the form of the rows is found by the columns")
    if system:
        result.same("system", system, "data.sources", "system of each source")
    share = settings.take("split_dataset_ratio", 0.0)
    result.set("data.eval_fraction", share, "split_dataset_ratio")
    if share:
        result.different("split_dataset_ratio", share, "rows are chosen by their hash", "data.eval_fraction")
    packed, length = settings.take("packing"), settings.take("packing_length") or settings.take("max_length")
    if length:
        result.set("data.sequence_length", length, "max_length")
        result.different("max_length", length, "longer rows are dropped and counted", "data.sequence_length")
        if rlhf in ("dpo", "orpo", "rm"):
            hold_pairs(result, "max_length", length)
    if packed is not None:
        result.same("packing", packed, "data.packing")
    if packed:
        result.set("data.packing", "best_fit", "packing")
    scale = settings.take("loss_scale", "default")
    trained = {"default": "assistant", "last_round": "last_assistant", "all": "all"}.get(str(scale))
    if trained is None:
        result.unsupported("loss_scale", scale, "tokens have no weights; a message with `weight: 0` is not trained on")
    elif scale != "default":
        result.set("data.train_on", trained, "loss_scale")
        result.same("loss_scale", scale, "data.train_on")


def _objective(result: Translation, settings: Settings, rlhf: str | None) -> None:
    values = {
        "beta": ("beta", ("dpo", "orpo", "kto")),
        "label_smoothing": ("label_smoothing", ("dpo",)),
        "rpo_alpha": ("sft_weight", ("dpo",)),
        "desirable_weight": ("desirable_weight", ("kto",)),
        "undesirable_weight": ("undesirable_weight", ("kto",)),
    }
    if rlhf:
        name = OBJECTIVES.get(rlhf)
        if name is None:
            result.unsupported("rlhf_type", rlhf, "orpo is nearest: it needs no reference either")
        result.set("objective.name", name or "orpo", "rlhf_type")
        result.same("rlhf_type", rlhf, "objective.name")
        if rlhf == "rm":
            result.set("objective.unit", "pair", "rlhf_type")
            result.set("model.num_labels", 1, "rlhf_type")
    for key, (field, names) in values.items():
        value = settings.take(key)
        if value is not None and rlhf in names:
            result.set(f"objective.{field}", value, key)
            result.same(key, value, f"objective.{field}")
        elif value:
            result.unsupported(key, value, "has no effect on the loss")


PROGRAM = Program(
    name="ms-swift",
    title=TITLE,
    marks=frozenset({"tuner_type", "train_type", "split_dataset_ratio", "target_regex", "rlhf_type"}),
    translate=translate,
    tables={"Settings": SETTINGS, "Without effect": WITHOUT_EFFECT, "Not supported": NOT_SUPPORTED},
    page="ms_swift",
    includes=frozenset({"trainer", *(program.name for program in trl.PROGRAMS)}),
    has_generation_settings=True,
    command=r"\bswift (?:sft|pt|rlhf)\b",
)
