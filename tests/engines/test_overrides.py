"""The parts of other libraries that llmtrain replaces exist, and are listed."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from llmtrain import overrides
from llmtrain.engines import build_engine
from llmtrain.errors import RecipeError
from llmtrain.overrides import OLDEST, OVERRIDES, TRIED, _difference, check_overrides, untried_versions
from llmtrain.plan.ds_config import render
from tests.helpers.batches import tiny_recipe
from tests.helpers.harness import run_ranks
from tests.helpers.traces import plan_of

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "llmtrain"


NAMED = (
    "deepspeed.utils.groups:_EXPERT_DATA_PARALLEL_GROUP_RANKS",
    "torch._inductor.cpp_builder:get_cpp_compiler",
)
"""Places that nothing else in the libraries imports by name once they are loaded."""


@pytest.fixture(autouse=True)
def _asked_anew():
    check_overrides.cache_clear()
    yield
    check_overrides.cache_clear()


def _name(place: str) -> str:
    return place.replace(":", ".").rpartition(".")[2]


def _without_table(path: Path) -> str:
    before, _, table = path.read_text().partition("\nOVERRIDES = (\n")
    return before + table.partition("\n)\n")[2]


@pytest.mark.parametrize("one", OVERRIDES, ids=lambda one: one.names[0])
def test_every_override_exists_and_is_used_and_tested(one):
    assert not one.differences()
    used = "".join(map(_without_table, PACKAGE.rglob("*.py")))
    assert all(re.search(rf"\b{_name(place)}\b", used) for place in one.names)
    assert (ROOT / one.test).is_file()


def _is_private(name: str) -> bool:
    return name.startswith("_") and not name.endswith("__")


def _private(path: Path, own: set[str]) -> Iterator[str]:
    """Private names that a module imports from libraries or reads of their objects, and what it assigns to them."""
    tree = ast.parse(path.read_text())
    foreign = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import | ast.ImportFrom):
            for alias in node.names:
                whole = ".".join(filter(None, (getattr(node, "module", None), alias.name)))
                if whole.partition(".")[0] in TRIED:
                    foreign.add((alias.asname or alias.name).partition(".")[0])
                    if any(map(_is_private, whole.split("."))):
                        yield alias.name.rpartition(".")[2]
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            is_set = isinstance(node.ctx, ast.Store) and re.split(r"[.(]", ast.unparse(node))[0] in foreign
            if is_set or (_is_private(node.attr) and node.attr not in own):
                yield node.attr
        elif isinstance(node, ast.Call) and ast.unparse(node.func) in ("getattr", "setattr", "hasattr", "delattr"):
            name = node.args[1]
            if isinstance(name, ast.Constant) and _is_private(name.value):
                yield name.value


NOT_THEIRS = {
    "_exit",  # of os and of C's library, where it is public
    "_NamedFuncPointer",  # a type in typeshed
    "_fields_",  # of ctypes, where it is public
    *("_replace", "_asdict"),  # of named tuples, where they are public
    "_redirect_stdout",  # of rich
    "_redirect_stderr",
    # Documented; the functions that use them refer to the pages.
    *("FakeTensorMode", "_record_memory_history", "_dump_snapshot", "_dynamo", "lookup_backend"),
    *("config", "compile_threads", "optimize_ddp"),
    *("_attn_implementation", "_init_weights"),
    "_apply_gate",  # of experts, for functions that are registered with `transformers` (`ExpertsInterface`)
}


def _own_names() -> set[str]:
    """Private names that llmtrain itself defines."""
    own = set()
    for node in (node for path in PACKAGE.rglob("*.py") for node in ast.walk(ast.parse(path.read_text()))):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            own.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            own.add(node.id)
        elif isinstance(node, ast.Attribute) and ast.unparse(node.value) == "self" and isinstance(node.ctx, ast.Store):
            own.add(node.attr)
    return own - {_name(place) for one in OVERRIDES for place in one.names}


def test_other_modules_do_not_touch_private_parts_of_libraries():
    own = _own_names()
    found = {str(path.relative_to(PACKAGE)): set(_private(path, own)) - NOT_THEIRS for path in PACKAGE.rglob("*.py")}
    assert {path: names for path, names in found.items() if names and not path.startswith("overrides/")} == {}
    listed = {name for one in OVERRIDES for place in one.names for name in re.split("[.:]", place)}
    assert set().union(*found.values()) <= listed


@pytest.mark.parametrize("place", ["deepspeed.no.such.module:name", "deepspeed.utils.groups:_NO_SUCH_GROUP"])
def test_a_version_without_an_overridden_part_is_refused_before_an_engine_is_built(monkeypatch, place):
    monkeypatch.setattr(overrides, "OVERRIDES", (*OVERRIDES, replace(OVERRIDES[0], places=(place,))))
    plan = plan_of(tiny_recipe(), 1)
    with pytest.raises(RecipeError, match=r"versions\.override") as error:
        build_engine(plan, render(plan), None)
    assert place.replace(":", ".") in str(error.value)
    assert f"pip install deepspeed=={TRIED['deepspeed']}" in str(error.value)


@pytest.mark.parametrize("parameters", ["param, other", "other, ...", "...", ""])
def test_a_version_with_other_parameters_is_refused(monkeypatch, parameters):
    place = "deepspeed.module_inject.auto_ep_folding:clear_autoep_folding_gradient_corrected"
    monkeypatch.setattr(overrides, "OVERRIDES", (*OVERRIDES, replace(OVERRIDES[0], places=(f"{place}({parameters})",))))
    with pytest.raises(RecipeError) as error:
        check_overrides()
    name = place.replace(":", ".")
    assert f"has {name}(param) instead of {name}({parameters}), on which llmtrain depends" in str(error.value)


def test_further_parameters_with_defaults_are_accepted_where_an_override_allows_them():
    place = "shutil:copytree(src, dst, {})"
    assert _difference(place.format("dirs_exist_ok, ...")) == ""
    assert _difference(place.format("...")) == ""
    assert _difference(place.format("dirs_exist_ok, symlinks, ...")) != ""  # in another order
    assert _difference("shutil:copytree(src, ...)") != ""  # dst has no default
    assert _difference("unittest:TestCase.assertIsNone(obj, msg)") == ""


def test_modules_load_without_a_part_that_a_later_version_may_lack():
    """Otherwise an ImportError would come before the refusal, which says what is missing and what to do."""
    program = "\n".join(
        (
            "from importlib import import_module",
            f"for module, name in {[place.split(':') for place in NAMED]}: delattr(import_module(module), name)",
            "import llmtrain.engines",
            "from llmtrain.overrides import check_overrides",
            "check_overrides()",
        )
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert "RecipeError" in done.stderr
    assert all(place.replace(":", ".") in done.stderr for place in NAMED)


def test_an_untested_version_is_named_with_the_possible_differences(monkeypatch):
    installed = dict(TRIED)
    monkeypatch.setattr(metadata, "version", installed.__getitem__)
    assert list(untried_versions()) == []
    installed |= OLDEST
    assert list(untried_versions()) == []
    installed |= {"deepspeed": "0.19.9+cpu", "torch": "2.13.1+cu130"}
    (line,) = untried_versions()
    assert line.startswith("deepspeed 0.19.9+cpu is untested")
    assert "DeepSpeedEngine.allreduce_no_retain" in line


def test_the_versions_of_the_constraints_are_those_that_were_tested():
    pinned = dict(re.findall(r"^([\w-]+)==(.+)$", (ROOT / "constraints.txt").read_text(), re.MULTILINE))
    assert {package: pinned[package] for package in TRIED} == TRIED
    oldest = dict(re.findall(r"^([\w-]+)==(.+)$", (ROOT / "constraints-oldest.txt").read_text(), re.MULTILINE))
    assert {package: oldest[package] for package in OLDEST} == OLDEST


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
