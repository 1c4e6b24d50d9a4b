"""Short completions, and a preference recipe that is small enough to train dozens of times in a test."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

from llmtrain.recipe import Recipe
from tests.helpers.chat_tokenizers import case
from tests.helpers.small_verify import small

LENGTH = 192
VOCAB = 384
TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
"""ChatML without the line feed after a turn, so that the last token of a completion is trained on."""


def write_pairs(folder: Path, number: int = 300, labelled: bool = False) -> Path:
    """Writes pairs of many lengths, of which one or a few fit into a sequence, and a tokenizer with a chat template.

    labelled: one labelled completion instead of each pair.
    """
    case("chatml", folder / "tokenizer")
    draw = random.Random(1)

    def text() -> str:
        return " ".join("".join(draw.choices("abcde", k=draw.randrange(1, 6))) for _ in range(draw.randrange(1, 9)))

    rows = [{"prompt": text(), "chosen": f"yes {text()}", "rejected": f"no {text()}"} for _ in range(number)]
    if labelled:
        chosen = [draw.random() < 0.6 for _ in rows]
        texts = [row["chosen" if label else "rejected"] for row, label in zip(rows, chosen, strict=True)]
        rows = [
            {"prompt": row["prompt"], "completion": text, "label": label}
            for row, text, label in zip(rows, texts, chosen, strict=True)
        ]
    path = folder / ("labelled.jsonl" if labelled else "pairs.jsonl")
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def small_pairs(pairs: Path, **fields: Any) -> Recipe:
    """Like `small`, with pairs that `write_pairs` has written."""
    own = {
        "data.tokenizer": str(pairs.parent / "tokenizer"),
        "data.chat_template": TEMPLATE,
        "data.sequence_length": LENGTH,
        "model.config.max_position_embeddings": LENGTH,
        "model.config.vocab_size": VOCAB,
        "objective.name": "dpo",
    }
    return small(pairs, **{**own, **fields})
