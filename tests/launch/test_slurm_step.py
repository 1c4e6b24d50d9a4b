"""Tasks of `srun` determine their ranks. The variables are those of a real step, which test_slurm_text.py checks."""

import pytest

from llmtrain.errors import RecipeError
from llmtrain.launch import discover
from llmtrain.launch.discovery.discover import Rank
from llmtrain.launch.discovery.slurm_step import hosts, port_of_step, tasks_per_node

STEP = {
    **{"SLURM_JOB_ID": "77", "SLURM_STEP_ID": "0", "SLURM_NODEID": "1", "SLURM_PROCID": "3", "SLURM_LOCALID": "1"},
    **{"SLURM_STEP_NUM_TASKS": "4", "SLURM_NTASKS": "4", "SLURM_STEP_NUM_NODES": "2"},
    **{"SLURM_STEP_TASKS_PER_NODE": "2(x2)", "SLURM_STEP_NODELIST": "n[3,7]"},
}
PORT = port_of_step(STEP)
EXPECTED = Rank(3, 1, 4, 2, "n3", PORT, "slurm", nodes=2)


@pytest.mark.parametrize(
    ("more", "expected"),
    [
        ({}, EXPECTED),
        ({"MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "4000"}, Rank(3, 1, 4, 2, "10.0.0.1", 4000, "slurm", nodes=2)),
        # Job templates that say the same in other words.
        ({"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1"}, EXPECTED),
        (
            {"SLURM_STEP_TASKS_PER_NODE": "1,3", "SLURM_LOCALID": "2"},
            Rank(3, 2, 4, 3, "n3", PORT, "slurm", nodes=2),
        ),
    ],
)
def test_a_task_of_a_step_finds_its_rank(more, expected):
    assert discover({**STEP, **more}) == expected


@pytest.mark.parametrize(
    "env",
    [
        {**STEP, "SLURM_STEP_NUM_TASKS": "1"},  # starts workers itself
        {name: value for name, value in STEP.items() if "STEP" not in name},  # a batch script
    ],
)
def test_a_process_of_another_kind_is_no_worker(env):
    assert discover(env) is None


INNER = {"RANK": "9", "WORLD_SIZE": "16", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "8"}
INNER |= {"MASTER_ADDR": "n3", "MASTER_PORT": "29500"}


@pytest.mark.parametrize(
    ("more", "launcher"),
    [
        ({"TORCHELASTIC_RUN_ID": "1"}, "torchrun"),
        ({"LLMTRAIN_LAUNCHER": "local"}, "local"),
        ({}, "environment"),  # each task has started its own workers
    ],
)
def test_a_launcher_takes_precedence_over_slurm(more, launcher):
    rank = discover({**STEP, **INNER, **more})
    assert rank is not None
    assert (rank.rank, rank.world_size, rank.launcher) == (9, 16, launcher)


@pytest.mark.parametrize(
    ("more", "names"),
    [
        ({"RANK": "0", "WORLD_SIZE": "4", "LOCAL_RANK": "1"}, ["RANK"]),
        # Left over in a shell: each task would train alone.
        ({"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"}, ["RANK", "LOCAL_RANK", "WORLD_SIZE"]),
        ({"SLURM_PROCID": "x"}, ["SLURM_PROCID"]),
        ({"SLURM_PROCID": "4"}, ["SLURM_PROCID"]),
        ({"SLURM_LOCALID": "2"}, ["SLURM_LOCALID"]),
        ({"SLURM_NODEID": "2"}, ["SLURM_NODEID"]),
        ({"SLURM_STEP_NODELIST": "n[3-1]"}, ["SLURM_STEP_NODELIST"]),
        ({"SLURM_STEP_NODELIST": ""}, ["SLURM_STEP_NODELIST"]),
        ({"SLURM_STEP_TASKS_PER_NODE": "2(y2)"}, ["SLURM_STEP_TASKS_PER_NODE"]),
        ({"MASTER_PORT": "70000"}, ["MASTER_PORT"]),
    ],
)
def test_impossible_values_are_named(more, names):
    with pytest.raises(RecipeError) as error:
        discover({**STEP, **more})
    assert [problem.field for problem in error.value.problems] == names


@pytest.mark.parametrize(
    ("counts", "nodes", "shape"),
    [("2(x2)", 4, (2, 2)), ("1,2", 3, (3, 1)), ("4", 4, (1, 4)), ("1,3", 4, (2, 2))],
)
def test_all_ranks_see_one_cluster(counts, nodes, shape):
    tasks = sum(tasks_per_node(counts))
    step = {**STEP, "SLURM_STEP_NUM_TASKS": str(tasks), "SLURM_STEP_TASKS_PER_NODE": counts}
    first = discover({**step, "SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_NODEID": "0"})
    assert first is not None
    assert first.shape == shape


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("n1", ["n1"]),
        ("n[1-3,7]", ["n1", "n2", "n3", "n7"]),
        ("n[08-10],gpu-a.b", ["n08", "n09", "n10", "gpu-a.b"]),
        ("r[0-1]n[1-2]", ["r0n1", "r0n2", "r1n1", "r1n2"]),
    ],
)
def test_node_lists_are_expanded(text, names):
    assert hosts(text) == names


@pytest.mark.parametrize("text", ["n[1-3", "n1]", "n[]", "n[a-b]", "n[3-1]", "n[1--2]", "a,,b", "a b", "n[-1]", ","])
def test_invalid_node_lists_are_refused(text):
    with pytest.raises(ValueError, match="is no"):
        hosts(text)


@pytest.mark.parametrize("text", ["", "x", "2(3)", "2(x)", "2;3", "-1"])
def test_invalid_lists_of_tasks_are_refused(text):
    with pytest.raises(ValueError, match="is not a list"):
        tasks_per_node(text)
