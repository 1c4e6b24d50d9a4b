"""Translates LLaMA-Factory's YAML. What is said of LLaMA-Factory was read in the sources of release 0.9.5."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from llmtrain.errors import RecipeError
from llmtrain.plan.migrate import trainer, trl
from llmtrain.plan.migrate.chat_templates import CHAT_TEMPLATES
from llmtrain.plan.migrate.completion import NOTHING, complete, hold_pairs, name_run
from llmtrain.plan.migrate.files import read_foreign
from llmtrain.plan.migrate.llama_factory_settings import (
    ALPACA_PARTS,
    COUNTS,
    DATA,
    DATASET_INFO,
    DESCRIBED,
    LINE_END_IS_TRAINED,
    MODEL,
    NAMES,
    NOT_SUPPORTED,
    NUMBERS,
    TEMPLATES,
    TEXTS,
    TITLE,
    TUNING,
    USUAL_TAGS,
    WITHOUT_EFFECT,
)
from llmtrain.plan.migrate.program import Given, Program
from llmtrain.plan.migrate.translation import Settings, Translation


def translate(given: Given) -> Translation:
    """Returns the recipe that LLaMA-Factory's settings become. Raises RecipeError for what cannot be trained here."""
    settings, result = Settings(given.file.values, file=given.file), Translation(TITLE)
    if "train_dataset" in settings:
        message = "is a setting of LLaMA-Factory's trainer v1, which has other settings: these are not translated"
        raise given.file.error("import.program", "train_dataset", message, "translate the file of the usual trainer")
    given.file.check(number=NUMBERS, count=COUNTS, names=NAMES, text=TEXTS)
    stage = settings.take("stage", "sft")
    if stage == "ppo":
        message = "is ppo: there is no reinforcement learning with generation"
        raise given.file.error("import.objective", "stage", message, "of the preference losses, dpo and kto exist")
    _model(result, settings)
    _tuning(result, settings)
    _data(result, settings, given, stage)
    _objective(result, settings, stage)
    recomputes = not settings.take("disable_gradient_checkpointing")
    result.set(
        "parallel.activation_checkpointing",
        "full" if recomputes else "none",
        f"{TITLE}'s default" if recomputes else "disable_gradient_checkpointing",
    )
    if "disable_gradient_checkpointing" in settings:
        result.same("disable_gradient_checkpointing", not recomputes, "parallel.activation_checkpointing")
    trainer.apply_arguments(result, settings, given)
    _precision(result, settings)
    if settings.take("use_muon"):
        result.set("optim.name", "muon", "use_muon")
        text = "matrices of decoder layers; all other weights are updated as by adamw at the same rate"
        result.different("use_muon", True, text, "optim.name")
    if patience := settings.take("early_stopping_steps"):
        result.set("train.early_stopping", {"patience": patience}, "early_stopping_steps")
        result.same("early_stopping_steps", patience, "train.early_stopping.patience")
    name_run(result, settings, "run_name", "output_dir")
    _held_out(result, settings)
    result.apply(settings, (*MODEL, *WITHOUT_EFFECT, *NOT_SUPPORTED))
    result.report_untaken(settings)
    complete(result)
    return result


def _listed(value: Any) -> list[str]:
    """Returns the items of a list, or of a text with commas."""
    if isinstance(value, str):
        return [item.strip() for item in value.split(",") if item.strip()]
    return list(value or ())


