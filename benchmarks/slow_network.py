"""Measures what share of its communication each strategy hides on a slow network; writes results/slow_network.json.

python benchmarks/slow_network.py

Two network namespaces with two ranks each act as hosts. They are joined by a virtual cable whose rate `tc` limits.
Layers mostly sleep instead of computing, and the model has ten buckets. Each plan first runs without the limit. The
additional seconds under the limit are those in which it waits for the network. The program needs root, and the programs
listed in `tests/helpers/two_hosts.py`.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))

from benchmarks.machine import facts  # noqa: E402
from benchmarks.programs.slow_network import (  # noqa: E402
    BACKWARD_S,
    BUCKET_MIB,
    FORWARD_S,
    MICRO_BATCHES,
    NODES,
    PER_NODE,
    PLANS,
    STEPS,
    plan_of,
    small_buckets,
)
from llmtrain.plan import Plan  # noqa: E402
from llmtrain.plan.predict.assumptions import Assumptions  # noqa: E402
from llmtrain.plan.predict.links import Links, TransferKind  # noqa: E402
from llmtrain.plan.predict.time import waits_of  # noqa: E402
from llmtrain.plan.predict.traffic import CommunicationGroups, Traffic, Transfer  # noqa: E402
from llmtrain.plan.predict.work import Work, parameters_of_stages  # noqa: E402
from llmtrain.plan.schedules import PipelineSchedule  # noqa: E402
from tests.helpers.two_hosts import INTERFACE, TwoHosts, missing, two_hosts  # noqa: E402

RESULT = ROOT / "benchmarks/results/slow_network.json"
RATE = 12.5e6
"""Rate of the limited cable in bytes per second, each way."""
BURST = "32kb"
"""Amount that the cable sends at once after a pause. A larger burst would compensate for the pauses between buckets."""
LOOPBACK = 2e9
"""Rate between the ranks of a host in bytes per second, which is too high to matter."""
ASSUMED = Assumptions(link=0.95, overlap=1.0, node_latency_s=1e-4, network_latency_s=2e-4)
"""Assumptions for this setup: headers take 5% of the rate, and a sleeping process leaves its core to communication."""
PORT = 29500
BESIDE_COMPUTATION: dict[str, TransferKind | None] = {"deepspeed": "all_gather", "ddp": "all_reduce", "fsdp2": None}
"""Strategy → kind of transfer that overlaps with computation on CPUs. DeepSpeed and FSDP2 overlap other transfers by
means of streams, which only accelerators have."""


def main() -> None:
    """Runs all plans with the unlimited and the limited cable, and writes the result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=PLANS, help="print the result of one plan, and write nothing")
    parser.add_argument("--short", action="store_true", help="time one step of each plan, and write nothing")
    options = parser.parse_args()
    if lacking := missing():
        sys.exit(lacking)
    names, steps = [options.only] if options.only else list(PLANS), 1 if options.short else STEPS
    with tempfile.TemporaryDirectory(prefix="benchmark-") as folder, two_hosts(Path(folder)) as both:
        free = _run(both, names, steps)
        _limit(both, RATE)
        limited = _run(both, names, steps)
    rows = [row_of(name, free[name], limited[name]) for name in names]
    document = {
        "command": "python benchmarks/slow_network.py",
        **facts(),
        "rate": RATE,
        "bucket_mib": BUCKET_MIB,
        "layer_forward_s": FORWARD_S,
        "layer_backward_s": BACKWARD_S,
        "micro_batches": MICRO_BATCHES,
        "steps": steps,
        "rows": rows,
    }
    text = json.dumps(document, indent=1) + "\n"
    print(text)
    if not (options.only or options.short):
        RESULT.write_text(text, encoding="utf-8")


def _limit(both: TwoHosts, rate: float) -> None:
    for host in both.hosts:
        shaped = ("tc", "qdisc", "add", "dev", INTERFACE, "root", "tbf", "rate", f"{8 * rate:.0f}bit")
        subprocess.run(host.command(*shaped, "burst", BURST, "latency", "400ms"), check=True)


