"""Numbers in the rows of the data reach the loss with the tokens of their document, however these are packed."""

from __future__ import annotations

import json
import string
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pyarrow.feather
import pyarrow.parquet
import pytest
import torch
from tokenizers import Tokenizer

from llmtrain import Custom
from llmtrain.data import BatchLoader, Prepared, prepare
from llmtrain.data.cache import Cache
from llmtrain.data.items import Items, document_rows, document_values, documents_with_targets
from llmtrain.data.progress import Progress
from llmtrain.data.report import notes
from llmtrain.data.sources.corpus import open_corpora
from llmtrain.data.synthetic import synthetic
from llmtrain.errors import DataError, Exit
from llmtrain.recipe import Source
from tests.helpers import own_losses
from tests.helpers.small_corpora import MakeRecipe, write_tokenizer
from tests.helpers.small_pairs import small_pairs, write_pairs

MINE = """
def read(path):
    yield from ({"text": "one", "score": 1}, {"text": "two", "score": 2.5})


def score(row):
    return {**row, "score": len(row["text"]) / 2}
"""
ROWS = [{"text": "one", "score": 1, "other": "x"}, {"text": None, "score": None}, {"text": "two", "score": 2.5}]


def write(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """Files of every kind with the texts one and two, and their scores 1 and 2.5."""
    monkeypatch.setenv("LLMTRAIN_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(sys, "path", [*sys.path])
    (tmp_path / "mine.py").write_text(MINE)
    write(tmp_path / "rows.jsonl", ROWS)
    (tmp_path / "rows.json").write_text(json.dumps(ROWS))
    (tmp_path / "rows.csv").write_text("score,text\n1,one\n,\n2.5,two\n")
    table = pyarrow.Table.from_pylist([{"text": row["text"], "score": row["score"]} for row in ROWS])
    pyarrow.parquet.write_table(table, tmp_path / "rows.parquet")
    pyarrow.feather.write_feather(table, tmp_path / "rows.arrow", compression="uncompressed")
    (tmp_path / "words.txt").write_text("words")
    (tmp_path / "named").mkdir()
    write(tmp_path / "named/train.jsonl", ROWS)
    return tmp_path


def documents(folder: Path, name: str, columns=("score",), drops_faulty: bool = False, **fields) -> list[tuple]:
    cache = Cache(folder / "cache", Progress())
    source = Source(str(folder / name), **fields)
    (corpus,) = open_corpora([source], cache, "data.sources", str(folder), drops_faulty, columns)
    return [(document.text, document.values) for document in corpus.documents()]


@pytest.mark.parametrize("name", ["rows.jsonl", "rows.json", "rows.csv", "rows.parquet", "rows.arrow", "named"])
def test_every_kind_of_file_has_numbers(folder, name):
    assert documents(folder, name) == [("one", (1.0,)), ("two", (2.5,))]


def test_readers_maps_and_datasets_have_numbers(folder, monkeypatch):
    assert documents(folder, "server", reader="mine:read") == [("one", (1.0,)), ("two", (2.5,))]
    assert documents(folder, "words.txt", map="mine:score") == [("words", (2.5,))]
    monkeypatch.chdir(folder)
    monkeypatch.setattr("llmtrain.data.sources.corpus.find_files", lambda *_: [])  # as for a name on the hub
    (corpus,) = open_corpora([Source("named")], Cache(folder / "cache", Progress()), loss_columns=("score",))
    assert [document.values for document in corpus.documents()] == [(1.0,), (2.5,)]


def test_several_columns_are_in_the_order_of_the_loss(folder):
    write(folder / "two.jsonl", [{"text": "a", "x": True, "y": -(2**24)}])
    assert documents(folder, "two.jsonl", ("y", "x")) == [("a", (-(2.0**24), 1.0))]


def refused(folder: Path, *arguments, **fields) -> list[str]:
    with pytest.raises(DataError) as error:
        documents(folder, *arguments, **fields)
    assert error.value.exit_code == Exit.DATA
    return [str(problem) for problem in error.value.problems]


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (None, "column 'score' is null, not a number"),
        ("0.5", "column 'score' contains '0.5', not a number"),
        ([1.0], "column 'score' contains [1.0], not a number"),
        (float("nan"), "column 'score' contains nan, which is not a finite number of fp32"),
        (1e39, "column 'score' contains 1e+39, which is not a finite number of fp32"),
        (
            2**24 + 1,
            "column 'score' contains 16777217, but fp32, in which the loss is given it, has all integers up to",
        ),
        (10**400, "but fp32, in which the loss is given it, has all integers up to"),
    ],
)
def test_other_values_are_refused_with_their_row(folder, value, message):
    rows = write(folder / "faulty.jsonl", [*ROWS, {"text": "three", "score": value}])
    (fault,) = refused(folder, "faulty.jsonl")
    assert fault.startswith(f"{rows}, line 4: ")
    assert message in fault
    assert "--set data.faulty_rows=drop" in fault
    assert documents(folder, "faulty.jsonl", drops_faulty=True) == [("one", (1.0,)), ("two", (2.5,))]


