"""What a recipe needs and settings may not say: it is filled in with placeholders, with a line for each."""

from __future__ import annotations

import re

from llmtrain.plan.migrate.translation import Settings, Translation

ROW_LENGTH = 2048
"""Placeholder for the sequence length."""
NOTHING = "FILL-IN"
"""Placeholder for a name."""


def name_run(translation: Translation, settings: Settings, *keys: str) -> None:
    """Names the run after the first of these settings, which are names or folders, else after the file."""
    named = ""
    for key in keys:
        value = settings.take(key)
        if not isinstance(value, str):
            continue
        name = recipe_name(value.rstrip("/").rpartition("/")[2])
        if not named:
            named = name
            translation.set("name", name, settings.shown(key), settings.place(key))
        translation.same(settings.shown(key), value, "name" if named == name else "", f"the folder is runs/{named}")
    if not named:
        translation.set("name", recipe_name(settings.stem))


def complete(translation: Translation) -> None:
    """Fills in the model, the data and the sequence length where the settings do not say them."""
    fields = translation.fields
    if not any(origin in fields for origin in ("model.pretrained", "model.architecture", "model.build")):
        translation.set("model.pretrained", NOTHING, "FILL IN: folder or hub name of the weights")
        translation.missing("model.pretrained", "the settings do not name the model: its folder or its name on the hub")
    if "data.tokenizer" not in fields:
        translation.set("data.tokenizer", fields.get("model.pretrained", NOTHING), "that of the model")
    if "data.sources" not in fields:
        translation.set("data.sources", [{"name": NOTHING}], "FILL IN: a file, a folder or a hub dataset")
        translation.missing("data.sources", "the settings do not name the data: a file, a folder or a hub dataset")
    if "data.sequence_length" not in fields:
        translation.set("data.sequence_length", ROW_LENGTH, "FILL IN: the most tokens of a sequence")
        text = "the settings do not say how long a sequence is, in tokens"
        translation.missing("data.sequence_length", text, ROW_LENGTH)
    if "data.packing" not in fields:
        translation.set("data.packing", "none", "one row per sequence")
    _shard(translation)
    text = "rows are read in another order: losses of single steps differ, and those of a run agree on average"
    translation.different("", None, text)
    text = "an update whose loss or gradient norm is a spike is skipped; 0 only skips what is not finite"
    translation.different("", None, text, "guard.spike_sigma")


def _shard(translation: Translation) -> None:
    """Shards the optimizer's states beside 16-bit weights, which DeepSpeed does not train without."""
    fields, stage = translation.fields, "parallel.zero_stage"
    half = fields.get("parallel.precision") in ("bf16", "fp16")
    if half and not fields.get(stage) and fields.get("parallel.backend", "deepspeed") == "deepspeed":
        translation.set(stage, 1, "16-bit weights with fp32 master weights need ZeRO 1; the results are the same")
        translation.different("", None, "the optimizer's states are sharded (ZeRO 1), with the same results", stage)


def hold_pairs(translation: Translation, key: str, length: int) -> None:
    """Sets the sequences of a preference loss. length: the most tokens of one completion with its prompt."""
    translation.set("data.sequence_length", 2 * length, f"2 × {key}: both completions of a pair")
    translation.set("data.packing", "best_fit", "whole pairs share a sequence")
    text = (
        "counts sequences, and each has as many pairs as fit: `llmtrain data RECIPE` prints how many, by which to "
        f"divide it for as many pairs per step as in {translation.program}"
    )
    translation.different("", None, text, "batch.global_batch_size")


def recipe_name(text: str) -> str:
    """Returns a name of a recipe that is like a text."""
    return re.sub(r"[^A-Za-z0-9._-]+", "-", text).strip("-._") or "run"
