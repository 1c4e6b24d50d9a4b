"""Rules against plans that Accelerate, Horovod or nn.DataParallel cannot run, or would not run as requested."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from llmtrain.plan.draft import Draft
from llmtrain.plan.rules.rule import Fault, assignment, rule


@dataclass(frozen=True)
class Abilities:
    """The options with which a strategy gives the same results as the plain loop."""

    stages: tuple[int, ...]
    """Supported ZeRO stages, the default one first."""
    precisions: tuple[str, ...]


STRATEGIES = {
    "ddp": Abilities((0,), ("fp32", "autocast_bf16")),
    "fsdp2": Abilities((3, 2), ("fp32", "bf16", "autocast_bf16")),
    "horovod": Abilities((0,), ("fp32", "bf16", "autocast_bf16")),
    "data_parallel": Abilities((0,), ("fp32", "autocast_bf16")),
}
"""`ParallelConfig.strategy` → its abilities. Strategies that are not listed are DeepSpeed's."""
_DEEPSPEED = assignment(parallel__backend="deepspeed")


@rule("backend.accelerate", "run")
def accelerate(draft: Draft) -> Iterator[Fault]:
    """Refuses `parallel.accelerate`, which chooses what accelerate runs, under another backend."""
    parallel = draft.parallel
    if parallel.backend != "accelerate" and parallel.accelerate != "ddp":
        message = f"'{parallel.accelerate}' has no effect: parallel.backend is '{parallel.backend}'"
        fix = f"{assignment(parallel__backend='accelerate')}, or {assignment(parallel__accelerate='ddp')}"
        yield Fault("parallel.accelerate", message, fix)


@rule("backend.degrees", "run")
def degrees(draft: Draft) -> Iterator[Fault]:
    """Refuses every degree other than data parallelism (`Accelerator.prepare`). Other backends receive the whole model:
    each device holds a replica."""
    parallel = draft.parallel
    if parallel.backend == "deepspeed":
        return
    for name in ("pipeline", "tensor", "sequence", "expert"):
        degree = getattr(parallel, name)
        if degree > 1:
            message = f"must be 1, not {degree}: the backend {parallel.backend} supports data parallelism only"
            yield Fault(f"parallel.{name}", message, f"{assignment(**{f'parallel__{name}': 1})}, or {_DEEPSPEED}")


@rule("backend.zero_stage", "run")
def zero_stage(draft: Draft) -> Iterator[Fault]:
    """Refuses ZeRO stages that the strategy does not support. FSDP2 always shards parameters; the others keep all of
    them on each device."""
    strategy, stage = draft.parallel.strategy, draft.parallel.zero_stage
    able = STRATEGIES.get(strategy)
    if able and stage not in able.stages:
        message = f"must be {' or '.join(map(str, sorted(able.stages)))} with {strategy}, not {stage}"
        other = _DEEPSPEED
        if strategy == "ddp" and stage in STRATEGIES["fsdp2"].stages:
            other = assignment(parallel__accelerate="fsdp2")
        yield Fault("parallel.zero_stage", message, f"{assignment(parallel__zero_stage=able.stages[0])}, or {other}")


@rule("backend.precision", "run")
def precision(draft: Draft) -> Iterator[Fault]:
    """Refuses precisions in which a strategy does not give the results of the reference. DistributedDataParallel and
    nn.DataParallel train the weights that they are given: in bf16, without fp32 master weights, small updates are lost.
    Accelerate ignores fp16 on CPUs, and on GPUs its loss scale is not in our checkpoints; the plain loop of the other
    backends has no loss scale."""
    parallel = draft.parallel
    able = STRATEGIES.get(parallel.strategy)
    if able is None or parallel.precision in able.precisions:
        return
    message = f"must be {' or '.join(able.precisions)} with {parallel.strategy}, not '{parallel.precision}'"
    other = assignment(parallel__backend="deepspeed", parallel__zero_stage=1)
    if parallel.strategy == "ddp" and parallel.precision == "bf16":
        other = assignment(parallel__accelerate="fsdp2", parallel__zero_stage=3)
    yield Fault("parallel.precision", message, f"{assignment(parallel__precision='autocast_bf16')}, or {other}")


