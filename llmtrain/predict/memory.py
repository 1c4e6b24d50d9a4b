"""Adds up the memory of a plan: state and activations of each stage, at the moments of a step."""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

from llmtrain.cluster import GIB
from llmtrain.plan.plan import Plan
from llmtrain.predict.activations import activations_of, in_flight
from llmtrain.predict.model_state import saved_bytes, state_of
from llmtrain.predict.parts import Parts, Shortage, readable, unit_of
from llmtrain.recipe import Part

CONTEXT = GIB
"""Assumed: a device's context, its libraries and their workspaces."""
MEASURED = Path(__file__).with_name("measured.json")
"""How predicted peaks compare with those of a GPU; `null` until one has been measured. `python -m benchmarks.render`
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
    shown = sorted(((size, name) for name, size in parts.by_part().items() if size), reverse=True)
    return ", ".join(f"{name.replace('_', ' ')} {readable(size)}" for size, name in shown)


def memory_of(plan: Plan, traced: tuple[int, ...] | None = None) -> PlanMemory | None:
    """Returns the memory of a plan; None for a model that is not a chain of layers, since its activations are unknown.

    traced: bytes that each layer was observed to save (`models.trace.traced_layers`).
    """
    weights = plan.model.weights
    if weights is None:
        return None
    on_cpu = plan.cluster.spec.on_cpu
    framework = 0 if on_cpu else CONTEXT + (COMMUNICATORS if plan.cluster.world_size > 1 else 0)
    stages = []
    for stage in range(plan.parallel.pipeline):
        state = state_of(plan, weights, stage)
        activations = activations_of(plan, weights, stage, traced)
        fixed = {"communication": activations.sent, "framework": framework}
        saved, begun, passing = activations.saved, state.forward + state.late, state.passing
        begins = (
            state.forward.plus(activations=saved + activations.casts, logits=activations.gradient),
            state.forward.plus(activations=saved, logits=activations.logits),
            begun.plus(activations=saved, logits=activations.gradient, gradients=activations.head),
            begun.plus(gradients=passing.first, activations=saved + activations.working),
        )
        ends = (
            state.backward,
            begun.plus(gradients=passing.last, activations=activations.lowest),
            state.forward.plus(gradients=passing.whole, activations=activations.others),
        )
        stages.append(
            StageMemory(
                start=state.start.plus(framework=framework),
                forward=max(begins, key=_total).plus(**fixed),
                backward=(max(ends, key=_total) if passing.whole else state.backward).plus(**fixed),
                update=state.update.plus(framework=framework),
                host=state.host + activations.host,
                host_copies=saved_bytes(plan, weights, stage) if plan.recipe.checkpoint.background else 0,
                in_flight=in_flight(plan, stage),
            )
        )
    return PlanMemory(stages=tuple(stages), capacity=plan.cluster.spec.memory_bytes, is_traced=traced is not None)


def _total(parts: Parts) -> int:
    return parts.total


def lacking(plan: Plan) -> Shortage | None:
    """Returns why a plan does not fit into its devices, or None if it does.

    Also None if the memory of the devices or of the plan is unknown.
    """
    memory = memory_of(plan)
    if memory is None or memory.capacity is None or memory.fits:
        return None
    where = f" on stage {memory.fullest}" if plan.stages else ""
    size = memory.needed - memory.capacity
    return Shortage(size, f"does not fit by {readable(size)}{where}")
