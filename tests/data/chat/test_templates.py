"""Many chat templates: each trains on exactly the assistant's turns, or is refused for a stated reason."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from llmtrain.data.chat.conversation import Conversation, RowError, conversation
from llmtrain.data.chat.encode import Encoded
from tests.helpers.chat_tokenizers import NAMES, Case, about_template, case
from tests.helpers.small_chats import CALL, CHAT, THINKING, TOOL

SYSTEM = {"role": "system", "content": "Be brief."}


def those_with(part: str) -> list[str]:
    return [name for name in NAMES if part in about_template(name)]


@pytest.fixture
def one(name: str, tmp_path: Path) -> Case:
    return case(name, tmp_path)


def encoded(one: Case, chat: Conversation, **options: Any) -> Encoded:
    (found,) = one.encoder(**options).encode([chat])
    assert isinstance(found, Encoded), str(found)
    return found


def wrapped(one: Case, text: str) -> str:
    return one.about.get("lead", "") + text + one.about["end"]


@pytest.mark.parametrize("name", NAMES)
def test_exactly_the_turns_of_the_assistant_are_trained_on(one: Case) -> None:
    chat = conversation([SYSTEM, *CHAT] if one.about.get("system", True) else CHAT)
    if "refused" in one.about:
        (found,) = one.encoder().encode([chat])
        assert isinstance(found, RowError)
        assert one.about["refused"] in str(found)
        return
    found = encoded(one, chat)
    expected = one.about.get("turns") or [wrapped(one, "It is 4."), wrapped(one, "Bye.")]
    assert one.trained(found) == expected
    theirs = AutoTokenizer.from_pretrained(one.folder).apply_chat_template(list(chat.messages), return_dict=False)
    assert found.ids.tolist()[: len(theirs)] == theirs
    assert found.ids.tolist()[len(theirs) :] in ([], [AutoTokenizer.from_pretrained(one.folder).eos_token_id])
    assert one.trained(encoded(one, chat, train_on="last_assistant")) == expected[-1:]
    assert encoded(one, chat, train_on="all").trained.all()


@pytest.mark.parametrize("name", those_with("thinking"))
def test_reasoning_is_trained_on_if_the_template_writes_it(one: Case) -> None:
    turns = THINKING
    if one.about["special"][0] == "<|startoftext|>":  # it reads thinking from a field only
        turns = [
            {**turn, "content": turn["content"].split("</think>\n\n")[-1]}
            | ({"thinking": "They leave."} if turn is THINKING[3] else {})
            for turn in THINKING
        ]
    assert one.trained(encoded(one, conversation(turns))) == one.about["thinking"]


@pytest.mark.parametrize("name", those_with("call"))
def test_calls_are_trained_on_and_results_are_not(one: Case) -> None:
    answer = one.about.get("answer") or wrapped(one, "Sunny.")
    assert one.trained(encoded(one, conversation(CALL, [TOOL]))) == [one.about["call"], answer]
