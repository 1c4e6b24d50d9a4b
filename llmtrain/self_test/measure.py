"""Measures the rates that a prediction of time assumes, all devices at once, and the time and memory of real steps."""

from __future__ import annotations

import platform
import statistics
import time
from collections.abc import Callable

import torch
from torch import distributed as dist
from torch.nn.functional import scaled_dot_product_attention

from llmtrain.data import MicroBatch, StepBatch
from llmtrain.doctor.all_reduce import bus_bandwidth
from llmtrain.ds_config import render
from llmtrain.engines import build_engine
from llmtrain.models.precision import DTYPES
from llmtrain.plan import Plan
from llmtrain.predict.work import ATTENTION_BACKWARD
from llmtrain.runtime.distributed import barrier
from llmtrain.self_test.job import DeviceRates, MeasureJob

HEADS, HEAD_DIM = 16, 128
KERNELS = 2000
"""Kernels whose launches are timed."""
WARM_UP = 2
EXACT = 64
"""Inner size of a product of integers from −2 to 2: sums of up to 256 are exact in bf16, too."""


def measure(job: MeasureJob, device: torch.device) -> DeviceRates:
    """Measures this rank's device. All ranks measure the same at the same time, since they share power and links."""
    is_gpu = device.type == "cuda"
    matmul = {name: _matmul(job, dtype, device) for name, dtype in DTYPES.items()}
    attention = {name: _attention(job, dtype, device) for name, dtype in DTYPES.items()}
    wrong = tuple(name for name, dtype in DTYPES.items() if not is_right(dtype, device, dist.get_rank()))
    memory, launch = _memory(job, device), _launch(job, device)
    node, host = _link(job, device), _host(job, device) if is_gpu else None
    step_s, allocated = _steps(job, device)
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
        step_s=step_s,
        allocated_bytes=allocated,
    )


def _seconds(work: Callable[[], object], job: MeasureJob, device: torch.device) -> float:
    """Returns the mean seconds of `work`, repeated for about `job.seconds` after a warm-up."""
    barrier()
    work()
    _wait(device)
    repeats, spent, started = 0, 0.0, time.perf_counter()
    while spent < job.seconds:
        work()
        repeats += 1
        if repeats & (repeats - 1) == 0:  # waiting after each one would leave the device idle in between
            _wait(device)
        spent = time.perf_counter() - started
    _wait(device)
    return (time.perf_counter() - started) / repeats


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _matmul(job: MeasureJob, dtype: torch.dtype, device: torch.device) -> float:
    """Returns the FLOP/s of the products of a feed-forward layer: into its width and back, of random numbers.

    Products of zeros would take less power, and run faster than those of a model.
    """
    rows, width = job.rows, job.width
    x = torch.randn(rows, width, device=device).to(dtype)
    up, down = (torch.randn(shape, device=device).to(dtype) for shape in ((width, 4 * width), (4 * width, width)))
    return 2 * (2 * rows * width * 4 * width) / _seconds(lambda: (x @ up) @ down, job, device)


def _attention(job: MeasureJob, dtype: torch.dtype, device: torch.device) -> float:
    shape = (1, HEADS, job.rows, HEAD_DIM)
    query, key, value = (torch.randn(shape, device=device).to(dtype).requires_grad_() for _ in range(3))
    gradient = torch.ones(shape, device=device, dtype=dtype)

    def work() -> None:
        output = scaled_dot_product_attention(query, key, value, is_causal=True)
        torch.autograd.grad(output, (query, key, value), gradient)

    forward = 4 * HEADS * HEAD_DIM * job.rows**2 / 2
    return (1 + ATTENTION_BACKWARD) * forward / _seconds(work, job, device)


def is_right(dtype: torch.dtype, device: torch.device, seed: int) -> bool:
    """Whether a product of integers, which no rounding affects, is what a CPU computes in integers."""
    generator = torch.Generator().manual_seed(seed)
    a, b = (torch.randint(-2, 3, shape, generator=generator) for shape in ((1024, EXACT), (EXACT, 1024)))
    product = (a.to(device, dtype) @ b.to(device, dtype)).to("cpu", torch.int64)
    return torch.equal(product, (a.int() @ b.int()).long())


def _memory(job: MeasureJob, device: torch.device) -> float:
    block, copy = (torch.zeros(job.copied_bytes, dtype=torch.uint8, device=device) for _ in range(2))
    return 2 * job.copied_bytes / _seconds(lambda: copy.copy_(block), job, device)


def _launch(job: MeasureJob, device: torch.device) -> float:
    one = torch.zeros(1, device=device)
    return _seconds(lambda: [one.add_(1) for _ in range(KERNELS)], job, device) / KERNELS


def _link(job: MeasureJob, device: torch.device) -> float | None:
    """Returns the bus bandwidth of an all-reduce over all ranks, in the doctor's convention."""
    ranks = dist.get_world_size()
    if ranks == 1:
        return None
    block = torch.zeros(job.copied_bytes // 4, device=device)
    repeats = torch.tensor([1.0], device=device)
    started = time.perf_counter()
    dist.all_reduce(block)
    _wait(device)
    repeats[0] = min(20.0, job.seconds / (time.perf_counter() - started))
    dist.all_reduce(repeats, dist.ReduceOp.MIN)  # all ranks take part in each
    count = max(1, int(repeats.item()))
    started = time.perf_counter()
    for _ in range(count):
        dist.all_reduce(block)
    _wait(device)
    return bus_bandwidth(ranks, job.copied_bytes, (time.perf_counter() - started) / count)


def _host(job: MeasureJob, device: torch.device) -> float:
    """Returns the rate of the slower direction."""
    block = torch.zeros(job.copied_bytes, dtype=torch.uint8, device=device)
    pinned = torch.zeros(job.copied_bytes, dtype=torch.uint8, pin_memory=True)
    there = _seconds(lambda: block.copy_(pinned, non_blocking=True), job, device)
    back = _seconds(lambda: pinned.copy_(block, non_blocking=True), job, device)
    return job.copied_bytes / max(there, back)


def _steps(job: MeasureJob, device: torch.device) -> tuple[float, int | None]:
    """Returns the median seconds of a step of the plan, and the bytes that torch held at most."""
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)
    engine = build_engine(job.plan, render(job.plan), device)
    seconds = []
    for _ in range(WARM_UP + job.steps):
        batch = _batch(job.plan)
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
    """Returns random tokens: this rank's part of a global batch."""
    length, rows = plan.recipe.data.sequence_length, plan.batch.micro_batch_size
    positions = torch.arange(length).expand(rows, length)
    micro_batches = []
    for _ in range(plan.batch.gradient_accumulation_steps):
        tokens = torch.randint(plan.model.vocab_size, (rows, length))
        micro_batches.append(MicroBatch(tokens, positions, tokens))
    samples = plan.batch.global_batch_size
    return StepBatch(micro_batches, samples * length, samples, first_sample=0)
