import os
import subprocess
import sys

import pytest

from llmtrain.errors import RecipeError
from llmtrain.launch.discovery import Rank, accelerate_processes, discover, without_local_rank

COMMON = {
    "RANK": "3",
    "WORLD_SIZE": "4",
    "LOCAL_RANK": "1",
    "MASTER_ADDR": "node-1",
    "MASTER_PORT": "29501",
}
TORCHRUN = {**COMMON, "LOCAL_WORLD_SIZE": "2", "TORCHELASTIC_RUN_ID": "none"}
DEEPSPEED = {**COMMON, "LOCAL_SIZE": "2", "CROSS_RANK": "1", "CROSS_SIZE": "2"}
HOROVODRUN = {
    "HOROVOD_RANK": "3",
    "HOROVOD_SIZE": "4",
    "HOROVOD_LOCAL_RANK": "1",
    "HOROVOD_LOCAL_SIZE": "2",
    "HOROVOD_GLOO_RENDEZVOUS_ADDR": "node-1",
    "HOROVOD_GLOO_RENDEZVOUS_PORT": "29501",
}


def expected(launcher: str) -> Rank:
    return Rank(3, 1, 4, 2, "node-1", 29501, launcher)


@pytest.mark.parametrize(
    ("env", "launcher"),
    [
        (TORCHRUN, "torchrun"),
        (DEEPSPEED, "deepspeed"),
        (HOROVODRUN, "horovodrun"),
        ({**COMMON, "LOCAL_WORLD_SIZE": "2"}, "environment"),
        ({**COMMON, "LOCAL_WORLD_SIZE": "2", "LLMTRAIN_LAUNCHER": "local"}, "local"),
        # The innermost launcher is believed.
        ({**TORCHRUN, **DEEPSPEED, **HOROVODRUN, "LLMTRAIN_LAUNCHER": "local"}, "local"),
    ],
)
def test_each_launcher_is_recognised(env, launcher):
    assert discover(env) == expected(launcher)


@pytest.mark.parametrize(
    "env",
    [
        {},
        {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"},
        # accelerate's simple launcher, with --num_processes 2 on a CPU
        {"ACCELERATE_USE_CPU": "False", "ACCELERATE_MIXED_PRECISION": "no", "MASTER_PORT": "29500"},
        {"RANK": ""},
    ],
)
def test_nothing_launched_us(env):
    assert discover(env) is None


@pytest.mark.parametrize(
    ("change", "names"),
    [
        ({"WORLD_SIZE": None}, ["WORLD_SIZE"]),
        ({"RANK": None}, ["RANK"]),
        ({"WORLD_SIZE": None, "MASTER_ADDR": None, "MASTER_PORT": "x"}, ["WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"]),
        ({"LOCAL_WORLD_SIZE": None}, ["LOCAL_WORLD_SIZE"]),
        ({"RANK": "4"}, ["RANK"]),
        ({"RANK": "-1"}, ["RANK"]),
        ({"RANK": "٣"}, ["RANK"]),
        ({"RANK": "1.0"}, ["RANK"]),
        ({"WORLD_SIZE": "0"}, ["WORLD_SIZE"]),
        ({"MASTER_PORT": "70000"}, ["MASTER_PORT"]),
        ({"LOCAL_RANK": "2"}, ["LOCAL_RANK"]),
        ({"RANK": "0"}, ["LOCAL_RANK"]),
        ({"LOCAL_WORLD_SIZE": "8"}, ["LOCAL_WORLD_SIZE"]),
    ],
)
def test_what_cannot_be_is_refused_by_name(change, names):
    env = {name: value for name, value in {**TORCHRUN, **change}.items() if value is not None}
    with pytest.raises(RecipeError) as error:
        discover(env)
    assert [problem.field for problem in error.value.problems] == names
    assert {problem.rule for problem in error.value.problems} == {"launch.environment"}


@pytest.mark.parametrize("name", sorted(HOROVODRUN.keys() - {"HOROVOD_RANK"}))
def test_what_horovodrun_left_out_is_named_as_it_names_it(name):
    with pytest.raises(RecipeError) as error:
        discover({key: value for key, value in HOROVODRUN.items() if key != name})
    assert name in [problem.field for problem in error.value.problems]


def test_local_rank_argument_must_agree():
    assert discover(DEEPSPEED, ["--local_rank=1", "--max-steps", "3"]) == expected("deepspeed")
    with pytest.raises(RecipeError, match="--local_rank=0"):
        discover(DEEPSPEED, ["--local_rank=0"])


def test_local_rank_argument_is_taken_out():
    assert without_local_rank(["--local_rank=1", "--set", "a=--local_rank=1"]) == ["--set", "a=--local_rank=1"]


@pytest.mark.parametrize(
    ("arguments", "number"),
    [
        (["--num_processes", "2"], 2),
        (["--num-processes=3"], 3),
        ([], None),
        (["--num_processes", "many"], None),
    ],
)
def test_accelerate_was_asked_for_processes(arguments, number):
    env = {"ACCELERATE_MIXED_PRECISION": "no"}
    parent = ["python", "accelerate", "launch", *arguments, "recipes/tiny.py"]
    assert accelerate_processes(env, parent) == number


def test_without_accelerate_nothing_was_asked_for():
    assert accelerate_processes({}, ["accelerate", "launch", "--num_processes", "2"]) is None
    assert accelerate_processes({**TORCHRUN, "ACCELERATE_MIXED_PRECISION": "no"}, ["--num_processes", "2"]) is None


def test_the_parent_is_really_asked():
    """A parent with accelerate's arguments starts a child as accelerate does."""
    child = "from llmtrain.launch import accelerate_processes; print(accelerate_processes())"
    parent = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {child!r}], check=True)"
    env = {**os.environ, "ACCELERATE_MIXED_PRECISION": "no"}
    env.pop("RANK", None)
    command = [sys.executable, "-c", parent, "--num_processes", "2", "recipes/tiny.py"]
    assert subprocess.run(command, capture_output=True, text=True, check=True, env=env).stdout == "2\n"