def test_cells_of_csv_files_are_checked_too(folder):
    (folder / "faulty.csv").write_text("score,text\n1,one\nhigh,two\n")
    assert "line 3: column 'score' contains 'high', not a number" in refused(folder, "faulty.csv")[0]


@pytest.mark.parametrize("name", ["rows.jsonl", "rows.csv", "rows.parquet", "rows.arrow", "words.txt"])
def test_sources_without_the_columns_are_refused_with_the_nearest_name(folder, name):
    faults = refused(folder, name, ("scores", "txt"))
    nearest = "" if name == "words.txt" else "; did you mean 'score'?"
    for fault, message in zip(faults, (f"'scores'{nearest} (columns: ", "'txt'; did you mean 'text'?"), strict=True):
        assert f"has no column {message}" in fault
        assert "objective.columns" in fault


LETTERS = string.ascii_letters


def value_of(letter: str) -> tuple[float, float]:
    return ord(letter) / 8, -ord(letter)


def letters_file(path: Path, letters: str = LETTERS, longest: int = 80) -> Path:
    """Documents of a letter each, and numbers that depend on the letter."""
    rows = [
        {"text": letter * (1 + (7 * number + 13 * copy) % longest), "a": value_of(letter)[0], "b": value_of(letter)[1]}
        for copy in range(4)
        for number, letter in enumerate(letters)
    ]
    return write(path, rows)


def letters_recipe(make_recipe: MakeRecipe, tmp_path: Path, columns=("a", "b"), count=None, **data):
    tokenizer = tmp_path / "tokenizer"
    if not tokenizer.exists():
        write_tokenizer(tokenizer)
    objective = Custom(own_losses.weighted, columns=columns, count=count, unit="token")
    sources = [letters_file(tmp_path / "letters.jsonl"), letters_file(tmp_path / "others.jsonl", "0123456789")]
    return make_recipe(*sources, tokenizer=str(tokenizer), **data).with_(objective=objective)


def check_values(prepared: Prepared, batch) -> int:
    """Compares the numbers with the letters of the same positions; returns the number of letters."""
    tokenizer = Tokenizer.from_file(str(prepared.tokenizer.folder / "tokenizer.json"))
    seen = 0
    for one in batch.micro_batches:
        for token, values in zip(one.input_ids.flatten().tolist(), one.values.flatten(0, 1).tolist(), strict=True):
            letter = tokenizer.id_to_token(token)
            if letter != "</s>":
                assert tuple(values) == value_of(letter)
                seen += 1
        padding = (one.labels < 0) & (one.input_ids == prepared.eos_id)
        assert not one.values[padding].any()
    return seen


PACKINGS = [{}, {"packing": "concat"}, {"packing": "none"}, {"mask_documents": False}]


