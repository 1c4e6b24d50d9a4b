"""The comparison with Hugging Face's Trainer."""

from collections.abc import Sequence

from benchmarks.benchmark import Benchmark, Result, Verdict, program, script, sets, tuned
from benchmarks.pairs import Case, Side

FIELDS = ("data.packing=concat", "data.mask_documents=false")
"""The usual data format with the Trainer: one stream of tokens cut into sequences, and attention across documents."""
SAME_KERNELS = (
    *("model.attention=sdpa", "kernels.blocks=eager", "kernels.loss=whole"),
    *("kernels.matmul=torch", "kernels.threads=auto"),
)
"""The Trainer's default kernels."""
MICRO_BATCH = 4
"""Sequences in llmtrain's micro-batch, instead of the recipe's 2: `tune` shows that more are faster, and with 4, less
memory is needed than by the Trainer."""
SPEED = {
    "tokens_per_second": ("tokens/s", ",.0f"),
    "step_ms": ("ms a step", ".1f"),
    "kernel_ms": ("of which products and attention", ".1f"),
    "peak_gib": ("peak memory of rank 0, GiB", ".2f"),
}
"""Columns of the table: name of a number → heading and format."""


def _fields(ranks: int, zero: int | None) -> tuple[str, ...]:
    is_ddp = zero is None and ranks > 1
    ddp = ("parallel.backend=accelerate", "parallel.accelerate=ddp") if is_ddp else ()
    return (*FIELDS, f"parallel.zero_stage={zero or 0}", *ddp)


def _trainer(name: str, folder: str, ranks: int, steps: str, *flags: str) -> Side:
    return Side(name, script(ranks, "benchmarks/programs/hf_trainer.py", folder, "--steps", steps, *flags))


def _case(name: str, ranks: int, quick: bool, zero: int | None = None) -> Case:
    """Returns a case whose sides run in turns."""
    steps = "20" if quick else "80"
    common, fields = ["--ranks", str(ranks), "--steps", steps], sets(*_fields(ranks, zero))
    larger = [*fields, *sets(f"batch.micro_batch_size={MICRO_BATCH}")]
    # Each step is logged, since the times at which steps end are needed.
    sides = [Side("llmtrain", program("ours", *common, *larger, *sets("logging.every_steps=1")))]
    setup = [tuned(larger, ranks)]
    flags = [] if zero is None else ["--zero", str(zero)]
    for number, (about, own) in enumerate((("", fields), (f", micro-batches of {MICRO_BATCH}", larger))):
        folder = f"{{work}}/{ranks}-{zero}{number}"
        setup.append(Side(f"batches{about}", program("subject", folder, *common, *own)))
        sides.append(_trainer(f"Trainer{about}", folder, ranks, steps, *flags))
    return Case(name, sides, setup)


def cases(quick: bool) -> Sequence[Case]:
    """Returns the cases: one rank and two, with and without DeepSpeed."""
    return [
        _case("1 rank", 1, quick),
        _case("2 ranks, DDP", 2, quick),
        _case("1 rank, DeepSpeed ZeRO-1", 1, quick, zero=1),
        _case("2 ranks, DeepSpeed ZeRO-1", 2, quick, zero=1),
    ]


def mixed_cases(quick: bool) -> Sequence[Case]:
    """Returns the cases in mixed precision: one rank and two. With DeepSpeed, the Trainer has no bf16 on a CPU."""
    steps, found = "20" if quick else "60", []
    for name, ranks in (("1 rank", 1), ("2 ranks, DDP", 2)):
        options = sets(*_fields(ranks, None), "parallel.precision=autocast_bf16")
        common, folder = ["--ranks", str(ranks), "--steps", steps, *options], f"{{work}}/{ranks}"
        sides = [
            Side("llmtrain", program("ours", *common)),
            _trainer("Trainer", folder, ranks, steps, "--bf16"),
            Side("llmtrain, the same kernels", program("ours", *common, *sets(*SAME_KERNELS))),
        ]
        found.append(Case(name, sides, [Side("batches", program("subject", folder, *common)), tuned(options, ranks)]))
    return found


def verdicts(result: Result) -> Sequence[Verdict]:
    """Returns the verdicts on whether llmtrain is faster by a quarter and needs less memory, for each case."""
    return [*ahead(result, "Trainer", least=1.25), *_smaller(result, "Trainer")]


def ahead(result: Result, peer: str, least: float = 1.0) -> Sequence[Verdict]:
    """Returns a verdict per case on whether the pairwise ratio of our tokens/s to the peer's exceeds `least`."""
    found = []
    for case in result["cases"]:
        ratio = case["against"][peer]["tokens_per_second"]
        found.append(
            Verdict(
                f"{case['name']}: " + (f"at least {least} × the tokens/s" if least > 1 else "ahead in tokens/s"),
                f"{ratio['median']:.3f}× ({ratio['lowest']:.3f} to {ratio['highest']:.3f})",
                ratio["median"] > least,
            )
        )
    return found


def _smaller(result: Result, peer: str) -> Sequence[Verdict]:
    return [
        Verdict(
            f"{case['name']}: less memory",
            f"{(ratio := case['against'][peer]['peak_gib']['median']):.2f}× the peak of rank 0",
            ratio < 1,
        )
        for case in result["cases"]
    ]


BENCHMARK = Benchmark(
    name="trainer",
    title="Against Hugging Face's Trainer, on a CPU",
    description=(
        "`llmtrain train recipes/tiny.py`, with the kernels that `llmtrain tune` chose before, is compared with a "
        "script that uses `transformers.Trainer` with its defaults: the same model, the same sequences (cut from one "
        "stream, with attention across documents, as usual with the Trainer), the same global batch, optimizer and "
        f"schedule. llmtrain's micro-batches have {MICRO_BATCH} sequences instead of the recipe's 2, because `tune` "
        "shows that this is faster. The Trainer with such micro-batches is shown as well. Each uses its own number of "
        "threads. All run at the same time, in turns of a second, while the others are stopped. The speed is that of "
        "the steps after the first ten. The time of the Trainer's matrix products and attention limits how much faster "
        "a program with these kernels can be."
    ),
    cases=cases,
    columns=SPEED,
    verdicts=verdicts,
    minutes=30,
    pairs=3,
    in_turns=True,
)

MIXED = Benchmark(
    name="trainer_bf16",
    title="Against Hugging Face's Trainer in mixed precision, on a CPU",
    description=(
        "The same runs as in `trainer`, with weights in fp32 and products in bf16: the Trainer's `bf16=True`, and "
        "llmtrain's `parallel.precision=autocast_bf16`. Both have the recipe's micro-batches, and whole commands "
        "alternate. llmtrain with the Trainer's kernels is shown as well. The Trainer does not offer bf16 with "
        "DeepSpeed on a CPU."
    ),
    cases=mixed_cases,
    columns=SPEED,
    verdicts=verdicts,
    minutes=12,
)
