"""Horovod and `torch.nn.DataParallel`: backends that keep the whole model on every device."""

from __future__ import annotations

from collections.abc import Iterator

from llmtrain.plan.draft import Draft
from llmtrain.plan.rules.rule import Fault, assignment, rule

PRECISIONS = {
    "horovod": ("fp32", "bf16", "autocast_bf16"),
    "data_parallel": ("fp32", "autocast_bf16"),
}
"""Backend → precisions that it trains as the plain loop does."""
_DEEPSPEED = assignment(parallel__backend="deepspeed")


@rule("replicated.degrees", "Horovod and nn.DataParallel copy the whole model: they have no other parallelism.", "read")
def degrees(draft: Draft) -> Iterator[Fault]:
    """Degrees other than that of data parallelism."""
    parallel = draft.parallel
    if parallel.strategy not in PRECISIONS:
        return
    for name in ("pipeline", "tensor", "sequence", "expert"):
        degree = getattr(parallel, name)
        if degree > 1:
            message = f"{degree} was given: the backend {parallel.strategy} has data parallelism only"
            yield Fault(f"parallel.{name}", message, f"{assignment(**{f'parallel__{name}': 1})}, or {_DEEPSPEED}")


@rule("replicated.sharding", "Horovod and nn.DataParallel shard and offload nothing; it would be ignored.", "read")
def sharding(draft: Draft) -> Iterator[Fault]:
    """ZeRO stages and offload."""
    parallel = draft.parallel
    if parallel.strategy not in PRECISIONS:
        return
    for name, unused in (
        ("zero_stage", 0),
        ("offload_optimizer", "none"),
        ("offload_param", "none"),
        ("nvme_path", None),
    ):
        given = getattr(parallel, name)
        if given != unused:
            message = f"'{given}' was given: the backend {parallel.strategy} shards and offloads nothing"
            fix = assignment(**{f"parallel__{name}": "null" if unused is None else unused})
            yield Fault(f"parallel.{name}", message, f"{fix}, or {_DEEPSPEED}")


@rule(
    "replicated.precision",
    "Neither scales the loss, as fp16 needs. nn.DataParallel sums the gradients of its devices in the type of the "
    "weights, which in bf16 loses their low bits.",
    "read",
)
def precision(draft: Draft) -> Iterator[Fault]:
    """Precisions that would be trained as something else (`torch/nn/parallel/_functions.py`, `Broadcast.backward`)."""
    parallel = draft.parallel
    allowed = PRECISIONS.get(parallel.strategy)
    if allowed and parallel.precision not in allowed:
        message = f"'{parallel.precision}' was given: the backend {parallel.strategy} trains in {', '.join(allowed)}"
        fix = f"{assignment(parallel__precision='autocast_bf16')}, or {_DEEPSPEED}"
        yield Fault("parallel.precision", message, fix)


@rule("replicated.grad_accum", "The plain loop sums gradients in fp32; another type would be ignored.", "read")
def grad_accum(draft: Draft) -> Iterator[Fault]:
    """Accumulators below fp32."""
    parallel = draft.parallel
    if parallel.strategy in PRECISIONS and parallel.grad_accum_dtype != "fp32":
        message = f"'{parallel.grad_accum_dtype}' was given: the backend {parallel.strategy} sums gradients in fp32"
        yield Fault("parallel.grad_accum_dtype", message, assignment(parallel__grad_accum_dtype="fp32"))


@rule("data_parallel.devices", "nn.DataParallel is one process, and spreads its work over that machine's GPUs.", "read")
def devices(draft: Draft) -> Iterator[Fault]:
    """Several machines, or several CPU devices."""
    cluster = draft.cluster
    if draft.parallel.strategy != "data_parallel":
        return
    if cluster.nodes > 1:
        message = f"'data_parallel' was given for {cluster.nodes} machines: it is one process on one"
        yield Fault("parallel.backend", message, _DEEPSPEED)
    elif cluster.spec.on_cpu and cluster.devices_per_node > 1:
        message = (
            f"'data_parallel' was given for {cluster.devices_per_node} CPU devices: it spreads work over GPUs only"
        )
        yield Fault("parallel.backend", message, f"{_DEEPSPEED}, or use one device")


@rule(
    "data_parallel.slow",
    "PyTorch advises DistributedDataParallel instead: nn.DataParallel copies the weights to every device in each "
    "forward pass, sums gradients on the first one, which alone updates, and drives all devices from one interpreter.",
    "read",
    refuses=False,
)
def slow(draft: Draft) -> Iterator[Fault]:
    """Notes what one process per device does better."""
    if draft.parallel.strategy == "data_parallel" and draft.cluster.devices_per_node > 1:
        message = (
            "nn.DataParallel copies the weights to each device in every pass, updates on the first alone and has one "
            "interpreter for all: a process per device trains the same, faster"
        )
        yield Fault("parallel.backend", message, _DEEPSPEED)


RULES = (degrees, sharding, precision, grad_accum, devices, slow)
