"""What llmtrain replaces in other libraries is there, and is listed."""

from __future__ import annotations

import re
from dataclasses import replace
from importlib import metadata
from pathlib import Path

import pytest
from batches import tiny_recipe
from harness import run_ranks
from packaging.requirements import Requirement
from traces import plan_of

from llmtrain.ds_config import render
from llmtrain.engines import build_engine, overrides
from llmtrain.engines.overrides import OVERRIDES, TRIED, check_overrides, untried_versions
from llmtrain.errors import RecipeError

ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def _asked_anew():
    check_overrides.cache_clear()
    yield
    check_overrides.cache_clear()


@pytest.mark.parametrize("one", OVERRIDES, ids=lambda one: one.place)
def test_every_place_is_there_and_is_used_and_tested(one):
    assert one.is_there
    name = one.place.rpartition(".")[2].rpartition(":")[2]
    assert re.search(rf"\b{name}\b", (ROOT / "llmtrain" / one.ours).read_text())
    assert (ROOT / one.test).is_file()


@pytest.mark.parametrize("place", ["deepspeed.no.such.module:name", "deepspeed.utils.groups:_NO_SUCH_GROUP"])
def test_a_version_without_a_place_is_refused_before_an_engine_is_built(monkeypatch, place):
    monkeypatch.setattr(overrides, "OVERRIDES", (*OVERRIDES, replace(OVERRIDES[0], place=place)))
    plan = plan_of(tiny_recipe(), 1)
    with pytest.raises(RecipeError, match=r"versions\.override") as error:
        build_engine(plan, render(plan), None)
    assert place.replace(":", ".") in str(error.value)
    assert f"pip install deepspeed=={TRIED['deepspeed']}" in str(error.value)


def test_an_untried_version_is_named_with_what_may_differ(monkeypatch):
    assert list(untried_versions()) == []
    installed = {**TRIED, "deepspeed": "0.20.1", "torch": "2.13.1+cu130"}
    monkeypatch.setattr(metadata, "version", installed.__getitem__)
    (line,) = untried_versions()
    assert line.startswith("deepspeed 0.20.1 was not tried")
    assert "DeepSpeedEngine.allreduce_no_retain" in line


def _compiled_collective(rank: int) -> bool:
    from deepspeed.ops import __compatible_ops__

    return __compatible_ops__["deepspeed_shm_comm"]


def test_deepspeeds_collective_for_cpus_is_off_in_workers():
    assert run_ranks(1, _compiled_collective) == [False]


def test_the_next_minor_versions_are_not_installed():
    lines = (ROOT / "pyproject.toml").read_text().partition("dependencies = [")[2].partition("]")[0]
    bounds = {one.name: one.specifier for one in map(Requirement, re.findall(r'"([^"]+)"', lines))}
    for package, version in TRIED.items():
        major, minor = map(int, version.split(".")[:2])
        assert version in bounds[package]
        assert f"{major}.{minor + 1}.0" not in bounds[package]
