"""Benchmarks on a CPU: the gains of kernels, memory allocators and matrix products."""

from __future__ import annotations

import platform
from collections.abc import Sequence
from pathlib import Path

from benchmarks.benchmark import Benchmark, Result, Verdict, median_of, program, sets
from benchmarks.pairs import Case, Side

BASE = "as transformers has it"
NAMED = (
    *("model.attention=sdpa", "kernels.blocks=eager", "kernels.loss=whole"),
    *("kernels.matmul=torch", "kernels.threads=2"),
)
BF16 = ("parallel.precision=bf16", "parallel.zero_stage=1")
"""A pass is the same at every ZeRO stage. Stage 1 is used because stage 0 refuses bf16."""
ONEDNN, TORCH = "oneDNN", "PyTorch's choice"
KEPT = "as a rank has it"
GIVEN_BACK = "freed memory given back"
OWN_SETTING = {"GLIBC_TUNABLES": "glibc.malloc.check=0"}
"""A setting without effect of its own. llmtrain does not configure glibc if the user has set a tunable."""
WHOLE = ("data.packing=concat", "data.mask_documents=false")
BOUNDS = "varlen / sdpa"
LARGE = ("model.config.vocab_size=32000", "batch.micro_batch_size=8")
"""Fields with which the logits (8 × 256 tokens in fp32) take 250 MiB."""
TCMALLOC = [
    f"{folder}/libtcmalloc_minimal.so.4" for folder in (f"/usr/lib/{platform.machine()}-linux-gnu", "/usr/lib64")
]


def _side(name: str, *options: str, env: dict[str, str] | None = None) -> Side:
    """Returns a side with these recipe fields and program options (`--...`); other fields are as in `transformers`."""
    fields = [one for one in options if not one.startswith("--")]
    fields += [one for one in NAMED if one.partition("=")[0] not in {field.partition("=")[0] for field in fields}]
    flags = [one for one in options if one.startswith("--")]
    return Side(name, program("passes", *flags, *sets(*fields)), env or {})


def cases(quick: bool) -> Sequence[Case]:
    """Returns the cases in fp32 and in bf16, each compared with the defaults of `transformers`."""
    compiled = ("kernels.blocks=compiled", "kernels.loss=compiled")
    return [
        Case(
            "fp32",
            [
                _side("layers and loss compiled", *compiled),
                _side(BASE),
                _side("layers compiled", "kernels.blocks=compiled"),
                _side("loss in chunks", "kernels.loss=chunked"),
                _side("loss in chunks, compiled", "kernels.loss=compiled"),
                _side("eager attention", "model.attention=eager"),
                _side("varlen attention", "model.attention=varlen"),
                _side("1 thread", "kernels.threads=1"),
                _side("oneDNN's matrix products", "kernels.matmul=onednn"),
                _side("matrices column by column", "--transposed"),
            ],
        ),
        Case(
            "bf16",
            [
                _side("layers and loss compiled", *compiled, *BF16),
                _side(BASE, *BF16),
                _side("fp32", "parallel.precision=fp32"),
                _side("autocast_bf16", "parallel.precision=autocast_bf16"),
                _side("eager attention", "model.attention=eager", *BF16),
                _side("varlen attention", "model.attention=varlen", *BF16),
            ],
        ),
    ]


def verdicts(result: Result) -> Sequence[Verdict]:
    """Returns the verdicts on whether compiling is faster. No aim was set for how much."""
    return [_faster(case, BASE, "compiled is faster than the defaults of transformers") for case in result["cases"]]


def _faster(case: Result, other: str, aim: str) -> Verdict:
    ratio = case["against"][other]["pass_ms"]
    told = f"{ratio['median']:.2f}× its time ({ratio['lowest']:.2f} to {ratio['highest']:.2f})"
    return Verdict(f"{case['name']}: {aim}", told, ratio["median"] < 1)


def _memory(*fields: str) -> list[Side]:
    """Returns one side per allocator: glibc as configured by llmtrain, glibc's default, and tcmalloc if installed."""
    found = [_side(KEPT, *fields), _side(GIVEN_BACK, *fields, env=OWN_SETTING)]
    if library := next((path for path in TCMALLOC if Path(path).exists()), None):
        found.append(_side("tcmalloc, preloaded", *fields, env={"LD_PRELOAD": library}))
    return found


def host_cases(quick: bool) -> Sequence[Case]:
    """Returns the cases: memory allocation for small and for large tensors, and how threads wait."""
    more = [
        _side("huge pages", env={"THP_MEM_ALLOC_ENABLE": "1"}),
        _side("threads that do not spin", env={"OMP_WAIT_POLICY": "passive"}),
    ]
    return [Case("logits of 8 MiB", [*_memory(), *more]), Case("logits of 250 MiB", _memory(*LARGE))]


def host_verdicts(result: Result) -> Sequence[Verdict]:
    """Returns the verdicts on whether keeping freed memory is faster. No aim was set for how much."""
    return [
        _faster(case, GIVEN_BACK, "keeping freed memory is faster than glibc's default") for case in result["cases"]
    ]


