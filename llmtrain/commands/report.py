"""`llmtrain report`: writes or serves a page of finished or active runs, from their directories alone."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from llmtrain.errors import Problem, RecipeError


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
    if twice := dict.fromkeys(str(run) for run in runs if sum(other.resolve() == run.resolve() for other in runs) > 1):
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
