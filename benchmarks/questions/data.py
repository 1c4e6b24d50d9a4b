"""Preparing data, and waiting for it."""

from collections.abc import Sequence

from benchmarks.pairs import Case, Side
from benchmarks.question import Question, Result, Verdict, case_of, median_of

MEGABYTES, LARGE_MEGABYTES = 40, 500
PROGRAM = ["python", "-m", "benchmarks.programs.data"]


def _corpus(name: str, megabytes: int) -> Side:
    return Side(
        f"{megabytes} MB of text", ["python", "-m", "benchmarks.programs.corpus", f"{{work}}/{name}", str(megabytes)]
    )


def cases(quick: bool) -> Sequence[Case]:
    """Tokenizing on one core and two, packing, seeking, memory, stalls."""
    corpus, small = "{work}/corpus.jsonl", _corpus("corpus.jsonl", 12 if quick else MEGABYTES)
    made = [small, Side("its tokenizer", [*PROGRAM, "pack", corpus, "--cores", "2"])]

    def sides(cores: int) -> list[Side]:
        names = {"ours": "ours", "encode_batch": "batch", "encode_batch_fast": "fast"}
        return [Side(name, [*PROGRAM, part, corpus, "--cores", str(cores)]) for name, part in names.items()]

    large = "{work}/large.jsonl"
    return [
        Case("tokenizing, 1 core", sides(1), setup=made),
        Case("tokenizing, 2 cores", sides(2)),
        Case("packing, T = 2048", [Side("ours", [*PROGRAM, "pack", corpus, "--length", "2048"])]),
        Case("packing, T = 4096", [Side("ours", [*PROGRAM, "pack", corpus, "--length", "4096"])]),
        Case("seeking", [Side("ours", [*PROGRAM, "seek", corpus])]),
        Case(
            "memory, a large corpus",
            [Side("ours", [*PROGRAM, "ours", large, "--cores", "2"])],
            setup=[
                _corpus("large.jsonl", 24 if quick else LARGE_MEGABYTES),
                Side("its tokenizer", [*PROGRAM, "tokenizer", large, "--cores", "2"]),
            ],
        ),
        Case(
            "stalls",
            [
                Side(
                    "ours",
                    ["python", "-m", "benchmarks.programs.ours", "--ranks", "2", "--steps", "20" if quick else "80"],
                )
            ],
        ),
    ]


def verdicts(result: Result) -> Sequence[Verdict]:
    """The aims of tokenizing, packing, seeking and stalls."""
    one, two = case_of(result, "tokenizing, 1 core"), case_of(result, "tokenizing, 2 cores")
    ratio = one["against"]["encode_batch"]["tokens_per_second"]["median"]
    fast = one["against"]["encode_batch_fast"]["tokens_per_second"]["median"]
    more = median_of(two, "ours", "tokens_per_second") / median_of(one, "ours", "tokens_per_second")
    found = [
        Verdict(
            "tokenizing at least 0.95× of `encode_batch` on one core",
            f"{ratio:.2f}× ({fast:.2f}× of `encode_batch_fast`)",
            ratio >= 0.95,
        ),
        Verdict("at least 1.7× on two cores", f"{more:.2f}×", more >= 1.7),
    ]
    for name in ("packing, T = 2048", "packing, T = 4096"):
        case = case_of(result, name)
        share, fill, split = (
            median_of(case, "ours", number) for number in ("of_tokenizing", "fill", "documents_split")
        )
        found.append(
            Verdict(
                f"{name}: at most 5% of tokenizing, fill at least 99.9%, no document of at most T tokens split",
                f"{share:.1%}, {fill:.2%}, {split:.0f} split",
                share <= 0.05 and fill >= 0.999 and split == 0,
            )
        )
    seek = median_of(case_of(result, "seeking"), "ours", "seek_ms")
    found.append(Verdict("the batch at sample 10⁹ in under 10 ms", f"{seek:.1f} ms", seek < 10))
    large = case_of(result, "memory, a large corpus")
    small_gib, gib = median_of(two, "ours", "peak_gib"), median_of(large, "ours", "peak_gib")
    found.append(
        Verdict("memory does not grow with the corpus", f"{gib:.2f} after {small_gib:.2f} GiB", gib < small_gib + 0.5)
    )
    stall = median_of(case_of(result, "stalls"), "ours", "stall")
    found.append(Verdict("data waited for at most 0.5% of the step", f"{stall:.2%}", stall <= 0.005))
    return found


QUESTION = Question(
    name="data",
    title="Data",
    asks=(
        "Tokenizing from a jsonl file to the token store, reading, splitting and writing included, against "
        "`tokenizers` alone on texts that lie in memory, 1,000 at once; a byte-level BPE of 16,384 tokens, documents "
        "of 3,000 characters in the mean. Then best-fit packing, the first batch that a resumed run asks for, the most "
        "memory that a corpus of 500 MB takes (10 GB: `python -m benchmarks.programs.corpus big.jsonl 10000`, then "
        "`python -m benchmarks.programs.data ours big.jsonl --cores 2`), and what a step waits for its data."
    ),
    cases=cases,
    columns={
        "tokens_per_second": ("tokens/s", ",.0f"),
        "tokens_per_cpu_second": ("tokens per second of CPU", ",.0f"),
        "peak_gib": ("peak memory, GiB", ".2f"),
        "of_tokenizing": ("of tokenizing", ".2%"),
        "fill": ("fill", ".3%"),
        "documents_split": ("short documents split", ".0f"),
        "seek_ms": ("batch at 10⁹, ms", ".2f"),
        "seek_10_12_ms": ("at 10¹², ms", ".2f"),
        "stall": ("waited of a step", ".3%"),
    },
    verdicts=verdicts,
    minutes=45,
)
