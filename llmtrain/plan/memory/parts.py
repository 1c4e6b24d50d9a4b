"""Bytes by part, and the moments of a step that they are counted at."""

from __future__ import annotations

from dataclasses import dataclass

from llmtrain.recipe import Part

GIB = 2**30
MIB = 2**20


class Parts(Part):
    """Bytes on one rank's device at one moment, by what they are for."""

    parameters: int = 0
    """Weights that the forward pass reads, as they lie between uses."""
    masters: int = 0
    """fp32 copies that the optimizer updates, beside weights in a lower type."""
    optimizer: int = 0
    """Moments."""
    gradients: int = 0
    """Gradients, accumulated or reduced."""
    buckets: int = 0
    """Buffers that gradients are reduced in."""
    live_parameters: int = 0
    """Parameters gathered for use: ZeRO-3's and FSDP2's."""
    communication: int = 0
    """What else is sent and received: activations between pipeline stages, buffers of a backend."""
    activations: int = 0
    """What the backward pass reads again, of every micro-batch in flight."""
    logits: int = 0
    """Logits in fp32, their softmax and its gradient."""
    framework: int = 0
    """Device context, libraries and communicators; assumed, not computed."""

    @property
    def total(self) -> int:
        """All of it."""
        return sum(self.by_part().values())

    def by_part(self) -> dict[str, int]:
        """Name → bytes, in the order above."""
        return {name: getattr(self, name) for name in type(self).model_fields}

    def plus(self, **more: int) -> Parts:
        """A copy with bytes added to some parts."""
        return self.model_copy(update={name: getattr(self, name) + value for name, value in more.items()})


class State(Part):
    """What a rank holds without activations: at the start, at the two ends of a backward pass, and in the update."""

    start: Parts = Parts()
    """While the engine is made, where that takes more than what it then holds."""
    forward: Parts
    """When the last micro-batch's backward pass begins."""
    backward: Parts
    """When it ends; the reduction still has its bucket."""
    update: Parts
    """While the optimizer runs."""
    host: int = 0
    """Bytes of host memory, where something is offloaded."""


@dataclass(frozen=True)
class Shortage:
    """Why a plan does not fit into its devices' memory."""

    size: int
    """Bytes that are lacking on the fullest rank."""
    said: str
    """"does not fit by 3.1 GiB on stage 0"."""


def unit_of(largest: int) -> tuple[int, str]:
    """The unit that sizes up to `largest` are shown in, and its name."""
    return (GIB, "GiB") if largest >= GIB / 10 else (MIB, "MiB")


def readable(size: int) -> str:
    """Bytes for people: `31.4 GiB`, `25.1 MiB`."""
    unit, name = unit_of(size)
    return f"{size / unit:,.1f} {name}"
