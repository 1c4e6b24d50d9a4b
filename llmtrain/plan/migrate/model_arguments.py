"""Arguments that scripts around the Trainer share: the model, its quantization and its adapter, and the data."""

from __future__ import annotations

from typing import Any

from llmtrain.plan.migrate.translation import Setting, Settings, Translation

ATTENTION = {
    "eager": "eager",
    "sdpa": "sdpa",
    "flash_attention_2": "flash_attention_2",
    "flash_attention_3": "flash_attention_3",
    "flex_attention": "flex_attention",
    "kernels-community/flash-attn2": "flash_attention_2",
    "kernels-community/flash-attn3": "flash_attention_3",
    "kernels-community/flash-attn": "flash_attention_2",
    "kernels-community/vllm-flash-attn3": "flash_attention_3",
}
"""`attn_implementation` → `model.attention`."""
TARGETS = ("q_proj", "v_proj")
"""Layers that PEFT adapts in Llama, Mistral, Qwen and most other families if none are named."""
SPLIT_IN_WORKERS = "rows are tokenized once, in as many processes as there are cores"
NAME = "name, folder or file of the weights; the tokenizer is the same unless one is named"

MODEL = (
    Setting(key="model_name_or_path", field="model.pretrained", joint=NAME),
    Setting(key="model_revision", field="model.revision", values=None),
    Setting(key="tokenizer_name", field="data.tokenizer", joint="by default that of the model"),
    Setting(key="tokenizer_name_or_path", field="data.tokenizer", joint="by default that of the model"),
    Setting(key="config_name", unsupported="the configuration is that of the weights; model.config overrides fields"),
    Setting(key="config_overrides", unsupported="write them to model.config"),
    Setting(key="model_type", unsupported="a new model is model.architecture with model.config"),
    Setting(key="attn_implementation", field="model.attention", values=ATTENTION),
    Setting(key="use_flash_attention_2", field="model.attention", values={True: "flash_attention_2", False: "auto"}),
    Setting(key="trust_remote_code", field="model.trust_remote_code"),
    Setting(key="dtype", field="parallel.precision", joint="with bf16, fp16 and DeepSpeed"),
    Setting(key="torch_dtype", field="parallel.precision", joint="with bf16, fp16 and DeepSpeed"),
    Setting(key="low_cpu_mem_usage", harmless="weights are always read tensor by tensor"),
    Setting(key="use_fast_tokenizer", harmless="fast tokenizers are always used where there are any"),
    Setting(key="token", harmless="the hub's own token, of `hf auth login`, is used"),
    Setting(key="use_auth_token", harmless="the hub's own token, of `hf auth login`, is used", older=True),
    Setting(key="cache_dir", harmless="the hub's own cache is used; HF_HOME moves it"),
)
ADAPTER = (
    Setting(key="use_peft", field="model.adapter", joint="an adapter is trained if this is on"),
    Setting(key="lora_r", field="model.adapter.rank", joint="TRL's default is 16, PEFT's 8"),
    Setting(key="lora_alpha", field="model.adapter.alpha", joint="TRL's default is 32, PEFT's 8"),
    Setting(key="lora_dropout", field="model.adapter.dropout", joint="TRL's default is 0.05, PEFT's 0"),
    Setting(
        key="lora_target_modules",
        field="model.adapter.targets",
        joint="if none are named, PEFT chooses by the family: q_proj and v_proj in most",
    ),
    Setting(key="lora_target_parameters", field="model.adapter.target_parameters", joint="fused experts"),
    Setting(key="lora_modules_to_save", field="model.adapter.modules_to_save", joint="as named"),
    Setting(key="use_rslora", field="model.adapter.rslora", joint="as given"),
    Setting(key="use_dora", field="model.adapter.dora", joint="as given"),
    Setting(key="load_in_4bit", field="model.quantize", joint="nf4, with an adapter"),
    Setting(key="load_in_8bit", joint="not supported; model.quantize=nf4 needs half the memory of 8 bits"),
    Setting(key="bnb_4bit_quant_type", field="model.quantize", joint="nf4 only"),
    Setting(key="use_bnb_nested_quant", field="model.quantize", joint="scales are always quantized, too"),
    Setting(key="bnb_4bit_compute_dtype", joint="parallel.precision is the data type of the products"),
    Setting(key="bnb_4bit_quant_storage", harmless="only the layout of the packed values depends on it"),
    Setting(key="lora_task_type", harmless="the objective decides"),
    Setting(key="lora_inference_mode", harmless="a run trains the adapter"),
    Setting(key="lora_fan_in_fan_out", harmless="how a layer stores its matrix is known"),
    Setting(key="lora_weight_tying", harmless="a table that embedding and head share stays shared"),
    Setting(key="lora_bias", joint="biases are not trained: none"),
    Setting(key="lora_init", joint="B is 0 and A is drawn, as PEFT's default"),
)


