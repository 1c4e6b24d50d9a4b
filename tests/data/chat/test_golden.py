"""Tokens, masks and faults of conversations of many kinds under each template, against hashes of an earlier version.

`python -m tests.data.chat.test_golden` writes the hashes again, after a change that is meant to change tokens: it needs
another `FORMAT` in `llmtrain/data/chat/tokenize.py`.
"""

from __future__ import annotations

import json
import random
import tempfile
from pathlib import Path
from typing import Any

import pytest
import xxhash

from llmtrain.data.chat.conversation import Conversation, conversation
from llmtrain.data.chat.encode import Encoded
from tests.helpers.chat_tokenizers import NAMES, Case, case
from tests.helpers.small_chats import CALL, THINKING, TOOL

HASHES = Path(__file__).with_name("golden.json")
OPTIONS: tuple[dict[str, Any], ...] = (
    {},
    {"train_on": "last_assistant"},
    {"train_on": "all"},
    {"parse_special": True},
)
TEXTS = (
    *(
        "It is 4.",
        "What is 2+2?",
        " yes",
        "no ",
        "\n\nline\n\n",
        "é",
        "e\u0301",
        "\u0301a",
        "日本語",
        "🙂",
        "a\tb",
        "  ",
    ),
    *("<think>", "</think>", "[INST]", "<b>", "USER: ", '{"name": "value"}', "\r\n", "user\nassistant\n", "."),
)


def conversations(one: Case) -> list[Conversation]:
    rng = random.Random(one.folder.name)
    words = [*TEXTS, *one.about["special"], *one.about.get("added", [])]

    def text() -> str:
        plain = rng.random() < 0.6
        found = "".join(rng.choices(TEXTS[:2] if plain else words, k=rng.randint(1, 4)))
        return found if found.strip() else "a"

    chats = []
    for number in range(14):
        exchanges = [("user", "assistant")] * rng.randint(1, 3)
        messages: list[dict[str, Any]] = [{"role": role, "content": text()} for pair in exchanges for role in pair]
        if number % 4 == 1:
            messages = [{"role": "system", "content": text()}, *messages]
        if number % 6 == 2:
            messages[-1]["train"] = number % 12 == 2
        if number % 7 == 3:
            messages[-1]["thinking"] = text()
        chats.append(conversation(messages))
    chats += [conversation(CALL, [TOOL]), conversation(THINKING), conversation(CALL)]
    chats += [conversation([{"role": "user", "content": "a"}, *THINKING]), conversation(THINKING[:-1])]
    return chats + chats[:6]


def hashed(one: Case) -> str:
    found = []
    for options in OPTIONS:
        for made in one.encoder(**options).encode(conversations(one)):
            if isinstance(made, Encoded):
                found.append([made.ids.tolist(), made.loss_mask.tolist(), list(made.cuts), sorted(made.ends)])
            else:
                found.append([str(made)])
    return xxhash.xxh3_64_hexdigest(json.dumps(found).encode())


@pytest.mark.parametrize("name", NAMES)
def test_tokens_and_masks_are_those_of_earlier_versions(name: str, tmp_path: Path) -> None:
    assert hashed(case(name, tmp_path / name)) == json.loads(HASHES.read_text())[name]


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        made = {name: hashed(case(name, Path(folder) / name)) for name in NAMES}
    HASHES.write_text(json.dumps(made, indent=1) + "\n")
