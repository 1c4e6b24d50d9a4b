"""A model of a few layers that computes in the same way as a plan, and the duration of its passes."""

from __future__ import annotations

import statistics
import time
from dataclasses import dataclass

import torch

from llmtrain.data import NO_TARGET, MicroBatch
from llmtrain.engines.forward import forward, install_kernels, objective_of
from llmtrain.engines.runtime.cpu import keep_freed_memory, use_kernels_of_cpu
from llmtrain.models.build import causal_lm, model_configuration
from llmtrain.models.precision import autocast, weight_dtype
from llmtrain.models.tiny.configuration import with_layers
from llmtrain.plan import Plan
from llmtrain.system.host import CoreMeter, available_cores, busy, max_cores_used_by_others
from llmtrain.train.tune.choice import THREADS

LAYERS = 2
"""Number of layers: one of each kind in families that alternate two; the others use the same kernels."""
WARM_PASSES = 3
"""The first pass compiles; the second may compile again if a size turned out to vary."""
ALONE_S = 0.4
"""Seconds of passes that are not compared with others."""
TURN_S = 0.1
"""Seconds of one side's passes before the other's turn: a machine's speed drifts within seconds."""
TURNS = 5
"""Minimum number of turns."""
COMPARE_S = 6.0
"""Minimum duration of a comparison in seconds."""
QUIET_TRIES = 3
"""Number of tries of a comparison, since other processes may end soon."""


class Trial:
    """The first layers of a plan's model, with embedding and head, on a real micro-batch.

    Tensor, expert and sequence parallelism and ZeRO are not applied: one device computes everything.
    """

    def __init__(self, plan: Plan, batch: MicroBatch, device: torch.device) -> None:
        """Raises RecipeError as the engines do."""
        recipe = plan.recipe
        if device.type == "cpu":
            keep_freed_memory(plan)  # as the engine does
        self.plan, self.batch, self.device = plan, batch, device
        self.precision = recipe.parallel.precision
        config = with_layers(model_configuration(recipe), LAYERS)
        torch.manual_seed(recipe.train.seed)
        with torch.device(device):
            self.model = causal_lm(config, recipe.model, weight_dtype(recipe.parallel.precision)).train()
        install_kernels(self.model, plan)
        self.objective = objective_of(recipe, config) if recipe.objective.is_own else None
        self.targets = int((batch.labels != NO_TARGET).sum())

    def warm(self) -> float:
        """Runs the first passes; returns the loss, a mean over target tokens."""
        self._prepare()
        for _ in range(WARM_PASSES):
            loss = self._pass()
        return float(loss)

    def seconds(self, least_s: float = ALONE_S) -> float:
        """Returns the mean duration of a forward and backward pass over at least `least_s` seconds."""
        self._prepare()
        self._wait()
        started, passes = time.perf_counter(), 0
        while time.perf_counter() - started < least_s:
            self._pass()
            self._wait()
            passes += 1
        return (time.perf_counter() - started) / passes

    def _pass(self) -> torch.Tensor:
        with autocast(self.precision, self.device.type):
            if self.objective:
                self.objective.begin()
            loss_sum, auxiliary = forward(self.model, self.model, self.batch, self.device, self.objective)
        loss = loss_sum.sum() / self.targets  # an objective that compares pairs has a loss for each token
        (loss if auxiliary is None else loss + auxiliary).backward()  # type: ignore[no-untyped-call]
        self.model.zero_grad(set_to_none=True)
        return loss.detach()

    def _prepare(self) -> None:
        """Restores what another trial in this process may have changed."""
        if self.device.type == "cpu":
            use_kernels_of_cpu(self.plan)

    def _wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


class BusyError(Exception):
    """Other processes use the cores that are measured."""


@dataclass(frozen=True)
class Comparison:
    """A comparison of two trials by the medians of their turns."""

    seconds: float
    """Duration of a pass of the first trial."""
    ratio: float
    """Duration of the second trial, relative to the first."""
    is_faster: bool
    """Whether the second trial is faster, and not by chance.

    It must win by two standard deviations of a fair coin: 5 turns of 5, or 15 of 20.
    """


def compare_in_turns(first: Trial, other: Trial) -> Comparison:
    """Compares two trials turn by turn.

    A device's speed drifts, but within a turn both drift alike. Load by others on a CPU is not drift: a pass with all
    threads waits for the one whose core is shared. Raises BusyError if the load does not end.
    """
    turns = _turns(first, other)
    won = sum(second < first for first, second in turns)
    return Comparison(
        seconds=statistics.median(first for first, _ in turns),
        ratio=statistics.median(second / first for first, second in turns),
        is_faster=won >= len(turns) / 2 + len(turns) ** 0.5,
    )


def _turns(first: Trial, other: Trial) -> list[tuple[float, float]]:
    cores = available_cores()
    for _ in range(QUIET_TRIES):
        meter = CoreMeter()
        turns: list[tuple[float, float]] = []
        started = time.perf_counter()
        while len(turns) < TURNS or time.perf_counter() - started < COMPARE_S:
            turns.append((first.seconds(TURN_S), other.seconds(TURN_S)))
        of_others = meter.cores_used_by_others()
        if first.device.type != "cpu" or of_others <= max_cores_used_by_others(cores):
            return turns
    raise BusyError(busy(of_others, cores))


def with_threads(plan: Plan, threads: int) -> Plan:
    """Returns the plan with this number of threads, if its recipe leaves it open."""
    if plan.recipe.kernels.threads != "auto":
        return plan
    return plan.model_copy(update={"recipe": plan.recipe.with_(**{THREADS: threads})})
