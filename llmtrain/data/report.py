"""What preparing the data made, for people."""

from __future__ import annotations

from typing import Any

from rich.table import Table

from llmtrain.data.prepare import Prepared, PreparedSource
from llmtrain.data.samples import fill


def summary(prepared: Prepared) -> dict[str, Any]:
    """The prepared data as JSON data."""
    return {
        "made": prepared.made,
        "seconds": prepared.seconds,
        "key": prepared.key,
        "tokenizer": str(prepared.tokenizer_dir),
        "vocab_size": prepared.vocab_size,
        "sequence_length": prepared.sequence_length,
        "train_sequences": prepared.train_sequences,
        "eval_sequences": prepared.eval_sequences,
        "sources": [_source(source) for source in prepared.sources],
    }


def report(prepared: Prepared) -> Table:
    """The prepared data as a table for a rich console: a row per source and split."""
    state = "made" if prepared.made else "found, nothing made,"
    title = f"Data {state} in {prepared.seconds:.2f} s, vocabulary {prepared.vocab_size:,}"
    table = Table(title=title, title_justify="left")
    table.add_column("source")
    table.add_column("split")
    for heading in ("documents", "tokens", "tokens/s", f"sequences of {prepared.sequence_length}", "fill"):
        table.add_column(heading, justify="right")
    for source in prepared.sources:
        facts = _source(source)
        for split in ("train", "eval"):
            part = facts[split]
            numbers = (part["documents"], part["tokens"], facts["tokens_per_second"], part["sequences"])
            shown = [f"{number:,.0f}" for number in numbers]
            table.add_row(source.name, split, *shown, f"{part['fill']:.2%}")
    unused = sum(source.train.unused() for source in prepared.sources)
    if unused:
        table.caption = f"{unused:,} training tokens at the end of the streams are left out: less than a sequence each"
    return table


def _source(source: PreparedSource) -> dict[str, Any]:
    splits = source.store.meta["splits"]
    tokens = sum(split["tokens"] for split in splits.values())
    return {
        "name": source.name,
        "made": source.made,
        "store": str(source.store.path),
        "tokens_per_second": tokens / max(source.store.seconds, 1e-9),
        "unused_tokens": source.train.unused(),
        "train": {**splits["train"], "sequences": len(source.train), "fill": fill(source.train)},
        "eval": {**splits["eval"], "sequences": len(source.eval), "fill": fill(source.eval)},
    }
