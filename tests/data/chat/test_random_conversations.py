"""Random conversations under every template, whose masks are checked by what the trained tokens decode to.

Each message holds words that occur nowhere else, so that the text of the trained tokens says whose words they are. This
shares nothing with the encoder, which neither searches for texts nor decodes tokens.
"""

from __future__ import annotations

import random
import re
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from llmtrain.data.chat.conversation import RowError, conversation
from llmtrain.data.chat.encode import Encoded
from tests.helpers.chat_tokenizers import NAMES, Case, about_template, case

BETWEEN = [
    " ",
    "\n",
    "\n\n",
    ", ",
    ": ",
    "\t",
    " 雪 ",
    " e\u0301 ",
    "🙂",
    "\r\n",
    ' {"a": 1} ',
    " </s>x ",
    " <|im_end|> ",
]
ODD = [*BETWEEN, "<think>", "</think>", "\n</think>\n\n", "<b>", "[INST]", "[/INST]", "  ", "\u0301", "\u200d"]
WORD = re.compile(r"([uas])q(\d+)z")
"""A word of the user, the assistant or the system text."""


def said(rng: random.Random, role: str, numbers: count[int], between: list[str]) -> str:
    """Unique words of a role with other text between them, and sometimes around them."""
    text = f"{role[0]}q{next(numbers)}z"
    for _ in range(rng.randrange(4)):
        text += f"{rng.choice(between)}{role[0]}q{next(numbers)}z"
    if between is ODD:
        text = rng.choice(["", *ODD]) + text + rng.choice(["", *ODD])
    return text


def conversations(
    rng: random.Random, about: dict[str, Any], between: list[str], size: int
) -> list[list[dict[str, Any]]]:
    spelled = [f" {text} " for text in (*about["special"], *about.get("added", []))] if between is ODD else []
    chats = []
    for _ in range(size):
        numbers = count(1)
        roles = ["user", "assistant"] * rng.randint(1, 4)
        if about.get("system", True) and rng.random() < 0.4:
            roles = ["system", *roles]
        texts = [said(rng, role, numbers, between) for role in roles]
        if spelled:
            texts = [text + rng.choice(["", *spelled]) for text in texts]
        chats.append([{"role": role, "content": text} for role, text in zip(roles, texts, strict=True)])
    return chats


def encoded(one: Case, chats: list[list[dict[str, Any]]]) -> list[Encoded | RowError]:
    return one.encoder().encode([conversation(chat) for chat in chats])


def alike(one: Encoded | RowError, other: Encoded | RowError) -> bool:
    if isinstance(one, RowError) or isinstance(other, RowError):
        return str(one) == str(other)
    same = one.ids.tolist() == other.ids.tolist() and one.loss_mask.tolist() == other.loss_mask.tolist()
    return same and (one.cuts, one.ends) == (other.cuts, other.ends)


EXACT = [name for name in NAMES if not about_template(name).keys() & {"refused", "turns"}]
TRAINED = [name for name in NAMES if "refused" not in about_template(name)]


@pytest.mark.parametrize("name", EXACT)
def test_exactly_the_text_of_the_assistant_is_trained_on(name: str, tmp_path: Path) -> None:
    one, rng = case(name, tmp_path), random.Random(name)
    lead, end = one.about.get("lead", ""), one.about["end"]
    chats = conversations(rng, one.about, BETWEEN[:-2], 6)
    for chat, found in zip(chats, encoded(one, chats), strict=True):
        assert isinstance(found, Encoded), str(found)
        assert one.trained(found) == [f"{lead}{turn['content']}{end}" for turn in chat if turn["role"] == "assistant"]


@pytest.mark.parametrize("name", TRAINED)
def test_no_text_of_another_role_is_trained_on(name: str, tmp_path: Path) -> None:
    one, rng = case(name, tmp_path), random.Random(name)
    chats = conversations(rng, one.about, ODD, 12)
    together = encoded(one, chats)
    accepted = 0
    for number, (chat, found) in enumerate(zip(chats, together, strict=True)):
        if number % 4 == 0:  # which no earlier one has prepared
            assert alike(found, encoded(one, [chat])[0])
        if isinstance(found, RowError):
            continue
        accepted += 1
        words = WORD.findall(" ".join(one.trained(found)))
        assert {who for who, _ in words} == {"a"}
        if "turns" not in one.about:
            theirs = [turn["content"].split("</think>")[-1] for turn in chat if turn["role"] == "assistant"]
            assert set(WORD.findall(" ".join(theirs))) <= set(words)
    assert accepted > 2
