"""A rank on a CPU keeps the memory that it has freed, unless its user has set how memory is had."""

from __future__ import annotations

import ctypes
import os
import platform
import resource
from types import SimpleNamespace

import pytest
import torch

from llmtrain.predict import memory_of
from llmtrain.runtime import host_memory
from llmtrain.runtime.host_memory import keep_freed_memory
from tests.helpers.batches import tiny_recipe
from tests.helpers.harness import run_ranks
from tests.helpers.traces import engine_of, plan_of

FLOATS, TURNS = 2**25, 20  # 128 MiB, 32,768 pages; more than any threshold that glibc moves by itself
PAGES = FLOATS * 4 // resource.getpagesize()


def _page_faults(rank: int, setting: dict[str, str]) -> int:
    """Of filling and freeing a large tensor many times, once the rank has its engine and has done so as often before.

    Until a piece of the heap fits, some tensors have a new one: up to ten were seen.
    """
    os.environ.update(setting)
    engine_of(plan_of(tiny_recipe(), 1))
    for _ in range(2):
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        for _ in range(TURNS):
            torch.empty(FLOATS).fill_(1.0)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before


@pytest.fixture
def untold(monkeypatch) -> None:
    """A test that tells glibc fails."""
    monkeypatch.setattr(ctypes, "CDLL", lambda _: pytest.fail("glibc was told"))


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="only glibc is told")
def test_freed_memory_is_kept_and_not_cleared_again():
    assert run_ranks(1, _page_faults, {})[0] < PAGES
    assert run_ranks(1, _page_faults, {"MALLOC_ARENA_MAX": "8"})[0] >= TURNS * PAGES


@pytest.mark.parametrize("setting", [{"GLIBC_TUNABLES": "glibc.malloc.check=0"}, {"MALLOC_ARENA_MAX": "8"}])
def test_a_setting_of_the_users_own_is_left_alone(setting, monkeypatch, untold):
    for name, value in setting.items():
        monkeypatch.setenv(name, value)
    keep_freed_memory(plan_of(tiny_recipe(), 1))


def test_another_libc_is_left_alone(monkeypatch):
    monkeypatch.setattr(ctypes, "CDLL", lambda _: object())
    keep_freed_memory(plan_of(tiny_recipe(), 1))


@pytest.mark.parametrize(
    ("bytes_of", "granted"),
    [("memory_bytes", 2**20), ("memory_limit", 2**20)],
)
def test_a_host_without_room_gets_its_memory_back(bytes_of, granted, monkeypatch, untold):
    monkeypatch.setattr(host_memory, bytes_of, lambda: granted)
    keep_freed_memory(plan_of(tiny_recipe(), 1))


def test_all_ranks_of_a_host_need_room(monkeypatch):
    plan = plan_of(tiny_recipe(**{"parallel.zero_stage": 1, "parallel.offload_optimizer": "cpu"}), 2)
    memory = memory_of(plan)
    assert memory
    assert memory.stages[0].host
    needed = memory.needed + memory.stages[0].host + memory.stages[0].host_copies
    told = []
    monkeypatch.setattr(ctypes, "CDLL", lambda _: SimpleNamespace(mallopt=lambda *values: told.append(values)))
    for missing in (1, 0):
        monkeypatch.setattr(host_memory, "memory_bytes", lambda: 6 * needed - missing)  # noqa: B023
        keep_freed_memory(plan)
        assert bool(told) is not bool(missing)


def test_a_plan_of_unknown_memory_gives_it_back(monkeypatch, untold):
    monkeypatch.setattr(host_memory, "memory_of", lambda plan: None)
    keep_freed_memory(plan_of(tiny_recipe(), 1))
