"""The cases, in order of importance. Does not import torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial

from benchmarks.gpu import checks, peers, steps
from benchmarks.gpu.case import Case, Numbers, Situation
from benchmarks.gpu.steps import CHATS, COMPILED, LIGER, PLAIN, PRETRAINED, TimedPlan

LORA = {"model.adapter": {"rank": 64, "alpha": 16}}
OFFLOAD = {"parallel.offload_optimizer": "cpu"}
ENGINE = ("torch", "transformers", "deepspeed", "llmtrain.engines")


def _timed(question: str, seconds: int, plan: TimedPlan) -> Case:
    return Case(question, seconds, partial(steps.measure, plan), ENGINE)


def _peer(question: str, seconds: int, measure: Callable[[Situation], Numbers], module: str) -> Case:
    return Case(question, seconds, measure, ("torch", module))


PLANS: Mapping[str, tuple[str, int, TimedPlan]] = {
    "1b compiled": ("MFU of 1B with compiled layers and loss", 26, TimedPlan(accumulation=4)),
    "1b plain": ("1B as transformers has it", 15, TimedPlan(kernels=PLAIN)),
    "1b liger": ("1B with Liger's layers and loss", 20, TimedPlan(kernels=LIGER)),
    "3b compiled": (
        "MFU of 3B on one device",
        30,
        TimedPlan("3b", micro=2, accumulation=8, fields={"parallel.activation_checkpointing": "selective"}),
    ),
    "1b zero2": ("ZeRO-2", 16, TimedPlan(fields={"parallel.zero_stage": 2})),
    "1b zero3": ("ZeRO-3", 22, TimedPlan(fields={"parallel.zero_stage": 3})),
    "1b zero3 offload": (
        "ZeRO-3, optimizer states and parameters in host memory",
        30,
        TimedPlan(fields={"parallel.zero_stage": 3, "parallel.offload_param": "cpu", **OFFLOAD}),
    ),
    "1b zero2 offload": (
        "ZeRO-2, optimizer states in host memory",
        25,
        TimedPlan(fields={"parallel.zero_stage": 2, **OFFLOAD}),
    ),
    "1b recomputed": (
        "full recomputation",
        12,
        TimedPlan(micro=16, fields={"parallel.activation_checkpointing": "full"}),
    ),
    "1b 8192 tokens": ("long sequences", 15, TimedPlan(micro=2, length=8192)),
    "1b packed": ("documents kept apart by varlen", 12, TimedPlan(documents=2)),
    "1b packed sdpa": ("documents kept apart by a mask", 15, TimedPlan(kernels=PLAIN, documents=2, micro=4)),
    "1b autocast": (
        "fp32 weights, products in bf16",
        15,
        TimedPlan(micro=4, fields={"parallel.zero_stage": 0, "parallel.precision": "autocast_bf16"}),
    ),
    "1b fp32": (
        "fp32",
        20,
        TimedPlan(kernels=PLAIN, micro=2, fields={"parallel.zero_stage": 0, "parallel.precision": "fp32"}),
    ),
    "gpt2": ("another family", 12, TimedPlan("gpt2", PLAIN, micro=16, length=1024)),
    "experts": ("a mixture of experts", 15, TimedPlan("experts", PLAIN, length=1024)),
    "8b qlora": (
        "LoRA on 8B in 4 bits",
        60,
        TimedPlan("8b", micro=1, length=4096, source=PRETRAINED, fields={"model.quantize": "nf4", **LORA}),
    ),
    "8b lora": ("LoRA on 8B", 40, TimedPlan("8b", micro=1, length=4096, source=PRETRAINED, fields=LORA)),
    "1b fp8": ("products in fp8", 30, TimedPlan(fields={"kernels.fp8": "tensorwise"})),
    "1b fsdp2": (
        "FSDP2",
        15,
        TimedPlan(
            kernels=COMPILED | {"kernels.loss": "whole"},
            micro=4,
            fields={"parallel.zero_stage": 3, "parallel.backend": "accelerate", "parallel.accelerate": "fsdp2"},
        ),
    ),
    "1b flex": (
        "FlexAttention",
        25,
        TimedPlan(kernels=COMPILED | {"model.attention": "flex_attention"}, documents=2),
    ),
}
"""Name → question, seconds and plan of the timed steps."""
FIRST = ("1b compiled", "1b plain", "1b liger")
"""Plans that are timed before the comparisons with other libraries."""

_BESIDE_TRAINER = _timed("the model and the batch of the Trainer", 16, TimedPlan())
_TRAINER = _peer("Hugging Face's Trainer: bf16, otherwise its defaults", 25, peers.trainer, "transformers.trainer")
_BESIDE_TRL = _timed("packed conversations, kept apart", 30, TimedPlan(source=CHATS))
_TRL = _peer("TRL's SFTTrainer: packed, bf16, otherwise its defaults", 58, peers.trl, "trl.trainer.sft_trainer")

CASES: Mapping[str, Case] = {
    "machine": Case("what this machine is", 8, checks.machine),
    "self-test": Case("every strategy of one GPU equals plain PyTorch in fp32; rates", 55, checks.self_test),
    "verify bf16": Case("ZeRO 1 to 3 equal plain PyTorch in bf16 with varlen and compiled kernels", 75, checks.verify),
    "resume": Case(
        "a run that is stopped and resumed equals an uninterrupted one; export and sample", 80, checks.resume
    ),
    "tests": Case("what only a GPU can show: tests/gpu", 190, checks.tests),
    "small": Case(
        "every plan below takes steps with a small model",
        150,
        partial(steps.try_all, {name: plan for name, (_, _, plan) in PLANS.items()}),
        ENGINE,
    ),
    **{name: _timed(*PLANS[name]) for name in FIRST},
    "wrapper": Case("what the worker costs beside a bare DeepSpeed loop", 80, checks.wrapper),
    **{
        f"{name} {turn}": case
        for turn in (1, 2)
        for name, case in {"beside Trainer": _BESIDE_TRAINER, "Trainer": _TRAINER}.items()
    },
    **{f"{name} {turn}": case for turn in (1, 2) for name, case in {"beside TRL": _BESIDE_TRL, "TRL": _TRL}.items()},
    **{name: _timed(*declared) for name, declared in PLANS.items() if name not in FIRST},
}
TIMED: Mapping[str, TimedPlan] = {
    **{name: plan for name, (_, _, plan) in PLANS.items()},
    **{f"beside Trainer {turn}": TimedPlan() for turn in (1, 2)},
    **{f"beside TRL {turn}": TimedPlan(source=CHATS) for turn in (1, 2)},
}
"""Name of a case → the plan whose steps it times."""
SECOND_TURN = frozenset(name for name in CASES if name.endswith(" 2"))
"""Repetitions, which show nothing with small models."""
TOGETHER: Sequence[Sequence[str]] = (("verify bf16", "resume", "small"),)
"""Cases that run at the same time, because none of their times count. tests/gpu measures the memory of the device."""
