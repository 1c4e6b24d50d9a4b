"""Benchmarks of data preparation, and of the time that training waits for data."""

from collections.abc import Sequence

from benchmarks.benchmark import Benchmark, Result, Verdict, case_of, median_of, program
from benchmarks.pairs import Case, Side

MEGABYTES, LARGE_MEGABYTES, WHOLE_MEGABYTES = 40, 1_000, 10_000
SHORT_MEGABYTES = 24
PROGRAM = program("data")
SEEK = program("seek")
SOUGHT = {
    "sample 10⁹, in the page cache": [],
    "sample 10⁹, on the disk": ["--cold"],
    "batch at 10⁹, in the page cache": ["--batch"],
    "batch at 10⁹, on the disk": ["--batch", "--cold"],
}
GROWING = "a growing corpus"
SPEED = ("tokens/s", ",.0f")
GROWTH = {
    "hundredth_gib": ("peak after a hundredth, GiB", ".2f"),
    "tenth_gib": ("a tenth", ".2f"),
    "third_gib": ("a third", ".2f"),
    "packed_gib": ("all, packed", ".2f"),
    "mib_per_gb": ("MiB per GB", ".1f"),
    "gigabytes": ("GB of text", ".2f"),
}
MOST_MORE = 1.1
"""Largest ratio of the memory peak at the end to the peak after a third of the corpus. It exceeds 1 because long
documents may come together by chance. If memory grew with the corpus, the ratio would be 3."""


def _corpus(name: str, megabytes: int) -> Side:
    return Side(f"{megabytes} MB of text", program("corpus", f"{{work}}/{name}", str(megabytes)))


def _growth(megabytes: int) -> Case:
    """Returns a case that tokenizes and packs a corpus of this size once."""
    large = "{work}/large.jsonl"
    return Case(
        GROWING,
        [Side("ours", program("growth", large, "--cores", "2"))],
        setup=[
            _corpus("large.jsonl", megabytes),
            Side("its tokenizer", [*PROGRAM, "tokenizer", large, "--cores", "2"]),
        ],
    )


def _seeking() -> list[Case]:
    """Returns the cases of seeking. Each is the first call in a new process."""
    folder = "{work}/sparse"
    made = [Side("an index of 10⁹ sequences", [*SEEK, "make", folder])]
    return [
        Case(name, [Side("ours", [*SEEK, "read", folder, *words])], setup=[] if number else made)
        for number, (name, words) in enumerate(SOUGHT.items())
    ]


def cases(quick: bool) -> Sequence[Case]:
    """Returns the cases: tokenizing on one core and on two, packing, seeking, memory and stalls."""
    corpus, small = "{work}/corpus.jsonl", _corpus("corpus.jsonl", 12 if quick else MEGABYTES)
    made = [small, Side("its tokenizer", [*PROGRAM, "pack", corpus, "--cores", "2"])]

    def sides(cores: int) -> list[Side]:
        names = {"ours": "ours", "encode_batch": "batch", "encode_batch_fast": "fast"}
        return [Side(name, [*PROGRAM, part, corpus, "--cores", str(cores)]) for name, part in names.items()]

    return [
        Case("tokenizing, 1 core", sides(1), setup=made),
        Case("tokenizing, 2 cores", sides(2)),
        Case("packing, T = 2048", [Side("ours", [*PROGRAM, "pack", corpus, "--length", "2048"])]),
        Case("packing, T = 4096", [Side("ours", [*PROGRAM, "pack", corpus, "--length", "4096"])]),
        *_seeking(),
        Case("far epochs of a small corpus", [Side("ours", [*PROGRAM, "seek", corpus])]),
        _growth(SHORT_MEGABYTES if quick else LARGE_MEGABYTES),
        Case("stalls", [Side("ours", program("ours", "--ranks", "2", "--steps", "20" if quick else "80"))]),
    ]