def _model(result: Translation, settings: Settings) -> None:
    name = settings.take("model_name_or_path")
    if name:
        result.set("model.pretrained", name, "model_name_or_path", settings.place("model_name_or_path"))
        result.same("model_name_or_path", name, "model.pretrained")
    if (revision := settings.take("model_revision", "main")) != "main":
        result.set("model.revision", revision, "model_revision")
        result.same("model_revision", revision, "model.revision")
    new = [*_listed(settings.take("add_tokens")), *_listed(settings.take("add_special_tokens"))]
    if new:
        result.set("model.new_tokens", new, "add_tokens, add_special_tokens")
        text = "those that the tokenizer lacks get rows with the mean of the others, up to a multiple of 128 rows"
        result.different("add_tokens", new, text, "model.new_tokens")
    attention = settings.take("flash_attn")
    exact = {"sdpa": "sdpa", "disabled": "eager"}.get(str(attention))
    if exact:
        result.set("model.attention", exact, "flash_attn")
        result.same("flash_attn", attention, "model.attention")
    elif attention:
        text = "model.attention=auto takes the fastest kernel measured on the device; all are exact"
        result.same("flash_attn", attention, text=text)
    if scaling := settings.take("rope_scaling"):
        text = "LLaMA-Factory takes the factor from cutoff_len; set model.config.rope_parameters with a factor"
        result.unsupported("rope_scaling", scaling, text)
    if settings.take("enable_liger_kernel"):
        result.set("kernels.blocks", "liger", "enable_liger_kernel")
        result.set("kernels.loss", "liger", "enable_liger_kernel")
        result.same("enable_liger_kernel", True, "kernels.blocks")


def _tuning(result: Translation, settings: Settings) -> None:
    kind = settings.take("finetuning_type", "lora")
    rows = [row for row in TUNING if row.field.startswith("model.adapter.") and row.key != "adapter_name_or_path"]
    values = {row.key: settings.take(row.key) for row in rows}
    path = _listed(settings.take("adapter_name_or_path"))
    fresh = settings.take("create_new_adapter")
    bits = settings.take("quantization_bit")
    for key, usual in (("quantization_method", "bnb"), ("quantization_type", "nf4"), ("double_quantization", True)):
        if (value := settings.take(key)) not in (None, usual):
            text = "weights are quantized as NF4, with quantized scales; quantized checkpoints are read as they are"
            result.different(key, value, text, "model.quantize")
        elif value is not None:
            result.same(key, value)
    result.same("finetuning_type", kind, {"freeze": "model.trainable"}.get(kind, "model.adapter" * (kind != "full")))
    if kind == "freeze":
        _freeze(result, settings)
    if kind in ("full", "freeze"):
        if bits:
            result.unsupported("quantization_bit", bits, "weights are only quantized with an adapter")
        return
    if kind != "lora":
        result.unsupported("finetuning_type", kind, "LoRA with the same rank is taken; DoRA is model.adapter.dora")
    if bits == 4:
        result.set("model.quantize", "nf4", "quantization_bit")
        result.same("quantization_bit", bits, "model.quantize")
    elif bits:
        text = "the frozen weights stay in the precision of the run; model.quantize=nf4 stores them in about 4 bits"
        result.unsupported("quantization_bit", bits, text)
    if path and not fresh and len(path) == 1:
        result.set("model.adapter.pretrained", path[0], "adapter_name_or_path")
        result.same("adapter_name_or_path", path[0], "model.adapter.pretrained", "its configuration counts")
        return
    if path:
        text = "merge these adapters first (PEFT's merge_and_unload), and set model.pretrained to the result"
        result.unsupported("adapter_name_or_path", path, text)
    rank = values["lora_rank"] or 8
    targets = _listed(values["lora_target"]) or ["all"]
    fields: dict[str, Any] = {
        "rank": (rank, "lora_rank"),
        "alpha": (values["lora_alpha"] or 2 * rank, "lora_alpha"),
        "dropout": (values["lora_dropout"], "lora_dropout"),
        "targets": ("all-linear" if targets == ["all"] else targets, "lora_target"),
        "modules_to_save": (_listed(values["additional_target"]) or None, "additional_target"),
        "rslora": (values["use_rslora"], "use_rslora"),
        "dora": (values["use_dora"], "use_dora"),
    }
    for field, (value, key) in fields.items():
        if value is not None:
            result.set(f"model.adapter.{field}", value, key if values[key] is not None else f"{TITLE}'s default")
            if values[key] is not None:
                result.same(key, values[key], f"model.adapter.{field}")


