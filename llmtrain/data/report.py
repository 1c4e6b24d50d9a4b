"""Describes the prepared data for people."""

from __future__ import annotations

import math
from typing import Any, Literal

import numpy as np
from rich import box
from rich.console import Group
from rich.table import Table
from rich.text import Text

from llmtrain.data.chat.template import DATE
from llmtrain.data.order import integer_weights
from llmtrain.data.prepare import Prepared, PreparedSource
from llmtrain.data.samples import fill_fraction
from llmtrain.recipe import Recipe
from llmtrain.system.streams import short_names, visible

NAME_CHARACTERS = 14
"""Minimum width of a source's name in the table; longer names take several lines."""


def data_summary(prepared: Prepared, recipe: Recipe) -> dict[str, Any]:
    """Returns the prepared data as JSON data."""
    return {
        "made": prepared.made,
        "seconds": prepared.seconds,
        "key": prepared.key,
        "tokenizer": str(prepared.tokenizer_dir),
        "vocab_size": prepared.vocab_size,
        "sequence_length": prepared.sequence_length,
        "train_sequences": prepared.train_sequences,
        "eval_sequences": prepared.eval_sequences(),
        "sources": [
            {**_source(source), "epochs": epochs}
            for source, epochs in zip(prepared.sources, _epochs(prepared, recipe), strict=True)
        ],
        "evaluation_sources": [_source(source) for source in prepared.evaluation_sources],
        "evaluation_sets": {name: [_source(source) for source in sources] for name, sources in prepared.sets.items()},
        "notes": notes(prepared, recipe),
    }


def report(prepared: Prepared, recipe: Recipe) -> Group:
    """Renders the prepared data for a rich console: a table with a row per source and split, and the notes."""
    state = "made" if prepared.made else "found in the cache"
    sizes = f"vocabulary {prepared.vocab_size:,}, sequence length {prepared.sequence_length:,}"
    title = f"Data {state} in {prepared.seconds:.2f} s, {sizes}"
    table = Table(box=box.SIMPLE, padding=(0, 1, 0, 0), pad_edge=False)
    table.add_column("source", overflow="fold", min_width=NAME_CHARACTERS)
    table.add_column("split", overflow="fold")
    for heading in ("documents", "tokens", "sequences", "fill", "epochs"):
        table.add_column(heading, justify="right", no_wrap=True)
    short = short_names(source.name for source in prepared.all_sources)

    def add(source: PreparedSource, split: Literal["train", "eval"], more: str = "", epochs: str = "") -> None:
        name = Text(visible(short[source.name]))
        table.add_row(name, Text(visible(f"{split}{more}")), *_cells(source, split), epochs)

    for source, epochs in zip(prepared.sources, _epochs(prepared, recipe), strict=True):
        add(source, "train", epochs=f"{epochs:.3g}")
        if not prepared.evaluation_sources:
            add(source, "eval")
    for source in prepared.evaluation_sources:
        add(source, "eval")
    for name, sources in prepared.sets.items():
        for source in sources:
            add(source, "eval", f" {name}")
    whole = [f"{short_name} is {name}" for name, short_name in sorted(short.items()) if short_name != name]
    return Group(title, table, *(Text(visible(line)) for line in (*whole, *notes(prepared, recipe))))


def notes(prepared: Prepared, recipe: Recipe) -> list[str]:
    """Returns remarks on the data, one line each."""
    remarks = []
    for source, epochs in zip(prepared.sources, _epochs(prepared, recipe), strict=True):
        if epochs > 1 and not recipe.train.epochs:
            remarks.append(f"{source.name} repeats: {recipe.train.steps:,} steps are {epochs:.3g} epochs of it")
    for source in prepared.all_sources:
        if rows := source.store.meta.get("rows"):
            remarks.append(f"{source.name}: {rows['summary']}")
        if chats := source.store.meta.get("conversations"):
            remarks.append(_conversations(source, chats, recipe))
            if end := chats.get("ordinary_end"):
                remarks.append(
                    f"{source.name}: the chat template ends turns with {end}, which is not a special token of the "
                    "tokenizer; generation stops at it, but it remains in texts that are decoded without special "
                    "tokens: set special to true in the tokenizer's files"
                )
        if (special := source.store.special).count:
            read = "special tokens" if recipe.data.special_tokens == "parse" else "ordinary text"
            remarks.append(f"{source.name} contains {special}; they are read as {read} (data.special_tokens)")
    if difference := prepared.tokenizer.difference:
        remarks.append(
            f"the tokenizer is read in two ways: {difference} (data.tokenizer_class=generic reads the latter)"
        )
    unused = sum(source.train.unused() for source in prepared.sources)
    if recipe.data.chat_template and not prepared.chat_template and recipe.model.new_tokens != "template":
        remarks.append("data.chat_template has no effect: no source has conversations")
    if prepared.chat_template and prepared.chat_template.writes_date:
        remarks.append(f"the chat template writes the current date; all conversations have {DATE:%Y-%m-%d} instead")
    if unused:
        remarks.append(f"{unused:,} training tokens at the end of the streams are unused: each is less than a sequence")
    return remarks


