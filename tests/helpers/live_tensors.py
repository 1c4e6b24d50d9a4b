"""Counts the bytes that an engine holds, from the live tensors."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from llmtrain.plan import Plan
from tests.helpers.batches import step_batch
from tests.helpers.traces import engine_of

LET_GO_S = 0.1
"""A thread of gloo lets go of what it has reduced shortly after the reduction has completed."""
SCALARS = 32
"""Storages of at most this many bytes are not states of weights, but step counts or norms."""


def live_bytes(without: set[int]) -> int:
    """Bytes of the storages of weights and states that are alive, each storage once, `without` these."""
    return sum(size for address, size in live_storages().items() if address not in without)


def live_storages(dimensions: int | None = None) -> dict[int, int]:
    """Returns address → bytes of every such storage, or only of those of tensors with this number of dimensions."""
    gc.collect()
    found: dict[int, int] = {}
    for one in gc.get_objects():
        if issubclass(type(one), Tensor):
            for tensor in _held(one):
                storage = tensor.untyped_storage()
                is_state = tensor.is_floating_point() or tensor.dtype is torch.uint8  # 8-bit moments
                if not is_state or dimensions not in (None, tensor.dim()):
                    continue
                if tensor.device.type != "meta" and storage.nbytes() > SCALARS:
                    found[storage.data_ptr()] = storage.nbytes()
    found.pop(0, None)  # storages without memory
    return found


def _held(tensor: Tensor) -> Iterator[Tensor]:
    """Yields a tensor and its gradient, which has no Python object until it is first accessed."""
    yield _local(tensor)
    if tensor.is_leaf and tensor.grad is not None:
        yield _local(tensor.grad)


def _local(tensor: Tensor) -> Tensor:
    """Returns the part that this rank holds."""
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor


def measure(rank: int, plan: Plan) -> tuple[int, int]:
    """Returns bytes on this rank in the second step: after its first backward pass, and after the last one.

    For a pipeline, whose passes are interleaved, both are measured before the update: the activations that are kept
    (`passed_storages`), and everything else.
    """
    # Kept alive: storages of an earlier engine would be freed meanwhile, and their addresses reused.
    left = [
        _local(one).untyped_storage() for one in gc.get_objects() if issubclass(type(one), Tensor) and not one.is_meta
    ]
    before = set(live_storages())
    engine: Any = engine_of(plan)
    seen: list[int] = []
    is_pipeline = plan.parallel.pipeline > 1

    def look() -> None:
        time.sleep(LET_GO_S)
        passed = passed_storages() if is_pipeline else {}
        seen.append(live_bytes(before | passed.keys() | buffers() | statistics(engine)))
        if is_pipeline:
            seen.insert(0, sum(size for address, size in passed.items() if address not in before))

    watch = _watch_pipeline if is_pipeline else _watch
    watch(engine, look)
    batch = plan.batch
    for step in range(2):
        seen.clear()
        engine.train_step(
            step_batch(
                step,
                batch.micro_batch_size,
                batch.gradient_accumulation_steps,
                engine.data_parallel_rank,
                plan.data_parallel_size,
            )
        )
    del left
    return seen[0], seen[-1]


def statistics(engine: Any) -> set[int]:
    """Returns the addresses of the guard's statistics: a few kilobytes, whatever the model."""
    return {tensor.untyped_storage().data_ptr() for tensor in engine.guard.state().values()}


def buffers() -> set[int]:
    """Returns the addresses of buffers of modules: frequencies of rotary positions."""
    modules = (one for one in gc.get_objects() if issubclass(type(one), nn.Module))
    return {tensor.untyped_storage().data_ptr() for one in modules for tensor in one.buffers(recurse=False)}


def passed_storages() -> dict[int, int]:
    """Returns activations and their gradients: tensors of three dimensions, which no weight of a dense model has."""
    return live_storages(dimensions=3)


def _watch(engine: Any, look: Callable[[], None]) -> None:
    """Measures after each backward pass."""
    inner = getattr(engine, "engine", engine)
    backward = inner.backward

    def watched(*arguments: Any, **options: Any) -> None:
        backward(*arguments, **options)
        look()

    inner.backward = watched


def _watch_pipeline(engine: Any, look: Callable[[], None]) -> None:
    """Measures before each update."""
    inner = engine.engine
    update = inner._exec_optimizer_step

    def watched(*arguments: Any, **options: Any) -> None:
        look()
        update(*arguments, **options)

    inner._exec_optimizer_step = watched
