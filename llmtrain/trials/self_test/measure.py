"""Measures the rates that time predictions assume, on all devices at once, and the time and memory of real steps."""

from __future__ import annotations

import platform
import statistics
import time
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path

import torch
from torch import distributed as dist
from torch.nn.functional import scaled_dot_product_attention

from llmtrain.data import MicroBatch, StepBatch
from llmtrain.engines import build_engine
from llmtrain.engines.runtime.distributed import barrier
from llmtrain.launch.doctor.all_reduce import bus_bandwidth
from llmtrain.models.precision import DTYPES
from llmtrain.plan import Plan
from llmtrain.plan.ds_config import render
from llmtrain.plan.predict.work import ATTENTION_BACKWARD
from llmtrain.recipe.cluster import Cluster
from llmtrain.system.durable import write_atomically
from llmtrain.trials.jobs import Say
from llmtrain.trials.self_test.job import HEAD_DIM, DeviceRates, MeasureJob, rates_file, timed_plan

HEADS = 16
SIZES = (256, 512, 1024, 2048, 4096)
"""Widths of matrix products and lengths of attention, tried in order until one takes `LONG_S`."""
BYTES = tuple(2**power for power in range(24, 30))
"""Sizes of copies in bytes, tried in the same way."""
LONG_S = 2e-3
"""Duration of a kernel in seconds from which on its launch is negligible."""
SECONDS = 0.3
"""Seconds for which the largest kernel is repeated, so that a GPU reaches its power limit."""
LAUNCHES = 2000
"""Number of launches of a kernel that are timed."""
WARM_UP, STEPS = 2, 5
EXACT = 64
"""Inner size of a product of integers from −2 to 2. Its sums are at most 256, so they are exact even in bf16."""


def measure_rank(job: MeasureJob, folder: Path, device: torch.device, _: Say) -> None:
    """Measures this rank's device, and writes the rates to the folder."""
    write_atomically(rates_file(folder, dist.get_rank()), measure_device(job.cluster, device).model_dump_json())


def measure_device(cluster: Cluster, device: torch.device) -> DeviceRates:
    """Measures this rank's device. All ranks measure the same at the same time, because they share power and links."""
    is_gpu = device.type == "cuda"
    matmul = {name: _matmul(dtype, device) for name, dtype in DTYPES.items()}
    attention = {name: _attention(dtype, device) for name, dtype in DTYPES.items()}
    wrong = tuple(name for name, dtype in DTYPES.items() if not is_right(dtype, device, dist.get_rank()))
    memory, launch = _memory(device), _launch(device)
    (node, pairs), host = _links(device), _host(device) if is_gpu else None
    slowest = torch.tensor([matmul[name] for name in DTYPES], dtype=torch.float64, device=device)
    dist.all_reduce(slowest, dist.ReduceOp.MIN)
    step_s, allocated = _steps(timed_plan(cluster, dict(zip(DTYPES, slowest.tolist(), strict=True))), device)
    properties = torch.cuda.get_device_properties(device) if is_gpu else None
    return DeviceRates(
        rank=dist.get_rank(),
        product=properties.name if properties else platform.processor() or platform.machine(),
        memory_bytes=properties.total_memory if properties else None,
        wrong=wrong,
        matmul=matmul,
        attention=attention,
        memory_bandwidth=memory,
        launch_s=launch,
        host_bandwidth=host,
        node_bandwidth=node,
        pair_bandwidth=pairs,
        step_s=step_s,
        allocated_bytes=allocated,
    )


def _rate(
    sizes: Iterable[int], prepare: Callable[[int], tuple[float, Callable[[], object]]], device: torch.device
) -> float:
    """Returns the rate, in units of work per second, for the first size that takes `LONG_S`, else for the last size.

    prepare: returns the amount of work for a size, and the function that does it.
    """
    barrier()
    amount, work = 0.0, None
    for size in sizes:
        amount, work = prepare(size)
        if _seconds(work, SECONDS / 10, device) >= LONG_S:
            break
    assert work is not None, "there are sizes"
    return amount / _seconds(work, SECONDS, device)


def _seconds(work: Callable[[], object], least: float, device: torch.device) -> float:
    """Returns the mean seconds of `work`, which is repeated for at least `least` seconds after a warm-up."""
    work()
    _wait(device)
    repeats, spent, started = 0, 0.0, time.perf_counter()
    while spent < least:
        work()
        repeats += 1
        if repeats & (repeats - 1) == 0:  # waiting after each call would leave the device idle between them
            _wait(device)
        spent = time.perf_counter() - started
    _wait(device)
    return (time.perf_counter() - started) / repeats


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _matmul(dtype: torch.dtype, device: torch.device) -> float:
    """Returns the FLOP/s of a feed-forward layer's two matrix products, with random numbers.

    Products of zeros would need less power and would run faster than those of a model.
    """

    def prepare(width: int) -> tuple[float, Callable[[], object]]:
        x = torch.randn(width, width, device=device).to(dtype)
        up, down = (torch.randn(shape, device=device).to(dtype) for shape in ((width, 4 * width), (4 * width, width)))
        return 2 * (2 * 4 * width**3), lambda: (x @ up) @ down

    return _rate(SIZES, prepare, device)