def _conversations(source: PreparedSource, chats: dict[str, Any], recipe: Recipe) -> str:
    """Describes how many rows of a source of conversations are used, and why others are not."""
    cut = f"{chats['cut']:,} cut at a turn, {chats['dropped']:,} dropped, since longer than a sequence"
    faulty = f"; {chats['faulty']:,} faulty rows left out, such as {chats['faults'][0]}" if chats["faulty"] else ""
    rows = ", ".join(f"{name} in {count:,} rows" for name, count in sorted(chats.get("unread", {}).items()))
    unread = f"; not read: {rows}" if rows else ""
    streams = source.store.streams
    where, stream = " or ".join(chats["columns"]), streams["train"]
    what, sizes = "pairs" if stream.holds_pairs else "conversations", np.diff(stream.documents.astype(np.int64))
    examples, unit = len(sizes) // 2, "pairs"
    if stream.desirable is not None:
        share, sizes = float(np.mean(stream.desirable)) if stream.desirable.size else 0.0, sizes[0::2]
        what, unit = f"completions, {share:.0%} of them desirable", "completions"
    of_step = ""
    if recipe.objective.reads_completions and len(source.train):
        mean = examples / len(source.train)
        of_step = (
            f"; {mean:.3g} {unit} in a sequence and {mean * recipe.batch.global_batch_size:.3g} in a step, on average"
        )
    middle, most, longest = np.percentile(sizes, (50, 90, 100)).astype(int).tolist() if sizes.size else (0, 0, 0)
    counts = source.store.meta.get("images", {})
    images = f" and {sum(split['images'] for split in counts.values()):,} images" if counts else ""
    return (
        f"{source.name} has {chats['kept']:,} {what}{images} ({where}) with {chats['trained_tokens']:,} trained tokens "
        f"(data.train_on={recipe.data.train_on}); lengths: median {middle:,}, "
        f"90 % up to {most:,}, longest {longest:,} tokens; "
        f"{cut}{faulty}{unread}{of_step}"
    )


def _epochs(prepared: Prepared, recipe: Recipe) -> list[float]:
    """Returns how many times the whole run reads each source."""
    if recipe.train.epochs:
        return [float(recipe.train.epochs)] * len(prepared.sources)
    samples = recipe.train.steps * recipe.batch.global_batch_size
    weights = integer_weights([source.weight for source in prepared.sources])
    return [
        samples * weight / sum(weights) / len(source.train) if len(source.train) else math.inf
        for source, weight in zip(prepared.sources, weights, strict=True)
    ]


def _cells(source: PreparedSource, split: Literal["train", "eval"]) -> list[str]:
    part = _source(source)[split]
    return [*(f"{part[name]:,}" for name in ("documents", "tokens", "sequences")), f"{part['fill']:.2%}"]


def _source(source: PreparedSource) -> dict[str, Any]:
    splits = source.store.meta["splits"]
    tokens = sum(split["tokens"] for split in splits.values())
    return {
        "name": source.name,
        "made": source.made,
        "rows": source.store.meta.get("rows"),
        "store": str(source.store.path),
        "tokens_per_second": tokens / max(source.store.seconds, 1e-9),
        "unused_tokens": source.train.unused(),
        "train": {**splits["train"], "sequences": len(source.train), "fill": fill_fraction(source.train)},
        "eval": {**splits["eval"], "sequences": len(source.eval), "fill": fill_fraction(source.eval)},
    }