COLUMNS = {
    "pass_ms": ("ms a pass", ".1f"),
    "page_faults": ("page faults a pass", ",.0f"),
    "peak_gib": ("peak memory, GiB", ".2f"),
}
BENCHMARK = Benchmark(
    name="cpu",
    title="The gain of each choice on a CPU",
    description=(
        "Forward and backward pass of a micro-batch of `recipes/tiny.py` through two layers and the head, with "
        "packed documents masked, on two threads unless stated otherwise: with the defaults of `transformers` (sdpa "
        "with a mask, logits of all tokens), and with one change at a time. `auto` measures the kernels among these "
        "changes and chooses the fastest; the recipe decides the precision."
    ),
    cases=cases,
    columns=COLUMNS,
    verdicts=verdicts,
    minutes=28,
)
HOST = Benchmark(
    name="host",
    title="How a rank on a CPU gets its memory",
    description=(
        "The same passes, with glibc configured as in a rank whose host has room, and with glibc's default. By "
        "default glibc returns the pages of a large tensor to the system, which clears new ones for the next tensor. "
        "tcmalloc is included where it is installed. In the second case the vocabulary has 32,000 tokens and a "
        "micro-batch has 8 sequences."
    ),
    cases=host_cases,
    columns=COLUMNS,
    verdicts=host_verdicts,
    minutes=10,
)


def product_cases(quick: bool) -> Sequence[Case]:
    """Returns the cases: a layer of nanoGPT's size, and two larger ones."""
    found = []
    for tokens, inputs, outputs in ((768, 128, 512), (2048, 384, 1024), (2048, 1024, 4096)):
        sizes = f"--tokens {tokens} --inputs {inputs} --outputs {outputs}".split()
        sides = [
            Side(name, program("products", "--matmul", matmul, *sizes))
            for name, matmul in ((ONEDNN, "onednn"), (TORCH, "torch"))
        ]
        found.append(Case(f"{tokens:,} tokens, {inputs:,} → {outputs:,}", sides))
    return found


def product_verdicts(result: Result) -> Sequence[Verdict]:
    """Returns the verdicts on whether oneDNN is faster where `auto` chooses it. No aim was set for how much."""
    return [
        Verdict(
            f"{case['name']}: oneDNN is faster",
            f"{(ratio := case['against'][TORCH]['forward']['median']):.2f}× the operations a second",
            ratio > 1,
        )
        for case in result["cases"]
    ]


def attention_cases(quick: bool) -> Sequence[Case]:
    """Returns cases of different lengths, of a document per sequence and of packed documents."""
    found = []
    for name, fields in (("one document", WHOLE), ("packed documents", ())):
        for length, sequences in ((256, 4), (1024, 2), (4096, 1)):
            sizes = (f"data.sequence_length={length}", f"model.config.max_position_embeddings={length}")
            rows = (f"batch.micro_batch_size={sequences}", f"batch.global_batch_size={sequences}")
            words = ["--turns", "3" if quick else "20", *sets(*sizes, *rows, *fields)]
            found.append(Case(f"{length:,} tokens, {name}", [Side(BOUNDS, program("attention", *words))]))
    return found


def attention_verdicts(result: Result) -> Sequence[Verdict]:
    """Returns the verdicts on whether `varlen` is faster."""
    ratios = {case["name"]: median_of(case, BOUNDS, "ratio") for case in result["cases"]}
    return [Verdict(f"{name}: `varlen` is faster", f"{ratio:.3f} ×", ratio < 1) for name, ratio in ratios.items()]


ATTENTION = Benchmark(
    name="attention",
    title="Attention by document boundaries, on a CPU",
    description=(
        "Forward and backward passes of two compiled layers and the head of `recipes/tiny.py` in fp32, on two threads, "
        "with `varlen` (llmtrain's kernel in C++) and with `sdpa` (PyTorch's kernel). Both alternate in one process. "
        "Sequences consist of one document each, or of packed documents, which PyTorch's kernel separates by a mask."
    ),
    cases=attention_cases,
    columns={"pass_ms": ("ms a pass", ".1f"), "ratio": ("× a pass with `sdpa`", ".3f")},
    verdicts=attention_verdicts,
    minutes=8,
    pairs=3,
)

PRODUCTS = Benchmark(
    name="products",
    title="Matrix products on a CPU, by oneDNN and by MKL",
    description=(
        "The three products of a linear layer in fp32: its result, the gradient of its inputs and the gradient of its "
        "weight, by `kernels.matmul=onednn` and by `kernels.matmul=torch`. MKL uses AVX-512 on Intel's processors "
        "only, so the result depends on the processor."
    ),
    cases=product_cases,
    columns={
        "forward": ("result, GFLOP/s", ".0f"),
        "of_inputs": ("gradient of inputs, GFLOP/s", ".0f"),
        "of_weight": ("gradient of weight, GFLOP/s", ".0f"),
    },
    verdicts=product_verdicts,
    minutes=5,
)
