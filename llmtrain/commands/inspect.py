"""`llmtrain inspect`: shows a run in the terminal, from its directory alone."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from llmtrain.commands.options import JsonOption, RunArgument

if TYPE_CHECKING:
    from llmtrain.report import RunData


def inspect_run(run: RunArgument, as_json: JsonOption = False) -> None:
    """Show a summary of a run in the terminal.

    The run may be active or finished. The summary contains its progress, curves, events and checkpoints.
    """
    from rich.console import Console

    from llmtrain.report import read_run
    from llmtrain.report.terminal import overview

    data = read_run(run)
    if as_json:
        print(json.dumps(_document(data), indent=2))
    else:
        console = Console(highlight=False)
        console.print(overview(data, console))


def _document(run: RunData) -> dict[str, Any]:
    """Returns the summary of a run as JSON data."""
    from llmtrain.report import facts

    return {
        "path": str(run.path),
        "name": run.name,
        "status": run.status,
        "step": run.step,
        "max_steps": run.max_steps,
        "seconds_since_line": run.seconds_since_line,
        "facts": dict(facts.facts(run)),
        "figures": {figure.label: figure.value for figure in facts.figures(run)},
        "predicted_memory_bytes": {figure.label: figure.value for figure in facts.predicted_memory(run)},
        "predicted_step_s": {figure.label: figure.value for figure in facts.predicted_step(run)},
        "time_s": {figure.label: figure.value for figure in facts.time_spent(run)},
        "slow_ranks": dict(facts.stragglers(run)),
        "events": [asdict(event) for event in run.events],
        "checkpoints": [asdict(checkpoint) | {"folder": str(checkpoint.folder)} for checkpoint in run.checkpoints],
        "profiles": [asdict(profile) for profile in run.profiles],
        "samples": [asdict(sample) for sample in run.samples[-10:]],
        "scores": [asdict(score) for score in run.scores],
        "problems": list(run.problems),
    }