@rule("backend.grad_accum", "run")
def grad_accum(draft: Draft) -> Iterator[Fault]:
    """Refuses gradient accumulation in less precision than fp32. Other backends sum gradients in fp32; another type
    would be ignored."""
    parallel = draft.parallel
    if parallel.strategy in STRATEGIES and parallel.grad_accum_dtype != "fp32":
        message = f"'{parallel.grad_accum_dtype}' has no effect: {parallel.strategy} sums gradients in fp32"
        yield Fault("parallel.grad_accum_dtype", message, assignment(parallel__grad_accum_dtype="fp32"))


@rule("backend.offload", "run")
def offload(draft: Draft) -> Iterator[Fault]:
    """Refuses offload, which would be ignored. Among the other backends only FSDP2 can offload, and only parameters,
    gradients and optimizer together, which has not been compared with the reference."""
    parallel = draft.parallel
    if parallel.strategy not in STRATEGIES:
        return
    for name, unused in (("offload_optimizer", "none"), ("offload_param", "none"), ("nvme_path", None)):
        given = getattr(parallel, name)
        if given != unused:
            message = f"must be {unused or 'null'}, not '{given}': offload is not supported with {parallel.strategy}"
            fix = assignment(**{f"parallel__{name}": unused or "null"})
            yield Fault(f"parallel.{name}", message, f"{fix}, or {_DEEPSPEED}")


@rule("data_parallel.devices", "run")
def devices(draft: Draft) -> Iterator[Fault]:
    """Refuses several machines, and several CPU devices. nn.DataParallel is a single process that spreads its work over
    the GPUs of one machine."""
    cluster = draft.cluster
    if draft.parallel.strategy != "data_parallel":
        return
    if cluster.nodes > 1:
        message = f"'data_parallel' does not support {cluster.nodes} machines: it is a single process on one machine"
        yield Fault("parallel.backend", message, _DEEPSPEED)
    elif cluster.spec.on_cpu and cluster.devices_per_node > 1:
        message = (
            f"'data_parallel' does not support {cluster.devices_per_node} CPU devices: it spreads work over GPUs only"
        )
        yield Fault("parallel.backend", message, f"{_DEEPSPEED}, or use one device")


@rule("data_parallel.slow", "read", refuses=False)
def slow(draft: Draft) -> Iterator[Fault]:
    """Gives a note on the advantages of one process per device. PyTorch recommends DistributedDataParallel instead:
    nn.DataParallel copies the weights to every device in each forward pass, sums gradients and updates on the first
    device alone, and drives all devices from one interpreter. How much slower it is has not been measured, since that
    takes several GPUs."""
    if draft.parallel.strategy == "data_parallel" and draft.cluster.devices_per_node > 1:
        message = (
            "nn.DataParallel copies the weights to each device in every pass, updates on the first "
            "device alone and drives all of them from one interpreter: PyTorch recommends one process "
            "per device, which gives the same result"
        )
        yield Fault("parallel.backend", message, _DEEPSPEED)


@rule("backend.hierarchical", "run")
def hierarchical(draft: Draft) -> Iterator[Fault]:
    """Refuses hpZ, a part of DeepSpeed's ZeRO 3 that other strategies ignore."""
    parallel = draft.parallel
    if parallel.strategy in STRATEGIES and parallel.hierarchical_partition > 1:
        message = f"must be 1, not {parallel.hierarchical_partition}: {parallel.strategy} does not support hpZ"
        fix = assignment(parallel__hierarchical_partition=1)
        yield Fault("parallel.hierarchical_partition", message, f"{fix}, or {_DEEPSPEED}")
