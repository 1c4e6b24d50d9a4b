"""The report of a dry run, as JSON and as lines for people."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from rich import box
from rich.table import Table

from llmtrain.plan import Plan
from llmtrain.plan.described import model_line, split_lines, volume_lines
from llmtrain.plan.predict.traffic import volumes
from llmtrain.system.quantities import readable_bytes
from llmtrain.trials.dry_run.job import DryRunResult
from llmtrain.trials.dry_run.order import DataOrder, Read
from llmtrain.trials.dry_run.shrink import Change

REPLICAS, MICRO_BATCHES, RANKS = 4, 4, 4
"""Largest numbers of replicas, micro-batches and ranks that are shown."""


@dataclass(frozen=True)
class DryRunReport:
    """A dry run that passed."""

    plan: Plan
    shrunk: Plan
    changes: tuple[Change, ...]
    order: DataOrder
    result: DryRunResult
    seconds: float

    def document(self) -> dict[str, Any]:
        """Returns the report as JSON data. Communication: bytes by kind, for a rank of each stage."""
        return {
            "passed": True,
            "plan": self.plan.summary(),
            "communication": list(volumes(self.plan)),
            "data_order": self.order.model_dump(mode="json"),
            "changes": [change.model_dump() for change in self.changes],
            "dry_run": {"plan": self.shrunk.summary(), "communication": list(volumes(self.shrunk))}
            | self.result.model_dump(mode="json"),
            "seconds": self.seconds,
        }

    def lines(self) -> Iterator[str]:
        """Yields all lines except for the table of what was not tested."""
        yield model_line(self.plan)
        yield from split_lines(self.plan)
        yield from volume_lines(volumes(self.plan))
        yield from _order_lines(self.order)
        yield ""
        yield f"dry run  {ranks(self.shrunk)} on this machine, {self.seconds:.0f} s"
        yield from split_lines(self.shrunk)
        yield from volume_lines(volumes(self.shrunk))
        yield from _result_lines(self.result)

    def table(self) -> Table:
        """Returns a table of what was scaled down, and what that leaves untested."""
        shown = Table(box=box.SIMPLE, padding=(0, 1, 0, 0), pad_edge=False)
        for name in ("", "plan", "dry run", "not tested"):
            shown.add_column(name, overflow="fold")
        for change in self.changes:
            shown.add_row(change.what, change.plan, change.dry_run, change.untested)
        return shown


def ranks(plan: Plan) -> str:
    """Formats the number of ranks."""
    return "1 rank" if plan.workers == 1 else f"{plan.workers} ranks"


def _order_lines(order: DataOrder) -> Iterator[str]:
    """Yields lines on the first micro-batches of the first replicas, in the first step."""
    what = "sequences of the prepared data" if order.is_prepared else "samples, counted from the beginning"
    yield f"data     first step, {what}"
    for replica, readers in enumerate(order.ranks[:REPLICAS]):
        reads = [read for read in order.reads if read.step == 1 and read.data_rank == replica][:MICRO_BATCHES]
        text = "; ".join(_read(read, order) for read in reads)
        numbers = ", ".join(map(str, readers[:RANKS])) + (", …" if len(readers) > RANKS else "")
        yield f"         data rank {replica} (rank{'s' if len(readers) > 1 else ''} {numbers}): {text}; …"


def _read(read: Read, order: DataOrder) -> str:
    if read.sequences:
        shown = [f"{number}" for number in read.sequences[:ROWS]]
        if len(order.sources) > 1:
            shown = [
                f"{order.sources[source]} {number}"
                for source, number in zip(read.sources, read.sequences[:ROWS], strict=False)
            ]
        return ", ".join(shown) + (", …" if read.rows > ROWS else "")
    return f"{read.first}" if read.rows == 1 else f"{read.first} to {read.first + read.rows - 1}"


ROWS = 4
"""Number of sequences of a micro-batch that are shown."""


def _result_lines(result: DryRunResult) -> Iterator[str]:
    checkpoint = result.checkpoint
    yield f"trained  {len(result.steps)} steps: loss {', '.join(f'{step.loss:.4f}' for step in result.steps)}"
    yield f"         gradient norm {', '.join(f'{step.grad_norm:.4f}' for step in result.steps)}"
    if result.eval_loss is not None:
        yield f"         evaluation loss {result.eval_loss:.4f}"
    yield (
        f"saved    after step {checkpoint.after_step}: {checkpoint.files} files, {readable_bytes(checkpoint.size)}, "
        f"{checkpoint.save_s:.1f} s"
    )
    yield (
        f"loaded   into new engines, {checkpoint.load_s:.1f} s: step {checkpoint.after_step + 1} "
        "repeated with the same loss, gradient norm and weights, bit for bit"
    )
