"""Small corpora for the tests of the data."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path

from llmtrain.recipe import Recipe

MakeRecipe = Callable[..., Recipe]
WORDS = [
    "the",
    "of",
    "naïve",
    "snow",
    "雪",
    "model",
    "trains",
    "on",
    "text,",
    "with",
    "(many)",
    "words;",
    "and\nlines",
    "=",
    "12345\t#",
    "so\n",
]


def make_texts(count: int, seed: int = 0, longest: int = 120) -> list[str]:
    """Different documents of 1 to `longest` words."""
    rng = random.Random(seed)
    return [f"{n} " + " ".join(rng.choices(WORDS, k=rng.randint(1, longest))) for n in range(count)]


def write_jsonl(path: Path, texts: list[str], column: str = "text") -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps({"id": n, column: text}) + "\n" for n, text in enumerate(texts)))
    return path