def verdicts(result: Result) -> Sequence[Verdict]:
    """Returns the verdicts on the aims of tokenizing, packing, seeking, memory and stalls."""
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
        numbers = ("of_tokenizing", "fill", "fill_possible", "documents_split")
        share, fill, possible, split = (median_of(case, "ours", number) for number in numbers)
        found.append(
            Verdict(
                f"{name}: at most 5% of tokenizing, fill at least 99.9%, no document of at most T tokens split",
                f"{share:.1%}, {fill:.2%} ({possible:.2%} is possible), {split:.0f} split",
                share <= 0.05 and fill >= 0.999 and split == 0,
            )
        )
    found += [_sought(result, name) for name in SOUGHT]
    found.append(_bounded(case_of(result, GROWING)))
    stall = median_of(case_of(result, "stalls"), "ours", "stall")
    found.append(Verdict("data waited for at most 0.5% of the step", f"{stall:.2%}", stall <= 0.005))
    return found


def _sought(result: Result, name: str) -> Verdict:
    case = case_of(result, name)
    taken, read = median_of(case, "ours", "seek_ms"), median_of(case, "ours", "read_kib")
    return Verdict(f"{name}: in under 10 ms", f"{taken:.1f} ms, {read:,.0f} KiB read", taken < 10)


def _bounded(case: Result) -> Verdict:
    """Returns the verdict on whether the memory peak hardly grows after a third of a corpus."""
    names = ("tenth_gib", "third_gib", "peak_gib", "packed_gib")
    tenth, third, peak, packed = (median_of(case, "ours", name) for name in names)
    slope, gigabytes = median_of(case, "ours", "mib_per_gb"), median_of(case, "ours", "gigabytes")
    return Verdict(
        f"{gigabytes:.3g} GB of text in bounded memory: at most {MOST_MORE - 1:.0%} more at the end than after a third",
        f"{tenth:.2f}, {third:.2f}, {peak:.2f} GiB after a tenth, a third, all, which is {peak / third - 1:+.1%} or "
        f"{slope:+.1f} MiB per GB; {packed:.2f} GiB with packing",
        peak <= MOST_MORE * third,
    )


BENCHMARK = Benchmark(
    name="data",
    title="Data",
    description=(
        "Five measurements. *Tokenizing*, from a jsonl file to the token store, including reading, splitting and "
        "writing: it is compared with `tokenizers` alone on texts in memory, 1,000 at once. The tokenizer is a "
        "byte-level BPE of 16,384 tokens, and documents have 3,000 characters on average. *Packing*: best-fit. *The "
        "first call* of a new process, which has already imported its packages and opened a corpus of 2³⁰ sequences, "
        "until it has its tensors: those of one sample, or those of the 8 rows of a rank in a global batch of 512, "
        "including the number of targets of the whole batch. The pages of the corpus are in the page cache, or were "
        "removed from it and are read from the disk. (Only these sequences are written; the rest of the 4.4 TB is a "
        "sparse file.) *The peak memory* of tokenizing as a corpus grows (10 GB: `python -m benchmarks corpus`). *The "
        "time* that a step waits for its data."
    ),
    cases=cases,
    columns={
        "tokens_per_second": SPEED,
        "tokens_per_cpu_second": ("tokens per second of CPU", ",.0f"),
        "peak_gib": ("peak memory, GiB", ".2f"),
        "of_tokenizing": ("time, relative to tokenizing", ".2%"),
        "fill": ("fill", ".3%"),
        "fill_possible": ("highest possible fill", ".3%"),
        "documents_split": ("short documents split", ".0f"),
        "seek_ms": ("first call, ms", ".2f"),
        "seek_cpu_ms": ("CPU time of the call, ms", ".2f"),
        "read_kib": ("read from the disk, KiB", ",.0f"),
        "seek_10_12_ms": ("then a call at 10¹², ms", ".2f"),
        **GROWTH,
        "stall": ("waiting, relative to a step", ".3%"),
    },
    verdicts=verdicts,
    minutes=45,
)

WHOLE = Benchmark(
    name="corpus",
    title="A corpus of 10 GB",
    description=(
        "The peak memory of one process that tokenizes a corpus of 10 GB on two cores and packs it, recorded during "
        "one run; this takes 16 GB in the folder for temporary files. Training the tokenizer, on at most 64 MB of "
        "the text, is not included."
    ),
    cases=lambda quick: [_growth(SHORT_MEGABYTES if quick else WHOLE_MEGABYTES)],
    columns={
        "tokens_per_second": SPEED,
        "peak_gib": ("peak memory, GiB", ".2f"),
        **GROWTH,
    },
    verdicts=lambda result: [_bounded(case_of(result, GROWING))],
    minutes=50,
    pairs=1,
)
