"""New tokens of a tokenizer: the rows that a plan counts, and the output of data preparation and export."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tokenizers import Tokenizer
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from llmtrain.data import prepare
from llmtrain.errors import DataError, RecipeError
from llmtrain.plan.facts.vocabulary import control_tokens, shipped_templates, with_resized_vocabulary
from llmtrain.plan.rules import resolve
from llmtrain.recipe import DataConfig, ModelConfig, Recipe, Source
from llmtrain.recipe.cluster import Cluster
from tests.helpers.batches import tiny_recipe
from tests.helpers.chat_tokenizers import base_tokenizer

CHATML = ("<|im_start|>", "<|im_end|>")
CHAT = {
    "messages": [
        {"role": "user", "content": "What is 2+2?"},
        {"role": "assistant", "content": "It is 4. <|im_end|>"},
    ]
}


@pytest.fixture
def folders(tmp_path) -> tuple[Path, Path, int]:
    """A tokenizer, a model's configuration that has just as many rows, and their number."""
    inner = Tokenizer.from_str(base_tokenizer())
    inner.add_special_tokens(["<|endoftext|>"])
    PreTrainedTokenizerFast(tokenizer_object=inner, eos_token="<|endoftext|>").save_pretrained(tmp_path / "tokenizer")
    size = inner.get_vocab_size()
    return tmp_path / "tokenizer", _model(tmp_path / "model", size), size


def _model(folder: Path, rows: int) -> Path:
    folder.mkdir()
    config = {**tiny_recipe().model.config, "model_type": "llama", "vocab_size": rows}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def _recipe(tokenizer: Path, model: Path, new_tokens, **fields) -> Recipe:
    corpus = tokenizer.parent / "chats.jsonl"
    corpus.write_text("".join(json.dumps(CHAT) + "\n" for _ in range(8)))
    data = DataConfig(
        sources=[Source(str(corpus))],
        tokenizer=str(tokenizer),
        sequence_length=128,
        chat_template="chatml",
        eval_fraction=0.0,
        cache_dir=str(tokenizer.parent / "cache"),
    )
    chosen = ModelConfig(pretrained=str(model), new_tokens=new_tokens)
    return tiny_recipe().model_copy(update={"model": chosen, "data": data}).with_(**fields)


@pytest.mark.parametrize("new_tokens", ["template", ["<|im_start|>", "<|im_end|>", "<|im_end|>"]])
def test_the_plan_counts_the_rows_that_data_preparation_needs(new_tokens, folders):
    tokenizer, model, size = folders
    plan = resolve(_recipe(tokenizer, model, new_tokens), Cluster())
    assert plan.recipe.model.kept_rows == size
    assert plan.model.vocab_size == plan.recipe.vocab_size == 384  # the next multiple of 128
    assert with_resized_vocabulary(plan.recipe) == plan.recipe
    prepared = prepare(plan.recipe)
    assert prepared.vocab_size == size + 2
    made = AutoTokenizer.from_pretrained(prepared.tokenizer_dir)
    assert made.convert_tokens_to_ids(list(CHATML)) == [size, size + 1]
    assert made("<|im_end|>")["input_ids"] == [size + 1]


def test_the_tokens_of_the_template_are_special_and_those_of_a_list_are_not(folders):
    tokenizer, model, _ = folders
    for new_tokens, shown in (("template", "It is 4."), (CHATML, "It is 4.<|im_end|>")):
        folder = prepare(with_resized_vocabulary(_recipe(tokenizer, model, new_tokens))).tokenizer_dir
        made = AutoTokenizer.from_pretrained(folder)
        assert made.decode(made("It is 4.<|im_end|>")["input_ids"], skip_special_tokens=True) == shown


def test_conversations_are_encoded_with_new_tokens(folders):
    tokenizer, model, size = folders
    prepared = prepare(
        with_resized_vocabulary(_recipe(tokenizer, model, "template", **{"data.special_tokens": "text"}))
    )
    tokens = prepared.sources[0].store.streams["train"]
    first = tokens.tokens[: int(tokens.documents[1])].tolist()
    # Two turns; the text of the second one that spells a token stays text.
    assert (first.count(size), first.count(size + 1)) == (2, 2)


def test_other_tokens_give_another_store(folders):
    tokenizer, model, _ = folders
    keys = {
        prepare(with_resized_vocabulary(_recipe(tokenizer, model, tokens))).key
        for tokens in ((), CHATML, "template", [*CHATML, "<x>"])
    }
    assert len(keys) == 4


