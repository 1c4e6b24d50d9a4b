"""Benchmarks on one GPU: its MFU, and comparisons with peers."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence

from benchmarks.benchmark import Benchmark, Result, Verdict, median_of, program, sets, tuned
from benchmarks.definitions import trainer, wrapper
from benchmarks.pairs import Case, Side

LEAST_MFU = 0.55
LEAST_SPEEDUP, MOST_MEMORY = 1.5, 0.6
DATA = {
    "data.sources": json.dumps([{"name": "stdlib"}]),
    "data.tokenizer": json.dumps({"vocab_size": 32000}),
    "data.packing": "concat",
    # Attention covers the whole sequence, in accordance with the count of FLOPs.
    "data.mask_documents": "false",
}
"""Data that need no hub, unlike the recipe's own. The cost of a step does not depend on the text."""
PLAIN = {"model.attention": "sdpa", "kernels.blocks": "eager", "kernels.loss": "whole"}
RUNGS: Mapping[str, Mapping[str, str]] = {
    "as transformers has it": PLAIN,
    "loss in chunks": PLAIN | {"kernels.loss": "chunked"},
    "loss in chunks, compiled": PLAIN | {"kernels.loss": "compiled"},
    "Liger's loss": PLAIN | {"kernels.loss": "liger"},
    "Liger's layers and loss": PLAIN | {"kernels.loss": "liger", "kernels.blocks": "liger"},
    "layers and loss compiled": PLAIN | {"kernels.loss": "compiled", "kernels.blocks": "compiled"},
    "layers compiled, Liger's loss": PLAIN | {"kernels.loss": "liger", "kernels.blocks": "compiled"},
}
AUTO = "as measured (auto)"
ACCUMULATION = 4
PEAK = ("peak memory, GiB", ".2f")


def _fields(sequence: int, micro: int) -> dict[str, str]:
    return {
        **DATA,
        "data.sequence_length": str(sequence),
        "batch.micro_batch_size": str(micro),
        "batch.global_batch_size": str(ACCUMULATION * micro),
        "parallel.zero_stage": "1",
        "parallel.precision": "bf16",
        "model.attention": "auto",
        "kernels.blocks": "auto",
        "kernels.loss": "auto",
    }


def _sets(fields: Mapping[str, str]) -> list[str]:
    return sets(*(f"{field}={value}" for field, value in fields.items()))


def mfu_cases(quick: bool) -> Sequence[Case]:
    """Returns the cases: all rungs for the 1B model at T = 2048, and two for other models and lengths."""
    steps = "20" if quick else "60"
    found: list[Case] = []
    for recipe, sequence, micro in (
        ("llama_1b", 2048, 16),
        ("llama_1b", 4096, 8),
        ("llama_3b", 2048, 4),
        ("llama_3b", 4096, 2),
    ):
        path, fields = f"recipes/{recipe}.py", _fields(sequence, micro)
        rungs = {AUTO: {}, **(RUNGS if not found else {"loss in chunks": RUNGS["loss in chunks"]})}
        sides = [
            Side(name, program("ours", "--recipe", path, "--steps", steps, *_sets({**fields, **rung})))
            for name, rung in rungs.items()
        ]
        found.append(Case(f"{recipe}, T = {sequence:,}", sides, setup=[tuned(_sets(fields), recipe=path)]))
    return found


def mfu_verdicts(result: Result) -> Sequence[Verdict]:
    """Returns the verdicts on whether the MFU of the kernels that `auto` chooses is high enough, for each case."""
    found = []
    for case in result["cases"]:
        mfu = median_of(case, AUTO, "mfu")
        found.append(Verdict(f"{case['name']}: at least {LEAST_MFU:.0%}", f"{mfu:.1%}", mfu >= LEAST_MFU))
    return found


