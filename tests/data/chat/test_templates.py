"""Many chat templates: each trains on exactly the assistant's turns, or is refused for a stated reason."""

from __future__ import annotations

import re
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from llmtrain.data.chat.conversation import Conversation, RowError, conversation
from llmtrain.data.chat.encode import Encoded
from llmtrain.data.chat.template import ChatTemplate
from tests.helpers.chat_tokenizers import NAMES, Case, about_template, case, write_chat_tokenizer
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


@pytest.mark.parametrize("name", ["glm4", "glm4_5"])
def test_a_call_at_the_end_ends_with_the_token_before_its_result(one: Case) -> None:
    """These templates have no end token: generation must stop where the result begins."""
    found = encoded(one, conversation(CALL[:2], [TOOL]))
    (call,) = one.trained(found)
    assert call.count("get_weather") == 1
    assert call.endswith("<|observation|>")
    assert found.ends == {int(found.ids[-1])}


@pytest.mark.parametrize(
    ("name", "end"),
    [
        ("gemma_training", "<end_of_turn>"),
        ("lfm2_training", "<|im_end|>"),
        ("lfm2_2_5", "<|im_end|>"),
        ("nemotron_3_nano_training", "<|im_end|>"),
        ("qwen2_5_training", "<|im_end|>"),
        ("qwen3_training", "<|im_end|>"),
        ("qwen3_8_training", "<|im_end|>"),
    ],
)
def test_a_line_end_in_a_generation_block_does_not_end_the_turn(name: str, end: str, tmp_path: Path) -> None:
    """Blocks of TRL's templates, and of LFM2.5's own, contain it. As a stop token, it would end texts at a line."""
    source = (files("trl") / "chat_templates" / f"{name}.jinja").read_text()
    special = sorted({*re.findall(r"<\|\w+\|>|<\w+_of_turn>", source), "<bos>", "<eos>"})
    about = {"special": special, "bos": "<bos>", "eos": "<eos>"}
    folder = write_chat_tokenizer(tmp_path, about, source)
    one = Case(source, about, folder, ChatTemplate(source, {"bos_token": "<bos>", "eos_token": "<eos>"}))
    found = encoded(one, conversation(CHAT))
    assert [text.removeprefix("<think></think>").split("</think>\n\n")[-1] for text in one.trained(found)] == [
        f"It is 4.{end}",
        f"Bye.{end}",
    ]
    assert AutoTokenizer.from_pretrained(folder).convert_ids_to_tokens(sorted(found.ends)) == [end]


@pytest.mark.parametrize("name", ["chatml"])
def test_a_generation_prompt_is_not_trained_on_if_a_block_contains_a_part_of_it(one: Case) -> None:
    """As in TRL's template for Qwen 2.5, whose blocks begin with the line end of the prompt."""
    source = (
        "{% for m in messages %}{% if m.role == 'assistant' %}{{ '<|im_start|>assistant' }}{% generation %}"
        "{{ '\n' + m.content + '<|im_end|>' }}{% endgeneration %}{% else %}{{ '<|im_start|>user\n' + m.content }}"
        "{% endif %}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
    )
    one = one._replace(source=source, template=ChatTemplate(source, one.template.special))
    assert one.trained(encoded(one, conversation(CHAT))) == ["It is 4.<|im_end|>", "Bye.<|im_end|>"]
