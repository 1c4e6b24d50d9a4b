"""The comparison of expert parallelism and ZeRO-3, on two cores that compute."""

from collections.abc import Sequence

from benchmarks.benchmark import Benchmark, Result, Verdict, case_of, median_of, program, sets
from benchmarks.pairs import Case, Side

SIDE = "ZeRO-3 / experts"
NUMBERS = (8, 64)
FIELDS = (
    *("model.architecture=qwen3_moe", "model.config.hidden_size=256", "model.config.moe_intermediate_size=256"),
    *("model.config.num_hidden_layers=4", "model.config.num_attention_heads=4", "model.config.num_experts_per_tok=2"),
    *("model.config.num_key_value_heads=2", "model.config.head_dim=64", "data.sequence_length=128"),
    *("batch.global_batch_size=4", "batch.micro_batch_size=2", "data.tokenizer.vocab_size=512"),
    *("kernels.blocks=eager", "kernels.loss=whole", "kernels.threads=1"),
)
"""Two sequences of 128 tokens on each rank: few tokens for an expert, as on many devices."""
PLANS = (
    *("--plan", "zero3:parallel.zero_stage=3"),
    *("--plan", "experts:parallel.zero_stage=1,parallel.expert=2"),
    *("--plan", "experts_zero3:parallel.zero_stage=3,parallel.expert=2"),
)


def cases(quick: bool) -> Sequence[Case]:
    """Returns a case for each number of experts, in which the steps of all plans alternate."""
    turns = "2" if quick else "8"
    return [
        Case(
            f"{number} experts",
            [
                Side(
                    SIDE,
                    program(
                        *("alternating", "--turns", turns),
                        *sets(*FIELDS, f"model.config.num_experts={number}"),
                        *PLANS,
                    ),
                )
            ],
        )
        for number in NUMBERS
    ]


def verdicts(result: Result) -> Sequence[Verdict]:
    """Returns whether expert parallelism is at least twice as fast where experts are many."""
    name = f"{NUMBERS[-1]} experts"
    ratio = median_of(case_of(result, name), SIDE, "experts")
    return [Verdict(f"{name}: a step of ZeRO-3 takes at least twice as long", f"{ratio:.2f}×", ratio >= 2)]


BENCHMARK = Benchmark(
    name="experts",
    title="Expert parallelism beside ZeRO-3, on CPUs that compute",
    description=(
        "Two ranks train a mixture of experts, with two experts for each token, under three plans in turn. ZeRO-3 "
        "gathers all experts of a layer in both passes, however few tokens they process. With expert parallelism, each "
        "rank keeps half of the experts, and tokens are sent to them and back."
    ),
    cases=cases,
    columns={
        "zero3_ms": ("ZeRO-3, ms a step", ".0f"),
        "experts_ms": ("experts × ZeRO-1", ".0f"),
        "experts_zero3_ms": ("experts × ZeRO-3", ".0f"),
        "experts": ("ZeRO-3 / experts × ZeRO-1", ".2f"),
        "experts_zero3": ("ZeRO-3 / experts × ZeRO-3", ".2f"),
    },
    verdicts=verdicts,
    minutes=6,
)