@pytest.mark.parametrize("data", PACKINGS, ids=str)
def test_numbers_stay_with_their_documents_under_every_packing_layout_and_restart(make_recipe, tmp_path, data):
    prepared = prepare(letters_recipe(make_recipe, tmp_path, **data))
    for ranks, micro, steps, cursor in ((1, 8, 1, 0), (2, 2, 2, 8), (4, 1, 2, 21)):
        sizes = {"global_batch_size": 8, "micro_batch_size": micro, "gradient_accumulation_steps": steps}
        loaders = [BatchLoader(prepared, seed=3, dp_rank=rank, dp_size=ranks, **sizes) for rank in range(ranks)]
        for loader in loaders:
            assert check_values(prepared, loader.train_batch(cursor)) > 20
    for batch in BatchLoader(prepared, seed=3, dp_rank=0, dp_size=1, **sizes).eval_batches():
        assert check_values(prepared, batch)


def test_shortened_micro_batches_keep_the_first_numbers(make_recipe, tmp_path):
    prepared = prepare(letters_recipe(make_recipe, tmp_path, packing="none", sequence_length=512))
    sizes = {"global_batch_size": 8, "micro_batch_size": 2, "gradient_accumulation_steps": 4}
    batch = BatchLoader(prepared, seed=3, dp_rank=0, dp_size=1, shortens=True, **sizes).train_batch(0)
    assert check_values(prepared, batch)
    assert all(one.values.shape == (*one.labels.shape, 2) for one in batch.micro_batches)
    assert {one.to(torch.device("meta")).values.shape for one in batch.micro_batches} == {
        one.values.shape for one in batch.micro_batches
    }


def test_the_numbers_identify_the_tokens(make_recipe, tmp_path):
    keys = [
        prepare(letters_recipe(make_recipe, tmp_path, columns)).key
        for columns in ((), ("a",), ("a", "b"), ("b", "a"), ("a",))
    ]
    assert len(set(keys)) == 4
    assert keys[1] == keys[4]


def test_a_count_is_given_the_numbers(make_recipe, tmp_path):
    recipe = letters_recipe(make_recipe, tmp_path, ("a",), own_losses.count_heavy)
    prepared = prepare(recipe)
    sizes = {"global_batch_size": 8, "micro_batch_size": 8, "gradient_accumulation_steps": 1}
    for unit in ("token", "document"):
        items = Items(recipe.with_(**{"objective.unit": unit}))
        batch = BatchLoader(prepared, seed=3, dp_rank=0, dp_size=1, items=items, **sizes).train_batch(0)
        (one,) = batch.micro_batches
        labels, values = one.labels, one.values
        if unit == "document":
            kept = documents_with_targets(labels, one.documents.bounds)
            values = document_values(values, one.documents.bounds, kept)
            labels = document_rows(labels, one.documents.bounds, kept, -100)
        assert batch.num_items == own_losses.count_heavy(labels, values[..., 0]) > 0


def test_sources_of_evaluation_need_the_columns(make_recipe, tmp_path):
    recipe = letters_recipe(make_recipe, tmp_path)
    other = write(tmp_path / "other.jsonl", [{"text": "x" * 50, "a": 1.0, "c": 2}])
    with pytest.raises(DataError, match=r"other.jsonl, line 1: has no column 'b'.*\(columns: text, a, c\)"):
        prepare(recipe.with_(**{"evaluation.sets": {"more": [Source(str(other))]}}))
    right = [Source(str(letters_file(tmp_path / "right.jsonl", "xyz")))]
    prepared = prepare(recipe.with_(**{"evaluation.sets": {"more": right}}))
    sizes = {"global_batch_size": 8, "micro_batch_size": 2, "gradient_accumulation_steps": 4}
    loader = BatchLoader(prepared, seed=3, dp_rank=0, dp_size=1, **sizes)
    assert all(check_values(prepared, batch) for batch in loader.eval_batches(name="more"))


def test_damaged_numbers_are_noticed_when_they_are_read(make_recipe, tmp_path):
    prepared = prepare(letters_recipe(make_recipe, tmp_path))
    path = prepared.sources[0].folders[0] / "train_values.bin"
    data = bytearray(path.read_bytes())
    data[5] ^= 1
    path.write_bytes(data)
    reopened = prepare(letters_recipe(make_recipe, tmp_path))
    with pytest.raises(DataError, match=r"train_values.bin: the bytes .* are not those that were written"):
        reopened.sources[0].train.read(np.arange(len(reopened.sources[0].train)))


