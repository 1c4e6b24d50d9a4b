"""What recomputing activations costs and saves."""

from collections.abc import Sequence

from benchmarks.benchmark import Benchmark, Result, Verdict, case_of, median_of, program, sets
from benchmarks.pairs import Case, Side

MOST_TIME, MOST_KEPT = 1.05, 0.6
FIELDS = (
    *("model.config.hidden_size=1024", "model.config.intermediate_size=3584", "data.sequence_length=512"),
    *("model.config.num_attention_heads=8", "model.config.num_key_value_heads=2", "batch.micro_batch_size=2"),
    *("data.mask_documents=false", "kernels.blocks=eager", "kernels.loss=whole"),
)
"""The proportions of Llama 3 8B, at a quarter of its width."""


def cases(quick: bool) -> Sequence[Case]:
    """Returns the cases: each kind of recomputation, compared with passes that keep all activations."""
    words = ["--turns", "3" if quick else "40", *sets(*FIELDS)]
    return [Case(kind, [Side(f"{kind} / none", program("recompute", kind, *words))]) for kind in ("selective", "full")]


def verdicts(result: Result) -> Sequence[Verdict]:
    """Returns the verdicts on the aims of selective recomputation."""
    case = case_of(result, "selective")
    ratio, kept = (median_of(case, "selective / none", number) for number in ("ratio", "kept_share"))
    return [
        Verdict(f"selective: at most {MOST_TIME:.2f} × the time of a pass", f"{ratio:.3f} ×", ratio <= MOST_TIME),
        Verdict(f"selective: at most {MOST_KEPT:.0%} of the activations", f"{kept:.0%}", kept <= MOST_KEPT),
    ]


BENCHMARK = Benchmark(
    name="recompute",
    title="What recomputation costs, on a CPU",
    description=(
        "Forward and backward passes of two layers and the head, in fp32, with and without recomputation "
        "(`parallel.activation_checkpointing`), alternate in one process. The layers have the proportions of Llama 3 "
        "8B at a quarter of its width. The share of activations is that of the plan; tests compare it with tensors. "
        "Updates are left out, because they would reduce the share of recomputation in the time."
    ),
    cases=cases,
    columns={
        "pass_ms": ("ms a pass", ".0f"),
        "ratio": ("× none", ".3f"),
        "kept_share": ("activations kept", ".0%"),
    },
    verdicts=verdicts,
    minutes=20,
)
