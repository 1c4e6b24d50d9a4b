"""The model, the adapter and the objective of an axolotl configuration."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from llmtrain.plan.migrate.axolotl.settings import SETTINGS, names_in, number
from llmtrain.plan.migrate.translation import Settings, Translation


def translate_model(result: Translation, settings: Settings) -> None:
    """Translates the model, its tokenizer, what is frozen, and the adapter."""
    base = settings.take("base_model")
    result.set("model.pretrained", base, "base_model", settings.place("base_model"))
    result.same("base_model", base, "model.pretrained")
    if (config := settings.take("base_model_config")) not in (None, base):
        result.unsupported("base_model_config", config, "the folder of model.pretrained has the configuration")
    tokenizer = settings.take("tokenizer_config")
    result.set("data.tokenizer", tokenizer or base, "tokenizer_config" if tokenizer else "that of base_model")
    if tokenizer:
        result.same("tokenizer_config", tokenizer, "data.tokenizer")
    tokens: Any = settings.take("tokens", [])
    special: Mapping[str, Any] = settings.take("special_tokens", {})
    if isinstance(tokens, Mapping):  # an earlier form of special_tokens
        special = {**tokens, **special}
        result.same("tokens", tokens, text="as special_tokens")
        tokens = []
    added = names_in(tokens)
    extra = names_in(special.get("additional_special_tokens") or [])
    if added or extra:
        result.set("model.new_tokens", [*added, *extra], "tokens")
        text = "those that the tokenizer lacks get rows with the mean of the others, up to a multiple of 128 rows"
        result.different("tokens", [*added, *extra], text, "model.new_tokens")
    for name, token in special.items():
        if name == "pad_token":
            result.same(f"special_tokens.{name}", token, text="padding is left out of the loss, whatever its token")
        elif name != "additional_special_tokens" and token:
            text = "the tokenizer's own is used; write this one into the tokenizer's folder if it has another"
            result.different(f"special_tokens.{name}", token, text, "data.tokenizer")
    if patterns := settings.take("unfrozen_parameters"):
        if settings.take("adapter"):
            text = "an adapter freezes all other weights; name what else to train in model.adapter.modules_to_save"
            result.different("unfrozen_parameters", patterns, text, "model.adapter")
        else:
            _trainable(result, names_in(patterns))
    _adapter(result, settings)


def _trainable(result: Translation, expressions: list[str]) -> None:
    translated = []
    for expression in expressions:
        try:
            begin, end = ("" if expression.startswith("^") else "*"), ("" if expression.endswith("$") else "*")
            body = expression.removeprefix("^").removesuffix("$")
            translated += [f"{begin}{pattern}{end}" for pattern in patterns(body)]
        except ValueError as error:
            result.unsupported("unfrozen_parameters", expression, str(error))
    if translated:
        result.set("model.trainable", translated, "unfrozen_parameters")
        result.same("unfrozen_parameters", expressions, "model.trainable", "as patterns with *")


GROUP = re.compile(r"\((?:\?:)?([^()]*)\)(\??)")
"""An innermost group of alternatives, and whether it may be missing."""


def patterns(expression: str) -> list[str]:
    """Returns patterns of names that match what a regular expression does.

    A dot counts as itself. Of several groups of alternatives, the last is taken apart, and `*` stands for the others,
    as for repeated characters: the patterns match more if a model has other names there. Raises ValueError for other
    expressions.
    """
    if re.search(r"\[\d*:\d*\]$", expression):
        raise ValueError("a range of rows cannot be trained alone; model.new_tokens trains those of new tokens")
    found = list(GROUP.finditer(expression))
    if "(?" in expression.replace("(?:", "("):
        raise ValueError("is a regular expression without a pattern of names; write one with * and ?")
    if found and "|" in GROUP.sub("", expression):
        raise ValueError("is a regular expression without a pattern of names; write one with * and ?")
    if found:
        chosen = [*found[-1][1].split("|"), *([""] if found[-1][2] else [])]
        before = GROUP.sub("*", expression[: found[-1].start()])
        return [one for part in chosen for one in patterns(before + part + expression[found[-1].end() :])]
    if "|" in expression:
        return [one for part in expression.split("|") for one in patterns(part)]
    body = re.sub(r"(?<!\\)\.[*+]", "*", expression).replace("\\.", ".")
    body = re.sub(r"(\[[^\]]+\]|\\d|\\w)[+*]", "*", body)
    if re.search(r"[\\(){}^$+]", body):
        raise ValueError("is a regular expression without a pattern of names; write one with * and ?")
    return [re.sub(r"\*+", "*", body)]


def _adapter(result: Translation, settings: Settings) -> None:
    adapter, four, eight = (settings.take(name) for name in ("adapter", "load_in_4bit", "load_in_8bit"))
    pretrained = settings.take("lora_model_dir")
    targets, linear = settings.take("lora_target_modules"), settings.take("lora_target_linear")
    if not adapter:
        for key, value in (("load_in_4bit", four), ("load_in_8bit", eight)):
            if value:
                result.unsupported(
                    key, value, "weights are only quantized with an adapter; they are trained as they are"
                )
        for row in SETTINGS:
            if row.field.startswith("model.adapter.") and (value := settings.take(row.key)):
                result.same(row.key, value, text="has no effect without `adapter`, in axolotl either")
        return
    if adapter not in ("lora", "qlora"):
        result.unsupported("adapter", adapter, "adapters are LoRA, DoRA and rsLoRA: set model.adapter")
        return
    result.same("adapter", adapter, "model.adapter")
    if eight:
        text = "the frozen weights stay in the precision of the run, so they need twice the memory; "
        result.unsupported("load_in_8bit", eight, f"{text}model.quantize=nf4 needs half of it")
    if four or adapter == "qlora":
        result.set("model.quantize", "nf4", "load_in_4bit")
        result.same("load_in_4bit", True, "model.quantize", "NF4 with double quantization, as in axolotl")
    if pretrained:
        result.set("model.adapter.pretrained", pretrained, "lora_model_dir")
        result.same("lora_model_dir", pretrained, "model.adapter.pretrained", "its configuration counts")
        for key in ("lora_r", "lora_alpha", "lora_target_parameters", "lora_modules_to_save", "peft_use_dora"):
            settings.take(key)
        return
    result.apply(settings, [row for row in SETTINGS if row.key in ("lora_r", "lora_alpha", "lora_dropout")])
    for name, value in (("rank", 8), ("alpha", 8)):
        if f"model.adapter.{name}" not in result.fields:
            result.set(f"model.adapter.{name}", value, "PEFT's default")
    if linear or targets in (None, "all-linear"):
        more = [name for name in names_in(targets or []) if name != "all-linear"]
        result.set("model.adapter.targets", "all-linear", "lora_target_linear")
        result.same("lora_target_linear", linear, "model.adapter.targets")
        if more:
            text = "all linear layers of the decoder have adapters; embedding and head are trained in `modules_to_save`"
            result.same("lora_target_modules", more, "model.adapter.targets", text)
    elif isinstance(targets, str):
        try:
            named = patterns(targets)
        except ValueError as error:
            result.unsupported(
                "lora_target_modules", targets, f"{error} in model.adapter.targets; until then, all have one"
            )
        else:
            result.set("model.adapter.targets", named, "lora_target_modules")
            result.same("lora_target_modules", targets, "model.adapter.targets", "as patterns with *")
    else:
        result.set("model.adapter.targets", names_in(targets), "lora_target_modules")
        result.same("lora_target_modules", targets, "model.adapter.targets")


def translate_objective(result: Translation, settings: Settings, rl: Any) -> None:
    """Translates the loss. rl: axolotl's name for it; None for the cross-entropy."""
    beta = next(
        (value for key in ("trl.beta", "rl_beta", "dpo_beta") if (value := settings.take(key)) is not None), None
    )
    strength = settings.take("orpo_alpha")
    losses, weights = settings.take("dpo_loss_type"), settings.take("dpo_loss_weights")
    if settings.take("reward_model"):
        result.set("model.num_labels", 1, "reward_model")
        result.set("objective.name", "llmtrain.objectives:reward_model", "reward_model")
        result.set("objective.unit", "pair")
        settings.take("num_labels")
        text = "the reward is the output at the last trained token of a conversation"
        result.different("reward_model", True, text, "objective.name")
        return
    if not rl:
        return
    if rl not in ("dpo", "ipo", "orpo", "kto"):
        text = "of the preference losses, dpo, ipo, orpo and kto exist; orpo is nearest: it needs no reference either"
        result.unsupported("rl", rl, text)
        result.set("objective.name", "orpo", f"in place of {rl}")
        return
    if result.fields.get("model.adapter.dropout"):
        result.set("model.adapter.dropout", 0.0, "TRL turns it off for preferences")
        result.different("lora_dropout", settings.take("lora_dropout"), "is off, as TRL turns it off for preferences")
    if rl == "orpo":
        text = "the cross-entropy is that of the chosen completion, in TRL also of its prompt"
        result.different("", None, text, "objective.name")
    name = rl
    if losses is not None and rl == "dpo":
        name = _dpo_losses(result, names_in(losses), weights)
    result.set("objective.name", name, "rl")
    result.same("rl", rl, "objective.name")
    value = beta if beta is not None else strength
    if value is not None:
        result.set("objective.beta", number(value), "orpo_alpha" if beta is None else "rl_beta")
        result.same("orpo_alpha" if beta is None else "rl_beta", value, "objective.beta")
    used = {"dpo_label_smoothing": "dpo", "kto_desirable_weight": "kto", "kto_undesirable_weight": "kto"}
    for key, loss in used.items():
        if name != loss and settings.take(key):
            result.same(key, settings.take(key), text=f"has no effect on `{name}`, in axolotl either")


def _dpo_losses(result: Translation, losses: list[str], weights: Any) -> str:
    """Returns the objective for a list of TRL's losses, of which `sft` may be the second."""
    first, *others = losses
    name = {"sigmoid": "dpo", "ipo": "ipo"}.get(first)
    if name is None or others not in ([], ["sft"]) or (others and not isinstance(weights, list)):
        result.unsupported("dpo_loss_type", losses, "`sigmoid` and `ipo` exist, alone or with `sft`; dpo is taken")
        return "dpo"
    if others:
        result.set("objective.sft_weight", weights[1] / weights[0], "dpo_loss_weights")
        result.same("dpo_loss_weights", weights, "objective.sft_weight")
    result.same("dpo_loss_type", losses, "objective.name")
    return name