def _freeze(result: Translation, settings: Settings) -> None:
    count = settings.take("freeze_trainable_layers", 2)
    modules = _listed(settings.take("freeze_trainable_modules", "all"))
    extra = [f"*{name}*" for name in _listed(settings.take("freeze_extra_modules"))]
    layers = _number_of_layers(str(result.fields.get("model.pretrained"))) if count > 0 else -count
    if layers is None:
        text = f"name the parameters of the last {count} layers, such as model.layers.30.*: the model is not here"
        result.missing("model.trainable", text, count)
        result.set("model.trainable", ["model.layers.*", *extra], "FILL IN: these are all layers")
        _note_frozen(result, settings)
        return
    numbers = range(layers - count, layers) if count > 0 else range(layers)
    parts = ["*" if name == "all" else f"*{name}*" for name in modules]
    result.set("model.trainable", [f"*.{number}.{part}" for number in numbers for part in parts] + extra, "freeze_…")
    _note_frozen(result, settings)


def _note_frozen(result: Translation, settings: Settings) -> None:
    for key in ("freeze_trainable_layers", "freeze_trainable_modules", "freeze_extra_modules"):
        if key in settings:
            result.same(key, settings.take(key), "model.trainable")


def _number_of_layers(model: str) -> int | None:
    """Returns the number of layers of a model in a local folder; None if it cannot be read."""
    try:
        layers = read_foreign(Path(model) / "config.json").values.get("num_hidden_layers")
    except RecipeError:
        return None
    return layers if isinstance(layers, int) else None


def _data(result: Translation, settings: Settings, given: Given, stage: str) -> None:
    folder, info = _described(result, settings, given)
    names = _listed(settings.take("dataset"))
    result.fields["data.sources"] = sources = [
        source for place, name in enumerate(names) if (source := _source(result, name, folder, info, stage, place))
    ]
    if not sources:
        result.missing("data.sources", f"name the training data: {DATASET_INFO} does not describe them")
        del result.fields["data.sources"]
    evaluated = _listed(settings.take("eval_dataset"))
    held = [(name, _source(result, name, folder, info, stage, None)) for name in evaluated]
    if held and settings.take("eval_on_each_dataset"):
        result.set("evaluation.sets", {name: [source] for name, source in held if source}, "eval_on_each_dataset")
        result.same("eval_on_each_dataset", True, "evaluation.sets")
    elif held:
        result.set("evaluation.sources", [source for _, source in held if source], "eval_dataset")
        result.same("eval_dataset", evaluated, "evaluation.sources")
    if system := settings.take("default_system"):
        for source in sources:
            source.setdefault("system", system)
        result.same("default_system", system, "data.sources", "system of each source")
    length = settings.take("cutoff_len", 2048)
    result.set("data.sequence_length", length, "cutoff_len" if "cutoff_len" in settings else f"{TITLE}'s default")
    text = "longer rows are dropped and counted (data.too_long); LLaMA-Factory cuts off their ends"
    if stage != "pt":
        result.different("cutoff_len", length, text, "data.sequence_length")
    else:
        result.same("cutoff_len", length, "data.sequence_length")
    if stage in ("dpo", "rm"):
        hold_pairs(result, "cutoff_len", length)
    _packing(result, settings, stage)
    _template(result, settings, stage)
    probabilities, strategy = _listed(settings.take("interleave_probs")), settings.take("mix_strategy", "concat")
    if strategy == "concat" and "mix_strategy" in settings:
        result.same("mix_strategy", strategy, text="sources are mixed in proportion to their sizes with epochs")
    if probabilities and len(probabilities) == len(sources) and settings.take("max_steps"):
        for source, share in zip(sources, probabilities, strict=True):
            source["weight"] = float(share)
        result.same("interleave_probs", probabilities, "data.sources", "weight of each source")
        result.same("mix_strategy", strategy, "data.sources", "a source that ends begins anew")
    elif strategy != "concat":
        text = "with epochs, sources are mixed in proportion to their sizes; set train.max_steps and their weight"
        result.different("mix_strategy", strategy, text, "data.sources")


def _described(result: Translation, settings: Settings, given: Given) -> tuple[Path, Mapping[str, Any] | None]:
    """Returns the folder of the data, and what `dataset_info.json` says; None for names of the hub."""
    name = settings.take("dataset_dir", "data")
    if name == "ONLINE":
        return Path(), None
    beside = given.file.path.parent / str(name)
    folder = beside if (beside / DATASET_INFO).exists() else Path(str(name))
    if not (folder / DATASET_INFO).exists():
        text = f"{DATASET_INFO} is neither below {beside} nor below the working directory; it describes the data sets"
        result.missing("dataset_dir", text, name)
        return folder, {}
    result.same("dataset_dir", name, text=f"{folder / DATASET_INFO} describes the data sets")
    return folder, read_foreign(folder / DATASET_INFO).values