def test_spare_rows_are_used_and_a_known_token_changes_nothing(folders, tmp_path):
    tokenizer, _, size = folders
    larger = _model(tmp_path / "larger", size + 60)
    found = with_resized_vocabulary(_recipe(tokenizer, larger, "template")).model
    assert (found.kept_rows, found.config) == (size, {})
    found = with_resized_vocabulary(_recipe(tokenizer, larger, ["<|endoftext|>"])).model
    assert (found.kept_rows, found.config) == (size + 60, {})


def test_a_tokenizer_with_more_tokens_than_the_model_needs_new_tokens(folders, tmp_path):
    tokenizer, _, size = folders
    smaller = _model(tmp_path / "smaller", size - 1)
    with pytest.raises(DataError, match="only") as error:
        prepare(_recipe(tokenizer, smaller, ()))
    assert "model.new_tokens" in error.value.problems[0].fix
    found = with_resized_vocabulary(_recipe(tokenizer, smaller, ["<|endoftext|>"])).model
    assert (found.kept_rows, found.config) == (size - 1, {"vocab_size": 384})


def test_rows_of_known_tokens_are_never_removed(folders):
    tokenizer, model, size = folders
    recipe = with_resized_vocabulary(_recipe(tokenizer, model, "template"))
    with pytest.raises(DataError, match="already has") as error:
        prepare(recipe.with_(**{"model.kept_rows": size - 1}))
    assert error.value.problems[0].fix == f"--set model.kept_rows={size}"


@pytest.mark.parametrize(
    ("fields", "rule"),
    [
        ({"model.new_tokens": ["<new>"]}, "model.new_tokens"),
        ({"model.kept_rows": 3}, "model.new_tokens"),
        ({"model.new_tokens": [""]}, "recipe.value"),
    ],
)
def test_meaningless_new_tokens_are_refused(fields, rule):
    with pytest.raises(RecipeError) as error:
        resolve(tiny_recipe(**fields), Cluster())
    assert {problem.rule for problem in error.value.problems} == {rule}


def test_a_tokenizer_without_a_template_is_refused(folders):
    tokenizer, model, _ = folders
    with pytest.raises(DataError, match="has no chat template"):
        with_resized_vocabulary(_recipe(tokenizer, model, "template", **{"data.chat_template": None}))


def test_special_tokens_of_a_template_are_found():
    assert control_tokens(shipped_templates()["chatml"]) == CHATML
    text = "'<start_of_turn>' + role + '<|eot_id|>' <｜User｜> if a <b> and c|> '<|' + role + '|>' [INST]"
    assert control_tokens(text) == ("<start_of_turn>", "<|eot_id|>", "<｜User｜>")
    assembled = (
        "{{ bos_token + '' }}{% for m in messages %}{{ '<|' + m.role + '|>' + m.content + '<|end|>' }}{% endfor %}"
    )
    assert control_tokens(assembled) == ("<|end|>", "<|system|>", "<|user|>", "<|assistant|>", "<|tool|>")


def test_a_template_without_special_tokens_is_reported(folders):
    tokenizer, model, _ = folders
    with pytest.raises(DataError, match="writes no text like"):
        with_resized_vocabulary(_recipe(tokenizer, model, "template", **{"data.chat_template": "plain"}))


@pytest.mark.parametrize(
    ("fields", "frozen"),
    [
        ({"model.adapter.rank": 4}, "embedding and head"),
        ({"model.adapter.rank": 4, "model.adapter.modules_to_save": ["lm_head"]}, "the embedding"),
        ({"model.adapter.rank": 4, "model.adapter.modules_to_save": ["lm_head", "embed_tokens"]}, None),
        ({"model.trainable": ["*.embed_tokens.*"]}, "the head"),
        ({}, None),
    ],
)
def test_frozen_new_rows_are_refused(fields, frozen, folders):
    tokenizer, model, _ = folders
    recipe = _recipe(tokenizer, model, "template", **{"model.config.tie_word_embeddings": False}, **fields)
    refused = []
    try:
        resolve(recipe, Cluster())
    except RecipeError as error:
        refused = [(one.rule, frozen is not None and f"but {frozen} would" in one.message) for one in error.problems]
    assert refused == ([] if frozen is None else [("model.new_tokens_trained", True)])
