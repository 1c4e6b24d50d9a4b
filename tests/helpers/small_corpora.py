"""Small corpora for the tests of data preparation."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors

from llmtrain.data import BatchLoader, Prepared
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
    """Returns different documents of 1 to `longest` words."""
    rng = random.Random(seed)
    return [f"{n} " + " ".join(rng.choices(WORDS, k=rng.randint(1, longest))) for n in range(count)]


def write_jsonl(path: Path, texts: list[str], column: str = "text") -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps({"id": n, column: text}) + "\n" for n, text in enumerate(texts)))
    return path


def write_tokenizer(folder: Path, bos: bool = False, **config: Any) -> Path:
    """Writes a byte-level tokenizer in the format of a model folder."""
    names = {"<s>": 0, "</s>": 1}
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {**names, **{token: number + 2 for number, token in enumerate(alphabet)}}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(list(names))
    if bos:
        tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    folder.mkdir(parents=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    fields = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>", "eos_token": "</s>", **config}
    (folder / "tokenizer_config.json").write_text(json.dumps({k: v for k, v in fields.items() if v}))
    return folder


def whole_batches(prepared: Prepared, ends_after: int = 0) -> BatchLoader:
    """The batches of one rank: 8 sequences in one micro-batch."""
    sizes = {"global_batch_size": 8, "micro_batch_size": 8, "gradient_accumulation_steps": 1}
    return BatchLoader(prepared, seed=1, dp_rank=0, dp_size=1, ends_after=ends_after, **sizes)
