"""How long the page of long runs takes to open."""

from collections.abc import Sequence

from benchmarks.benchmark import Benchmark, Result, Verdict, case_of, median_of, program
from benchmarks.pairs import Case, Side

PROGRAM = program("report_page")
MOST_S, MOST_MB = 2.0, 2.0
ONE, TEN = "one run", "ten runs"


def cases(quick: bool) -> Sequence[Case]:
    """Returns the cases: the pages of one run and of ten runs, each with 100,000 logged steps."""
    steps = "2000" if quick else "100000"
    return [
        Case(
            name,
            [Side("Chromium", [*PROGRAM, "open", f"{{work}}/{runs}"])],
            setup=[
                Side("the page", [*PROGRAM, "write", f"{{work}}/{runs}", "--runs", str(runs), "--steps", steps]),
            ],
        )
        for name, runs in ((ONE, 1), (TEN, 10))
    ]


def verdicts(result: Result) -> Sequence[Verdict]:
    """Returns the verdicts on whether the time for ten runs and the page size for one run are small enough."""
    seconds = median_of(case_of(result, TEN), "Chromium", "opened_s")
    size = median_of(case_of(result, ONE), "Chromium", "page_mb")
    return [
        Verdict(f"{TEN}: opens in under {MOST_S:.0f} s", f"{seconds:.2f} s", seconds < MOST_S),
        Verdict(f"{ONE}: under {MOST_MB:.0f} MB", f"{size:.2f} MB", size < MOST_MB),
    ]


BENCHMARK = Benchmark(
    name="report",
    title="The page of long runs",
    description=(
        "`llmtrain report` of runs with 100,000 logged steps each. A Chromium without a window or a GPU, just "
        "started, opens the page: the time from the navigation until the first curves are on the screen. Curves "
        "further down are drawn on scrolling; the time to draw all curves is shown, too."
    ),
    cases=cases,
    columns={
        "opened_s": ("opened, s", ".2f"),
        "all_drawn_s": ("all curves drawn, s", ".2f"),
        "page_mb": ("page, MB", ".2f"),
    },
    verdicts=verdicts,
    minutes=1,
)
