"""SVG pictures of a plan: of its memory, and of its pipeline's schedule."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from xml.sax.saxutils import escape

from llmtrain.plan.plan import Batch
from llmtrain.plan.predict.memory import LABELS, PlanMemory, StageMemory
from llmtrain.plan.predict.parts import readable, unit_of
from llmtrain.plan.schedules import PipelineSchedule, Slot, lengths

ROW = 22
"""Height of a row, with the space below it."""
LEFT = 64
"""x coordinate of the rows, to the right of their names."""
LETTER_WIDTH = 7
"""Approximate width of a letter of the title."""
DARK, GREY = "#222222", "#e4e4e4"


def picture(width: float, height: float, title: str, elements: Iterable[str]) -> str:
    """Returns the whole document: white, with its title on top; wider than `width` if the title needs it."""
    width = max(width, 16 + LETTER_WIDTH * len(title))
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:g} {height:g}" width="{width:g}" '
        f'height="{height:g}" font-family="sans-serif" font-size="9">'
    )
    return "\n".join((head, box(0, 0, width, height, "white"), text(8, 18, title, size=13), *elements, "</svg>")) + "\n"


def row_name(y: float, name: str) -> str:
    """Returns the name of the row that begins at `y`."""
    return text(8, y + 14, name)


def box(x: float, y: float, width: float, height: float, fill: str, tooltip: str = "") -> str:
    """Returns a rectangle; tooltip: shown by a browser."""
    place = f'x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" fill="{fill}"'
    return f"<rect {place}><title>{escape(tooltip)}</title></rect>" if tooltip else f"<rect {place}/>"


def text(x: float, y: float, content: str, *, fill: str = DARK, anchor: str = "start", size: int | None = None) -> str:
    """Returns a line of text; y: its base line, anchor: which part of it is at x."""
    given = f' font-size="{size}"' if size else ""
    return f'<text x="{x:g}" y="{y:g}" fill="{fill}" text-anchor="{anchor}"{given}>{escape(content)}</text>'


def bar_label(x: float, y: float, width: float, content: str, fill: str) -> str:
    """Returns a figure in the middle of a box of a row."""
    return text(x + width / 2, y + 13, content, fill=fill, anchor="middle")


def line(x: float, top: float, bottom: float, colour: str) -> str:
    """Returns a vertical line from top to bottom."""
    return f'<line x1="{x:g}" y1="{top:g}" x2="{x:g}" y2="{bottom:g}" stroke="{colour}" stroke-width="1.5"/>'


COLOURS = {
    "parameters": "#4c78a8",
    "masters": "#9ecae9",
    "optimizer": "#f58518",
    "gradients": "#54a24b",
    "buckets": "#a8d8a0",
    "live_parameters": "#b279a2",
    "communication": "#eeca3b",
    "activations": "#e45756",
    "logits": "#ffb3bd",
    "framework": "#bab0ac",
}
"""Part → colour."""
LIGHT = frozenset(("masters", "buckets", "communication", "logits", "framework", "optimizer"))
"""Parts whose colour is light, so that their figures are dark."""

PLOT, RIGHT = 640, 150
"""Width of the rows, and of the text after them."""
PER_LINE = 5
"""Parts per line of the legend."""
KEY_TOP, KEY_ROW, KEY_WIDTH = 32, 16, 140
FIGURE = 26
"""Minimum width of a box for its figure to be shown."""


def memory_svg(memory: PlanMemory) -> str:
    """Draws the fullest rank of each stage at its fullest moment.

    A row for each stage has its parts side by side, and a line shows the capacity of a device.
    """
    shown = [name for name in COLOURS if any(getattr(stage.peak, name) for stage in memory.stages)]
    top = KEY_TOP + KEY_ROW * -(-len(shown) // PER_LINE) + 18
    bottom = top + len(memory.stages) * ROW
    scale = PLOT / max(memory.needed, memory.capacity or 0, 1)
    unit, _ = unit_of(memory.needed)
    elements = [*_legend(shown)]
    for number, stage in enumerate(memory.stages):
        name = f"stage {number}" if len(memory.stages) > 1 else "each rank"
        elements += [row_name(top + number * ROW, name), *_row(stage, top + number * ROW, scale, unit)]
    if memory.capacity:
        x = LEFT + memory.capacity * scale
        elements += [
            line(x, top - 6, bottom, DARK),
            text(x, top - 9, f"a device has {readable(memory.capacity)}", anchor="end"),
        ]
    return picture(LEFT + PLOT + RIGHT, bottom + 12, _title(memory), elements)


def _title(memory: PlanMemory) -> str:
    room = f" of {readable(memory.capacity)}" if memory.capacity else ""
    source = "traced" if memory.is_traced else "estimated"
    return f"Memory of the fullest rank: {readable(memory.needed)}{room} (activations {source})"


def _legend(shown: list[str]) -> Iterator[str]:
    for number, name in enumerate(shown):
        x, y = 8 + number % PER_LINE * KEY_WIDTH, KEY_TOP + number // PER_LINE * KEY_ROW
        yield box(x, y, 10, 10, COLOURS[name])
        yield text(x + 15, y + 9, name.replace("_", " "), size=10)


def _row(stage: StageMemory, y: float, scale: float, unit: int) -> Iterator[str]:
    """Yields the bars of the parts, figures where there is room for them, and the sum after them."""
    yield box(LEFT, y, PLOT, ROW - 3, GREY)
    x = float(LEFT)
    for name in COLOURS:
        size = getattr(stage.peak, name)
        if not size:
            continue
        width = size * scale
        yield box(x, y, width, ROW - 3, COLOURS[name], f"{name.replace('_', ' ')}: {size:,} bytes")
        if width >= FIGURE:
            yield bar_label(x, y, width, f"{size / unit:,.1f}", DARK if name in LIGHT else "white")
        x += width
    yield text(LEFT + PLOT + 8, y + 9, readable(stage.peak.total), size=10)
    yield text(LEFT + PLOT + 8, y + 18, LABELS[stage.moment], size=8)


MAX_SHOWN = 32
"""Micro-batches that a picture shows; more would only be thin lines, and the middle repeats itself."""
SCHEDULE_NAMES = {"1f1b": "1F1B", "interleaved": "interleaved 1F1B", "zero_bubble": "zero bubble"}
PASS_COLOURS = {
    "forward": ("#4c78a8", "#9ecae9"),
    "backward": ("#54a24b", "#b6d7a8"),
    "weights": ("#e45756", "#f2a6a5"),
}
"""Colours of the passes of a rank's first stage, and of its other stages."""
UNIT, TOP = 11, 34


