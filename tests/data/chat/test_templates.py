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
CALL_WITHOUT_TEXT = [
    CALL[0],
    {"role": "assistant", "tool_calls": [{"function": {"name": "get_weather", "arguments": {"days": 2}}}]},
    *CALL[2:],
]
PARALLEL = [
    CALL[0],
    {"role": "assistant", "tool_calls": [{"function": {"name": name, "arguments": {"x": "1"}}} for name in "fg"]},
    {"role": "tool", "content": "one"},
    {"role": "tool", "content": "two"},
    {"role": "assistant", "content": "Both."},
]


def those_with(part: str) -> list[str]:
    return [name for name in NAMES if part in about_template(name)]


@pytest.fixture
def one(name: str, tmp_path: Path) -> Case:
    return case(name, tmp_path)


def encoded(one: Case, chat: Conversation, **options: Any) -> Encoded:
    (found,) = one.encoder(**options).encode([chat])
    assert isinstance(found, Encoded), str(found)
    return found


def case_of_trl(name: str, folder: Path) -> Case:
    """Reads a template of TRL's, and writes a tokenizer for it."""
    pytest.importorskip("trl", reason="the oldest versions are tested without TRL")
    source = (files("trl") / "chat_templates" / f"{name}.jinja").read_text()
    special = sorted({*re.findall(r"<\|\w+\|>|<\w+_of_turn>", source), "<bos>", "<eos>"})
    about = {"special": special, "bos": "<bos>", "eos": "<eos>"}
    template = ChatTemplate(source, {"bos_token": "<bos>", "eos_token": "<eos>"})
    return Case(source, about, write_chat_tokenizer(folder, about, source), template)


def stops(one: Case, found: Encoded) -> list[str]:
    texts = AutoTokenizer.from_pretrained(one.folder).convert_ids_to_tokens(sorted(found.ends))
    return sorted(texts)


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
    assert encoded(one, chat, train_on="all").loss_mask.all()


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


@pytest.mark.parametrize("name", ["chatml", "chatml_generation", "qwen2_5"])
def test_an_end_token_that_is_not_special_ends_turns_and_is_told(name: str, tmp_path: Path) -> None:
    """Some tokenizers that were extended for ChatML declare its tokens so. The model only stops at the end token."""
    source = case(name, tmp_path / "known").source
    known = about_template(name)
    added = ["<|im_start|>", "<|im_end|>", *known.get("added", [])]
    about = {**known, "special": ["<|endoftext|>"], "added": added, "eos": "<|endoftext|>"}
    template = ChatTemplate(source, {"eos_token": "<|endoftext|>"})
    one = Case(source, about, write_chat_tokenizer(tmp_path / "own", about, source), template)
    found = encoded(one, conversation(CHAT))
    assert one.trained(found) == ["It is 4.<|im_end|>", "Bye.<|im_end|>"]
    assert stops(one, found) == ["<|im_end|>"]
    assert one.encoder().ordinary_end == "<|im_end|>"
    assert case(name, tmp_path / "again").encoder().ordinary_end == ""
    if "call" in known:
        (call, _) = one.trained(encoded(one, conversation(CALL, [TOOL])))
        assert call == known["call"]


@pytest.mark.parametrize("tag", ["<think>", "<arg_key>", "</tool_call>"])
@pytest.mark.parametrize("name", ["glm4_5"])
def test_a_token_of_a_message_that_is_not_special_does_not_end_the_turn(one: Case, tag: str) -> None:
    """The template writes no end token, but writes such tokens elsewhere."""
    found = encoded(one, conversation([*CHAT[:-1], {"role": "assistant", "content": f"So {tag} it ends {tag}"}]))
    assert one.trained(found)[-1].endswith("<|endoftext|>")
    assert stops(one, found) == ["<|endoftext|>", "<|user|>"]
    assert one.encoder().ordinary_end == ""


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
    one = case_of_trl(name, tmp_path)
    found = encoded(one, conversation(CHAT))
    assert [text.removeprefix("<think></think>").split("</think>\n\n")[-1] for text in one.trained(found)] == [
        f"It is 4.{end}",
        f"Bye.{end}",
    ]
    assert stops(one, found) == [end]


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


@pytest.mark.parametrize("name", ["gptoss", "gptoss_training"])
def test_the_name_of_a_call_in_the_header_of_its_result_is_not_trained_on(name: str, tmp_path: Path) -> None:
    one = case_of_trl(name, tmp_path)
    for call in (CALL, CALL_WITHOUT_TEXT):
        found = encoded(one, conversation(call, [TOOL]))
        trained = one.trained(found)
        assert [text.count("get_weather") for text in trained] == [1, 0]
        assert trained[0].endswith("}<|call|>")
        assert trained[1] == "<|channel|>final<|message|>Sunny.<|return|>"
        assert stops(one, found) == ["<|call|>", "<|return|>"]


@pytest.mark.parametrize("name", ["chatml"])
def test_the_names_of_parallel_calls_may_be_written_again_with_their_results(one: Case) -> None:
    source = (
        "{% set ns = namespace(calls=[]) %}{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}"
        "{% if m.tool_calls %}{% set ns.calls = m.tool_calls %}"
        "{% for call in m.tool_calls %}{{ call.function.name + call.function.arguments | tojson }}{% endfor %}"
        "{% elif m.role == 'tool' %}{{ ns.calls[0].function.name + ':' + m.content }}{% set ns.calls = ns.calls[1:] %}"
        "{% else %}{{ m.content }}{% endif %}{{ '<|im_end|>\n' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
    )
    one = one._replace(source=source, template=ChatTemplate(source, one.template.special))
    found = encoded(one, conversation(PARALLEL))
    assert one.trained(found) == ['f{"x": "1"}g{"x": "1"}<|im_end|>', "Both.<|im_end|>"]


@pytest.mark.parametrize("name", ["gpt_oss"])
def test_a_template_that_writes_only_one_of_several_calls_is_refused(one: Case) -> None:
    (found,) = one.encoder().encode([conversation(PARALLEL)])
    assert isinstance(found, RowError)
    assert "leaves out the call 2 of message 2" in str(found)


@pytest.mark.parametrize(("name", "is_accepted"), [("chatml", True), ("qwen2_5", False), ("llama3", False)])
def test_a_turn_of_the_assistant_at_the_beginning_needs_a_prompt(one: Case, is_accepted: bool) -> None:
    """Many templates read the first message, or write a token before it, so there is no prompt without messages."""
    (found,) = one.encoder().encode([conversation([CHAT[3], *CHAT[:2]])])
    assert isinstance(found, Encoded) == is_accepted
    assert is_accepted or "it begins the conversation: give a system text" in str(found)
    prompted = encoded(one, conversation([SYSTEM, CHAT[3], *CHAT[:2]]))
    assert one.trained(prompted) == [wrapped(one, "Bye."), wrapped(one, "It is 4.")]


@pytest.mark.parametrize("name", ["gpt_oss", "qwen2_5"])
def test_a_developer_writes_the_system_text(one: Case) -> None:
    developer = {**SYSTEM, "role": "developer"}
    found, expected = (encoded(one, conversation([first, *CHAT])) for first in (developer, SYSTEM))
    assert found.ids.tolist() == expected.ids.tolist()
