"""Small conversations, and a recipe that trains on them."""

from __future__ import annotations

import json
from typing import Any

from llmtrain.recipe import Recipe, parse_recipe
from tests.helpers.chat_tokenizers import Case

CHAT = [
    {"role": "user", "content": "What is 2+2?"},
    {"role": "assistant", "content": "It is 4."},
    {"role": "user", "content": "Thanks"},
    {"role": "assistant", "content": "Bye."},
]
THINKING = [
    CHAT[0],
    {"role": "assistant", "content": "<think>\nTwo and two.\n</think>\n\nIt is 4."},
    CHAT[2],
    {"role": "assistant", "content": "<think>\nThey leave.\n</think>\n\nBye."},
]
CALL = [
    {"role": "user", "content": "Weather in Rome?"},
    {
        "role": "assistant",
        "content": None,
        "tool_calls": [
            {"id": "abcdefghi", "function": {"name": "get_weather", "arguments": '{"city": "Rome", "days": 2}'}}
        ],
    },
    {"role": "tool", "name": "get_weather", "tool_call_id": "abcdefghi", "content": "sunny"},
    {"role": "assistant", "content": "Sunny."},
]
TOOL = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Weather of a city",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}, "days": {"type": "integer"}}},
    },
}


def chat(number: int, turns: int = 2) -> list[dict[str, str]]:
    roles = ("user", "assistant")
    return [{"role": roles[turn % 2], "content": f"{roles[turn % 2]} {number} " + "a" * turn} for turn in range(turns)]


def recipe(one: Case, rows: list[Any], **data: Any) -> Recipe:
    path = one.folder.parent / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    fields = {"tokenizer": str(one.folder), "sequence_length": 256, "cache_dir": str(one.folder.parent / "cache")}
    return parse_recipe(
        {
            "name": "test",
            "model": {"architecture": "llama", "config": {"vocab_size": 400}},
            "data": {"sources": [{"name": str(path)}], "eval_fraction": 0.0, **fields, **data},
            "optim": {"lr": 1e-3},
            "batch": {"global_batch_size": 4, "micro_batch_size": 2},
            "train": {"max_steps": 10},
        }
    )


ROWS = [{"messages": chat(number, 2 + 2 * (number % 3))} for number in range(60)]
