"""Determines the rank of this process in a Slurm step (`srun`) with one task per device."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Mapping

from llmtrain.launch.discovery.rank import Launcher, Rank, RankReader
from llmtrain.launch.rendezvous import port_of_job

MARKER = "SLURM_STEP_NUM_TASKS"
"""Set by `srun` only, not in a batch script. A single task starts workers itself, as any process does."""
LAUNCHER = Launcher(
    "slurm",
    markers=(MARKER,),
    rank="SLURM_PROCID",
    local_rank="SLURM_LOCALID",
    world_size=MARKER,
    local_world_size="SLURM_STEP_TASKS_PER_NODE",
    master_addr="SLURM_STEP_NODELIST",
)
"""The tasks of one step of `srun`, one for each device."""


def is_worker(env: Mapping[str, str]) -> bool:
    """Whether this process is one of several tasks of a step."""
    return env.get(MARKER, "").isdecimal() and int(env[MARKER]) > 1


def read(reader: RankReader) -> Rank:
    """Reads the rank of this process; problems are collected in `reader`."""
    env = reader.env
    node = reader.number("SLURM_NODEID")
    counts = reader.parsed(LAUNCHER.local_world_size, tasks_per_node) or [1]
    nodes = reader.parsed(LAUNCHER.master_addr, hosts) or [""]
    if node >= len(counts) and not reader.problems:
        reader.refuse("SLURM_NODEID", f"{node} is not among the {len(counts)} nodes of {LAUNCHER.local_world_size}")
    return Rank(
        rank=reader.number(LAUNCHER.rank),
        local_rank=reader.number(LAUNCHER.local_rank),
        world_size=reader.number(LAUNCHER.world_size, minimum=1),
        local_world_size=counts[min(node, len(counts) - 1)],
        # slurm/train.sbatch sets both: the address by which Slurm knows the node, and a free port.
        master_addr=env.get("MASTER_ADDR") or nodes[0],
        master_port=reader.port("MASTER_PORT") if env.get("MASTER_PORT") else port_of_step(env),
        launcher=LAUNCHER.name,
        nodes=len(counts),
    )


def tasks_per_node(text: str) -> list[int]:
    """Expands Slurm's shorthand for the tasks of each node: `2(x3),1` is [2, 2, 2, 1]. Raises ValueError."""
    counts: list[int] = []
    for entry in text.split(","):
        match = re.fullmatch(r"([0-9]+)(?:\(x([0-9]+)\))?", entry)
        if match is None:
            raise ValueError(f"'{text}' is not a list of tasks such as 2(x3),1")
        counts += [int(match[1])] * int(match[2] or 1)
    return counts


def hosts(nodelist: str) -> list[str]:
    """Expands a node list: `n[1-3,07],gpu5` is n1, n2, n3, n07, gpu5. Raises ValueError."""
    # Commas outside brackets separate names; several brackets are multiplied, the last one varies fastest.
    if re.fullmatch(r"(?:[^\[\],\s]|\[[0-9,-]+\])+(?:,(?:[^\[\],\s]|\[[0-9,-]+\])+)*", nodelist) is None:
        raise ValueError(f"'{nodelist}' is not a list of nodes such as n[1-3,7]")
    names = []
    for name in re.findall(r"(?:[^\[\],]|\[[^\]]*\])+", nodelist):
        parts = re.split(r"\[([^\]]*)\]", name)
        choices = [list(_numbers(part)) if index % 2 else [part] for index, part in enumerate(parts)]
        names += ["".join(choice) for choice in itertools.product(*choices)]
    return names


def _numbers(ranges: str) -> Iterator[str]:
    """Yields each number of `1-3,07`, with the leading zeros of its range."""
    for part in ranges.split(","):
        first, _, last = part.partition("-")
        if not first.isdecimal() or not (last or first).isdecimal() or int(last or first) < int(first):
            raise ValueError(f"'[{ranges}]' is not a range of nodes")
        yield from (f"{number:0{len(first)}d}" for number in range(int(first), int(last or first) + 1))


def port_of_step(env: Mapping[str, str]) -> int:
    """Returns rank 0's port for this step if none was chosen; two jobs on a node use different ones."""
    job, step = (int(env.get(name, "0") or 0) for name in ("SLURM_JOB_ID", "SLURM_STEP_ID"))
    return port_of_job(job * 7 + step)
