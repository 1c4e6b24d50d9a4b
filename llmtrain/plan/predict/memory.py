"""Adds up the memory of a plan: state and activations of each stage, at the moments of a step."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from functools import cache
from operator import attrgetter
from pathlib import Path
from typing import Any, NamedTuple

from llmtrain.plan.facts.weights import Weights
from llmtrain.plan.flops import backward_layers
from llmtrain.plan.kernels import recomputes_loss
from llmtrain.plan.plan import Plan
from llmtrain.plan.predict.activations import Activations, activations_of, in_flight, lowest_kept_layer
from llmtrain.plan.predict.flat import frozen_groups, optimizer_groups
from llmtrain.plan.predict.model_state import RankGroups, checkpoint_bytes, state_of
from llmtrain.plan.predict.parts import Parts, Shortage, State, readable, unit_of
from llmtrain.plan.schedules import PipelineSchedule
from llmtrain.recipe import ParallelConfig, Part
from llmtrain.recipe.cluster import GIB

CONTEXT = GIB
"""Assumed: a device's context, its libraries and their workspaces."""
MEASURED = Path(__file__).with_name("measured.json")
"""How predicted peaks compare with those of a GPU; `null` until one has been measured. `python tools/render.py gpu`
writes it."""
COMMUNICATORS = GIB
"""Assumed: buffers of NCCL's communicators, if there is more than one rank."""

LABELS = {
    "start": "while the engine is created",
    "forward": "as the backward pass begins",
    "backward": "as the backward pass ends",
    "update": "in the update",
}
MOMENTS = tuple(LABELS)


class StageMemory(Part):
    """Memory of the fullest rank of a pipeline stage."""

    start: Parts
    """While the engine is created, if that needs more than the engine holds afterwards."""
    forward: Parts
    """At the beginning of the last micro-batch's backward pass: all activations, and the gradients of earlier
    micro-batches. Includes the tensors of the loss, or what follows once they are freed, whichever is larger."""
    backward: Parts
    """At the end of that pass: all gradients, no activations. If a pipeline frees the gradients of each pass, the
    largest of three: this end, the end of a pass that leaves the activations of others, and a pass's last layer."""
    update: Parts
    """While the optimizer runs."""
    host: int
    """Bytes of this rank's host memory, if something is offloaded."""
    host_copies: int
    """Bytes of this rank's host memory while a checkpoint is being written (`checkpoint.background`)."""
    in_flight: int
    """Micro-batches whose activations are held at once."""

    @property
    def moment(self) -> str:
        """The fullest moment.

        Within a backward pass activations shrink and gradients grow, so the peak is at one of its ends.
        """
        return max(MOMENTS, key=lambda name: getattr(self, name).total)

    @property
    def peak(self) -> Parts:
        """Bytes by part at the fullest moment."""
        parts: Parts = getattr(self, self.moment)
        return parts


class PlanMemory(Part):
    """Memory of every stage; a single one without a pipeline."""

    stages: tuple[StageMemory, ...]
    capacity: int | None
    """Memory of a device in bytes; None if unknown, as for a CPU."""
    is_traced: bool = False
    """Whether the activations were traced on the model instead of estimated."""

    @property
    def fullest(self) -> int:
        """The stage that needs the most memory."""
        return max(range(len(self.stages)), key=lambda stage: self.stages[stage].peak.total)

    @property
    def needed(self) -> int:
        """Bytes on the fullest rank."""
        return self.stages[self.fullest].peak.total

    @property
    def allocated(self) -> int:
        """Bytes that torch allocates on the fullest rank: the peak without the framework's share."""
        moments: list[Parts] = [getattr(stage, name) for stage in self.stages for name in MOMENTS]
        return max(parts.total - parts.framework for parts in moments)

    @property
    def fits(self) -> bool:
        """Whether the fullest rank fits; True if the capacity is unknown."""
        return self.capacity is None or self.needed <= self.capacity

    def summary(self) -> dict[str, Any]:
        """Returns the memory in bytes as `llmtrain plan --json` prints it."""
        fullest = self.stages[self.fullest]
        return {
            "needed_bytes": self.needed,
            "capacity_bytes": self.capacity,
            "fits": self.fits,
            "stage": self.fullest,
            "moment": fullest.moment,
            "parts": fullest.peak.by_part(),
            "host_bytes_per_rank": max(stage.host for stage in self.stages),
            "host_copy_bytes_per_rank": max(stage.host_copies for stage in self.stages),
            "stages": [
                {"needed_bytes": stage.peak.total, "moment": stage.moment, "in_flight": stage.in_flight}
                | {"parts": stage.peak.by_part(), "host_bytes": stage.host}
                for stage in self.stages
            ],
            "activations": "traced" if self.is_traced else "estimated",
        }

    def described(self) -> Iterator[str]:
        """Yields lines for people."""
        fullest = self.stages[self.fullest]
        room = f" of {readable(self.capacity)}" if self.capacity else ""
        where = f" on stage {self.fullest}" if len(self.stages) > 1 else ""
        moment = LABELS[fullest.moment]
        yield f"memory   {readable(self.needed)}{room} on the fullest rank{where}, at the peak ({moment})"
        yield f"         {by_part(fullest.peak)}"
        if len(self.stages) > 1:
            unit, name = unit_of(self.needed)
            each = ", ".join(f"{stage.peak.total / unit:.1f}" for stage in self.stages)
            yield f"         {name} by stage: {each}"
        yield f"         activations {'traced' if self.is_traced else 'estimated'}; {measured()}"
        if host := max(stage.host for stage in self.stages):
            yield f"         {readable(host)} of host memory per rank"
        if copies := max(stage.host_copies for stage in self.stages):
            yield f"         {readable(copies)} of host memory per rank while a checkpoint is being written"