def _attention(dtype: torch.dtype, device: torch.device) -> float:
    def prepare(length: int) -> tuple[float, Callable[[], object]]:
        shape = (1, HEADS, length, HEAD_DIM)
        query, key, value = (torch.randn(shape, device=device).to(dtype).requires_grad_() for _ in range(3))
        gradient = torch.ones(shape, device=device, dtype=dtype)

        def work() -> None:
            output = scaled_dot_product_attention(query, key, value, is_causal=True)
            torch.autograd.grad(output, (query, key, value), gradient)

        return (1 + ATTENTION_BACKWARD) * 4 * HEADS * HEAD_DIM * length**2 / 2, work

    return _rate(SIZES, prepare, device)


def is_right(dtype: torch.dtype, device: torch.device, seed: int) -> bool:
    """Whether a matrix product of integers, which needs no rounding, equals a CPU's product in integer arithmetic."""
    generator = torch.Generator().manual_seed(seed)
    a, b = (torch.randint(-2, 3, shape, generator=generator) for shape in ((1024, EXACT), (EXACT, 1024)))
    product = (a.to(device, dtype) @ b.to(device, dtype)).to("cpu", torch.int64)
    return torch.equal(product, (a.int() @ b.int()).long())


def _memory(device: torch.device) -> float:
    def prepare(size: int) -> tuple[float, Callable[[], object]]:
        block, other = _block(size, device), _block(size, device)
        return 2 * size, lambda: other.copy_(block)

    return _rate(BYTES, prepare, device)


def _block(size: int, device: torch.device) -> torch.Tensor:
    return torch.zeros(size, dtype=torch.uint8, device=device)


def _launch(device: torch.device) -> float:
    scalar = torch.zeros(1, device=device)
    return _seconds(lambda: [scalar.add_(1) for _ in range(LAUNCHES)], SECONDS, device) / LAUNCHES


def _links(device: torch.device) -> tuple[float | None, tuple[float | None, ...]]:
    """Returns two bandwidths: of an all-reduce over all ranks (bus bandwidth as in the doctor), and of each pair."""
    ranks = dist.get_world_size()
    if ranks == 1:
        return None, (None,)
    for size in BYTES:
        reduce = partial(dist.all_reduce, torch.zeros(size // 4, device=device))
        _repeated(reduce, 1, device)
        slowest = torch.tensor([_repeated(reduce, 1, device)], device=device)
        dist.all_reduce(slowest, dist.ReduceOp.MAX)  # so that all ranks stop at the same size
        if slowest.item() >= LONG_S:
            break
    repeats = max(1, int(SECONDS / slowest.item()))
    node = bus_bandwidth(ranks, size, _repeated(reduce, repeats, device))
    return node, _pairs(_block(size, device), max(1, repeats // ranks))


def _pairs(block: torch.Tensor, repeats: int) -> tuple[float | None, ...]:
    """Returns the bytes per second, each way, to each other rank. An all-reduce does not show which link is slow.

    In round k, ranks i and j with i + j ≡ k (mod the number of ranks) exchange data. Each pair therefore meets once,
    and other pairs disturb it no more than in an all-reduce.
    """
    rank, ranks = dist.get_rank(), dist.get_world_size()
    bandwidths: list[float | None] = [None] * ranks
    received = torch.empty_like(block)
    for number in range(ranks):
        other = (number - rank) % ranks

        def exchange(other: int = other) -> None:
            if other != rank:
                calls = [dist.P2POp(dist.isend, block, other), dist.P2POp(dist.irecv, received, other)]
                for work in dist.batch_isend_irecv(calls):
                    work.wait()

        _repeated(exchange, 1, block.device)
        seconds = _repeated(exchange, repeats, block.device)
        if other != rank:
            bandwidths[other] = block.nbytes / seconds
    return tuple(bandwidths)


def _repeated(work: Callable[[], object], repeats: int, device: torch.device) -> float:
    """Returns the mean seconds of `work`, which all ranks do together."""
    _wait(device)
    barrier()
    started = time.perf_counter()
    for _ in range(repeats):
        work()
    _wait(device)
    return (time.perf_counter() - started) / repeats


def _host(device: torch.device) -> float:
    """Returns the bytes per second between host and device, in the slower direction."""

    def prepare(size: int, back: bool) -> tuple[float, Callable[[], object]]:
        block, pinned = _block(size, device), torch.zeros(size, dtype=torch.uint8, pin_memory=True)
        target, source = (pinned, block) if back else (block, pinned)
        return size, lambda: target.copy_(source, non_blocking=True)

    return min(_rate(BYTES, partial(prepare, back=back), device) for back in (False, True))


def _steps(plan: Plan, device: torch.device) -> tuple[float, int | None]:
    """Returns the median seconds of the plan's steps, and the peak of torch's allocated bytes (None on a CPU)."""
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)
    engine = build_engine(plan, render(plan), device)
    seconds = []
    for _ in range(WARM_UP + STEPS):
        batch = _batch(plan)
        _wait(device)
        barrier()
        started = time.perf_counter()
        engine.train_step(batch)
        _wait(device)
        seconds.append(time.perf_counter() - started)
    allocated = torch.cuda.max_memory_allocated(device) if device.type == "cuda" else None
    engine.close()
    return statistics.median(seconds[WARM_UP:]), allocated


def _batch(plan: Plan) -> StepBatch:
    """Returns this rank's part of a global batch of random tokens."""
    length, rows = plan.recipe.data.sequence_length, plan.batch.micro_batch_size
    positions = torch.arange(length).expand(rows, length)
    micro_batches = []
    for _ in range(plan.batch.gradient_accumulation_steps):
        tokens = torch.randint(plan.model.vocab_size, (rows, length))
        micro_batches.append(MicroBatch(tokens, positions, tokens))
    samples = plan.batch.global_batch_size
    return StepBatch(micro_batches, samples * length, samples, first_sample=0)