def _run(both: TwoHosts, names: list[str], steps: int) -> dict[str, dict[str, float]]:
    """Starts two ranks on each host, and returns the numbers that rank 0 prints for each plan."""
    workers = []
    for rank in range(NODES * PER_NODE):
        host = both.hosts[rank // PER_NODE]
        own: dict[str, object] = {"RANK": rank, "LOCAL_RANK": rank % PER_NODE, "WORLD_SIZE": NODES * PER_NODE}
        own |= {"MASTER_ADDR": both.hosts[0].address, "MASTER_PORT": PORT, "GLOO_SOCKET_IFNAME": INTERFACE}
        own |= {"DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": 1, "SLOW_NETWORK": json.dumps([names, steps])}
        environment = os.environ | {key: str(value) for key, value in own.items()}
        command = host.command(sys.executable, "-m", "benchmarks.programs.slow_network")
        out = subprocess.PIPE if rank == 0 else subprocess.DEVNULL
        workers.append(subprocess.Popen(command, cwd=ROOT, env=environment, stdout=out, text=True))
    printed = workers[0].communicate()[0]
    if any(worker.wait() for worker in workers):
        sys.exit("a rank failed; its error is above")
    found: dict[str, dict[str, float]] = json.loads(printed.partition("RESULT ")[2].splitlines()[0])
    return found


def row_of(name: str, free: dict[str, float], limited: dict[str, float]) -> dict[str, Any]:
    """Returns prediction and measurement side by side. The prediction adds waiting to the measured unlimited step."""
    waiting, hidden = predicted(plan_of(name))
    expected, measured = free["step_s"] + waiting, limited["step_s"]
    total = waiting + hidden
    return {
        "plan": name,
        "cable_bytes": round(limited["cable_bytes"]),
        "free_step_s": round(free["step_s"], 4),
        "communication_s": round(total, 4),
        "predicted_step_s": round(expected, 4),
        "measured_step_s": round(measured, 4),
        "step_error": round(expected / measured - 1, 4),
        "predicted_hidden": round(hidden / total, 4),
        "measured_hidden": round(1 - (measured - free["step_s"]) / total, 4),
    }


def predicted(plan: Plan) -> tuple[float, float]:
    """Returns the seconds per step that the slowest rank waits for communication, and those that are hidden."""
    links = Links(PER_NODE, LOOPBACK, RATE * ASSUMED.link / PER_NODE, LOOPBACK, ASSUMED)
    groups, m = CommunicationGroups(plan), plan.batch.gradient_accumulation_steps
    schedule = PipelineSchedule.of(plan.parallel)
    found = []
    for held in parameters_of_stages(plan.model, plan.stages):
        work = Work(forward=held.layers * FORWARD_S, recompute=0.0, backward=held.layers * BACKWARD_S)
        with small_buckets():
            traffic = on_gloo(groups.traffic(held), plan.recipe.parallel.strategy)
        each, once, hidden = waits_of(traffic, links, work, m, schedule)
        found.append((m * sum(each.values()) + sum(once.values()), hidden))
    return max(found)


def on_gloo(traffic: Traffic, strategy: str) -> Traffic:
    """Returns the transfers as made on CPUs: ranks wait for most, and gloo's reduce-scatter is an all-reduce."""
    beside = BESIDE_COMPUTATION[strategy]

    def hidden(transfers: list[Transfer]) -> list[Transfer]:
        return [one for one in transfers if one.kind == beside]

    def waited(always: list[Transfer], *others: list[Transfer]) -> list[Transfer]:
        waits = [*always, *(one for transfers in others for one in transfers if one.kind != beside)]
        return [replace(one, kind="all_reduce") if one.kind == "reduce_scatter" else one for one in waits]

    return traffic._replace(
        exposed=waited(traffic.exposed, traffic.forward_overlapped, traffic.backward_overlapped),
        forward_overlapped=hidden(traffic.forward_overlapped),
        backward_overlapped=hidden(traffic.backward_overlapped),
        step=waited(traffic.step, traffic.step_forward_overlapped, traffic.step_overlapped),
        step_forward_overlapped=hidden(traffic.step_forward_overlapped),
        step_overlapped=hidden(traffic.step_overlapped),
    )


if __name__ == "__main__":
    main()