def _source(
    result: Translation, name: str, folder: Path, info: Mapping[str, Any] | None, stage: str, place: int | None
) -> dict[str, Any] | None:
    """Returns the source of a data set that `dataset_info.json` describes; None if it does not.

    place: its number in `data.sources`; None for data of an evaluation.
    """
    key = "dataset" if place is not None else "eval_dataset"
    if info is None:
        result.same(key, name, "data.sources", "a hub data set; the form of its rows is found by the columns")
        return {"name": name}
    one = info.get(name)
    if not isinstance(one, Mapping):
        result.missing(key, f"{DATASET_INFO} does not describe it; set name and format of a source", name)
        return None
    described, own = Settings(one, f"{DATASET_INFO}: {name}."), Translation(TITLE)
    own.apply(described, DESCRIBED)
    source: dict[str, Any] = {}
    if hub := described.take("hf_hub_url"):
        source["name"] = hub
        described.take("ms_hub_url"), described.take("om_hub_url"), described.take("file_name")
    elif file := described.take("file_name"):
        source["name"] = str(folder / file)
    else:
        own.missing(key, f"has no name that can be read here; copy it, and name the file: {_shown(one)}", name)
        source["name"] = NOTHING
        described.take("ms_hub_url"), described.take("om_hub_url")
    source |= {field.removeprefix("data.sources."): value for field, value in own.fields.items()}
    columns = dict(described.take("columns") or {})
    _rows(own, described, source, columns, stage)
    own.same_as_read(described, "data.sources")
    own.report_untaken(described)
    result.lines += own.lines
    result.same(key, name, "data.sources", source["name"])
    if place is not None:
        result.comments[f"data.sources.{place}.name"] = f"dataset: {name}"
    return source


def _shown(one: Mapping[str, Any]) -> str:
    return ", ".join(f"{key}: {value}" for key, value in one.items() if key.endswith(("url", "name")))


def _rows(own: Translation, described: Settings, source: dict[str, Any], columns: dict[str, str], stage: str) -> None:
    """Translates the form of the rows, and their columns."""
    form, ranking = described.take("formatting", "alpaca"), described.take("ranking", False)
    key = f"{described.prefix}columns"
    for tag, name in (described.take("tags") or {}).items():
        if name not in USUAL_TAGS.get(tag, ()):
            text = f"is read as {' or '.join(USUAL_TAGS.get(tag, ('nothing',)))}; rename it with map of the source"
            own.unsupported(f"{described.prefix}tags.{tag}", name, text)
    for media in ("images", "videos", "audios"):
        if name := columns.pop(media, None):
            text = "set model.images to train on images" if media == "images" else "texts and images are trained on"
            own.unsupported(f"{key}.{media}", name, text)
    if stage == "pt":
        source["format"] = "text"
        source["text_column"] = columns.get("prompt") or columns.get("messages") or "instruction"
        return
    label = columns.pop("kto_tag", None)
    named: dict[str, str] = {
        part: columns.pop(part) for part in ("chosen", "rejected", "system", "tools", "history") if part in columns
    }
    if form == "alpaca":
        asked = {here: columns.pop(there, here) for there, here in ALPACA_PARTS.items()}
        if ranking:
            source["format"] = "preference"
            named["prompt"] = asked["instruction"]
        elif label:
            source["format"] = "unpaired_preference"
            named |= {"prompt": asked["instruction"], "completion": asked["output"], "label": label}
        else:
            source["format"] = "instruction"
            usual = {"instruction": ("instruction",), "input": ("input", "context"), "output": ("output", "response")}
            named |= {part: name for part, name in asked.items() if name and name not in usual[part]}
            text = "instruction and input are joined by an empty line, in LLaMA-Factory by a line end"
            own.different(f"{described.prefix}formatting", form, text, "data.sources")
        if (ranking or label) and "query" in described.take("columns", {}):
            text = "the input of a question is not read in preferences; join it to the prompt with map of the source"
            own.unsupported(f"{key}.query", asked["input"], text)
    else:
        messages = columns.pop("messages", "conversations")
        if ranking:
            source["format"] = "preference"
            named["prompt"] = messages
        elif label:
            source["format"] = "unpaired_preference"
            text = "rows with a label need a prompt and a completion; split the messages with map of the source"
            own.unsupported(f"{key}.kto_tag", label, text)
        else:
            source["format"] = "messages"
            if messages not in ("messages", "conversations", "conversation", "dialogue"):
                named["messages"] = messages
    for part, name in columns.items():
        own.unsupported(f"{key}.{part}", name, f"the format {source['format']} has no such part")
    named = {part: name for part, name in named.items() if name and part != name}
    if named:
        source["columns"] = named


