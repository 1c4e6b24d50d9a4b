"""The time from the command to the first step."""

from collections.abc import Sequence

from benchmarks.benchmark import Benchmark, Result, Verdict, program, script, sets
from benchmarks.pairs import Case, Side


def cases(quick: bool) -> Sequence[Case]:
    """Returns the cases: one rank and two, with data, tokens and batches already prepared."""
    found = []
    for ranks in (1, 2):
        folder = f"{{work}}/start{ranks}"
        field = sets("parallel.zero_stage=1")
        ours = program("ours", "--ranks", str(ranks), "--steps", "1", *field, *sets("logging.every_steps=1"))
        bare = program("timed", *script(ranks, "benchmarks/programs/bare_script.py", folder, "--steps", "1"))
        subject = program("subject", folder, "--ranks", str(ranks), "--steps", "2", *field)
        found.append(
            Case(
                f"{ranks} rank{'s' if ranks > 1 else ''}",
                [Side("llmtrain", ours), Side("bare DeepSpeed", bare)],
                setup=[Side("batches", subject)],
            )
        )
    return found


def verdicts(result: Result) -> Sequence[Verdict]:
    """Returns the verdicts on whether a start is as fast as that of a bare script. No other aim was set."""
    return [
        Verdict(
            f"{case['name']}: no slower than the bare script",
            f"{(ratio := case['against']['bare DeepSpeed']['first_step_s']['median']):.2f}× its time",
            ratio <= 1,
        )
        for case in result["cases"]
    ]


BENCHMARK = Benchmark(
    name="startup",
    title="From the command to the first step",
    description=(
        "`llmtrain train recipes/tiny.py`, with prepared data, until the first step is logged, compared with a bare "
        "DeepSpeed script that loads its batches from a file. The times at which files of the run directory appear "
        "show where the seconds go: planned (the recipe is checked and planned), worker (a rank runs Python), engine "
        "(model and engine are built), first step. The script prints when its imports are done."
    ),
    cases=cases,
    columns={
        "planned_s": ("planned, s", ".2f"),
        "worker_s": ("worker, s", ".2f"),
        "imported_s": ("imported, s", ".2f"),
        "engine_s": ("engine, s", ".2f"),
        "first_step_s": ("first step, s", ".2f"),
    },
    verdicts=verdicts,
    minutes=10,
)
