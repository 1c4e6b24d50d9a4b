"""Measures how long a rank works in a step, without waiting for others.

The duration of a step says nothing about a single rank, because all ranks end a step together.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from llmtrain.engines.engine import Engine
from llmtrain.models import compiled
from llmtrain.overrides.torch import around_waits
from llmtrain.plan import Plan
from llmtrain.system.heartbeat import Heartbeat

PASSES = 3
"""A step's work in units of a forward pass: a backward pass counts as about two."""
WAITS_IN_C = ("ddp", "horovod")
"""Strategies whose ranks wait for each other in C, which Python does not see."""


def measure_own_time(plan: Plan, engine: Engine, heartbeat: Heartbeat) -> None:
    """Reports to `heartbeat` when this rank compiles, and when it waits for others as far as the host sees it.

    On CPUs a rank waits in `Work.wait`, which is replaced in this process. The host does not see the waits of a GPU.
    There, events measure the time of forward passes, and are read later. That time includes waits in the collectives of
    forward passes (ZeRO-3, FSDP2, tensor, sequence and expert parallelism), so a slow rank cannot be distinguished from
    the ranks that wait for it. On CPUs, the same holds for collectives within compiled layers, which wait in C.
    """
    compiled.compiling = heartbeat.compiling
    if plan.cluster.world_size == 1:
        return
    if plan.cluster.spec.on_cpu:
        waits = Waits(heartbeat)
        waits.attach()
        heartbeat.work_timer = waits
    if not plan.cluster.spec.on_cpu or plan.recipe.parallel.strategy in WAITS_IN_C:
        heartbeat.work_timer = Forwards(_modules_of(engine))


class Waits:
    """On CPUs: the time of a step minus the time in `Work.wait`, which ends every collective called from Python."""

    def __init__(self, heartbeat: Heartbeat) -> None:
        self._heartbeat = heartbeat
        self._begun = self._waited_s = 0.0

    def attach(self) -> None:
        """Records the waits of this thread."""
        trainer = threading.get_ident()

        @contextmanager
        def recorded() -> Iterator[None]:
            if threading.get_ident() != trainer:
                yield  # a thread that saves in the background delays nobody
                return
            started = time.perf_counter()
            with self._heartbeat.waiting():
                yield
            self._waited_s += time.perf_counter() - started

        around_waits(recorded)

    def begin(self) -> None:
        """Starts the clock of a step."""
        self._begun, self._waited_s = time.perf_counter(), 0.0

    def end(self, data_wait_s: float) -> float:
        """Returns the seconds since `begin` without waits for other ranks; waits for data count as work."""
        return time.perf_counter() - self._begun - self._waited_s


class Forwards:
    """The time of the forward passes of this rank's part of the model, times `PASSES`, plus the wait for data."""

    def __init__(self, modules: list[nn.Module]) -> None:
        self._on_gpu = next(modules[0].parameters()).is_cuda
        self._passes_s = 0.0
        self._begun: Any = None
        self._pending: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []
        for module in modules:
            module.register_forward_pre_hook(lambda *_: self._enter())
            module.register_forward_hook(lambda *_: self._leave())

    def begin(self) -> None:
        """Resets the sum. The forward passes of an evaluation, without gradients, are never counted."""
        self._passes_s = 0.0

    def end(self, data_wait_s: float) -> float:
        """Returns the measured seconds.

        On a GPU, they belong to passes whose events have completed since. Some of these passes are of earlier steps,
        but over many steps their number is the same.
        """
        while self._pending and self._pending[0][1].query():  # type: ignore[no-untyped-call]
            begun, ended = self._pending.pop(0)
            self._passes_s += begun.elapsed_time(ended) / 1000
        return data_wait_s + PASSES * self._passes_s

    def _enter(self) -> None:
        self._begun = self._now()

    def _leave(self) -> None:
        if not torch.is_grad_enabled():
            return
        if self._on_gpu:
            self._pending.append((self._begun, self._now()))
        else:
            self._passes_s += self._now() - self._begun

    def _now(self) -> Any:
        if not self._on_gpu:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return event


def _modules_of(engine: Engine) -> list[nn.Module]:
    """Returns the modules that this rank's forward passes call: the model, or its stages."""
    stages = getattr(getattr(engine, "module", None), "stages", None)
    return [engine.model] if stages is None else list(stages)