def _packing(result: Translation, settings: Settings, stage: str) -> None:
    neat, packed = settings.take("neat_packing"), settings.take("packing")
    packed = bool(neat or (stage == "pt" if packed is None else packed))
    key = "neat_packing" if neat else "packing"
    if stage == "pt":
        result.set("data.packing", "concat" if packed else "none", key)
        if packed:
            result.set("data.mask_documents", False, f"as in {TITLE}")
            text = (
                "texts are one stream over the whole corpus; LLaMA-Factory joins 1,000 at a time, and drops the rests"
            )
            result.different(key, packed, text, "data.packing")
    elif stage == "sft":
        result.set("data.packing", "best_fit" if packed else "none", key)
        if packed and not neat:
            text = (
                "conversations of a sequence do not attend to each other; in LLaMA-Factory, they do without "
                "neat_packing, so its losses differ. data.mask_documents=false comes nearest"
            )
            result.different(key, packed, text, "data.packing")
        for key in ("packing", "neat_packing"):
            if key in settings and not (packed and not neat and key == "packing"):
                result.same(key, settings.take(key), "data.packing")


def _template(result: Translation, settings: Settings, stage: str) -> None:
    name = settings.take("template")
    everything, last = settings.take("train_on_prompt"), settings.take("mask_history")
    for key, value, field in (("train_on_prompt", everything, "all"), ("mask_history", last, "last_assistant")):
        if value:
            result.set("data.train_on", field, key)
            result.same(key, value, "data.train_on")
    if settings.take("split_special_tokens"):
        result.set("data.special_tokens", "text", "split_special_tokens")
        result.same("split_special_tokens", True, "data.special_tokens")
    if stage == "pt":
        if name:
            result.same("template", name, text="texts need none")
        return
    if name in TEMPLATES:
        result.set("data.chat_template", CHAT_TEMPLATES[TEMPLATES[name]], f"template: {name}")
        result.same("template", name, "data.chat_template", "a text that writes the same turns")
    else:
        text = "the tokenizer's own template is used, in place of a text of LLaMA-Factory's under this name"
        if name in (None, "empty", "default", "fewshot"):
            text = "the tokenizer's own template is used; data.chat_template=plain is one without special tokens"
        result.different("template", name, text)
    if str(name).startswith(LINE_END_IS_TRAINED):
        text = (
            "the line end that the template writes after the end of a turn is not trained; LLaMA-Factory trains it, so "
            "its losses have one more target for each turn, which soon is easy"
        )
        result.different("", None, text, "data.train_on")
    text = (
        "an empty system message, or one of the template's own, may be written in LLaMA-Factory: compare the first rows"
    )
    if str(name).startswith(("qwen", "vicuna", "alpaca", "deepseekcoder", "intern")) and not settings.take(
        "default_system"
    ):
        result.different("", None, f"{text} with `llmtrain data RECIPE --show 1`", "data.chat_template")


