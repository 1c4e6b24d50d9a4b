"""The cost at ten thousand ranks and a trillion tokens."""

from collections.abc import Sequence

from benchmarks.benchmark import Benchmark, Result, Verdict, case_of, median_of, program
from benchmarks.pairs import Case, Side

RANKS = (256, 2048, 10000)
PARTS = {
    "plan": ("plan: layout, rules, memory, time, DeepSpeed's JSON", "seconds", 1.0),
    "sampler": ("which sequences a global batch of one per rank holds", "batch_ms", 100.0),
    "manifest": ("the manifest of a checkpoint, read", "read_s", 1.0),
    "launch": ("a hostfile, read; the job script beside it", "hostfile_s", 1.0),
    "verdicts": ("rank 0's store answers every rank once", "seconds", 1.0),
}
"""Part → description, the number that is judged, and its upper limit."""


def cases(quick: bool) -> Sequence[Case]:
    """Returns a case per part, each with one side per number of ranks."""
    return [
        Case(what, [Side(f"{ranks:,} ranks", program("scale", part, str(ranks))) for ranks in RANKS])
        for part, (what, _, _) in PARTS.items()
    ]


def verdicts(result: Result) -> Sequence[Verdict]:
    """Returns the verdicts on whether each part stays under its limit with the most ranks."""
    found = []
    for what, number, most in PARTS.values():
        value = median_of(case_of(result, what), f"{RANKS[-1]:,} ranks", number)
        unit = "ms" if number.endswith("ms") else "s"
        found.append(Verdict(f"{what}: under {most:g} {unit}", f"{value:.3g} {unit}", value < most))
    return found


BENCHMARK = Benchmark(
    name="scale",
    title="10,000 ranks, 10¹² tokens",
    description=(
        "Simulated in one process: `recipes/llama3_70b.py` planned for this many H100s; the sampler in the middle of "
        "10¹² tokens in sequences of 8,192, whose order is computed and stored nowhere; a manifest of three files "
        "per rank; a hostfile with eight devices per host, and the job script; and the store through which ranks "
        "agree on stopping, read once for each rank. Real ranks read it one step ahead, without waiting."
    ),
    cases=cases,
    columns={
        "seconds": ("s", ".4f"),
        "batch_ms": ("ms", ".2f"),
        "write_s": ("written, s", ".3f"),
        "read_s": ("read, s", ".3f"),
        "mib": ("file, MiB", ".2f"),
        "hostfile_s": ("hostfile, s", ".4f"),
        "script_s": ("script, s", ".4f"),
        "peak_mib": ("peak memory, MiB", ".0f"),
    },
    verdicts=verdicts,
    minutes=6,
)
