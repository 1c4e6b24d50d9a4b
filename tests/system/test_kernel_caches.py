"""Compiled code is stored where only this user can write."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from llmtrain.errors import Exit, RecipeError
from llmtrain.launch.doctor.agent import Agent
from llmtrain.launch.local import common_environment
from llmtrain.run_dir import RunDir
from llmtrain.system.kernel_caches import FOLDERS, kernel_caches, private_folder, use_kernel_caches
from llmtrain.train.tune import request
from tests.helpers.small_plan import small_plan


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch) -> Path:
    monkeypatch.setenv("LLMTRAIN_CACHE", str(tmp_path / "cache"))
    for name in FOLDERS:
        monkeypatch.delenv(name, raising=False)
    return tmp_path / "cache"


def test_workers_compile_below_a_folder_of_this_user_only(cache):
    environment = common_environment(1)
    for name in FOLDERS:
        assert Path(environment[name]).is_relative_to(cache)
        assert Path(environment[name]).is_relative_to(private_folder())
    assert private_folder().stat().st_mode & 0o777 == 0o700
    assert environment == common_environment(1)  # the folder exists now


def test_torch_and_triton_use_these_folders():
    program = (
        "from torch._inductor.runtime.cache_dir_utils import cache_dir; "
        "from torch.utils.cpp_extension import _get_build_directory as built; "
        "print(cache_dir(), built('name', False), sep='\\n')"
    )
    environment = common_environment(1)
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=True)
    expected = [environment["TORCHINDUCTOR_CACHE_DIR"], environment["TORCH_EXTENSIONS_DIR"] + "/name"]
    assert done.stdout.splitlines() == expected


def test_measurements_of_kernels_and_prebuilt_operators_use_them(monkeypatch):
    """They start processes themselves."""
    used = []
    monkeypatch.setattr(subprocess, "Popen", lambda *_, env, **__: used.append(env["TORCH_EXTENSIONS_DIR"]) or 1 / 0)
    with pytest.raises(ZeroDivisionError):
        request.measure(small_plan(), "cpu", 1, True, print)
    started = SimpleNamespace(_start=lambda *_, env, **__: used.append(env["TORCH_EXTENSIONS_DIR"]) or 1 / 0)
    with pytest.raises(ZeroDivisionError):
        Agent.do_build(started, ["pin_memory"], "cpu")
    assert used == [common_environment(1)["TORCH_EXTENSIONS_DIR"]] * 2


def test_a_rank_that_another_launcher_started_is_refused_before_it_compiles(cache, tmp_path):
    cache.mkdir()
    private_folder().write_text("")
    run = RunDir(tmp_path / "run")
    run.create(small_plan(), {})
    place = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1"}
    command = [sys.executable, "-m", "llmtrain.train.worker", "--run-dir", str(run.path)]
    environment = {**os.environ, **place, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert "[kernels.cache]" in done.stdout + done.stderr
    assert done.returncode == Exit.USAGE


def test_folders_that_the_user_has_set_are_used_as_they_are(cache):
    own = {name: f"/own/{name}" for name in FOLDERS}
    environment = dict(own)
    use_kernel_caches(environment)
    assert environment == own
    assert not cache.exists()
    environment = {"TRITON_CACHE_DIR": "/own/triton"}
    use_kernel_caches(environment)
    assert environment["TRITON_CACHE_DIR"] == "/own/triton"
    assert environment == {name: str(folder) for name, folder in kernel_caches(environment).items()}


def _link(folder: Path) -> None:
    (folder.parent / "elsewhere").mkdir()
    folder.symlink_to(folder.parent / "elsewhere")


PLANTED = {
    "can be written by others": lambda folder: folder.mkdir() or folder.chmod(0o770),
    "is not a folder": _link,
    "cannot be created": lambda folder: folder.parent.chmod(0o500),
}


@pytest.mark.parametrize("message", PLANTED)
def test_a_folder_in_which_others_can_store_code_is_refused(message, cache, monkeypatch):
    if message == "cannot be created" and os.getuid() == 0:
        pytest.skip("root can write everywhere")
    cache.mkdir()
    PLANTED[message](private_folder())
    with pytest.raises(RecipeError, match=message) as error:
        use_kernel_caches({})
    (problem,) = error.value.problems
    assert (problem.rule, problem.field) == ("kernels.cache", str(private_folder()))
    assert "LLMTRAIN_CACHE" in problem.fix


def test_a_folder_of_another_user_is_refused(monkeypatch):
    use_kernel_caches({})
    folder, other = private_folder(), os.getuid() + 1
    monkeypatch.setattr(os, "getuid", lambda: other)
    folder.rename(private_folder())
    with pytest.raises(RecipeError, match="belongs to user"):
        use_kernel_caches({})