@cache
def measured() -> str:
    """Returns how many peaks were compared with those of a GPU (`measured.json`, from a committed benchmark)."""
    found = json.loads(MEASURED.read_text(encoding="utf-8"))
    if found is None:
        return "not measured on a GPU"
    return f"{found['close']} of {found['plans']} peaks within {found['within']:.0%} on {found['device']}"


def by_part(parts: Parts) -> str:
    """Returns the parts, largest first, without empty ones."""
    return ", ".join(f"{name} {readable(size)}" for name, size in parts.largest_first())


def memory_of(plan: Plan, traced: tuple[int, ...] | None = None) -> PlanMemory | None:
    """Returns the memory of a plan; None for a model that is not a chain of layers, since its activations are unknown.

    traced: bytes that each layer was observed to save (`models.activation_bytes.traced_layers`).
    """
    weights = plan.model.weights
    if weights is None:
        return None
    stages = []
    for rank in range(plan.parallel.pipeline):
        state, activations = state_of(plan, weights, rank), activations_of(plan, weights, rank, traced)
        stages.append(
            StageMemory(
                **{name: total.added() for name, total in _moments_of(plan, state, activations).items()},
                host=state.host + activations.host,
                host_copies=checkpoint_bytes(plan, weights, rank) if plan.recipe.checkpoint.background else 0,
                in_flight=in_flight(plan, rank),
            )
        )
    return PlanMemory(stages=tuple(stages), capacity=plan.cluster.spec.memory_bytes, is_traced=traced is not None)


class Sum(NamedTuple):
    """Memory that is only added up if it is the largest."""

    parts: tuple[Parts, ...]
    more: dict[str, int]

    @property
    def total(self) -> int:
        """The sum of all bytes."""
        return sum(part.total for part in self.parts) + sum(self.more.values())

    def added(self) -> Parts:
        """Returns the sum by part."""
        first, *others = self.parts
        return sum(others, first).plus(**self.more)


def _moments_of(plan: Plan, state: State, activations: Activations) -> dict[str, Sum]:
    """Returns the memory of a rank at each of `MOMENTS`."""
    on_cpu = plan.cluster.spec.on_cpu
    framework = 0 if on_cpu else CONTEXT + (COMMUNICATORS if plan.cluster.world_size > 1 else 0)
    fixed = {"communication": activations.sent, "framework": framework}
    saved, pass_gradients = activations.saved, state.pass_gradients
    kept, begun = (state.forward,), (state.forward, state.late)
    begins = (
        Sum(kept, {"activations": saved + activations.casts, "logits": activations.gradient} | fixed),
        Sum(kept, {"activations": saved, "logits": activations.logits} | fixed),
        Sum(begun, {"activations": saved, "logits": activations.gradient, "gradients": activations.head} | fixed),
        Sum(begun, {"gradients": pass_gradients.first, "activations": saved + activations.working} | fixed),
    )
    ends = [Sum((state.backward,), fixed)]
    if pass_gradients.whole:
        ends.append(Sum(begun, {"gradients": pass_gradients.last, "activations": activations.lowest} | fixed))
        ends.append(Sum(kept, {"gradients": pass_gradients.whole, "activations": activations.others} | fixed))
    return {
        "start": Sum((state.start,), {"framework": framework}),
        "forward": max(begins, key=_total),
        "backward": max(ends, key=_total),
        "update": Sum((state.update,), {"framework": framework}),
    }


def _total(parts: Sum) -> int:
    return parts.total


