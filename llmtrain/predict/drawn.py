"""Draws the memory of a plan: a row for each pipeline stage with its parts side by side, and the devices' capacity."""

from __future__ import annotations

from collections.abc import Iterator

from llmtrain.predict.memory import LABELS, PlanMemory, StageMemory
from llmtrain.predict.parts import readable, unit_of
from llmtrain.predict.picture import DARK, GREY, LEFT, ROW, bar_label, box, line, picture, row_name, text

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
"""Parts whose colour is dark, so that their figures are white."""

PLOT, RIGHT = 640, 150
"""Width of the rows, and of the text after them."""
PER_LINE = 5
"""Parts per line of the legend."""
KEY_TOP, KEY_ROW, KEY_WIDTH = 32, 16, 140
FIGURE = 26
"""Minimum width of a box for its figure to be shown."""


def memory_svg(memory: PlanMemory) -> str:
    """Returns a picture of the fullest rank of each stage at its fullest moment."""
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
