"""What our loop costs over a bare one."""

from collections.abc import Sequence

from benchmarks.pairs import Case, Side
from benchmarks.question import Question, Result, Verdict, median_of

MOST_MS, MOST = 1.0, 0.005
ONE_THREAD = {"OMP_NUM_THREADS": "1"}


def _interleaved(name: str, peer: str, ranks: int, quick: bool, *fields: str) -> Case:
    command = ["python", "-m", "benchmarks.programs.interleaved", "--peer", peer, "--ranks", str(ranks)]
    command += ["--blocks", "8" if quick else "30"]
    for field in fields:
        command += ["--set", field]
    return Case(name, [Side("ours − bare", command, ONE_THREAD)])


def cases(quick: bool) -> Sequence[Case]:
    """Both loops in one process, in turn; then whole commands in turn."""
    steps = "20" if quick else "80"
    found = [
        _interleaved("DeepSpeed, ZeRO-0, 1 rank", "deepspeed", 1, quick, "parallel.zero_stage=0"),
        _interleaved("DeepSpeed, ZeRO-1, 1 rank", "deepspeed", 1, quick, "parallel.zero_stage=1"),
        _interleaved("DeepSpeed, ZeRO-1, 2 ranks", "deepspeed", 2, quick, "parallel.zero_stage=1"),
        _interleaved("PyTorch, 1 rank", "torch", 1, quick, "parallel.zero_stage=0"),
        _interleaved("PyTorch with DDP, 2 ranks", "torch", 2, quick, "parallel.zero_stage=0"),
    ]
    for ranks in (1, 2):
        start = ["python"] if ranks == 1 else ["python", "-m", "torch.distributed.run", "--nproc_per_node", str(ranks)]
        folder = f"{{work}}/subject{ranks}"
        subject = ["python", "-m", "benchmarks.programs.subject", folder, "--ranks", str(ranks), "--steps", steps]
        ours = ["python", "-m", "benchmarks.programs.ours", "--ranks", str(ranks), "--steps", steps]
        field = ["--set", "parallel.zero_stage=1"]
        found.append(
            Case(
                f"whole commands, ZeRO-1, {ranks} rank{'s' if ranks > 1 else ''}",
                [
                    Side("llmtrain", [*ours, *field], ONE_THREAD),
                    Side(
                        "bare DeepSpeed",
                        [*start, "benchmarks/programs/bare_script.py", folder, "--steps", steps],
                        ONE_THREAD,
                    ),
                ],
                setup=[Side("batches", [*subject, *field])],
            )
        )
    return found


def verdicts(result: Result) -> Sequence[Verdict]:
    """Of the loops in one process: the median over all runs."""
    found = []
    for case in result["cases"]:
        if not case["name"].startswith("DeepSpeed"):
            continue
        side = case["sides"][0]["name"]
        more, peer = median_of(case, side, "more_ms"), median_of(case, side, "peer_ms")
        error = median_of(case, side, "error_ms") / result["pairs"] ** 0.5
        found.append(
            Verdict(
                f"{case['name']}: at most {MOST:.1%} and {MOST_MS:g} ms a step",
                f"{more:+.2f} ± {error:.2f} ms, {more / peer:+.2%} of {peer:.1f} ms",
                more + error <= min(MOST_MS, MOST * peer),  # what cannot be told is not met
            )
        )
    return found


QUESTION = Question(
    name="wrapper",
    title="What the wrapper costs",
    asks=(
        "Our worker as `llmtrain train` starts it, with data, metrics, guard, watcher and the agreement on stopping, "
        "against a loop as people write it: the same model, attention, positions, tokens and DeepSpeed configuration, "
        "its batches ready in memory. `recipes/tiny.py`, one thread a rank. Both take turns in one process, four "
        "steps each, since a machine drifts by more than what is looked for; the difference is the median of "
        "neighbouring blocks. `cpu` is what the training thread computed. Below them, whole commands in turn."
    ),
    cases=cases,
    columns={
        "ours_ms": ("ours, ms a step", ".2f"),
        "peer_ms": ("bare, ms a step", ".2f"),
        "more_ms": ("more, ms", "+.2f"),
        "error_ms": ("± ms", ".2f"),
        "more_cpu_ms": ("more, cpu ms", "+.2f"),
        "step_ms": ("ms a step", ".2f"),
    },
    verdicts=verdicts,
    minutes=65,
)
