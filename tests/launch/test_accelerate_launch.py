"""The number of processes requested from accelerate's launcher, and the configuration that we write for it."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from llmtrain.launch.jobs.accelerate import has_configuration, render_configuration, requested_processes
from tests.helpers.small_plan import small_plan


@pytest.mark.parametrize(
    ("arguments", "number"),
    [
        (["--num_processes", "2"], 2),
        (["--num-processes=3"], 3),
        ([], None),
        (["--num_processes", "many"], None),
    ],
)
def test_the_number_of_processes_is_read_from_the_command_line(arguments, number):
    env = {"ACCELERATE_MIXED_PRECISION": "no"}
    parent = ["python", "accelerate", "launch", *arguments, "recipes/tiny.py"]
    assert requested_processes(env, parent) == number


def test_without_accelerate_no_number_of_processes_is_requested():
    assert requested_processes({}, ["accelerate", "launch", "--num_processes", "2"]) is None
    assert requested_processes({"RANK": "0", "ACCELERATE_MIXED_PRECISION": "no"}, ["--num_processes", "2"]) is None


def test_the_number_of_processes_is_read_from_the_parent():
    """A parent with accelerate's arguments starts a child as accelerate does."""
    child = "from llmtrain.launch.jobs.accelerate import requested_processes; print(requested_processes())"
    parent = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {child!r}], check=True)"
    env = {**os.environ, "ACCELERATE_MIXED_PRECISION": "no"}
    env.pop("RANK", None)
    command = [sys.executable, "-c", parent, "--num_processes", "2", "recipes/tiny.py"]
    assert subprocess.run(command, capture_output=True, text=True, check=True, env=env).stdout == "2\n"


@pytest.mark.parametrize("text", ["distributed_type: MULTI_CPU\nnum_processes: 3\n", '{\n  "num_processes": 3\n}'])
def test_the_number_of_processes_is_read_from_a_configuration(text, tmp_path):
    file = tmp_path / "accelerate" / "default_config.yaml"
    file.parent.mkdir()
    file.write_text(text)
    env = {"ACCELERATE_MIXED_PRECISION": "no"}
    assert requested_processes(env, ["accelerate", "launch", "--config_file", str(file), "recipes/tiny.py"]) == 3
    assert requested_processes({**env, "HF_HOME": str(tmp_path)}, ["accelerate", "launch", "recipes/tiny.py"]) == 3
    assert requested_processes({**env, "HF_HOME": str(tmp_path)}, ["accelerate", "launch", "--num_processes=2"]) == 2
    assert requested_processes({**env, "HF_HOME": str(tmp_path / "other")}, ["accelerate", "launch"]) is None


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"parallel.zero_stage": 3, "parallel.precision": "bf16"}, {"distributed_type": "DEEPSPEED"}),
        ({"parallel.backend": "accelerate", "parallel.accelerate": "ddp"}, {"distributed_type": "MULTI_GPU"}),
        (
            {"parallel.backend": "accelerate", "parallel.accelerate": "fsdp2", "parallel.zero_stage": 3}
            | {"parallel.precision": "bf16"},
            {"distributed_type": "FSDP", "mixed_precision": "bf16"},
        ),
    ],
)
def test_accelerate_reads_the_configuration_of_a_plan(fields, words, tmp_path):
    from accelerate.commands.config.config_args import load_config_from_file

    plan = small_plan(**fields)
    file = tmp_path / "accelerate.yaml"
    file.write_text(render_configuration(plan, tmp_path / "ds config.json"))
    read = load_config_from_file(str(file))
    assert (read.num_machines, read.num_processes, read.use_cpu) == (1, 2, False)
    assert {name: getattr(read, name) for name in words} == words
    if read.distributed_type == "DEEPSPEED":
        # All else stands in that file; accelerate refuses to hear it twice.
        assert read.deepspeed_config == {
            "deepspeed_config_file": str(tmp_path / "ds config.json"),
            "deepspeed_multinode_launcher": "standard",
            "zero3_init_flag": True,
        }
    if read.distributed_type == "FSDP":
        assert read.fsdp_config["fsdp_version"] == 2
        assert read.fsdp_config["fsdp_reshard_after_forward"] is True


def test_a_strategy_that_accelerate_does_not_know_has_no_configuration():
    assert not has_configuration(small_plan(**{"parallel.backend": "horovod"}))
