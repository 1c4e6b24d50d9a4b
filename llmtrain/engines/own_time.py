"""How long a rank works in a step, waiting for others left out: all ranks end a step together, whoever was slow."""

from __future__ import annotations

import threading
import time
from typing import Any

import torch
from torch import nn
from torch._C._distributed_c10d import Work

from llmtrain.engines.seam import Engine
from llmtrain.heartbeat import Heartbeat
from llmtrain.models import compiled
from llmtrain.plan import Plan

PASSES = 3
"""A step's work in forward passes: a backward pass is about two of them."""
WAITS_IN_C = ("ddp", "horovod")
"""Strategies whose ranks wait for each other where Python does not see it."""


def measure(plan: Plan, engine: Engine, heart: Heartbeat) -> None:
    """Has `heart` know when this rank compiles and, as far as the host sees it, waits for others, and measure its time.

    On CPUs a rank waits in `Work.wait`, which is replaced in this process. A GPU waits where no host sees it: there
    the time of forward passes is measured by events, which are read late. What they contain of collectives (ZeRO-3,
    FSDP2, tensor, sequence and expert parallelism) is waiting too, and hides a slow rank from those who wait for it.
    So do, on CPUs, the collectives within compiled layers, which wait in C.
    """
    compiled.compiling = heart.compiling
    if plan.cluster.world_size == 1:
        return
    if plan.cluster.spec.on_cpu:
        waits = Waits(heart)
        waits.attach()
        heart.own = waits
    if not plan.cluster.spec.on_cpu or plan.recipe.parallel.strategy in WAITS_IN_C:
        heart.own = Forwards(_module_of(engine))


class Waits:
    """On CPUs: the time of the step without that in `Work.wait`, where every collective of Python's ends."""

    def __init__(self, heart: Heartbeat) -> None:
        self._heart = heart
        self._begun = self._waited_s = 0.0

    def attach(self) -> None:
        """Has `Work.wait` go past this object, in this thread."""
        wait, trainer = Work.wait, threading.get_ident()

        def watched(work: Work, *arguments: Any) -> bool:
            if threading.get_ident() != trainer:
                return wait(work, *arguments)  # who saves in the background holds nobody up
            started = time.perf_counter()
            with self._heart.waiting():
                done = wait(work, *arguments)
            self._waited_s += time.perf_counter() - started
            return done

        Work.wait = watched  # type: ignore

    def begin(self) -> None:
        """Nothing is waited yet."""
        self._begun, self._waited_s = time.perf_counter(), 0.0

    def end(self, data_wait_s: float) -> float:
        """Data are waited for within the step."""
        return time.perf_counter() - self._begun - self._waited_s


class Forwards:
    """The time of the forward passes of this rank's part of the model, times `PASSES`, and the wait for data."""

    def __init__(self, module: nn.Module) -> None:
        self._on_gpu = next(module.parameters()).is_cuda
        self._passes_s = 0.0
        self._begun: Any = None
        self._pending: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []
        module.register_forward_pre_hook(lambda *_: self._enter())
        module.register_forward_hook(lambda *_: self._leave())

    def begin(self) -> None:
        """No pass has ended yet; those of an evaluation, without gradients, are never counted."""
        self._passes_s = 0.0

    def end(self, data_wait_s: float) -> float:
        """On a GPU, of the passes that have ended meanwhile: of earlier steps, but as many in the long run."""
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


def _module_of(engine: Engine) -> nn.Module:
    """What this rank's forward passes call: the model, or a stage of it."""
    stage = getattr(getattr(engine, "module", None), "stage", None)
    module: nn.Module = stage if stage is not None else engine.model  # type: ignore[attr-defined]
    return module
