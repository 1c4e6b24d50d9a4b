"""The operators that are built, and the report about one that cannot be built."""

from __future__ import annotations

import pytest

from llmtrain.launch.doctor.run import DISK, PINNED, build_operators, operators_of
from llmtrain.recipe import ParallelConfig


@pytest.mark.parametrize(
    ("fields", "env", "expected"),
    [
        ({}, {}, ()),
        ({"offload_optimizer": "cpu"}, {}, ()),  # torch's own optimizer
        ({"offload_optimizer": "cpu"}, {PINNED: "native"}, ("pin_memory",)),
        ({}, {PINNED: "native"}, ()),
        ({"offload_optimizer": "nvme"}, {}, DISK),
        ({"offload_param": "nvme"}, {}, DISK),
    ],
)
def test_the_operators_of_a_recipe_depend_on_its_offload(fields, env, expected):
    assert operators_of(ParallelConfig(**fields), env) == expected


def test_without_a_recipe_all_operators_are_prebuilt():
    assert operators_of(None, {}) == DISK


@pytest.mark.parametrize(("is_needed", "level"), [(True, "fault"), (False, "ok")])
def test_missing_libaio_is_a_fault_only_if_the_recipe_needs_it(is_needed, level):
    lacking = {"operator": "async_io", "seconds": 0.0, "file": "", "error": "libaio was not found"}
    [finding], _ = build_operators(Answering(lacking), ["async_io"], on_cpu=True, is_needed=is_needed)
    assert finding.level == level
    assert ("apt install libaio-dev" in finding.fix) == is_needed


class Answering:
    def __init__(self, *answers):
        self.answers = list(answers)
        self.sent = {}

    def send(self, do, **fields):
        self.sent = {"do": do, **fields}

    def reply(self, seconds):
        return self.answers.pop(0)


def test_the_compilers_message_is_reported():
    right = {"operator": "pin_memory", "seconds": 12.34, "file": "/cache/pin_memory/pin_memory.so", "error": ""}
    wrong = {"operator": "async_io", "seconds": 3.0, "file": "", "error": "x.cpp:1: error: no such thing"}
    channel = Answering(right, wrong)
    findings, built = build_operators(channel, DISK, on_cpu=True, is_needed=True)
    assert channel.sent == {"do": "build", "operators": list(DISK), "accelerator": "cpu"}
    assert [(one.level, one.text) for one in findings] == [
        ("ok", "pin_memory in /cache/pin_memory, 12.3 s"),
        ("fault", "async_io was not built:\nx.cpp:1: error: no such thing"),
    ]
    assert built == [right, wrong]