def schedule_svg(schedule: PipelineSchedule, batch: Batch) -> str:
    """Draws a step: a row for each rank of the pipe, with numbered passes; grey means idle."""
    micro_batches = batch.gradient_accumulation_steps
    shown = min(micro_batches, max(MAX_SHOWN, schedule.ranks))
    slots = list(schedule.slots(shown, lengths(schedule)))
    unit = UNIT / schedule.chunks if schedule.chunks > 2 else UNIT
    length = max(slot.end for slot in slots)
    title = f"{SCHEDULE_NAMES[schedule.name]}, {schedule.stages} stages, {micro_batches} micro-batches: "
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
    drawn = (element for slot in slots for element in _passes(schedule, slot, unit))
    return picture(LEFT + length * unit + 12, TOP + schedule.ranks * ROW + 12, title, (*rows, *drawn))


def _passes(schedule: PipelineSchedule, slot: Slot, unit: float) -> Iterator[str]:
    kind, stage, micro_batch = slot.action
    x, y, width = LEFT + slot.start * unit, TOP + slot.rank * ROW, (slot.end - slot.start) * unit
    title = f"stage {stage}, {kind} pass of micro-batch {micro_batch}"
    is_later = stage != schedule.stages_of(slot.rank)[0]
    yield box(x, y, width - 0.6, ROW - 3, PASS_COLOURS[kind][is_later], title)
    yield bar_label(x, y, width, str(micro_batch), "black" if is_later else "white")
