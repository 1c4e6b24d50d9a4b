"""Shows a run, or the differences between two runs, in a terminal."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
from rich.console import Console, Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from llmtrain.errors import printable
from llmtrain.report import facts
from llmtrain.report.curves import names_of_callbacks
from llmtrain.report.differences import Difference
from llmtrain.report.run import RunData
from llmtrain.report.table import Column
from llmtrain.system.quantities import readable_bytes

BLOCKS = "▁▂▃▄▅▆▇█"
LETTERS = "._-=+*#@"
"""Characters for curves if the terminal's encoding lacks the block characters."""
GAP = " "
CURVES = {
    "loss": "loss",
    "evaluation loss": "eval_loss",
    "gradient norm": "grad_norm",
    "learning rate": "lr",
    "tokens per second": "tokens_per_second",
    "MFU": "mfu",
    "step time, s": "step_time_s",
    "waiting for data, s": "data_wait_s",
    "peak memory": "peak_memory_bytes",
    "slowest rank, ratio": "slowest_ratio",
}
SHOWN_FACTS = ("model", "layout", "cluster", "data", "batch", "launched", "host", "commit")
MAX_EVENTS = 8
MAX_SAMPLE = 400
MAX_CURVE_WIDTH = 80
STATUS_STYLE = {"running": "green", "finished": "cyan", "died": "red", "interrupted": "yellow", "stopped": "yellow"}


def overview(run: RunData, console: Console) -> RenderableType:
    """Returns a summary of a run."""
    title = Text.assemble(
        (printable(run.name), "bold"), "  ", (facts.status_line(run), STATUS_STYLE.get(run.status, ""))
    )
    parts: list[RenderableType] = [title, _bar(run, console), "", _facts(run), "", _curves(run, console)]
    for heading, lines in _sections(run):
        parts += ["", Text(heading, "bold"), *(Padding(Text(printable(line, "\n")), (0, 0, 0, 2)) for line in lines)]
    return Group(*parts)


def comparison(
    names: Sequence[str], groups: dict[str, list[Difference]], metrics: Sequence[tuple[str, tuple[str, ...]]]
) -> Table:
    """Returns a table of the differences and the figures of two runs."""
    table = Table(box=None, pad_edge=False, expand=False)
    table.add_column("")
    for name in names:
        table.add_column(Text(printable(name)), overflow="fold")
    for group, found in groups.items():
        table.add_row(Text(f"{group}{'' if found else ': the same'}", "bold"))
        for difference in found:
            table.add_row(f"  {difference.field}", *(Text(printable(text)) for text in difference.texts))
    table.add_row(Text("metrics", "bold"))
    for label, texts in metrics:
        table.add_row(f"  {label}", *texts)
    return table


def curve(values: Column, width: int, characters: str) -> str:
    """Returns numbers as a line of characters.

    Each character stands for the mean of equally many neighbouring numbers; a gap means that none of them is finite.
    """
    width = min(width, len(values))
    means = [
        part[np.isfinite(part)].mean() if np.isfinite(part).any() else np.nan
        for part in np.array_split(values, max(1, width))
    ]
    finite = [mean for mean in means if np.isfinite(mean)]
    if not finite:
        return ""
    least, span = min(finite), max(finite) - min(finite)
    top = len(characters) - 1
    heights = [
        None if np.isnan(mean) else round((mean - least) / span * top) if span > 0 else top // 2 for mean in means
    ]
    return "".join(GAP if height is None else characters[height] for height in heights)


def _bar(run: RunData, console: Console) -> Text:
    """Returns a bar that shows the progress of the run."""
    if not run.max_steps:
        return Text()
    width = min(60, console.width - 8)
    share = min(1.0, run.step / run.max_steps)
    done = round(share * width)
    full, empty = ("━", "─") if _has_blocks(console) else ("=", "-")
    return Text.assemble((full * done, "green"), (empty * (width - done), "dim"), f" {share:.0%}")


def _facts(run: RunData) -> Table:
    table = Table.grid(padding=(0, 2))
    table.add_column(style="dim")
    table.add_column(overflow="fold")
    for label, text in facts.facts(run):
        if label in SHOWN_FACTS:
            table.add_row(label, Text(printable(text)))
    return table


def _curves(run: RunData, console: Console) -> Table:
    characters = BLOCKS if _has_blocks(console) else LETTERS
    width = max(8, min(MAX_CURVE_WIDTH, console.width - 58))
    table = Table.grid(padding=(0, 2))
    table.add_column(style="dim")
    for _ in range(3):
        table.add_column(justify="right")
    table.add_column(style="cyan", no_wrap=True)
    table.add_row("", Text("last", "dim"), Text("least", "dim"), Text("most", "dim"))
    for label, name in {**CURVES, **{name: name for name in names_of_callbacks(run)}}.items():
        values = (run.metrics if name in run.metrics else run.evaluations).get(name)
        finite = values[np.isfinite(values)]
        if len(finite):
            numbers = [_short(name, float(value)) for value in (finite[-1], finite.min(), finite.max())]
            table.add_row(Text(printable(label)), *numbers, curve(values, width, characters))
    return table


def _short(name: str, value: float) -> str:
    if name == "peak_memory_bytes":
        return readable_bytes(int(value))
    return f"{value:.1%}" if name == "mfu" else f"{value:,.0f}" if value >= 1000 else f"{value:.4g}"


def _sections(run: RunData) -> Iterator[tuple[str, list[str]]]:
    if time := facts.time_spent(run):
        yield "time", ["  ".join(f"{part.label} {part.text}" for part in time)]
    if memory := facts.predicted_memory(run):
        parts = ", ".join(f"{part.label} {part.text}" for part in memory[1:])
        yield "predicted memory of the fullest rank", [f"{memory[0].text}: {parts}"]
    if slow := facts.stragglers(run):
        yield "slow ranks", [f"{rank} {text}" for rank, text in slow]
    if events := list(facts.event_lines(run))[-MAX_EVENTS:]:
        yield "events", [f"{time}  step {step:,}  {event}  {text}".rstrip() for time, step, event, text in events]
    if run.checkpoints:
        yield (
            "checkpoints",
            [
                f"{saved.folder.name}  {saved.problem or readable_bytes(saved.bytes)}"
                f"{'  latest' if saved.is_latest else ''}"
                for saved in run.checkpoints
            ],
        )
    if run.profiles:
        yield (
            "recorded steps",
            [
                f"from step {window.step:,}, rank {window.rank}: {window.seconds:.3g} s, "
                f"computation {window.computation:.3g} s, "
                f"exposed communication {window.exposed_communication:.3g} s"
                for window in run.profiles
            ],
        )
    if run.scores:
        yield (
            f"downstream tasks after step {run.scores[-1].step:,}",
            [f"{name} {score:.4f}" for name, score in run.scores[-1].scores.items()],
        )
    if run.samples:
        last = run.samples[-1]
        lines = [line for line in (last.prompt + last.text)[:MAX_SAMPLE].splitlines() if line.strip()]
        yield f"sample after step {last.step:,}", lines
    if run.problems:
        yield "cannot be read", list(run.problems)


def _has_blocks(console: Console) -> bool:
    try:
        (BLOCKS + "━─").encode(console.encoding)
    except (UnicodeEncodeError, LookupError):
        return False
    return True
