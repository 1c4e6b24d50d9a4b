"""The comparison with a small GPT that is written out in plain PyTorch."""

from collections.abc import Sequence

from benchmarks.benchmark import Benchmark, Result, Verdict, program, sets, tuned
from benchmarks.definitions.trainer import SAME_KERNELS, SPEED, ahead
from benchmarks.pairs import Case, Side

FIELDS = (
    "model.architecture=gpt2",
    'model.config={"n_layer": 4, "n_head": 4, "n_embd": 128, "n_positions": 64, "resid_pdrop": 0.0, "embd_pdrop": 0.0, '
    '"attn_pdrop": 0.0}',
    *("data.tokenizer.vocab_size=300", "data.sequence_length=64", "data.packing=concat", "data.mask_documents=false"),
    *("batch.global_batch_size=12", "batch.micro_batch_size=12"),
)
"""The sizes of nanoGPT's example for CPUs, with bytes instead of characters."""
FOLDER = "{work}/gpt"
LOOP = "a GPT in plain PyTorch"


def cases(quick: bool) -> Sequence[Case]:
    """Returns the case, on one rank."""
    steps = ["--steps", "40" if quick else "400"]
    options = sets(*FIELDS)
    ours = program("ours", *steps, *options)
    return [
        Case(
            "1 rank",
            [
                Side("llmtrain", ours),
                Side(LOOP, program("gpt_loop", FOLDER, *steps)),
                Side("llmtrain, the kernels of transformers", [*ours, *sets(*SAME_KERNELS)]),
            ],
            setup=[Side("batches", program("subject", FOLDER, *steps, *options)), tuned(options)],
        )
    ]


def verdicts(result: Result) -> Sequence[Verdict]:
    """Returns the verdicts on whether llmtrain is faster."""
    return ahead(result, LOOP)


BENCHMARK = Benchmark(
    name="gpt",
    title="Against a small GPT in plain PyTorch, on a CPU",
    description=(
        "GPT-2 as `transformers` has it, with the kernels that `llmtrain tune` chose before, is compared with a GPT "
        "and a loop that are written out as in nanoGPT (`benchmarks/programs/gpt_loop.py`): 4 layers, a width of 128, "
        "12 sequences of 64 tokens a step, the same sequences and optimizer, in fp32. A step takes a few tens of "
        "milliseconds, so each operation and the overhead of the loop matter."
    ),
    cases=cases,
    columns=SPEED,
    verdicts=verdicts,
    minutes=6,
)
