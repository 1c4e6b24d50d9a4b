"""Conversations in rows of several formats are normalized, and faulty rows are reported."""

from __future__ import annotations

import json
from typing import Any

import pytest

from llmtrain.data.chat.conversation import (
    MAX_MESSAGES,
    TRAINED,
    ChatSource,
    Conversation,
    Format,
    RowError,
    conversation,
    find_layout,
)
from llmtrain.errors import DataError

ASKED = {"role": "user", "content": "a"}
SAID = {"role": "assistant", "content": "b"}
NESTED = json.loads('{"a":' * 200 + "[]" + "}" * 200)


def read(row: dict[str, Any], system: str | None = None, **named: str) -> Conversation:
    (found,) = find_layout(row, "data.sources.0", format=None, named=named, system=system).read(row)
    return found


def test_formats_with_usual_columns_are_normalized() -> None:
    chat = conversation([ASKED, SAID])
    assert read({"id": 1, "messages": [ASKED, SAID]}) == chat
    assert read({"conversations": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}]}) == chat
    assert read({"prompt": "a", "completion": "b"}) == chat
    assert read({"prompt": [ASKED], "completion": [SAID]}) == chat
    assert read({"question": "a", "answer": "b"}) == chat
    assert read({"instruction": "a", "input": "", "output": "b"}) == chat
    assert read({"mine": [ASKED, SAID]}, messages="mine") == chat
    assert read({"instruction": "x", "input": "y", "output": "b"}).messages[0]["content"] == "x\n\ny"


def test_a_system_text_comes_from_the_row_or_else_from_the_source() -> None:
    row = {"messages": [ASKED, SAID]}
    assert read({**row, "system": "s"}, "t").messages[0] == {"role": "system", "content": "s"}
    assert read(row, "t").messages[0] == {"role": "system", "content": "t"}
    own = [{"role": "system", "content": "u"}, ASKED, SAID]
    assert read({"messages": own}, "t").messages[0]["content"] == "u"


def test_calls_have_their_arguments_as_an_object() -> None:
    expected = {"type": "function", "function": {"name": "f", "arguments": {"x": 1}}}
    calls: list[Any] = [
        {"function": {"name": "f", "arguments": '{"x": 1}'}},
        {"name": "f", "arguments": {"x": 1}},
    ]
    for call in calls:
        assert conversation([ASKED, {"role": "assistant", "tool_calls": [call]}]).messages[1]["tool_calls"] == [
            expected
        ]
    for explicit in ({"x": None}, '{"x": null}'):
        chat = conversation([ASKED, {"role": "assistant", "tool_calls": [{"name": "f", "arguments": explicit}]}])
        assert chat.messages[1]["tool_calls"][0]["function"]["arguments"] == {"x": None}
    shared = conversation(
        [ASKED, {"from": "function_call", "value": '{"name": "f", "arguments": {"x": 1}}'}], '[{"a": 1}]'
    )
    assert (shared.messages[1]["tool_calls"], shared.tools) == ([expected], ({"a": 1},))


def test_a_message_can_be_excluded_from_training() -> None:
    chat = conversation([ASKED, {**SAID, "weight": 0}, ASKED, {**SAID, "train": True}, ASKED, {**SAID, "train": False}])
    assert chat.trained == (True, False, True, True, True, False)


@pytest.mark.parametrize("key", TRAINED)
def test_each_known_key_excludes_a_message(key: str) -> None:
    chat = conversation([ASKED, {**SAID, key: 0}, ASKED, {**SAID, key: True}])
    assert chat.trained == (True, False, True, True)


def test_a_function_call_is_a_tool_call() -> None:
    """OpenAI's older form, whose results have the role `function`."""
    call = {"name": "f", "arguments": '{"x": 1}'}
    result = {"role": "function", "content": "1"}
    older = [ASKED, {"role": "assistant", "content": None, "function_call": call}, result]
    assert conversation(older) == conversation([ASKED, {"role": "assistant", "tool_calls": [call]}, result])


