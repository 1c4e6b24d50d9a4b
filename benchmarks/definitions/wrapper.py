"""What our training loop costs in comparison with a bare one."""

from collections.abc import Sequence
from statistics import median, stdev

from benchmarks.benchmark import Benchmark, Result, Verdict, case_of, median_of, program, script, sets
from benchmarks.pairs import Case, Side

MAX_MS, MAX_FRACTION = 1.0, 0.005
ONE_THREAD = {"OMP_NUM_THREADS": "1"}
NARROW = (
    *("model.config.hidden_size=32", "model.config.intermediate_size=64", "data.tokenizer.vocab_size=512"),
    *("model.config.num_attention_heads=2", "model.config.num_key_value_heads=1"),
)
"""Fields of narrow layers: as many layers, tensors, micro-batches and tokens as in the recipe, but an eighth of the
computation. The overhead of a loop stays the same, and is not hidden by the variation of the computing time."""
WHOLE = "the recipe as it is, ZeRO-1, {}"
RANKS = {1: "1 rank", 2: "2 ranks"}


def _interleaved(name: str, peer: str, ranks: int, blocks: int, *fields: str) -> Case:
    command = program("interleaved", "--peer", peer, "--ranks", str(ranks), "--blocks", str(blocks), *sets(*fields))
    return Case(name, [Side("ours − bare", command, ONE_THREAD)])


def cases(quick: bool) -> Sequence[Case]:
    """Returns the cases: both loops alternate in one process, then whole commands alternate."""
    steps, blocks, of_whole = ("20", 8, 4) if quick else ("40", 100, 12)
    zero = {stage: f"parallel.zero_stage={stage}" for stage in (0, 1)}
    found = [
        _interleaved("DeepSpeed, ZeRO-0, 1 rank", "deepspeed", 1, blocks, zero[0], *NARROW),
        _interleaved("DeepSpeed, ZeRO-1, 1 rank", "deepspeed", 1, blocks, zero[1], *NARROW),
        _interleaved("DeepSpeed, ZeRO-1, 2 ranks", "deepspeed", 2, blocks, zero[1], *NARROW),
        _interleaved("PyTorch, 1 rank", "torch", 1, blocks, zero[0], *NARROW),
        _interleaved("PyTorch with DDP, 2 ranks", "torch", 2, blocks, zero[0], *NARROW),
        *(_interleaved(WHOLE.format(name), "deepspeed", ranks, of_whole, zero[1]) for ranks, name in RANKS.items()),
    ]
    for ranks, ranks_told in RANKS.items():
        folder, field = f"{{work}}/subject{ranks}", sets("parallel.zero_stage=1")
        ours = program("ours", "--ranks", str(ranks), "--steps", steps, *field)
        bare = script(ranks, "benchmarks/programs/bare_script.py", folder, "--steps", steps)
        subject = program("subject", folder, "--ranks", str(ranks), "--steps", steps, *field)
        found.append(
            Case(
                f"whole commands, ZeRO-1, {ranks_told}",
                [Side("llmtrain", ours, ONE_THREAD), Side("bare DeepSpeed", bare, ONE_THREAD)],
                setup=[Side("batches", subject)],
            )
        )
    return found


def verdicts(result: Result) -> Sequence[Verdict]:
    """Returns the verdicts on the overhead with narrow layers, as a share of a step of the whole recipe."""
    found = []
    for case in result["cases"]:
        if case["name"].startswith("DeepSpeed"):
            whole = case_of(result, WHOLE.format(case["name"].rpartition(", ")[2]))
            found.append(verdict(case, median_of(whole, whole["sides"][0]["name"], "peer_ms")))
    return found


def verdict(case: Result, step_ms: float) -> Verdict:
    """Returns the verdict on the median of our additional time over all runs. step_ms: a step of the bare loop."""
    more = [run["more_ms"] for run in case["sides"][0]["runs"]]
    error = 1.2533 * stdev(more) / len(more) ** 0.5  # standard error of a median, from the spread of processes
    return Verdict(
        f"{case['name']}: at most {MAX_FRACTION:.1%} and {MAX_MS:g} ms a step",
        f"{median(more):+.2f} ± {error:.2f} ms, {median(more) / step_ms:+.2%} of {step_ms:.1f} ms",
        median(more) + error <= min(MAX_MS, MAX_FRACTION * step_ms),  # not met if the error leaves it open
    )


BENCHMARK = Benchmark(
    name="wrapper",
    title="What the wrapper costs",
    description=(
        "The worker as `llmtrain train` starts it, with data, metrics, guard, watcher and the agreement on stopping, "
        "is compared with a typical hand-written loop: the same model, attention, positions, tokens and DeepSpeed "
        "configuration, with its batches ready in memory, and one thread per rank. Both alternate in one process, "
        "four steps each, because a machine drifts by more than the difference; the difference is the median of "
        "neighbouring blocks. It is measured with narrow layers: `recipes/tiny.py` with the same number of layers, "
        "tensors, micro-batches and tokens, but an eighth of the computation, because the variation of all of "
        "it would hide the difference. The share is that of a step of the whole recipe. `cpu` is the processor time of "
        "the training thread. At the end, whole commands alternate."
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
    minutes=36,
)
