"""Measures what grows with ranks and tokens, in one process: `scale plan|sampler|manifest|launch|verdicts RANKS`.

Ranks are simulated and none is started. Prints one line of JSON.
"""

from __future__ import annotations

import argparse
import json
import resource
import tempfile
import time
from pathlib import Path
from typing import Any

SEQUENCE = 8192
TOKENS = 10**12
PER_NODE = 8


def plan_of(ranks: int) -> Any:
    """Returns the plan of the 70B recipe on this number of H100s.

    Micro-batches have one sequence, and each replica has at least one of them.
    """
    from llmtrain.plan.load import load_recipe
    from llmtrain.plan.rules import resolve
    from llmtrain.recipe.cluster import Cluster

    replicas = ranks // 16
    fields = [f"batch.global_batch_size={16 * replicas}", "parallel.pipeline=16"]
    return resolve(
        load_recipe("recipes/llama3_70b.py", fields)[0],
        Cluster(nodes=ranks // PER_NODE, devices_per_node=PER_NODE, device="h100"),
    )


def plan(ranks: int) -> dict[str, float]:
    """Times a plan with its rules, memory, time and DeepSpeed JSON."""
    from llmtrain.plan.ds_config import render
    from llmtrain.plan.predict import memory_of
    from llmtrain.plan.predict.time import predict

    plan_of(ranks)  # loads the modules, which is not to be timed
    started = time.perf_counter()
    made = plan_of(ranks)
    memory_of(made)
    predict(made)
    render(made)
    return {"seconds": time.perf_counter() - started, "peak_mib": _peak_mib()}


def sampler(ranks: int) -> dict[str, float]:
    """Times the computation of the sequences in a global batch, with one sequence per rank, in the middle of the run.

    Each rank computes it for all of them.
    """
    import numpy as np

    from llmtrain.data.order import Mixture, permutation_key, permute

    sequences = TOKENS // SEQUENCE
    batch = ranks
    times = []
    for number in range(20):
        cursor = sequences // 2 + number * batch
        started = time.perf_counter()
        _, places = Mixture([0.7, 0.3]).locate(np.arange(cursor, cursor + batch))
        permute(places % sequences, sequences, permutation_key(1, "source", 0))
        times.append(time.perf_counter() - started)
    return {"batch_ms": sorted(times)[10] * 1000, "peak_mib": _peak_mib()}


def manifest(ranks: int) -> dict[str, float]:
    """Times writing, reading and joining the manifest of a checkpoint that all ranks wrote, with three files each."""
    from llmtrain.checkpoint.check import files_of
    from llmtrain.checkpoint.manifest import File, Manifest, read_manifests

    names = ("engine/pieces_rank_{:05d}.safetensors", "engine/index_rank_{:05d}.json", "rng/rank_{:05d}.safetensors")
    files = {
        name.format(rank): File(bytes=10**9 + rank, xxh3_128=f"{rank:032x}", rank=rank, private=False)
        for rank in range(ranks)
        for name in names
    }
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        started = time.perf_counter()
        Manifest(
            save="s",
            part=0,
            hosts=["h"],
            run="r",
            recipe="c",
            step=1,
            samples=1,
            eval_loss=None,
            written="2026-01-01T00:00:00.000000",
            world_size=ranks,
            layout={},
            versions={},
            files=files,
        ).write(folder)
        written = time.perf_counter()
        read = files_of(read_manifests(folder))
        done = time.perf_counter()
        size = sum(file.stat().st_size for file in folder.iterdir())
    assert len(read) == 3 * ranks
    return {"write_s": written - started, "read_s": done - written, "mib": size / 2**20, "peak_mib": _peak_mib()}


def launch(ranks: int) -> dict[str, float]:
    """Times reading a hostfile and rendering Slurm's job script."""
    from llmtrain.launch.hostfile import Host, read_hosts, render_hostfile
    from llmtrain.launch.jobs.slurm import SlurmJob, SlurmOptions, render_job
    from llmtrain.recipe.cluster import Cluster

    cluster = Cluster(nodes=ranks // PER_NODE, devices_per_node=PER_NODE, device="h100")
    folder = Path("/shared/job")
    job = SlurmJob(
        "llama3_70b", cluster, cluster.nodes, ("recipes/llama3_70b.py",), folder / "run", folder, SlurmOptions()
    )
    hosts = [Host(f"node{number:05d}", tuple(range(PER_NODE))) for number in range(ranks // PER_NODE)]
    with tempfile.NamedTemporaryFile("w", suffix=".hosts") as file:
        started = time.perf_counter()
        file.write(render_hostfile(hosts))
        file.flush()
        assert len(read_hosts(Path(file.name))) == len(hosts)
        listed = time.perf_counter()
        assert str(cluster.nodes) in render_job(job)
        done = time.perf_counter()
    return {"hostfile_s": listed - started, "script_s": done - listed, "peak_mib": _peak_mib()}


def verdicts(ranks: int) -> dict[str, float]:
    """Times how long the store of rank 0 takes to answer each rank once, if all ask for a verdict at the same time.

    Several connections ask concurrently: asking on one after another would time the requests.
    """
    from concurrent.futures import ThreadPoolExecutor
    from datetime import timedelta

    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    server = TCPStore("127.0.0.1", 0, is_master=True, timeout=timedelta(seconds=30))
    clients = [TCPStore("127.0.0.1", server.port, is_master=False) for _ in range(16)]
    server.set("verdict", "0")
    for client in clients:
        client.get("verdict")

    def ask(number: int) -> None:
        for _ in range(number, ranks, len(clients)):
            clients[number].get("verdict")

    with ThreadPoolExecutor(len(clients)) as pool:
        started = time.perf_counter()
        for done in [pool.submit(ask, number) for number in range(len(clients))]:
            done.result()
        return {"seconds": time.perf_counter() - started}


def _peak_mib() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**10


def main() -> None:
    """Measures one part."""
    parts = {one.__name__: one for one in (plan, sampler, manifest, launch, verdicts)}
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=parts)
    parser.add_argument("ranks", type=int)
    options = parser.parse_args()
    print(json.dumps(parts[options.part](options.ranks)))


if __name__ == "__main__":
    main()