@pytest.mark.parametrize(("question", "answer"), [("instruction", "output"), ("prompt", "response")])
def test_a_history_comes_before_the_question(question: str, answer: str) -> None:
    row = {question: "c", answer: "d", "history": [["a", "b"]]}
    (found,) = find_layout(row, "data", format=None, named={}).read(row)
    assert [message["content"] for message in found.messages] == ["a", "b", "c", "d"]
    assert all(found.trained)
    with pytest.raises(RowError, match="not a list of pairs of a question and its answer"):
        find_layout(row, "data", format=None, named={}).read({**row, "history": ["a"]})


def test_columns_that_nothing_reads_are_listed_or_refused() -> None:
    row = {"messages": [ASKED, {**SAID, "id": 5, "name": None}], "constraints": 1, "loss": 0.3, "split": None}
    layout = find_layout(row, "data", format=None, named={})
    assert layout.read(row)
    assert layout.unread(row) == {"column 'constraints'", "column 'loss'", "key 'id'"}
    for masking in ({"loss_mask": [0, 1]}, {"train": False}):
        with pytest.raises(RowError, match="which may say what is trained on"):
            layout.read({**row, **masking})


@pytest.mark.parametrize(
    ("row", "name", "fault"),
    [
        ({"prompt": "a", "completion": "b", "label": False}, "label", "set objective.name=kto, or list 'label'"),
        ({"prompt": "a", "completion": "b", "label": "0"}, "label", "may say whether the completion is desirable"),
        ({"question": "a", "answer": "b", "context": "c"}, "context", "may be a part of the conversation: 'c'"),
        ({"instruction": "a", "output": "b", "tools": [{"name": "f"}]}, "tools", "a part of the conversation"),
        (
            {"messages": [ASKED, SAID], "system_turns": [{"role": "system", "content": "s"}]},
            "system_turns",
            "a part of",
        ),
        ({"prompt": "a", "completion": "b", "role": "system"}, "role", "the column 'role', which may say who speaks"),
        ({"messages": [ASKED, {**SAID, "speaker": "user"}]}, "speaker", "the key 'speaker', which may say who speaks"),
        ({"messages": [ASKED, {**SAID, "response": "c"}]}, "response", "the key 'response', which may be a part of"),
        ({"messages": [ASKED, {**SAID, "masked": True}]}, "masked", "the unknown key 'masked', which may be a mask"),
        ({"messages": [ASKED, SAID], "loss_mask": [0, 1]}, "loss_mask", "or list 'loss_mask' in `ignore`"),
        (
            {"messages": json.dumps([ASKED, {**SAID, "masked": True}])},
            "masked",
            "the unknown key 'masked', which may be a mask",
        ),
    ],
)
def test_what_looks_like_a_role_a_turn_or_a_mask_is_read_or_ignored_on_purpose(
    row: dict[str, Any], name: str, fault: str
) -> None:
    with pytest.raises(RowError, match=fault):
        find_layout(row, "data", format=None, named={}).read(row)
    layout = ChatSource(ignored=(name,)).layout(row, "data")
    assert layout.read(row)
    assert not layout.unread(row)


@pytest.mark.parametrize(
    "row",
    [
        {"prompt": "a", "prompt_id": "f0e3", "messages": [ASKED, SAID]},  # as in ultrachat_200k
        {"prompt": "a", "completion": "b", "label": "topic", "model": "gpt-4", "source": "human", "turn": 1},
        {
            "messages": [ASKED, {**SAID, "speaker": "gpt", "sender": "Bob"}],
            "system": "",
            "chosen": "x",
            "rejected": "y",
        },
        {"instruction": "a", "input": "", "output": "b c", "answer": "c", "tools": [], "history": None},
    ],
)
def test_columns_that_repeat_a_turn_or_describe_a_row_are_only_listed(row: dict[str, Any]) -> None:
    layout = find_layout(row, "data", format=None, named={})
    assert layout.read(row)
    assert layout.unread(row)


