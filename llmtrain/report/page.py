"""The page of one or more runs: a single HTML file that needs no network.

Texts of a run are untrusted. The template escapes them, and the page's content policy allows only its own scripts.
"""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from llmtrain.errors import reason, truncate
from llmtrain.report import facts
from llmtrain.report.curves import Curves, charts_of, curves_of
from llmtrain.report.differences import compare_figures, differences
from llmtrain.report.run import RunData, read_run
from llmtrain.run_dir import RunDir
from llmtrain.system.durable import write_atomically
from llmtrain.system.quantities import readable_bytes

WEB = Path(__file__).parent / "web"
MAX_ROWS = 50
"""Number of rows in the table of a run's values."""
MAX_SAMPLES, MAX_TEXT = 60, 4000
"""Number of samples of a run on a page (the newest ones), and number of characters of each."""
MAX_EVENTS = 500


def write_report(folders: Sequence[Path], out: Path) -> None:
    """Writes the page of runs. Raises RecipeError if a folder holds no run, and OSError if it cannot be written."""
    write_atomically(out, page([read_run(folder) for folder in folders]))


def write_report_at_end(run: RunDir, warn: Callable[[str], None]) -> None:
    """Writes the page of a run that has ended. Failures only lead to a warning; they do not fail the run."""
    try:
        write_report([run.path], run.report)
    except Exception as error:
        warn(f"{run.report} was not written: {reason(error)}")


def page(runs: Sequence[RunData], revision: str = "") -> str:
    """Returns the page of runs. revision: identifies the content of a live page; empty for a static one."""
    names = names_of(runs)
    views = [_view(run, name) for run, name in zip(runs, names, strict=True)]
    script = Markup((WEB / "report.js").read_text("utf-8"))
    library = Markup((WEB / "uPlot.iife.min.js").read_text("utf-8"))
    environment = Environment(
        autoescape=True, loader=FileSystemLoader(WEB), undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    return environment.get_template("report.html.jinja").render(
        title=names[0] if len(runs) == 1 else f"{len(runs)} runs",
        runs=views,
        figures=compare_figures(runs),
        differences={group: found for group, found in differences(runs).items() if found},
        data=_json(_data(runs, names, revision)),
        policy=_policy([library, script], is_live=bool(revision)),
        style=Markup((WEB / "uPlot.min.css").read_text("utf-8") + (WEB / "report.css").read_text("utf-8")),
        library=library,
        license=Markup((WEB / "uPlot.LICENSE").read_text("utf-8")),
        script=script,
    )


def names_of(runs: Sequence[RunData]) -> list[str]:
    """Returns the names of runs; those with the same name are distinguished by their folders."""
    names = [truncate(run.name) for run in runs]
    return [f"{name} ({run.path})" if names.count(name) > 1 else name for run, name in zip(runs, names, strict=True)]


def _view(run: RunData, name: str) -> SimpleNamespace:
    """Returns the data of a run for the template."""
    time, figures = facts.time_spent(run), facts.figures(run)
    texts = {figure.label: figure.text for figure in figures}
    whole = sum(part.value or 0 for part in time) or 1
    return SimpleNamespace(
        name=name,
        run=run,
        facts=facts.facts(run),
        figures=figures,
        memory=facts.predicted_memory(run),
        measured_memory=texts.get("peak memory of rank 0", ""),
        # On CPUs, the measured memory is that of the whole process.
        is_resident=run.plan is not None and run.plan.cluster.spec.on_cpu,
        step_time=facts.predicted_step(run),
        measured_step=texts.get("step time", ""),
        time=[(part, (part.value or 0) / whole) for part in time],  # with its share of the running time
        stragglers=facts.stragglers(run),
        events=list(facts.event_lines(run))[-MAX_EVENTS:],
        values=_values(run),
        samples=_samples(run),
        size=readable_bytes,
    )


def _samples(run: RunData) -> dict[int, list[tuple[str, str]]]:
    """Maps steps to pairs of prompt and continuation, the newest step first."""
    by_step: dict[int, list[tuple[str, str]]] = {}
    for sample in run.samples[-MAX_SAMPLES:]:
        by_step.setdefault(sample.step, []).append((sample.prompt[:MAX_TEXT], sample.text[:MAX_TEXT]))
    return dict(sorted(by_step.items(), reverse=True))


def _values(run: RunData) -> tuple[list[str], list[list[str]]]:
    """Returns the column names and the rows of a table of equally spaced logged steps, including the last one."""
    table = run.metrics
    names = [name for name in table.names if table.last(name) is not None]
    chosen = np.unique(np.linspace(0, max(0, len(table) - 1), min(MAX_ROWS, len(table))).astype(int))
    columns = [table[name][chosen] for name in names]
    rows = [
        ["" if np.isnan(value) else f"{value:.15g}" if value.is_integer() else f"{value:.6g}" for value in row]
        for row in zip(*columns, strict=True)
    ]
    return names, rows


def _data(runs: Sequence[RunData], names: Sequence[str], revision: str) -> dict[str, Any]:
    charts = charts_of(runs)
    return {
        "revision": revision,
        "charts": [asdict(chart) for chart in charts],
        "runs": [
            _run_data(run, name, curves_of(run, charts, len(runs))) for run, name in zip(runs, names, strict=True)
        ],
    }


def _run_data(run: RunData, name: str, curves: tuple[Curves, Curves]) -> dict[str, Any]:
    memory = facts.predicted_memory(run)
    marks = [(event.step, event.event, truncate(event.text)) for event in run.events][-MAX_EVENTS:]
    kept = {checkpoint.step: checkpoint.folder.name for checkpoint in run.checkpoints}
    saved = facts.saved_steps(run)[-MAX_EVENTS:]
    marks += [(step, "checkpoint", kept.get(step, "removed since")) for step in saved]
    return {
        "name": name,
        "training": curves[0].document(),
        "evaluation": curves[1].document(),
        "marks": [{"step": step, "event": event, "text": text} for step, event, text in sorted(marks)],
        "predicted_memory": memory[0].value if memory else None,
    }


def _json(document: Any) -> Markup:
    """Returns JSON that is safe in a script element, whatever its texts contain."""
    text = json.dumps(document, separators=(",", ":"), allow_nan=False)
    return Markup(text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026"))


def _policy(scripts: Sequence[str], is_live: bool) -> str:
    """Returns a content policy that allows only these scripts, and no network except for a live page's server."""
    digests = (base64.b64encode(hashlib.sha256(script.encode()).digest()).decode() for script in scripts)
    rules = {
        "default-src": "'none'",
        "script-src": " ".join(f"'sha256-{digest}'" for digest in digests),
        "style-src": "'unsafe-inline'",
        "img-src": "data:",
        "connect-src": "'self'" if is_live else "'none'",
        "base-uri": "'none'",
        "form-action": "'none'",
    }
    return "; ".join(f"{name} {value}" for name, value in rules.items())
