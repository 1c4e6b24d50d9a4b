"""The launchers themselves start a script that reports its rank."""

import ast
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[2]
SCRIPT = """
import dataclasses, sys
from llmtrain.launch import discover
from llmtrain.launch.jobs.accelerate import requested_processes
rank = discover(argv=sys.argv[1:])
print(f"<<{rank and dataclasses.asdict(rank)}|{requested_processes()}>>", flush=True)
"""
COMMANDS = {
    "torchrun": ["torchrun", "--nproc_per_node", "2"],
    "deepspeed": ["deepspeed", "--num_accelerators", "2"],
    "accelerate": ["accelerate", "launch", "--num_processes", "2"],
}


@pytest.fixture(scope="module")
def answers(tmp_path_factory):
    """What the script says under each launcher: a list of (rank, processes asked of accelerate)."""
    script = tmp_path_factory.mktemp("launchers") / "who.py"
    script.write_text(SCRIPT)
    launcher_variables = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "TORCHELASTIC_RUN_ID", "CROSS_SIZE", "LLMTRAIN_LAUNCHER")
    env = {name: value for name, value in os.environ.items() if name not in launcher_variables}
    env |= {"PYTHONPATH": str(REPOSITORY), "DS_ACCELERATOR": "cpu", "CUDA_VISIBLE_DEVICES": ""}
    env |= {"HF_HOME": str(script.parent)}  # a user's default accelerate configuration must not matter
    folder = Path(sys.executable).parent
    started = {
        name: subprocess.Popen([folder / program, *options, script], env=env, stdout=subprocess.PIPE, text=True)
        for name, (program, *options) in COMMANDS.items()
    }
    outputs = {name: process.communicate(timeout=120)[0] for name, process in started.items()}
    return {
        name: sorted(
            (
                (ast.literal_eval(rank), ast.literal_eval(asked))
                for rank, asked in re.findall(r"<<(.*?)\|(.*?)>>", output)
            ),
            key=str,
        )
        for name, output in outputs.items()
    }


@pytest.mark.parametrize("launcher", ["torchrun", "deepspeed"])
def test_every_worker_finds_its_rank(answers, launcher):
    ranks = [rank for rank, _ in answers[launcher]]
    assert sorted(rank["rank"] for rank in ranks) == sorted(rank["local_rank"] for rank in ranks) == [0, 1]
    assert {(rank["world_size"], rank["local_world_size"], rank["launcher"]) for rank in ranks} == {(2, 2, launcher)}
    assert len({(rank["master_addr"], rank["master_port"]) for rank in ranks}) == 1
    assert {asked for _, asked in answers[launcher]} == {None}


def test_accelerate_on_a_cpu_starts_one_process_and_the_requested_number_is_found(answers):
    assert answers["accelerate"] == [(None, 2)]