MFU = Benchmark(
    name="mfu",
    title="MFU of one GPU",
    description=(
        "`recipes/llama_1b.py` and `recipes/llama_3b.py`, bf16, ZeRO-1, with measured kernels, as a share of "
        "989 TFLOP/s (the peak of an H100 or H200). FLOPs are 6·N + 12·L·d·T per token: nothing is subtracted for "
        "causal attention, and nothing is added for recomputation. The first case shows step by step what each "
        "kernel gains. Each case runs in its own process; results are medians of the windows of ten steps after the "
        "first."
    ),
    cases=mfu_cases,
    columns={"mfu": ("MFU", ".1%"), **trainer.BENCHMARK.columns, "peak_gib": PEAK},
    verdicts=mfu_verdicts,
    minutes=25,
    pairs=1,
    needs_gpu=True,
)


def wrapper_cases(quick: bool) -> Sequence[Case]:
    """Returns the case in which our worker and a bare DeepSpeed loop alternate in one process."""
    fields = _fields(2048, 4) | PLAIN | {"kernels.loss": "whole"}
    command = program("interleaved", "--recipe", "recipes/llama_1b.py", "--ranks", "1")
    command += ["--peer", "deepspeed", "--blocks", "6" if quick else "20", *_sets(fields)]
    return [Case("DeepSpeed, ZeRO-1, 1B", [Side("ours − bare", command)])]


def wrapper_verdicts(result: Result) -> Sequence[Verdict]:
    """Returns the verdict on the additional time, as a share of the step in which it was measured."""
    (case,) = result["cases"]
    return [wrapper.verdict(case, median_of(case, case["sides"][0]["name"], "peer_ms"))]


WRAPPER = Benchmark(
    name="wrapper_gpu",
    title="What the wrapper costs on a GPU",
    description=(
        "As on a CPU, with `recipes/llama_1b.py` in bf16: the worker of llmtrain with data, metrics, guard and "
        "watcher, and a bare DeepSpeed loop with the same model, kernels, tokens and configuration, alternating in "
        "one process."
    ),
    cases=wrapper_cases,
    columns=wrapper.BENCHMARK.columns,
    verdicts=wrapper_verdicts,
    minutes=10,
    pairs=3,
    needs_gpu=True,
)


def trainer_cases(quick: bool) -> Sequence[Case]:
    """Returns the cases: the Trainer with its eager default, ours with the measured kernels."""
    steps, recipe, options = "20" if quick else "40", "recipes/llama_1b.py", _sets(_fields(2048, 8))
    common = ["--recipe", recipe, "--steps", steps, *options]
    peer = ["python", "benchmarks/programs/hf_trainer.py", "{work}/1b", "--gpu", "--bf16", "--steps", steps]
    sides = [Side("llmtrain", program("ours", *common)), Side("Trainer", peer)]
    batches = Side("batches", program("subject", "{work}/1b", *common))
    return [Case("1B, T = 2,048", sides, setup=[batches, tuned(options, recipe=recipe)])]


def trainer_verdicts(result: Result) -> Sequence[Verdict]:
    """Returns the verdicts on the aims of speed and memory."""
    against = result["cases"][0]["against"]["Trainer"]
    speed, memory = against["tokens_per_second"]["median"], against["peak_gib"]["median"]
    return [
        Verdict(f"at least {LEAST_SPEEDUP}× its tokens/s", f"{speed:.2f}×", speed >= LEAST_SPEEDUP),
        Verdict(f"at most {MOST_MEMORY}× its peak memory", f"{memory:.2f}×", memory <= MOST_MEMORY),
    ]


TRAINER = Benchmark(
    name="trainer_gpu",
    title="Against Hugging Face's Trainer on a GPU",
    description=(
        "`recipes/llama_1b.py` is compared with a script that uses `transformers.Trainer` with its defaults and "
        "`bf16=True`: the same sequences, batch, optimizer and schedule. llmtrain runs in bf16 with ZeRO-1 and the "
        "kernels that were measured for the device. Whole commands alternate; the speed is that of the steps after "
        "the first ten."
    ),
    cases=trainer_cases,
    columns={**trainer.BENCHMARK.columns, "peak_gib": PEAK},
    verdicts=trainer_verdicts,
    minutes=20,
    pairs=5,
    needs_gpu=True,
)
