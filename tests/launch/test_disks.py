"""A machine that cannot offload to a disk is reported before anything starts, in agreement with DeepSpeed."""

from __future__ import annotations

import subprocess
import sys

import pytest

from llmtrain.errors import Exit, RecipeError
from llmtrain.launch import disks
from llmtrain.launch.disks import check_disks
from llmtrain.plan import Plan
from llmtrain.plan.rules import resolve
from llmtrain.recipe.cluster import Cluster
from tests.helpers.small_plan import small_plan

ON_DISK = {"parallel.zero_stage": 3, "parallel.offload_optimizer": "nvme", "parallel.offload_param": "nvme"}


def _plan(folder) -> Plan:
    recipe = small_plan().recipe.with_(**ON_DISK, **{"parallel.nvme_path": str(folder)})
    return resolve(recipe, Cluster(devices_per_node=2))


@pytest.fixture
def without_libaio(monkeypatch, tmp_path):
    """A compiler that links nothing, and all else that is needed."""
    for name in ("ninja", "c++"):
        (tmp_path / name).write_text("#!/bin/sh\n")
        (tmp_path / name).chmod(0o755)
    monkeypatch.setattr(disks, "_is_built", lambda: False)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setenv("CC", "false")


@pytest.mark.parametrize(
    ("value", "program"), [("g++ -m64", "g++"), ("'my compiler' -g", "my compiler"), ("g++ '", "g++ '"), ("", "")]
)
def test_a_compiler_may_be_named_by_any_text(value, program, monkeypatch):
    assert disks.compiler_of({"CXX": value}) == program
    assert disks.compiler_of({}) == "c++"
    monkeypatch.setenv("CFLAGS", value)
    disks.has_libaio()


def test_missing_libaio_is_reported_with_what_to_install(without_libaio, tmp_path):
    with pytest.raises(RecipeError) as error:
        check_disks(_plan(tmp_path / "states"))
    (problem,) = error.value.problems
    assert error.value.exit_code == Exit.USAGE
    assert (problem.rule, problem.field) == ("nvme.machine", "parallel.offload_optimizer")
    assert "libaio-dev" in problem.fix
    # What it says instead is legal.
    _, _, instead = problem.fix.partition("; or ")
    fields = dict(one.split("=") for one in instead.replace("--set ", "").split())
    fields = {name: None if value == "null" else value for name, value in fields.items()}
    other = resolve(_plan(tmp_path).recipe.with_(**fields), Cluster(devices_per_node=2))
    check_disks(other)


def test_nothing_is_missing_if_the_program_links(without_libaio, monkeypatch, tmp_path):
    monkeypatch.setenv("CC", "true")
    check_disks(_plan(tmp_path / "states"))
    assert not (tmp_path / "states").exists()


def test_nothing_is_compiled_if_the_operator_is_installed(without_libaio, monkeypatch, tmp_path):
    monkeypatch.setattr(disks, "_is_built", lambda: True)
    check_disks(_plan(tmp_path))


def test_plans_without_nvme_are_not_checked(without_libaio):
    check_disks(small_plan())


def test_a_missing_compiler_and_a_wrong_folder_are_reported_together(without_libaio, monkeypatch, tmp_path):
    monkeypatch.setenv("CXX", "no-such-compiler -O2")
    (tmp_path / "file").write_text("")
    with pytest.raises(RecipeError) as error:
        check_disks(_plan(tmp_path / "file" / "states"))
    compiler, library, folder = error.value.problems
    assert "no-such-compiler" in compiler.message
    assert "libaio" in library.message
    assert (folder.rule, folder.field) == ("nvme.path", "parallel.nvme_path")
    assert f"{tmp_path / 'file'} is not a folder" in folder.message


@pytest.mark.slow
@pytest.mark.parametrize("is_there", [False, True])
def test_the_check_agrees_with_deepspeed(is_there, monkeypatch, tmp_path):
    """With a library of that name in LDFLAGS, and without: on a machine that has libaio both find it."""
    if is_there:
        (tmp_path / "aio.c").write_text("void io_submit(void) {}\n")
        made = ["cc", "-shared", "-fPIC", str(tmp_path / "aio.c"), "-o", str(tmp_path / "libaio.so")]
        subprocess.run(made, check=True)
        monkeypatch.setenv("LDFLAGS", f"-L{tmp_path}")
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    program = "from deepspeed.ops.op_builder.cpu import AsyncIOBuilder as B; print('found', B().is_compatible())"
    told = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=300)
    found = "found True" in told.stdout
    assert found or not is_there
    assert found == disks.has_libaio()