def test_dropped_rows_are_reported(make_recipe, tmp_path):
    recipe = letters_recipe(make_recipe, tmp_path, faulty_rows="drop")
    with (tmp_path / "letters.jsonl").open("a") as file:
        file.write('{"text": "abc", "a": null, "b": 1}\n')
    prepared = prepare(recipe)
    assert any("1 faulty left out, such as" in note and "'a' is null" in note for note in notes(prepared, recipe))
    assert not any("others" in note for note in notes(prepared, recipe))
    with pytest.raises(DataError, match="'a' is null"):
        prepare(recipe.with_(**{"data.faulty_rows": "refuse"}))


def test_both_conversations_of_a_pair_have_the_numbers_of_their_row(tmp_path):
    pairs = write_pairs(tmp_path, 60)
    rows = [json.loads(line) for line in pairs.read_text().splitlines()]
    # The name of such a column may say what is trained on: it does not, since the loss reads it.
    write(pairs, [{**row, "loss_weight": number} for number, row in enumerate(rows)])
    objective = Custom(own_losses.pair_with_margin, unit="pair", columns=("loss_weight",))
    prepared = prepare(small_pairs(pairs, objective=objective))
    tokenizer = Tokenizer.from_file(str(prepared.tokenizer.folder / "tokenizer.json"))
    sizes = {"global_batch_size": 8, "micro_batch_size": 8, "gradient_accumulation_steps": 1}
    (one,) = BatchLoader(prepared, seed=3, dp_rank=0, dp_size=1, **sizes).train_batch(0).micro_batches
    bounds = one.documents.bounds
    kept = documents_with_targets(one.labels, bounds)
    texts = document_rows(one.input_ids, bounds, kept, 0).tolist()
    numbers = document_values(one.values, bounds, kept).flatten().int().tolist()
    assert len(numbers) >= 16
    for text, number, which in zip(texts, numbers, ["chosen", "rejected"] * (len(texts) // 2), strict=True):
        assert rows[number][which] in tokenizer.decode(text, skip_special_tokens=False)


def test_a_chat_keeps_the_numbers_of_its_row(tmp_path, make_recipe):
    turns = [{"role": "user", "content": "say"}, {"role": "assistant", "content": "x"}]
    # No other text, nor the template, has a capital letter.
    letters = string.ascii_uppercase
    chats = [{"messages": [turns[0], {**turns[1], "content": letter * 9}], "a": ord(letter)} for letter in letters]
    source = write(tmp_path / "chats.jsonl", chats)
    write_tokenizer(tmp_path / "tokenizer")
    objective = Custom(own_losses.weighted, columns=("a",))
    data = {"tokenizer": str(tmp_path / "tokenizer"), "chat_template": "chatml", "sequence_length": 256}
    prepared = prepare(make_recipe(source, **data).with_(objective=objective))
    view = prepared.sources[0].train
    rows = view.read(np.arange(len(view)))
    tokenizer = Tokenizer.from_file(str(prepared.tokenizer.folder / "tokenizer.json"))
    found = [
        (tokenizer.id_to_token(label), value)
        for label, value in zip(rows.labels.ravel().tolist(), rows.values.ravel().tolist(), strict=True)
        if label >= 0 and tokenizer.id_to_token(label) in letters
    ]
    assert len(found) >= 9 * 20
    assert all(value == ord(letter) for letter, value in found)


@pytest.mark.parametrize("unit", ["token", "pair"])
def test_random_data_have_numbers_that_may_be_classes_or_weights(tmp_path, unit):
    objective = Custom(own_losses.weighted, unit=unit, columns=("a", "b"))
    recipe = small_pairs(tmp_path / "pairs.jsonl", objective=objective, **{"data.sequence_length": 32})
    stream = synthetic(recipe, tmp_path / "cache").sources[0].store.streams["train"]
    values = stream.values.reshape(-1, 2)
    assert len(values) == len(stream.documents) - 1
    assert ((values > 0) & (values <= 1)).all()
    assert 0.3 < (values == 1).mean() < 0.7
    assert not (values[:, 0] == values[:, 1]).all()
    assert (values[0::2] == values[1::2]).all() == (unit == "pair")
