"""What Accelerate, Horovod and nn.DataParallel do not run, or would run as something else than is asked."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from llmtrain.plan.draft import Draft
from llmtrain.plan.rules.rule import Fault, assignment, rule


@dataclass(frozen=True)
class Abilities:
    """What a strategy runs as the plain loop does."""

    stages: tuple[int, ...]
    """ZeRO stages; the usual one first."""
    precisions: tuple[str, ...]


STRATEGIES = {
    "ddp": Abilities((0,), ("fp32", "autocast_bf16")),
    "fsdp2": Abilities((3, 2), ("fp32", "bf16", "autocast_bf16")),
    "horovod": Abilities((0,), ("fp32", "bf16", "autocast_bf16")),
    "data_parallel": Abilities((0,), ("fp32", "autocast_bf16")),
}
"""`ParallelConfig.strategy` → its abilities; what is not here is DeepSpeed's."""
_DEEPSPEED = assignment(parallel__backend="deepspeed")


@rule("backend.accelerate", "What accelerate would run says nothing where another backend runs.", "run")
def accelerate(draft: Draft) -> Iterator[Fault]:
    """`parallel.accelerate` under another backend."""
    parallel = draft.parallel
    if parallel.backend != "accelerate" and parallel.accelerate != "ddp":
        message = f"'{parallel.accelerate}' was given, but parallel.backend is '{parallel.backend}'"
        fix = f"{assignment(parallel__backend='accelerate')}, or {assignment(parallel__accelerate='ddp')}"
        yield Fault("parallel.accelerate", message, fix)


@rule("backend.degrees", "Other backends are handed the whole model: each device holds a replica.", "run")
def degrees(draft: Draft) -> Iterator[Fault]:
    """Degrees other than that of data parallelism (`Accelerator.prepare`)."""
    parallel = draft.parallel
    if parallel.backend == "deepspeed":
        return
    for name in ("pipeline", "tensor", "sequence", "expert"):
        degree = getattr(parallel, name)
        if degree > 1:
            message = f"{degree} was given: the backend {parallel.backend} has data parallelism only"
            yield Fault(f"parallel.{name}", message, f"{assignment(**{f'parallel__{name}': 1})}, or {_DEEPSPEED}")


@rule("backend.zero_stage", "FSDP2 always shards parameters; the others keep all of them on each device.", "run")
def zero_stage(draft: Draft) -> Iterator[Fault]:
    """Stages that a strategy does not have."""
    strategy, stage = draft.parallel.strategy, draft.parallel.zero_stage
    able = STRATEGIES.get(strategy)
    if able and stage not in able.stages:
        message = f"{stage} was given: {strategy} has {' and '.join(map(str, able.stages))}"
        other = _DEEPSPEED
        if strategy == "ddp" and stage in STRATEGIES["fsdp2"].stages:
            other = assignment(parallel__accelerate="fsdp2")
        yield Fault("parallel.zero_stage", message, f"{assignment(parallel__zero_stage=able.stages[0])}, or {other}")


@rule(
    "backend.precision",
    "DistributedDataParallel and nn.DataParallel train the weights that they are given: in bf16, without fp32 master "
    "weights, small updates are lost. fp16 Accelerate ignores on CPUs, and elsewhere it keeps the loss scale in no "
    "checkpoint of ours; the plain loop of the others has none.",
    "run",
)
def precision(draft: Draft) -> Iterator[Fault]:
    """Precisions that a strategy does not train as the reference does."""
    parallel = draft.parallel
    able = STRATEGIES.get(parallel.strategy)
    if able is None or parallel.precision in able.precisions:
        return
    message = f"'{parallel.precision}' was given: {parallel.strategy} trains in {', '.join(able.precisions)}"
    other = assignment(parallel__backend="deepspeed", parallel__zero_stage=1)
    if parallel.strategy == "ddp" and parallel.precision == "bf16":
        other = assignment(parallel__accelerate="fsdp2", parallel__zero_stage=3)
    yield Fault("parallel.precision", message, f"{assignment(parallel__precision='autocast_bf16')}, or {other}")


@rule("backend.grad_accum", "Other backends sum gradients in fp32; another type would be ignored.", "run")
def grad_accum(draft: Draft) -> Iterator[Fault]:
    """Accumulators below fp32."""
    parallel = draft.parallel
    if parallel.strategy in STRATEGIES and parallel.grad_accum_dtype != "fp32":
        message = f"'{parallel.grad_accum_dtype}' was given: {parallel.strategy} sums gradients in fp32"
        yield Fault("parallel.grad_accum_dtype", message, assignment(parallel__grad_accum_dtype="fp32"))


@rule(
    "backend.offload",
    "Of the other backends only FSDP2 has offload: of parameters, gradients and optimizer together, which has not been "
    "compared with the reference.",
    "run",
)
def offload(draft: Draft) -> Iterator[Fault]:
    """Offload, which would be ignored."""
    parallel = draft.parallel
    if parallel.strategy not in STRATEGIES:
        return
    for name, unused in (("offload_optimizer", "none"), ("offload_param", "none"), ("nvme_path", None)):
        given = getattr(parallel, name)
        if given != unused:
            message = f"'{given}' was given: {parallel.strategy} offloads nothing here"
            fix = assignment(**{f"parallel__{name}": unused or "null"})
            yield Fault(f"parallel.{name}", message, f"{fix}, or {_DEEPSPEED}")


@rule("data_parallel.devices", "nn.DataParallel is one process, and spreads its work over that machine's GPUs.", "run")
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
    "forward pass, sums gradients on the first one, which alone updates, and drives all devices from one interpreter. "
    "How much slower it is takes several GPUs to measure, and is not.",
    "read",
    refuses=False,
)
def slow(draft: Draft) -> Iterator[Fault]:
    """Notes what one process per device does better."""
    if draft.parallel.strategy == "data_parallel" and draft.cluster.devices_per_node > 1:
        message = (
            "nn.DataParallel copies the weights to each device in every pass, updates on the first alone and has one "
            "interpreter for all: PyTorch advises a process per device, which trains the same"
        )
        yield Fault("parallel.backend", message, _DEEPSPEED)


RULES = (accelerate, degrees, zero_stage, precision, grad_accum, offload, devices, slow)