def apply_model(translation: Translation, settings: Settings, adapter_defaults: bool = True) -> str:
    """Translates the model, the tokenizer, the quantization and the adapter.

    adapter_defaults: whether those of TRL's `ModelConfig` hold where the adapter's settings say nothing. Returns the
    data type in which the weights are loaded, as it is written; empty if nothing says so.
    """
    name = settings.take("model_name_or_path")
    if name:
        translation.set(
            "model.pretrained", name, settings.shown("model_name_or_path"), settings.place("model_name_or_path")
        )
        translation.same(settings.shown("model_name_or_path"), name, "model.pretrained")
    if settings.take("model_revision") == "main":  # the default, which would only clutter a recipe
        translation.same(settings.shown("model_revision"), "main", text="is the default")
        table = tuple(row for row in MODEL if row.key != "model_revision")
    else:
        table = MODEL
    translation.apply(settings, table)
    _adapter(translation, settings, adapter_defaults)
    translation.apply(settings, ADAPTER)
    for key in ("tokenizer_name", "tokenizer_name_or_path"):
        if tokenizer := settings.take(key):
            translation.set("data.tokenizer", tokenizer, settings.shown(key), settings.place(key))
            translation.same(settings.shown(key), tokenizer, "data.tokenizer")
    for key in ("torch_dtype", "dtype"):
        if dtype := settings.take(key):
            text = "the data type in which weights are loaded"
            translation.same(settings.shown(key), dtype, "parallel.precision", text)
            return str(dtype).removeprefix("torch.")
    return ""


def _adapter(translation: Translation, settings: Settings, trl_defaults: bool) -> None:
    given = {row.key: settings.take(row.key) for row in ADAPTER if row.joint}
    names = {key: settings.shown(key) for key in given}
    if not given["use_peft"]:
        for key, value in given.items():
            if value not in (None, False):
                translation.unsupported(names[key], value, "has no effect without an adapter (use_peft)")
        return
    translation.same(names["use_peft"], True, "model.adapter")
    rank, alpha, dropout = (16, 32, 0.05) if trl_defaults else (8, 8, 0.0)
    for key, field, default in (
        ("lora_r", "rank", rank),
        ("lora_alpha", "alpha", alpha),
        ("lora_dropout", "dropout", dropout),
        ("lora_target_parameters", "target_parameters", None),
        ("lora_modules_to_save", "modules_to_save", None),
        ("use_rslora", "rslora", None),
        ("use_dora", "dora", None),
    ):
        value = given[key]
        if value is not None:
            translation.same(names[key], value, f"model.adapter.{field}")
            comment = names[key]
        elif default is not None:
            value, comment = default, f"default of {names[key]}"
        else:
            continue
        translation.set(f"model.adapter.{field}", _listed(value, field), comment, settings.place(key))
    _targets(translation, names["lora_target_modules"], given["lora_target_modules"])
    for key, neutral, text in (
        ("lora_bias", "none", "biases are not trained beside an adapter"),
        ("lora_init", True, "A is drawn, and B is 0"),
    ):
        if given[key] is not None:
            note = translation.same if given[key] == neutral else translation.unsupported
            note(names[key], given[key], text=text)
    _quantized(translation, given, names)


def _targets(translation: Translation, key: str, targets: Any) -> None:
    field = "model.adapter.targets"
    if targets is None:
        translation.set(field, list(TARGETS), "the layers that PEFT chooses in most families")
        text = "PEFT chooses the layers by the family, q_proj and v_proj in most; for GPT-2 and others, name them here"
        translation.different(key, None, text, field)
        return
    named = targets if isinstance(targets, str) and "," not in targets else _listed(targets, "targets")
    if isinstance(named, str) and named != "all-linear":
        named = [named]
    translation.set(field, named, key)
    translation.same(key, targets, field)


def _quantized(translation: Translation, given: dict[str, Any], names: dict[str, str]) -> None:
    if given["load_in_8bit"]:
        text = "weights of 8 bits are not supported; model.quantize=nf4 stores them in about 4"
        translation.unsupported(names["load_in_8bit"], True, text)
    if not given["load_in_4bit"]:
        return
    translation.set("model.quantize", "nf4", names["load_in_4bit"])
    translation.same(names["load_in_4bit"], True, "model.quantize")
    kind = given["bnb_4bit_quant_type"]
    if kind not in (None, "nf4"):
        translation.different(
            names["bnb_4bit_quant_type"], kind, "values are NF4, whose errors are smaller", "model.quantize"
        )
    elif kind:
        translation.same(names["bnb_4bit_quant_type"], kind, "model.quantize")
    if given["use_bnb_nested_quant"]:
        translation.same(names["use_bnb_nested_quant"], True, "model.quantize")
    else:
        text = "the scales are quantized, too: 0.4 bits less for each weight, and slightly other values"
        translation.different(names["use_bnb_nested_quant"], False, text, "model.quantize")
    if given["bnb_4bit_compute_dtype"] is not None:
        text = "the products are computed in the run's precision"
        translation.same(names["bnb_4bit_compute_dtype"], given["bnb_4bit_compute_dtype"], "parallel.precision", text)


def _listed(value: Any, field: str) -> Any:
    """Returns the items of a text with commas, for a field that is a list."""
    if field in ("rank", "alpha", "dropout", "rslora", "dora"):
        return value
    return [item.strip() for item in value.split(",")] if isinstance(value, str) else value
