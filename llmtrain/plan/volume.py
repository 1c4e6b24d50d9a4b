"""How many bytes each rank sends in a step: what the time of a plan is predicted from, before links divide it."""

from __future__ import annotations

from collections import Counter

from llmtrain.cluster import Device
from llmtrain.plan.assumptions import Assumptions
from llmtrain.plan.draft import COMPUTE_DTYPE
from llmtrain.plan.links import Links
from llmtrain.plan.plan import Plan
from llmtrain.plan.traffic import Network
from llmtrain.plan.work import Worker, held_by

# Links of a byte per second that wait for nothing: what takes a second there is a byte.
_AT_ONCE = Assumptions(node_latency_s=1e-12, network_latency_s=1e-12, nvme_bandwidth=1.0)
_ANY = 1.0


def volumes(plan: Plan) -> tuple[dict[str, int], ...]:
    """For each pipeline stage, bytes that one of its ranks sends in a step, by kind (`Traffic`).

    In rings, as NCCL and gloo send: (n − 1) / n of what is gathered or scattered among n ranks, twice that of
    what is all-reduced. `host` is what crosses to and from the host's memory. Empty for `nn.DataParallel`,
    which copies through one process.
    """
    if plan.recipe.parallel.strategy == "data_parallel":
        return ()
    device = Device(name="any", memory_bytes=None, peak_flops={COMPUTE_DTYPE[plan.recipe.parallel.precision]: _ANY})
    links = Links(plan.cluster.world_size, 1.0, 1.0, _AT_ONCE)
    network = Network(plan, Worker(plan, device, _ANY, _ANY, _AT_ONCE), links, host_bandwidth=1.0)
    found = []
    for held in held_by(plan.model, plan.stages):
        traffic, sent = network.traffic(held), Counter[str]()
        each = plan.batch.gradient_accumulation_steps
        parts = ((traffic.waited, each), (traffic.hidden, each), (traffic.step, 1), (traffic.step_hidden, 1))
        for seconds, times in parts:
            for kind, size in seconds.items():
                sent[kind] += round(size * times)
        found.append({kind: size for kind, size in sent.items() if size})
    return tuple(found)
