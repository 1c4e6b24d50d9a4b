"""A small corpus, and recipes on it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from llmtrain.recipe import Recipe, parse_recipe
from tests.helpers.small_corpora import MakeRecipe, make_texts, write_jsonl


@pytest.fixture
def texts() -> list[str]:
    return make_texts(200)


@pytest.fixture
def corpus_file(tmp_path: Path, texts: list[str]) -> Path:
    return write_jsonl(tmp_path / "corpus.jsonl", texts)


@pytest.fixture
def cache_dir(tmp_path: Path) -> Path:
    return tmp_path / "cache"


@pytest.fixture
def make_recipe(cache_dir: Path) -> MakeRecipe:
    """`make_recipe(source, ..., sequence_length=32)`: a recipe on these files, with a small trained tokenizer."""

    def make(*sources: Path | str | dict[str, Any], **data: Any) -> Recipe:
        listed = [source if isinstance(source, dict) else {"name": str(source)} for source in sources]
        fields = {"tokenizer": {"vocab_size": 300}, "sequence_length": 32, "eval_fraction": 0.1, **data}
        return parse_recipe(
            {
                "name": "test",
                "model": {"architecture": "llama"},
                "data": {"sources": listed, "cache_dir": str(cache_dir), **fields},
                "optim": {"lr": 1e-3},
                "batch": {"global_batch_size": 8, "micro_batch_size": 2},
                "train": {"max_steps": 10},
            }
        )

    return make