def _objective(result: Translation, settings: Settings, stage: str) -> None:
    loss = settings.take("pref_loss", "sigmoid")
    beta, extra, smoothing = (settings.take(key) for key in ("pref_beta", "pref_ftx", "dpo_label_smoothing"))
    good, bad = settings.take("kto_chosen_weight"), settings.take("kto_rejected_weight")
    result.same("stage", stage, "objective.name")
    if stage == "rm":
        result.set("model.num_labels", 1, "stage: rm")
        result.set("objective.name", "llmtrain.objectives:reward_model", "stage: rm")
        result.set("objective.unit", "pair")
        return
    if stage not in ("dpo", "kto"):
        return
    if result.fields.get("model.adapter.dropout"):
        result.set("model.adapter.dropout", 0.0, f"{TITLE} turns it off for preferences")
    name = "kto" if stage == "kto" else {"sigmoid": "dpo", "ipo": "ipo", "orpo": "orpo"}.get(loss)
    if name is None:
        name = "orpo" if loss == "simpo" else "dpo"
        text = f"{name} is nearest; a function of yours in objective.name, with unit=pair, can be this loss"
        result.unsupported("pref_loss", loss, text)
    elif stage == "dpo":
        result.same("pref_loss", loss, "objective.name")
    result.set("objective.name", name, "pref_loss" if stage == "dpo" else "stage")
    used: Iterable[tuple[str, str, Any, tuple[str, ...]]] = (
        ("pref_beta", "beta", beta, ("dpo", "ipo", "orpo", "kto")),
        ("pref_ftx", "sft_weight", extra, ("dpo", "ipo")),
        ("dpo_label_smoothing", "label_smoothing", smoothing, ("dpo",)),
        ("kto_chosen_weight", "desirable_weight", good, ("kto",)),
        ("kto_rejected_weight", "undesirable_weight", bad, ("kto",)),
    )
    for key, field, value, names in used:
        if value is None:
            continue
        if name in names:
            result.set(f"objective.{field}", value, key)
            result.same(key, value, f"objective.{field}")
        elif value:
            result.unsupported(key, value, f"has no effect on {name}")
    if "model.adapter.pretrained" in result.fields and name in ("dpo", "ipo", "kto"):
        text = "the reference is the model with the adapter as training starts; in LLaMA-Factory it is without it"
        result.different("adapter_name_or_path", result.fields["model.adapter.pretrained"], text, "objective.name")


def _precision(result: Translation, settings: Settings) -> None:
    precision, pure = result.fields.get("parallel.precision"), settings.take("pure_bf16")
    halves = [settings.shown(key) for key in ("bf16", "fp16")]
    result.lines = [line for line in result.lines if line.key not in halves or not line.value]
    for key in ("bf16", "fp16"):
        if settings.take(key):
            text = "what is trained has fp32 weights, as LLaMA-Factory casts it; frozen weights have 16 bits"
            result.same(key, True, "parallel.precision", text)
    if pure:
        result.set("parallel.precision", "bf16", "pure_bf16")
        text = "fp32 master weights are kept beside the bf16 weights; without them, small updates are rounded away"
        result.different("pure_bf16", True, text, "parallel.precision")
    elif precision in ("autocast_bf16", "autocast_fp16") and any(
        field.startswith("model.adapter.") for field in result.fields
    ):
        half = precision.removeprefix("autocast_")
        result.set("parallel.precision", half, f"{half}: frozen weights in 16 bits, adapters with fp32 master weights")


def _held_out(result: Translation, settings: Settings) -> None:
    size = settings.take("val_size", 0)
    if not size or "evaluation.sources" in result.fields:
        result.set("data.eval_fraction", 0, "val_size")
        if "val_size" in settings:
            result.same("val_size", size, "data.eval_fraction")
    elif size < 1:
        result.set("data.eval_fraction", size, "val_size")
        result.different("val_size", size, "the rows are chosen by the hash of their text", "data.eval_fraction")
    else:
        result.missing("val_size", "is a number of rows; set data.eval_fraction to their share", size)


PROGRAM = Program(
    name="llama-factory",
    title=TITLE,
    marks=frozenset({"finetuning_type", "cutoff_len", "dataset_dir", "pref_loss", "neat_packing", "mask_history"}),
    translate=translate,
    tables={
        "Model": MODEL,
        "What is trained": TUNING,
        "Data": DATA,
        "A data set": DESCRIBED,
        "Without effect": WITHOUT_EFFECT,
        "Not supported": NOT_SUPPORTED,
    },
    page="llama_factory",
    includes=frozenset({"trainer", *(program.name for program in trl.PROGRAMS)}),
    has_generation_settings=True,
    command=r"\bllamafactory-cli\b",
)
