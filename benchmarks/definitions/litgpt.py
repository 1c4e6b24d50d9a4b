"""The comparison with litgpt."""

from collections.abc import Sequence

from benchmarks.benchmark import Benchmark, Result, Verdict, program, sets, tuned
from benchmarks.definitions.trainer import FIELDS, SPEED, ahead
from benchmarks.pairs import Case, Side

VERSION = "0.5.13"
FOLDER = "{work}/subject"
ENVIRONMENT = "{work}/litgpt"
PACKAGES = (f"litgpt=={VERSION}", "requests")  # litgpt imports `requests` without requiring it


def cases(quick: bool) -> Sequence[Case]:
    """Returns the case, on one rank. With several ranks, litgpt uses FSDP, which needs GPUs."""
    common = ["--ranks", "1", "--steps", "20" if quick else "60", *sets(*FIELDS)]
    return [
        Case(
            "1 rank",
            [
                Side("llmtrain", program("ours", *common)),
                Side(
                    "litgpt",
                    [f"{ENVIRONMENT}/bin/python", "benchmarks/programs/litgpt_pretrain.py", FOLDER, *common[2:4]],
                ),
            ],
            setup=[
                Side("environment", program("other_environment", ENVIRONMENT, *PACKAGES)),
                Side("batches", program("subject", FOLDER, *common)),
                tuned(sets(*FIELDS)),
            ],
        )
    ]


def verdicts(result: Result) -> Sequence[Verdict]:
    """Returns the verdicts on whether llmtrain is faster."""
    return ahead(result, "litgpt")


BENCHMARK = Benchmark(
    name="litgpt",
    title="Against litgpt, on a CPU",
    description=(
        "`llmtrain train recipes/tiny.py`, with the kernels that `llmtrain tune` chose before, is compared with "
        f"`litgpt pretrain` of litgpt {VERSION}, which compiles its model as a whole: a Llama of the same sizes with "
        "its own weights, the same sequences, batch and optimizer, in fp32. With several ranks, litgpt uses FSDP, "
        "which it supports on GPUs only. torchtitan is not compared here: it trains on GPUs."
    ),
    cases=cases,
    columns=SPEED,
    verdicts=verdicts,
    minutes=6,
)
