"""The question of the time from the command to the first step."""

from collections.abc import Sequence

from benchmarks.pairs import Case, Side
from benchmarks.question import Question, Result, Verdict


def cases(quick: bool) -> Sequence[Case]:
    """Returns the cases: one rank and two, with data, tokens and batches already prepared."""
    found = []
    for ranks in (1, 2):
        folder = f"{{work}}/start{ranks}"
        field = ["--set", "parallel.zero_stage=1"]
        ours = ["python", "-m", "benchmarks.programs.ours", "--ranks", str(ranks), "--steps", "1", *field]
        start = ["python"] if ranks == 1 else ["python", "-m", "torch.distributed.run", "--nproc_per_node", str(ranks)]
        subject = ["python", "-m", "benchmarks.programs.subject", folder, "--ranks", str(ranks), "--steps", "2", *field]
        found.append(
            Case(
                f"{ranks} rank{'s' if ranks > 1 else ''}",
                [
                    Side("llmtrain", [*ours, "--set", "logging.every_steps=1"]),
                    Side(
                        "bare DeepSpeed",
                        [
                            "python",
                            "-m",
                            "benchmarks.programs.timed",
                            *start,
                            "benchmarks/programs/bare_script.py",
                            folder,
                            "--steps",
                            "1",
                        ],
                    ),
                ],
                setup=[Side("batches", subject)],
            )
        )
    return found


def verdicts(result: Result) -> Sequence[Verdict]:
    """Returns the verdicts on whether a start is as fast as that of a bare script. No other aim was set."""
    found = []
    for case in result["cases"]:
        ratio = case["against"]["bare DeepSpeed"]["first_step_s"]
        found.append(
            Verdict(
                f"{case['name']}: no slower than the bare script",
                f"{ratio['median']:.2f}× its time",
                ratio["median"] <= 1,
            )
        )
    return found


QUESTION = Question(
    name="startup",
    title="From the command to the first step",
    asks=(
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
