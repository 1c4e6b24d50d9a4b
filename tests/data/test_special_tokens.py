"""Texts of special tokens in documents: counted, explained, refused or parsed."""

from __future__ import annotations

import json
import random
import re
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from llmtrain.data import Prepared, notes, prepare
from llmtrain.data.sources.special import SpecialTokenCounter, SpecialTokenCounts
from llmtrain.errors import DataError
from llmtrain.recipe import Recipe
from tests.helpers.small_corpora import MakeRecipe, make_texts, write_jsonl, write_tokenizer

CHAT = "<s>user\nhello {n}</s>\n<s>model\nhello</s>\n"


@pytest.fixture
def recipe(make_recipe: MakeRecipe, tmp_path: Path) -> Recipe:
    """Forty conversations under a template, for a tokenizer that has its tokens, and twenty plain texts."""
    tokenizer = write_tokenizer(tmp_path / "tokenizer")
    chats = [CHAT.format(n=number) for number in range(40)]
    return make_recipe(write_jsonl(tmp_path / "chat.jsonl", chats + make_texts(20)), tokenizer=str(tokenizer))


def stored(prepared: Prepared) -> list[list[int]]:
    streams = [prepared.sources[0].store.streams[split] for split in ("train", "eval")]
    return sorted(
        stream.tokens[start:end].tolist()
        for stream in streams
        for start, end in zip(stream.documents[:-1].astype(int), stream.documents[1:].astype(int), strict=True)
    )


def refusal(recipe: Recipe, **fields: Any) -> str:
    with pytest.raises(DataError) as caught:
        prepare(recipe.with_(**fields))
    assert [problem.rule for problem in caught.value.problems] == ["data.special_tokens"]
    return str(caught.value)


def test_a_template_in_the_text_is_refused_with_count_and_example(recipe: Recipe, tmp_path: Path) -> None:
    said = refusal(recipe)
    assert "data.sources.0.name" in said
    assert "160 texts of the tokenizer's special tokens (<s> 80, </s> 80) in 40 of 60 documents" in said
    assert r"such as '<s>user\nhello 0</s>" in said
    assert "--set data.special_tokens=parse" in said
    assert "if </s> separates documents" in said


def test_special_tokens_are_characters_as_text_and_tokens_when_parsed(recipe: Recipe) -> None:
    text, parsed = (prepare(recipe.with_(**{"data.special_tokens": how})) for how in ("text", "parse"))
    tokenizer = AutoTokenizer.from_pretrained(text.tokenizer_dir)
    texts = [json.loads(line)["text"] for line in Path(recipe.data.sources[0].name).read_text().splitlines()]

    def expected(split: bool) -> list[list[int]]:
        encoded = (tokenizer(one, add_special_tokens=False, split_special_tokens=split)["input_ids"] for one in texts)
        return sorted([*ids, 1] for ids in encoded)

    assert stored(text) == expected(split=True)
    assert stored(parsed) == expected(split=False)
    assert stored(text) != stored(parsed)
    assert text.key != parsed.key
    assert "read as ordinary text" in notes(text, recipe)[-1]


def test_a_store_made_as_text_follows_the_current_setting(recipe: Recipe, monkeypatch: pytest.MonkeyPatch) -> None:
    """The tokens are the same, and so is their key."""
    text = prepare(recipe.with_(**{"data.special_tokens": "text"}))
    monkeypatch.setattr("llmtrain.data.sources.files.FileCorpus.documents", None)  # reading it again fails
    assert "in 40 of 60 documents" in refusal(recipe)
    again = prepare(recipe.with_(**{"data.special_tokens": "text"}))
    assert (again.made, again.key) == (False, text.key)


def test_a_few_special_tokens_are_read_as_text_with_a_note(
    make_recipe: MakeRecipe, corpus_file: Path, texts: list[str], tmp_path: Path
) -> None:
    path = write_jsonl(tmp_path / "few.jsonl", [*texts, *["about <|endoftext|>"] * 10])
    recipe = make_recipe(path)
    (note,) = [line for line in notes(prepare(recipe), recipe) if "special" in line]
    assert "10 texts of the tokenizer's special tokens (<|endoftext|> 10) in 10 of 210 documents" in note
    assert "read as ordinary text" in note
    plain = make_recipe(corpus_file)
    assert not any("special" in line for line in notes(prepare(plain), plain))
    assert "11 texts" in refusal(make_recipe(write_jsonl(tmp_path / "more.jsonl", ["a <|endoftext|>"] * 11)))


def test_stories_in_one_file_get_a_hint(make_recipe: MakeRecipe, tmp_path: Path) -> None:
    (tmp_path / "stories.txt").write_text("\n<|endoftext|>\n".join(make_texts(50)))
    said = refusal(make_recipe(tmp_path / "stories.txt"))
    assert "in 1 of 1 documents" in said
    assert "if <|endoftext|> separates documents, neither is right: split the text there, and write each" in said


def test_a_tokenizer_that_parses_is_not_trained_on_the_characters(make_recipe: MakeRecipe, tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", [f"{text}<|endoftext|>" for text in make_texts(50)])
    prepared = prepare(make_recipe(path, special_tokens="parse"))
    vocabulary = AutoTokenizer.from_pretrained(prepared.tokenizer_dir).get_vocab()
    assert not any("oftext" in token for token in vocabulary if token != "<|endoftext|>")
    # A document that brings its end is not ended twice.
    assert all(ids.count(prepared.eos_id) == 1 for ids in stored(prepared))


def test_a_start_token_in_the_text_is_not_added_again(make_recipe: MakeRecipe, tmp_path: Path) -> None:
    tokenizer = str(write_tokenizer(tmp_path / "tokenizer", bos=True))
    path = write_jsonl(tmp_path / "a.jsonl", ["<s>one", "two"])
    prepared = prepare(make_recipe(path, tokenizer=tokenizer, special_tokens="parse", eval_fraction=0.0))
    assert [(ids[0], ids.count(0), ids[-1]) for ids in stored(prepared)] == [(0, 1, 1)] * 2


def test_the_counter_equals_a_plain_search() -> None:
    draw = random.Random(0)
    for tokens in (["<s>", "</s>", "<s>x", "[A]", "[AB]", "[", "."], ["<|a|>"], [f"<|{n}|>" for n in range(300)], [""]):
        text = "".join(draw.choice([*tokens, "<|", "x", "[A", " "]) for _ in range(3000))
        counter = SpecialTokenCounter(tokens)
        counter.count(text)
        found = counter.counts()
        wanted = sorted(filter(None, tokens), key=len, reverse=True)
        expected = re.findall("|".join(map(re.escape, wanted)), text) if wanted else []
        assert found.count == len(expected)
        assert all(expected.count(token) == count for token, count in found.tokens.items())


@pytest.mark.parametrize(("count", "characters", "few"), [(10, 0, True), (11, 10**6, False), (99, 10**8, True)])
def test_the_accepted_number_grows_with_the_corpus(count: int, characters: int, few: bool) -> None:
    assert SpecialTokenCounts(count, 1, 1, characters, {}, "").are_few == few
