"""Bytes by part, and the moments of a step at which they are counted."""

from __future__ import annotations

from dataclasses import dataclass
from operator import attrgetter

from llmtrain.recipe import Part
from llmtrain.recipe.cluster import GIB

MIB = 2**20


class Parts(Part):
    """Bytes on one rank's device at one moment, by their purpose."""

    parameters: int = 0
    """Weights that the forward pass reads, as stored between uses."""
    masters: int = 0
    """fp32 copies that the optimizer updates, in addition to weights of a lower precision."""
    optimizer: int = 0
    """The optimizer's moments."""
    gradients: int = 0
    """Gradients, accumulated or reduced."""
    buckets: int = 0
    """Buffers for the reduction of gradients."""
    live_parameters: int = 0
    """Parameters gathered for use by ZeRO-3 or FSDP2, or weights unpacked from 4 bits."""
    communication: int = 0
    """Other buffers for communication: activations between pipeline stages, buffers of a backend."""
    activations: int = 0
    """Tensors kept for the backward pass, for every micro-batch in flight."""
    logits: int = 0
    """Logits in fp32, their softmax and its gradient."""
    framework: int = 0
    """Device context, libraries and communicators; assumed, not computed."""

    @property
    def total(self) -> int:
        """Sum of all parts."""
        return sum(_sizes(self))

    def by_part(self) -> dict[str, int]:
        """Returns name → bytes, in the order above."""
        return {name: getattr(self, name) for name in type(self).model_fields}

    def largest_first(self) -> list[tuple[str, int]]:
        """Returns readable names and bytes, without empty parts."""
        sizes = sorted(((size, name) for name, size in self.by_part().items() if size), reverse=True)
        return [(name.replace("_", " "), size) for size, name in sizes]

    def plus(self, **more: int) -> Parts:
        """Returns a copy with bytes added to some parts."""
        return self.model_copy(update={name: getattr(self, name) + value for name, value in more.items()})

    def __add__(self, other: Parts) -> Parts:
        return self.plus(**other.by_part())


_sizes = attrgetter(*Parts.model_fields)


class PassGradients(Part):
    """Bytes of the gradients that a pipeline frees at the end of each backward pass."""

    first: int = 0
    """At the start of the backward pass of its first decoder layer."""
    last: int = 0
    """Maximum during the backward pass of its last decoder layer; see `Activations.lowest`."""
    whole: int = 0
    """At its end, with the fp32 copy of the largest gradient that is added to the sums."""


class State(Part):
    """Memory of a rank without activations: at the start, at both ends of a backward pass, and in the update."""

    start: Parts = Parts()
    """While the engine is created, if that needs more than the engine holds afterwards."""
    forward: Parts
    """At the beginning of the last micro-batch's backward pass."""
    late: Parts = Parts()
    """Additional memory for the first gradients of that pass, after the tensors of the loss are freed."""
    backward: Parts
    """At the end of that pass, while the reduction still holds its bucket."""
    pass_gradients: PassGradients = PassGradients()
    """Gradients of one pass of a pipeline; not included in `forward` and `backward`."""
    update: Parts
    """While the optimizer runs."""
    host: int = 0
    """Bytes of host memory, if something is offloaded."""

    def plus(self, moments: tuple[str, ...], **more: int) -> State:
        """Returns a copy with bytes added to some parts at some moments."""
        return self.model_copy(update={moment: getattr(self, moment).plus(**more) for moment in moments})


@dataclass(frozen=True)
class Shortage:
    """By how much a plan does not fit into its devices' memory."""

    size: int
    """Bytes missing on the fullest rank."""
    text: str
    """"does not fit by 3.1 GiB on stage 0"."""
    for_any_batch: bool = False
    """Whether no other micro-batch or recomputation would make it fit, because the update already needs more memory."""


def unit_of(largest: int) -> tuple[int, str]:
    """Returns the unit in which sizes up to `largest` are shown, and its name."""
    return (GIB, "GiB") if largest >= GIB / 10 else (MIB, "MiB")


def readable(size: int) -> str:
    """Formats bytes for people: `31.4 GiB`, `25.1 MiB`."""
    unit, name = unit_of(size)
    return f"{size / unit:,.1f} {name}"
