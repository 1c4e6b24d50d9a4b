"""The comparison of pipeline schedules, on two cores that compute."""

from collections.abc import Sequence

from benchmarks.benchmark import Benchmark, Result, Verdict, case_of, median_of, program, sets
from benchmarks.pairs import Case, Side

CASE, SIDE = "2 ranks, 8 micro-batches", "1F1B / others"
FIELDS = (
    *("model.config.num_hidden_layers=8", "model.config.hidden_size=384", "model.config.intermediate_size=1024"),
    *("batch.global_batch_size=16", "batch.micro_batch_size=2", "parallel.zero_stage=1"),
    *("kernels.blocks=eager", "kernels.loss=whole", "kernels.threads=1", "data.tokenizer.vocab_size=512"),
    "parallel.pipeline=2",
)
"""Sizes with which a pass takes tenths of a second, and the head is small compared with a layer. All stages therefore
take about equally long."""


def cases(quick: bool) -> Sequence[Case]:
    """Returns the case in which the steps of all schedules alternate."""
    plans = [
        f"{name}:parallel.pipeline_schedule={name},parallel.pipeline_chunks={chunks}"
        for name, chunks in (("1f1b", 1), ("interleaved", 2), ("zero_bubble", 2))
    ]
    options = [part for plan in plans for part in ("--plan", plan)]
    command = program("alternating", "--turns", "2" if quick else "6", *sets(*FIELDS), *options)
    return [Case(CASE, [Side(SIDE, command)])]


def verdicts(result: Result) -> Sequence[Verdict]:
    """Returns the verdicts on whether each other schedule is at least as fast as 1F1B."""
    case, found = case_of(result, CASE), []
    for name in ("interleaved", "zero_bubble"):
        ratio = median_of(case, SIDE, name)
        found.append(Verdict(f"{name}: a step of 1F1B takes at least as long", f"{ratio:.3f}×", ratio >= 1))
    return found


BENCHMARK = Benchmark(
    name="schedules",
    title="The pipeline's schedules beside each other, on CPUs that compute",
    description=(
        "A pipeline of two ranks with eight layers takes steps under every schedule in turn. Each rank has its own "
        "core. In theory, 1F1B idles for one ninth of a step with eight micro-batches. In the benchmark of the bubble, "
        "ranks sleep instead of computing. Here they compute, so the overhead of the other schedules costs time, and "
        "the two cores share the memory bandwidth."
    ),
    cases=cases,
    columns={
        "1f1b_ms": ("1F1B, ms a step", ".0f"),
        "interleaved_ms": ("interleaved", ".0f"),
        "zero_bubble_ms": ("zero bubble", ".0f"),
        "interleaved": ("1F1B / interleaved", ".3f"),
        "zero_bubble": ("1F1B / zero bubble", ".3f"),
    },
    verdicts=verdicts,
    minutes=7,
)
