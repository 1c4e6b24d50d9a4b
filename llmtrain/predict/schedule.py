"""The 1F1B schedule of a pipeline (PipeDream-Flush, arXiv 2006.09503), as executed and as a picture."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from llmtrain.plan.plan import Batch
from llmtrain.predict.picture import GREY, LEFT, ROW, bar_label, box, picture, row_name
from llmtrain.predict.time import bubble_of

FORWARD, BACKWARD = 1.0, 2.0
"""Lengths of the two passes, in units of a forward pass: a backward pass has twice the products."""
MOST_SHOWN = 32
"""Micro-batches that a picture shows; more would only be thin lines, and the middle repeats itself."""


@dataclass(frozen=True)
class Slot:
    """One pass of a stage."""

    stage: int
    micro_batch: int
    kind: Literal["forward", "backward"]
    start: float
    end: float


def one_forward_one_backward(
    stages: int, micro_batches: int, forward: float = FORWARD, backward: float = BACKWARD
) -> list[Slot]:
    """Returns every pass of every stage, with the times of its start and end; sending takes no time.

    A stage runs forward passes until the pipeline is full, then alternates between backward and forward passes; it
    starts a pass when it is free and its input has arrived.
    """
    ends: dict[tuple[int, int, str], float] = {}
    waiting = [list(_order(stage, stages, micro_batches)) for stage in range(stages)]
    free = [0.0] * stages
    slots = []
    while any(waiting):
        for stage, passes in enumerate(waiting):
            while passes:
                kind, number = passes[0]
                needed = _input(stage, stages, number, kind)
                if needed is not None and needed not in ends:
                    break
                start = max(free[stage], ends[needed] if needed is not None else 0.0)
                free[stage] = start + (forward if kind == "forward" else backward)
                ends[stage, number, kind] = free[stage]
                slots.append(Slot(stage, number, kind, start, free[stage]))
                passes.pop(0)
    return slots


def _order(stage: int, stages: int, micro_batches: int) -> Iterator[tuple[Literal["forward", "backward"], int]]:
    """Yields the passes of a stage in order.

    The last stage has one micro-batch in flight, the first as many as there are stages.
    """
    ahead = min(stages - stage, micro_batches)
    yield from (("forward", number) for number in range(ahead))
    for number in range(micro_batches):
        yield "backward", number
        if ahead + number < micro_batches:
            yield "forward", ahead + number


def _input(stage: int, stages: int, number: int, kind: str) -> tuple[int, int, str] | None:
    """Returns the pass that a pass waits for, or None for the first forward passes."""
    if kind == "forward":
        return (stage - 1, number, kind) if stage else None
    return (stage + 1, number, kind) if stage < stages - 1 else (stage, number, "forward")


COLOURS = {"forward": "#4c78a8", "backward": "#54a24b"}
UNIT, TOP = 11, 34


def schedule_svg(stages: int, batch: Batch) -> str:
    """Draws a step: a row for each stage, with numbered forward and backward passes; grey means idle."""
    micro_batches = batch.gradient_accumulation_steps
    shown = min(micro_batches, max(MOST_SHOWN, stages))
    slots = one_forward_one_backward(stages, shown)
    length = max(slot.end for slot in slots)
    title = f"1F1B, {stages} stages, {micro_batches} micro-batches: bubble {bubble_of(stages, micro_batches):.1%}"
    if shown < micro_batches:
        title += f" (the picture has {shown} micro-batches)"
    title += "; blue forward, green backward"
    rows = []
    for stage in range(stages):
        y = TOP + stage * ROW
        rows += [row_name(y, f"stage {stage}"), box(LEFT, y, length * UNIT, ROW - 3, GREY)]
    drawn = (element for slot in slots for element in _drawn(slot))
    return picture(LEFT + length * UNIT + 12, TOP + stages * ROW + 12, title, (*rows, *drawn))


def _drawn(slot: Slot) -> Iterator[str]:
    x, y, width = LEFT + slot.start * UNIT, TOP + slot.stage * ROW, (slot.end - slot.start) * UNIT
    title = f"stage {slot.stage}, {slot.kind} pass of micro-batch {slot.micro_batch}"
    yield box(x, y, width - 0.6, ROW - 3, COLOURS[slot.kind], title)
    yield bar_label(x, y, width, str(slot.micro_batch), "white")