class MemoryCache:
    """The states and activations of plans of one recipe and cluster, which differ in `parallel` and in micro-batches.

    Each is computed once for all plans that differ only in what it does not depend on.
    """

    def __init__(self) -> None:
        self._groups: dict[Any, RankGroups] = {}
        self._states: dict[Any, State] = {}
        self._activations: dict[Any, Activations] = {}

    def state(self, plan: Plan, weights: Weights, rank: int) -> State:
        """Returns `state_of`, which does not depend on micro-batches beyond whether there are several.

        Of recomputation, stages of a pipeline depend on `lowest_kept_layer`.
        """
        lowest = lowest_kept_layer(plan, rank) if plan.stages else None
        key = WITHOUT_RECOMPUTATION(plan.parallel), plan.batch.gradient_accumulation_steps > 1, lowest, rank
        if key not in self._states:
            held = WITHOUT_BOTH(plan.parallel), rank
            if held not in self._groups:
                self._groups[held] = optimizer_groups(plan, weights, rank), frozen_groups(plan, weights, rank)
            self._states[key] = state_of(plan, weights, rank, self._groups[held])
        return self._states[key]

    def activations(self, plan: Plan, weights: Weights, rank: int) -> Activations:
        """Returns `activations_of`, which do not depend on what is offloaded besides them, or kept twice (hpZ).

        Of the ZeRO stage, they only depend on what `recomputes_loss` makes of it.
        """
        key = WITHOUT_STORAGE(plan.parallel), plan.batch.micro_batch_size, recomputes_loss(plan.recipe), rank
        if key not in self._activations:
            self._activations[key] = activations_of(plan, weights, rank)
        return self._activations[key]


RECOMPUTATION = {"activation_checkpointing", "checkpoint_every", "offload_activations"}
STORAGE = {"zero_stage", "hierarchical_partition", "offload_optimizer", "offload_param", "nvme_path"}
"""Fields of `parallel`."""


def _without(fields: set[str]) -> Callable[[ParallelConfig], tuple[Any, ...]]:
    """Returns a function that returns the values of all other fields, as a key of a cache."""
    return attrgetter(*(field for field in ParallelConfig.model_fields if field not in fields))


WITHOUT_RECOMPUTATION, WITHOUT_STORAGE = _without(RECOMPUTATION), _without(STORAGE)
WITHOUT_BOTH = _without(RECOMPUTATION | STORAGE)


def memory_shortage(plan: Plan, cache: MemoryCache | None = None) -> Shortage | None:
    """Returns why a plan does not fit into its devices, or None if it does.

    cache: what a search keeps of earlier plans; what is new is added. Also None if the memory of the devices or of the
    plan is unknown.
    """
    weights, capacity, cache = plan.model.weights, plan.cluster.spec.memory_bytes, cache or MemoryCache()
    if weights is None or capacity is None:
        return None
    moments = {
        rank: _moments_of(plan, cache.state(plan, weights, rank), cache.activations(plan, weights, rank))
        for rank in _fullest_ranks(plan, weights)
    }
    peaks = {rank: max(map(_total, parts.values())) for rank, parts in moments.items()}
    fullest = max(peaks, key=lambda rank: peaks[rank])
    size = peaks[fullest] - capacity
    if size <= 0:
        return None
    where = f" on stage {fullest}" if plan.stages else ""
    in_update = any(_total(parts["update"]) > capacity for parts in moments.values())
    return Shortage(size, f"does not fit by {readable(size)}{where}", in_update)


def _fullest_ranks(plan: Plan, weights: Weights) -> list[int]:
    """Returns some ranks of the pipe in order, of which one is the first that needs the most memory.

    Ranks that hold the same need the more memory, the more passes they have in flight. So a rank is left out if an
    earlier one holds the same, and has as many passes in flight. With activations in host memory, passes on the device
    and on the host are rounded, so that all ranks are examined.
    """
    if plan.parallel.offload_activations:
        return list(range(plan.parallel.pipeline))
    schedule, found, most = PipelineSchedule.of(plan.parallel), list[int](), dict[tuple[Any, ...], int]()
    for rank in range(plan.parallel.pipeline):
        held = tuple(_held(plan, weights, stage) for stage in schedule.stages_of(rank)) if plan.stages else ()
        passes = in_flight(plan, rank)
        if passes > most.get(held, 0):
            found.append(rank)
            most[held] = passes
    return found


def _held(plan: Plan, weights: Weights, stage: int) -> tuple[Any, ...]:
    """Returns what the memory of a stage depends on: its layers, and which of them are recomputed and reached."""
    first, last = plan.stages[stage].layers
    below = max(0, plan.model.layers - backward_layers(plan.model) - first)
    ends = stage == 0, stage == plan.parallel.stages - 1
    return *ends, first % plan.parallel.checkpoint_every, below, weights.runs_of_layers[first : last + 1]