def test_keys_of_parts_that_nothing_reads_are_listed_or_refused() -> None:
    def row(**more: Any) -> dict[str, Any]:
        return {"messages": [{"role": "user", "content": [{"type": "text", "text": "a", **more}]}, SAID]}

    layout = find_layout(row(), "data", format=None, named={})
    assert layout.unread(row()) == set()
    assert layout.unread(row(cache_control={"type": "ephemeral"})) == {"key 'content.cache_control'"}
    for more, fault in (({"train": False}, "a part of message 1 has the unknown key"), ({"type": "image"}, "not text")):
        with pytest.raises(RowError, match=fault):
            layout.read(row(**more))


@pytest.mark.parametrize(
    ("turns", "fault"),
    [
        ("hello", "not a list of messages"),
        ([], "not a list of messages"),
        (["hello"], "message 1 is 'hello', not an object"),
        ([{"role": "narrator", "content": "a"}, SAID], "message 1 has the unknown role 'narrator'"),
        ([{"role": ["user"], "content": "a"}, SAID], "unknown role"),
        ([ASKED], "the assistant says nothing"),
        ([ASKED, {"role": "assistant", "content": " "}], "message 2 (assistant) is empty"),
        ([{"role": "user", "content": None}, SAID], "message 1 (user) is empty"),
        ([ASKED, {"role": "assistant", "content": 5}], "the content of message 2 is 5, not text"),
        ([{"role": "user", "content": [{"type": "audio", "url": "x"}]}, SAID], "parts that are not text"),
        ([ASKED, {"role": "system", "content": "s"}, SAID], "message 2 is a system text that is not the first"),
        ([ASKED, {"role": "tool", "content": "s"}, SAID], "message 2 is the result of a tool that was not called"),
        (
            [ASKED, {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{x"}}]}],
            "are not JSON",
        ),
        (
            [ASKED, {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "3"}}]}],
            "not an object",
        ),
        ([ASKED, {"role": "assistant", "tool_calls": [{"function": {}}]}], "names no function"),
        ([{**ASKED, "tool_calls": [{"name": "f"}]}, SAID], "not a list of the assistant's calls"),
        (
            [ASKED, {"role": "assistant", "tool_calls": [{"name": "f", "arguments": {"x": NESTED}}]}],
            "the arguments of message 2 for f are nested more than 100 levels deep",
        ),
        ([ASKED, {"from": "function_call", "value": "{x"}], "the call of message 2 are not JSON"),
        ([ASKED, {**SAID, "weight": 0.5}], "message 2 has weight 0.5"),
        ([ASKED, {**SAID, "masked": True}], "message 2 has the unknown key 'masked', which may be a mask"),
    ],
)
def test_faults_of_rows_are_described(turns: Any, fault: str) -> None:
    with pytest.raises(RowError) as caught:
        conversation(turns)
    assert fault in str(caught.value)


def test_tools_are_not_nested_without_end() -> None:
    with pytest.raises(RowError, match="tools are nested more than 100 levels deep"):
        conversation([ASKED, SAID], [NESTED])


@pytest.mark.parametrize(
    ("columns", "form", "named", "fault"),
    [
        (["text"], None, {}, "no conversations were found in the columns text"),
        (["messages"], "instruction", {}, "no conversations were found"),
        (["messages", "chat"], None, {"messages": "chats"}, "has no column 'chats'; did you mean 'chat'?"),
        (["messages", "chat"], None, {"prompt": "chat"}, "'messages' has no part prompt"),
    ],
)
def test_missing_columns_are_reported(
    columns: list[str], form: Format | None, named: dict[str, str], fault: str
) -> None:
    with pytest.raises(DataError) as caught:
        find_layout(columns, "data.sources.0", format=form, named=named)
    assert fault in str(caught.value)


def test_a_conversation_of_too_many_messages_is_refused() -> None:
    turns = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}] * 500
    assert len(conversation(turns).messages) == MAX_MESSAGES
    with pytest.raises(RowError, match="has 1,001 messages, of at most 1,000"):
        conversation([*turns, turns[0]])
