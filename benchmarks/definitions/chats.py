"""Benchmarks of conversations: tokenizing them with masks, and training on them."""

from collections.abc import Sequence

from benchmarks.benchmark import Benchmark, Result, Verdict, case_of, program
from benchmarks.pairs import Case, Side

PROGRAM = program("chats")
FOLDER = "{work}/chats"


def _made(copies: int) -> list[Side]:
    return [Side("the conversations", [*PROGRAM, "write", FOLDER, "--copies", str(copies)])]


def token_cases(quick: bool) -> Sequence[Case]:
    """Returns the cases of tokenizing, on one core and on two."""
    return [
        Case(
            f"{cores} core{'s' if cores > 1 else ''}",
            [Side(name, [*PROGRAM, part, FOLDER, "--cores", str(cores)]) for name, part in SIDES.items()],
            setup=_made(1 if quick else 20) if cores == 1 else [],
        )
        for cores in (1, 2)
    ]


SIDES = {"ours": "ours", "apply_chat_template + encode_batch": "raw"}
KINDS = {"packed": (1.5, ["--packed"]), "not packed": (1.0, []), "LoRA, packed": (1.0, ["--packed", "--lora"])}
"""Kind of training → the least ratio to TRL, and the options of the program."""


def sft_cases(quick: bool) -> Sequence[Case]:
    """Returns the cases of training: packed, not packed, and with an adapter."""
    steps = ["--steps", "20" if quick else "40"]
    sides = {"llmtrain train": "train", "TRL's SFTTrainer": "trl"}
    return [
        Case(
            name,
            [Side(side, [*PROGRAM, part, FOLDER, *words, *steps]) for side, part in sides.items()],
            setup=_made(1) if name == "packed" else [],
        )
        for name, (_, words) in KINDS.items()
    ]


def token_verdicts(result: Result) -> Sequence[Verdict]:
    """Returns the verdict on the aim of tokenizing."""
    ratios = [next(iter(case["against"].values()))["tokens_per_second"]["median"] for case in result["cases"]]
    found = ", ".join(f"{ratio:.2f}× ({case['name']})" for ratio, case in zip(ratios, result["cases"], strict=True))
    return [Verdict("at least 0.9× of the raw calls on the same cores", found, min(ratios) >= 0.9)]


def sft_verdicts(result: Result) -> Sequence[Verdict]:
    """Returns the verdicts on the aims of training."""
    found = []
    for name, (aim, _) in KINDS.items():
        ratio = next(iter(case_of(result, name)["against"].values()))["trained_per_second"]["median"]
        found.append(Verdict(f"{name}: at least {aim}× of TRL", f"{ratio:.2f}×", ratio >= aim))
    return found


TOKENS = Benchmark(
    name="chat_tokens",
    title="Tokenizing conversations",
    description=(
        "Tokenizing a file of conversations to disk, including the checked loss mask, is compared with rendering rows "
        "in memory with `apply_chat_template` and tokenizing them with `encode_batch`, without files and without a "
        "mask. Both render in one thread and tokenize on all cores."
    ),
    cases=token_cases,
    columns={"tokens_per_second": ("tokens/s", ",.0f"), "peak_gib": ("peak, GiB", ".2f")},
    verdicts=token_verdicts,
    minutes=5,
)
SFT = Benchmark(
    name="sft",
    title="Fine-tuning on conversations, beside TRL",
    description=(
        "Trained tokens per second on the same conversations, model and batches in fp32 on two cores: `llmtrain train` "
        "and TRL's `SFTTrainer`, packed, one conversation per sequence, and packed with LoRA of rank 16 on all linear "
        "layers, for which TRL uses PEFT. Packed, `llmtrain` keeps conversations apart; TRL does so with flash "
        "attention only, and here lets them see each other. Three runs of each, of 40 steps, without the first 10."
    ),
    cases=sft_cases,
    columns={"trained_per_second": ("trained tokens/s", ",.0f")},
    verdicts=sft_verdicts,
    minutes=6,
    pairs=3,
)
