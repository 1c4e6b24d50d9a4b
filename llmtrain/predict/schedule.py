"""A picture of a pipeline's schedule."""

from __future__ import annotations

from collections.abc import Iterator

from llmtrain.plan.plan import Batch
from llmtrain.plan.schedules import PipelineSchedule, Slot, lengths
from llmtrain.predict.picture import GREY, LEFT, ROW, bar_label, box, picture, row_name

MOST_SHOWN = 32
"""Micro-batches that a picture shows; more would only be thin lines, and the middle repeats itself."""
NAMES = {"1f1b": "1F1B", "interleaved": "interleaved 1F1B", "zero_bubble": "zero bubble"}
COLOURS = {"forward": ("#4c78a8", "#9ecae9"), "backward": ("#54a24b", "#b6d7a8"), "weights": ("#e45756", "#f2a6a5")}
"""Of the passes of a rank's first stage, and of its other stages."""
UNIT, TOP = 11, 34


def schedule_svg(schedule: PipelineSchedule, batch: Batch) -> str:
    """Draws a step: a row for each rank of the pipe, with numbered passes; grey means idle."""
    micro_batches = batch.gradient_accumulation_steps
    shown = min(micro_batches, max(MOST_SHOWN, schedule.ranks))
    slots = schedule.slots(shown, lengths(schedule))
    unit = UNIT / schedule.chunks if schedule.chunks > 2 else UNIT
    length = max(slot.end for slot in slots)
    title = f"{NAMES[schedule.name]}, {schedule.stages} stages, {micro_batches} micro-batches: "
    title += f"bubble {schedule.bubble(micro_batches):.1%}"
    if shown < micro_batches:
        title += f" (the picture has {shown} micro-batches)"
    title += "; blue forward, green backward"
    if schedule.splits_backward:
        title += ", red gradients of weights"
    if schedule.chunks > 1:
        title += "; light: stages after a rank's first"
    label = "stage" if schedule.chunks == 1 else "rank"
    rows = []
    for rank in range(schedule.ranks):
        y = TOP + rank * ROW
        rows += [row_name(y, f"{label} {rank}"), box(LEFT, y, length * unit, ROW - 3, GREY)]
    drawn = (element for slot in slots for element in _drawn(schedule, slot, unit))
    return picture(LEFT + length * unit + 12, TOP + schedule.ranks * ROW + 12, title, (*rows, *drawn))


def _drawn(schedule: PipelineSchedule, slot: Slot, unit: float) -> Iterator[str]:
    kind, stage, micro_batch = slot.what
    x, y, width = LEFT + slot.start * unit, TOP + slot.rank * ROW, (slot.end - slot.start) * unit
    title = f"stage {stage}, {kind} pass of micro-batch {micro_batch}"
    is_later = stage != schedule.stages_of(slot.rank)[0]
    yield box(x, y, width - 0.6, ROW - 3, COLOURS[kind][is_later], title)
    yield bar_label(x, y, width, str(micro_batch), "black" if is_later else "white")
