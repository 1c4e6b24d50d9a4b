"""The evaluation data: the end of a single text, or separate sources."""

from __future__ import annotations

import re
from itertools import chain
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from llmtrain.data import BatchLoader, Prepared, Progress, prepare
from llmtrain.data.cache import Cache, cache_folder, key_of
from llmtrain.data.sources.corpus import Split, open_corpora
from llmtrain.errors import DataError
from tests.helpers.small_corpora import MakeRecipe, make_texts, write_jsonl

BOOK = "\n".join(f"line {number} of the book, in some words" for number in range(500))


def text(prepared: Prepared, split: Split, source: int = 0) -> str:
    """All that a split of a source holds."""
    tokenizer = AutoTokenizer.from_pretrained(prepared.tokenizer_dir)
    sources = (*prepared.sources, *prepared.evaluation_sources, *chain(*prepared.sets.values()))
    return str(tokenizer.decode(sources[source].store.streams[split].tokens.tolist(), skip_special_tokens=True))


@pytest.fixture
def book(tmp_path: Path) -> Path:
    (tmp_path / "book.txt").write_text(BOOK)
    return tmp_path / "book.txt"


@pytest.mark.parametrize("fraction", [0.03, 0.1, 0.3, 0.5, 0.9, 0.99])
def test_the_end_of_a_single_text_is_held_out(make_recipe: MakeRecipe, book: Path, fraction: float) -> None:
    prepared = prepare(make_recipe(book, eval_fraction=fraction).with_(**{"evaluation.every_steps": 1}))
    train, held = text(prepared, "train"), text(prepared, "eval")
    assert train + held == BOOK
    assert train.endswith("\n")  # cut between lines
    assert len(held) == pytest.approx(fraction * len(BOOK), abs=0.02 * len(BOOK))


def test_only_a_single_text_has_a_new_store(make_recipe: MakeRecipe, corpus_file: Path, book: Path) -> None:
    """What an earlier version called so holds its whole text. All other stores, and the runs on them, go on."""
    for path, fraction, is_same in ((corpus_file, 0.1, True), (book, 0.1, False), (book, 0.0, True)):
        recipe = make_recipe(path, eval_fraction=fraction)
        prepared = prepare(recipe)
        cache = Cache(cache_folder(recipe.data), Progress())
        (corpus,) = open_corpora(recipe.data.sources, cache)
        before = key_of("tokens", 1, corpus.identity, prepared.tokenizer.identity, fraction)
        assert (prepared.sources[0].store.key == before) == is_same
        trained = key_of("trained", 1, 300, fraction, [1], [corpus.identity])
        assert (prepared.tokenizer_dir.name == trained) == is_same


def test_nothing_is_held_out_if_no_fraction_is_set(make_recipe: MakeRecipe, book: Path) -> None:
    prepared = prepare(make_recipe(book, eval_fraction=0.0))
    assert text(prepared, "train") == BOOK
    assert prepared.eval_sequences() == 0


