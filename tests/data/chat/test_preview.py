"""What `llmtrain data --show` shows is what the batches hold."""

from __future__ import annotations

import io
import re
from html import unescape
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console

from llmtrain.data import Progress, prepare, report
from llmtrain.data.preview import SequencePreview, first_sequences, render_html, render_terminal
from llmtrain.data.samples import NO_TARGET
from llmtrain.recipe import Recipe
from llmtrain.system.streams import visible
from tests.helpers.chat_tokenizers import Case, case
from tests.helpers.small_chats import recipe

NASTY = "<script>alert(1)</script> & \x1b[31mred \u202e 雪🙂 \x00"
ROWS = [
    {"messages": [{"role": "user", "content": f"{NASTY} {n}"}, {"role": "assistant", "content": f"snow 雪🙂 {n}"}]}
    for n in range(40)
]


@pytest.fixture
def made(tmp_path: Path) -> Recipe:
    one: Case = case("chatml", tmp_path / "tokenizer")
    return recipe(one, ROWS, sequence_length=512)


def texts(one: SequencePreview, *, is_trained: bool) -> str:
    return "".join(token.text for document in one.documents for token in document if token.is_trained is is_trained)


def test_the_first_sequences_are_shown_with_trained_tokens_marked(made: Recipe) -> None:
    prepared = prepare(made)
    shown = first_sequences(prepared, made, 3)
    for one in shown:
        count = len(one.documents)
        assert count > 1
        assert len(re.findall(r"snow 雪🙂 \d+<\|im_end\|>", texts(one, is_trained=True))) == count
        assert texts(one, is_trained=False).count(NASTY) == count
        assert "\ufffd" not in texts(one, is_trained=False)
        assert one.trained_tokens == sum(len(t.ids) for document in one.documents for t in document if t.is_trained)
        inputs = sum(len(token.ids) for document in one.documents for token in document)
        assert inputs + one.padding == 512
    samples = prepared.sources[0].train
    everything = samples.read(np.arange(len(samples))).labels
    assert (
        sum(one.trained_tokens for one in first_sequences(prepared, made, len(samples)))
        == (everything != NO_TARGET).sum()
    )


def test_the_page_escapes_the_data(made: Recipe) -> None:
    prepared = prepare(made)
    page = render_html(first_sequences(prepared, made, 2), prepared, made)
    assert "<script>" not in page
    assert not set("\x1b\x00\u202e") & set(page)
    text = unescape(re.sub(r"<[^>]*>", "", page))
    assert visible(NASTY, kept="") in text
    assert "40 conversations" in text


@pytest.mark.parametrize("color", ["truecolor", None])
def test_a_terminal_marks_trained_tokens_by_colour_or_brackets(made: Recipe, color: Any) -> None:
    console = Console(
        force_terminal=color is not None, color_system=color, width=200, record=True, file=None, quiet=False
    )
    with console.capture() as captured:
        console.print(render_terminal(first_sequences(prepare(made), made, 1), color is not None))
    written = captured.get()
    assert "\x1b[31mred" not in written
    assert r"\x1b[31mred" in written
    assert ("[[" in written) is (color is None)


@pytest.mark.parametrize("is_terminal", [True, False])
def test_names_of_files_are_no_markup(
    made: Recipe, tmp_path: Path, is_terminal: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    name = "a[/b]\x1b[9mc.jsonl"  # short enough to be shown as it is
    Path("a[").mkdir()
    Path("rows.jsonl").rename(name)
    named = made.with_(**{"data.sources": [{"name": name}]})
    console = Console(force_terminal=is_terminal, width=400, file=(written := io.StringIO()))
    prepared = prepare(named, Progress(console))
    console.print(report(prepared, named))
    console.print(render_terminal(first_sequences(prepared, named, 1), is_terminal))
    assert "\x1b[9m" not in written.getvalue()
    for after in (" ...", "  train", " has 40 conversations", ": "):
        assert is_terminal or rf"a[/b]\x1b[9mc.jsonl{after}" in written.getvalue()
