"""Shows the input of the model to people: decoded tokens, marked by whether they are trained on."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from html import escape
from itertools import groupby, pairwise
from string import Template
from typing import Any

import numpy as np
from rich.console import Group
from rich.text import Text

from llmtrain.data.loader import BatchLoader
from llmtrain.data.prepare import Prepared
from llmtrain.data.report import notes
from llmtrain.data.samples import NO_TARGET
from llmtrain.recipe import Recipe
from llmtrain.system.streams import visible

BROKEN = "\ufffd"
"""Stands for the bytes of an incomplete character."""
MAX_CHARACTER_BYTES = 4
"""Bytes of a character in UTF-8: at most as many tokens."""
MAX_TOKENS = 1 << 15
"""Tokens of a first batch that are kept: a page that a browser opens at once."""
STYLES = {"trained": "bold green", "context": "dim", "special": "magenta", "trained special": "bold green reverse"}


@dataclass(frozen=True)
class Token:
    """A token, or the few that together are a character."""

    text: str
    ids: tuple[int, ...]
    is_trained: bool
    is_special: bool

    @property
    def kind(self) -> str:
        """Its class in a page, and its style on a terminal."""
        special = "special" if self.is_special else ""
        return f"trained {special}".strip() if self.is_trained else special or "context"


@dataclass(frozen=True)
class SequencePreview:
    """A sequence."""

    source: str
    documents: tuple[tuple[Token, ...], ...]
    padding: int
    """Number of tokens of padding after the documents."""
    trained_tokens: int
    """Number of tokens that are trained on."""

    def __str__(self) -> str:
        tokens = sum(len(token.ids) for document in self.documents for token in document)
        what = f"{len(self.documents)} document{'s' if len(self.documents) > 1 else ''}, {tokens:,} tokens"
        return f"{visible(self.source)}: {what}, {self.trained_tokens:,} trained on, {self.padding:,} of padding"


def first_sequences(prepared: Prepared, recipe: Recipe, count: int) -> list[SequencePreview]:
    """Returns the sequences that a run reads first."""
    from tokenizers import Tokenizer

    tokenizer: Any = Tokenizer.from_file(str(prepared.tokenizer_dir / "tokenizer.json"))
    special = {token for token, added_token in tokenizer.get_added_tokens_decoder().items() if added_token.special}
    size = recipe.batch.global_batch_size
    loader = BatchLoader(
        prepared,
        seed=recipe.train.seed,
        global_batch_size=size,
        micro_batch_size=size,
        gradient_accumulation_steps=1,
        dp_rank=0,
        dp_size=1,
    )
    previews = []
    for source, number in zip(*(indices.tolist() for indices in loader.sample_ids(0, count)), strict=True):
        view, index = prepared.sources[source].train, np.array([number])
        inputs, positions, labels = (row[0] for row in view.read(index)[:3])
        size = int(view.count_inputs(index)[0])
        starts = [0, *(np.flatnonzero(np.diff(positions[:size]) != 1) + 1).tolist(), size]
        documents = []
        for first, end in pairwise(starts):
            ids, targets = inputs[first:end].tolist(), labels[first:end].tolist()
            trained = [False, *(target != NO_TARGET for target in targets)]
            if trained[-1]:
                ids.append(targets[-1])  # the last target is not an input
            documents.append(tuple(_tokens(tokenizer, special, ids, trained)))
        trained_on = int((labels != NO_TARGET).sum())
        previews.append(
            SequencePreview(prepared.sources[source].name, tuple(documents), len(inputs) - size, trained_on)
        )
    return previews


def _tokens(tokenizer: Any, special: set[int], ids: list[int], trained: Sequence[bool]) -> Iterator[Token]:
    previous: list[int] = []
    pending: list[int] = []
    for token, is_trained, following in zip(ids, trained, [*trained[1 : len(ids)], None], strict=False):
        pending.append(token)
        # Decoded together with what precedes it, since some decoders strip the first space.
        prefix = tokenizer.decode(previous, skip_special_tokens=False)
        text = tokenizer.decode([*previous, *pending], skip_special_tokens=False)[len(prefix) :]
        if text.endswith(BROKEN) and len(pending) < MAX_CHARACTER_BYTES and following == is_trained:
            continue
        yield Token(text, tuple(pending), is_trained, token in special)
        previous, pending = pending, []


def render_terminal(sequences: Sequence[SequencePreview], has_colors: bool) -> Group:
    """Renders sequences for a rich console; without colours, what is trained on is in brackets."""
    legend = Text("trained on, ", STYLES["trained"]) if has_colors else Text("[[trained on]], ")
    lines = [legend + Text("context, ", STYLES["context"]) + Text("special tokens", STYLES["special"])]
    for number, sequence in enumerate(sequences, start=1):
        lines.append(Text(f"\nsequence {number}, {sequence}", "bold"))
        for document_number, document in enumerate(sequence.documents, start=1):
            lines.append(Text(f"--- document {document_number}", "dim"))
            line = Text()
            for is_trained, tokens in groupby(document, key=lambda token: token.is_trained):
                brackets = ("[[", "]]") if is_trained and not has_colors else ("", "")
                line.append(brackets[0])
                for kind, alike in groupby(tokens, key=lambda token: token.kind):
                    line.append(_visible("".join(token.text for token in alike)), STYLES[kind])
                line.append(brackets[1])
            lines.append(line)
        if sequence.padding:
            lines.append(Text(f"--- {sequence.padding:,} tokens of padding", "dim"))
    return Group(*lines)


def render_html(sequences: Sequence[SequencePreview], prepared: Prepared, recipe: Recipe) -> str:
    """Returns a page with sequences and the notes on the data; all text in it is escaped."""
    parts = []
    for number, sequence in enumerate(sequences, start=1):
        documents = "".join(
            f'<pre dir="auto">{"".join(map(_token_html, document))}</pre>' for document in sequence.documents
        )
        padding = f'<p class="padding">{sequence.padding:,} tokens of padding</p>' if sequence.padding else ""
        parts.append(f"<h2>Sequence {number}</h2><p>{escape(str(sequence))}</p>{documents}{padding}")
    remarks = "".join(f"<li>{escape(visible(line))}</li>" for line in notes(prepared, recipe))
    return PAGE.substitute(name=escape(recipe.name), notes=remarks, sequences="\n".join(parts))


def first_batch_html(prepared: Prepared, recipe: Recipe) -> str:
    """Returns a page with the first batch of a run, or the first sequences of it."""
    limit = max(1, MAX_TOKENS // recipe.data.sequence_length)
    return render_html(first_sequences(prepared, recipe, min(limit, recipe.batch.global_batch_size)), prepared, recipe)


def _token_html(token: Token) -> str:
    ids = " ".join(map(str, token.ids))
    return f'<span class="{token.kind}" title="{ids}">{escape(_visible(token.text))}</span>'


def _visible(text: str) -> str:
    return visible(text, kept="\n").replace("\n", "↵\n")


PAGE = Template("""<!DOCTYPE html>
<html lang="en">
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'">
<title>$name: what the model is fed</title>
<style>
:root { color-scheme: light dark; --trained: #b7ebc6; --line: #8884; --faint: #6b7280; }
@media (prefers-color-scheme: dark) { :root { --trained: #14532d; --faint: #9ca3af; } }
body { font: 16px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem; }
pre { font: 14px/1.6 ui-monospace, monospace; white-space: pre-wrap; overflow-wrap: anywhere;
      border: 1px solid var(--line); border-radius: 6px; padding: .6rem .8rem; margin: .5rem 0; }
.context { color: var(--faint); } .trained { background: var(--trained); }
.special { font-weight: 700; text-decoration: underline; } .padding { color: var(--faint); }
</style>
<h1>$name: what the model is fed</h1>
<p><span class="trained">trained on</span> · <span class="context">context</span> ·
<span class="special">special token</span>. The title of a token is its id; each frame is a document.</p>
<ul>$notes</ul>
$sequences
</html>
""")