def test_the_tokenizer_is_not_trained_on_the_held_out_end(make_recipe: MakeRecipe, tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text(BOOK + "\n" + "qqzz " * 400)
    prepared = prepare(make_recipe(tmp_path / "a.txt", eval_fraction=0.3, tokenizer={"vocab_size": 400}))
    assert not any("qq" in token for token in AutoTokenizer.from_pretrained(prepared.tokenizer_dir).get_vocab())


def test_one_long_line_is_cut_between_words(make_recipe: MakeRecipe, tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("word " * 2000)
    prepared = prepare(make_recipe(tmp_path / "a.txt", eval_fraction=0.1))
    assert text(prepared, "eval").startswith(" word")


def test_two_files_are_two_documents(make_recipe: MakeRecipe, tmp_path: Path) -> None:
    """A document is held out as a whole, as before; the store's name is what it was."""
    for number, content in enumerate(make_texts(2, longest=200)):
        (tmp_path / f"{number}.txt").write_text(content)
    prepared = prepare(make_recipe(tmp_path, eval_fraction=1e-9))
    assert text(prepared, "eval") == ""


def test_separate_evaluation_sources(make_recipe: MakeRecipe, corpus_file: Path, book: Path, tmp_path: Path) -> None:
    other = write_jsonl(tmp_path / "other.jsonl", make_texts(30, seed=9))
    alone = make_recipe(corpus_file, eval_fraction=0.0)
    fields = {"evaluation.every_steps": 1, "evaluation.sources": [{"name": str(book)}, {"name": str(other)}]}
    prepared = prepare(alone.with_(**{**fields, "data.eval_fraction": 0.01}))
    assert prepared.key == prepare(alone).key  # all of the training data is trained on, and evaluation changes nothing
    assert [source.name for source in prepared.evaluated()] == [str(book), str(other)]
    assert text(prepared, "eval", source=1) == BOOK
    assert all(not len(source.train) for source in prepared.evaluation_sources)
    assert prepared.unigram_loss() > 0


def test_named_sets_are_evaluated_in_addition_to_the_held_out_documents(
    make_recipe: MakeRecipe, corpus_file: Path, book: Path, tmp_path: Path
) -> None:
    other = write_jsonl(tmp_path / "other.jsonl", make_texts(30, seed=9))
    recipe = make_recipe(corpus_file)
    sets = {"book": [{"name": str(book)}], "both": [{"name": str(book)}, {"name": str(other)}]}
    prepared = prepare(recipe.with_(**{"evaluation.every_steps": 1, "evaluation.sets": sets}))
    without = prepare(recipe)
    assert prepared.key == without.key
    assert [source.name for source in prepared.evaluated()] == [str(corpus_file)]
    assert prepared.eval_sequences() == without.eval_sequences() > 0
    assert text(prepared, "eval", source=1) == BOOK
    assert [source.name for source in prepared.evaluated("both")] == [str(book), str(other)]
    loader = BatchLoader(
        prepared, seed=1, global_batch_size=8, micro_batch_size=8, gradient_accumulation_steps=1, dp_rank=0, dp_size=1
    )
    assert loader.eval_sets == ["", "book", "both"]
    for name in loader.eval_sets:
        batches = list(loader.eval_batches(None, name))
        assert sum(batch.samples for batch in batches) == prepared.eval_sequences(name)
        assert {batch.eval_source for batch in batches} == {source.name for source in prepared.evaluated(name)}
    assert len(BOOK) - 8 < loader.eval_bytes(None, "book") < len(BOOK)  # the first token is no target


def test_a_set_without_a_sequence_is_named(make_recipe: MakeRecipe, corpus_file: Path, tmp_path: Path) -> None:
    (tmp_path / "few.txt").write_text("few words")
    recipe = make_recipe(corpus_file, packing="concat").with_(**{"evaluation.every_steps": 1})
    for name, said in {
        "few.txt": "evaluation.sets.few: contain too little",
        "none.txt": "evaluation.sets.few.0.name",
    }.items():
        with pytest.raises(DataError, match=re.escape(said)):
            prepare(recipe.with_(**{"evaluation.sets.few": [{"name": str(tmp_path / name)}]}))


def test_faults_of_evaluation_sources_name_them(make_recipe: MakeRecipe, corpus_file: Path, tmp_path: Path) -> None:
    (tmp_path / "empty.txt").write_text("")
    (tmp_path / "few.txt").write_text("few words")
    recipe = make_recipe(corpus_file, packing="concat").with_(**{"evaluation.every_steps": 1})
    for name, said in {
        "nothing.txt": r"evaluation.sources.0.name: '.*' was not found",
        "empty.txt": r"evaluation.sources.0.name: '.*' contains no text",
        "few.txt": r"evaluation.sources: contain too little text for one sequence of 32 tokens",
    }.items():
        with pytest.raises(DataError, match=said):
            prepare(recipe.with_(**{"evaluation.sources": [{"name": str(tmp_path / name)}]}))


def test_sources_with_equal_names_are_distinguished(make_recipe: MakeRecipe, tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "one two three", "other": "four five six"}\n' * 3)
    recipe = make_recipe(str(path), {"name": str(path), "text_column": "other"}, str(path), eval_fraction=0.0)
    names = [source.name for source in prepare(recipe).sources]
    assert names == [f"{path} train text #0", f"{path} train other", f"{path} train text #2"]
