"""Shows finished or active runs from their directories alone. `llmtrain profile` asks an active run to record steps."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from llmtrain.commands.plan import LARGEST_OPTION, JsonOption
from llmtrain.errors import Problem, RecipeError, format_value

if TYPE_CHECKING:
    from llmtrain.report import RunData

RunArgument = Annotated[Path, typer.Argument(metavar="RUN", help="Run directory.")]


@dataclass(frozen=True)
class ReportRequest:
    """The arguments of `llmtrain report`."""

    runs: Annotated[list[Path], typer.Argument(metavar="RUN…", help="Run directories.")]
    out: Annotated[
        Path | None, typer.Option(metavar="FILE", help="File to write; default: report.html in the run directory.")
    ] = None
    serve: Annotated[
        bool, typer.Option("--serve", help="Serve the page on this machine, and keep it up to date until Ctrl-C.")
    ] = False
    port: Annotated[int, typer.Option(help="With --serve: port; 0 chooses a free one.", min=0, max=65535)] = 0


def report_runs(request: ReportRequest) -> None:
    """Write an HTML page with the curves and tables of runs.

    A run writes its own page when it ends. The page of several runs compares them. It is written to report.html in the
    working directory.
    """
    from llmtrain.report.page import write_report
    from llmtrain.run_dir import RunDir

    if request.serve and request.out:
        raise RecipeError(Problem("report.out", "--out", "is not supported with --serve", "leave one of them out"))
    if request.port and not request.serve:
        raise RecipeError(Problem("report.port", "--port", "is only supported with --serve", "add --serve"))
    runs = request.runs
    if twice := dict.fromkeys(str(run) for run in runs if sum(one.resolve() == run.resolve() for one in runs) > 1):
        raise RecipeError([Problem("report.twice", run, "is given more than once", "give it once") for run in twice])
    if request.serve:
        _serve(request)
        return
    # Several runs share no folder in which the page could be written.
    out = request.out or (RunDir(runs[0]).report if len(runs) == 1 else Path("report.html"))
    try:
        write_report(runs, out)
    except OSError as error:
        message = f"cannot write {out}: {error.strerror}"
        raise RecipeError(Problem("report.write", "--out", message, "choose another file with --out")) from None
    print(f"wrote {out}")


def _serve(request: ReportRequest) -> None:
    from llmtrain.report.serve import LivePage, PageServer

    live = LivePage(request.runs)
    try:
        server = PageServer(live, request.port)
    except OSError as error:
        message = f"cannot listen on port {request.port}: {error.strerror}"
        raise RecipeError(Problem("report.port", "--port", message, "choose another port, or 0")) from None
    print(f"serving {server.address} until Ctrl-C", flush=True)
    try:
        server.serve_forever()
    except KeyboardInterrupt:
        print()


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


def compare_runs(
    a: Annotated[Path, typer.Argument(metavar="A", help="Run directory.")],
    b: Annotated[Path, typer.Argument(metavar="B", help="Run directory to compare it with.")],
    as_json: JsonOption = False,
) -> None:
    """Show what differs between two runs, in the terminal.

    Compares their recipes, data, plans, environments and metrics.
    """
    from rich.console import Console

    from llmtrain.report import read_run
    from llmtrain.report.differences import compared_metrics, differences
    from llmtrain.report.page import names_of
    from llmtrain.report.terminal import comparison

    runs = [read_run(path) for path in (a, b)]
    groups, metrics = differences(runs), compared_metrics(*runs)
    if as_json:
        document = {
            "runs": [str(run.path) for run in runs],
            "differences": {group: {one.field: one.values for one in found} for group, found in groups.items()},
            "metrics": {label: values for label, values, _ in metrics},
        }
        print(json.dumps(document, indent=2))
    else:
        rows = [(label, texts) for label, _, texts in metrics]
        Console(highlight=False).print(comparison(names_of(runs), groups, rows))


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
        "figures": {one.label: one.value for one in facts.figures(run)},
        "predicted_memory_bytes": {one.label: one.value for one in facts.predicted_memory(run)},
        "predicted_step_s": {one.label: one.value for one in facts.predicted_step(run)},
        "time_s": {one.label: one.value for one in facts.time_spent(run)},
        "slow_ranks": dict(facts.stragglers(run)),
        "events": [asdict(one) for one in run.events],
        "checkpoints": [asdict(one) | {"folder": str(one.folder)} for one in run.checkpoints],
        "profiles": [asdict(one) for one in run.profiles],
        "samples": [asdict(one) for one in run.samples[-10:]],
        "scores": [asdict(one) for one in run.scores],
        "problems": list(run.problems),
    }


def request_profile(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="Run directory of a job that is running.")],
    steps: Annotated[int, typer.Option(help="Number of steps to record.", min=1, max=LARGEST_OPTION)] = 3,
    ranks: Annotated[str, typer.Option(help="Ranks to record, separated by commas.")] = "0",
    memory: Annotated[bool, typer.Option("--memory", help="Also write a snapshot of a GPU's memory.")] = False,
) -> None:
    """Record steps of a running job with torch's profiler.

    The recording starts after the next logged step.
    """
    from llmtrain.recipe import ProfileConfig
    from llmtrain.run_dir import RunDir, write_json

    folder = RunDir(run)
    if not folder.plan_file.is_file():
        raise RecipeError(Problem("profile.run", str(run), "is not a run directory: it has no plan.json"))
    plan = folder.read_plan()
    try:
        numbers = tuple(int(one) for one in ranks.split(","))
    except ValueError:
        message = f"{format_value(ranks)} is not a list of numbers"
        raise RecipeError(Problem("profile.ranks", "--ranks", message, "--ranks 0,1")) from None
    if others := [one for one in numbers if not 0 <= one < plan.workers]:
        message = f"the run has no rank {', '.join(map(str, others))}"
        raise RecipeError(Problem("profile.ranks", "--ranks", message, f"its ranks are 0 to {plan.workers - 1}"))
    folder.profile.mkdir(exist_ok=True)
    write_json(folder.profile_request, ProfileConfig(steps=steps, ranks=numbers, memory=memory).model_dump(mode="json"))
    every = plan.recipe.logging.every_steps
    print(f"recording begins after the next logged step (every {every}) and is written to {folder.profile}")
