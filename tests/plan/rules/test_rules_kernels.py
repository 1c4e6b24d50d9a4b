"""Kernels of other libraries: plans that refuse them, their memory, and the printed lines."""

from __future__ import annotations

import pytest

from llmtrain.errors import RecipeError
from llmtrain.plan import installed
from llmtrain.plan.described import kernel_lines
from llmtrain.plan.kernels import chunks_loss, liger_chunk
from llmtrain.plan.predict import memory_of
from llmtrain.plan.rules import resolve
from llmtrain.recipe import ModelConfig
from llmtrain.recipe.cluster import Cluster
from llmtrain.trials.dry_run import shrink
from tests.helpers.small_plan import small_plan

LIGER = {"kernels.blocks": "liger", "kernels.loss": "liger"}
BF16 = {"parallel.precision": "bf16", "parallel.zero_stage": 1}
FP8 = {"kernels.fp8": "tensorwise", **BF16}
EXPERTS = {"model.architecture": "mixtral", "model.config.num_local_experts": 4}
ZERO_3 = {"parallel.zero_stage": 3}
FSDP = {"parallel.backend": "accelerate", "parallel.accelerate": "fsdp2", "parallel.zero_stage": 3}


def _found(device: str, **fields: object) -> dict[str, str]:
    """What is refused, all of it about kernels: rule, field and fix."""
    try:
        resolve(small_plan().recipe.with_(**fields), Cluster(devices_per_node=2, device=device))
    except RecipeError as error:
        return {f"{problem.rule} {problem.field}": problem.fix for problem in error.problems}
    return {}


@pytest.mark.parametrize(
    ("device", "fields", "expected"),
    [
        ("cpu", {"kernels.matmul": "onednn"}, {}),
        ("cpu", {"kernels.matmul": "torch", **BF16}, {}),
        ("cpu", {"kernels.matmul": "onednn", **BF16}, {"kernels.matmul kernels.matmul": "--set kernels.matmul=auto"}),
        ("h100", {"kernels.matmul": "onednn"}, {"kernels.matmul kernels.matmul": "--set kernels.matmul=auto"}),
        ("h100", LIGER, {}),
        ("gpu", LIGER | BF16, {}),
        ("h100", LIGER | {"parallel.pipeline": 2, "parallel.zero_stage": 1}, {}),
        ("h100", LIGER | {"parallel.sequence": 2}, {}),
        ("h100", {"kernels.blocks": "liger", **ZERO_3}, {}),
        ("h100", {"kernels.blocks": "liger", "parallel.tensor": 2}, {}),
        ("h100", {"kernels.blocks": "liger", **FSDP}, {}),
        (
            "cpu",
            LIGER,
            {
                "kernels.liger_device kernels.blocks": "--set kernels.blocks=eager",
                "kernels.liger_device kernels.loss": "--set kernels.loss=chunked",
            },
        ),
        ("h100", LIGER | ZERO_3, {"kernels.liger_loss kernels.loss": "--set kernels.loss=chunked"}),
        ("h100", LIGER | {"parallel.tensor": 2}, {"kernels.liger_loss kernels.loss": "--set kernels.loss=chunked"}),
        (
            "h100",
            LIGER | {"parallel.precision": "fp16", "parallel.zero_stage": 1},
            {"kernels.liger_loss kernels.loss": "--set kernels.loss=chunked"},
        ),
        ("h100", LIGER | FSDP, {"kernels.loss kernels.loss": "--set kernels.loss=whole"}),
        (
            "h100",
            LIGER | {"parallel.backend": "data_parallel"},
            {
                "kernels.liger_blocks kernels.blocks": "--set kernels.blocks=eager",
                "kernels.loss kernels.loss": "--set kernels.loss=whole",
            },
        ),
    ],
)
def test_liger_kernels_are_refused(device, fields, expected):
    assert _found(device, **fields) == expected


@pytest.mark.parametrize(
    ("device", "fields"),
    [
        ("h100", {}),
        ("gpu", {"kernels.fp8": "rowwise"}),
        ("b200", {"parallel.pipeline": 2}),
        ("h200", {"parallel.sequence": 2}),
        ("h100", {"parallel.zero_stage": 2}),
        ("h100", LIGER),
    ],
)
def test_fp8_is_allowed(device, fields):
    assert _found(device, **FP8 | fields) == {}


@pytest.mark.parametrize(
    ("device", "fields", "why"),
    [
        ("cpu", {}, "CPUs do not multiply in fp8"),
        ("a100", {}, "compute capability 8.9"),
        ("mi300x", {}, "NVIDIA"),
        ("h100", {"parallel.precision": "fp32"}, "the weights must be in bf16, but parallel.precision is 'fp32'"),
        ("h100", {"parallel.precision": "autocast_bf16"}, "parallel.precision is 'autocast_bf16'"),
        ("h100", ZERO_3, "the weights that ZeRO-3 gathers"),
        ("h100", {"parallel.tensor": 2}, "tensor parallelism replaces"),
        ("h100", FSDP, "fsdp2 wraps weights in its own way, which has not been compared; the weights that ZeRO-3"),
        ("h100", EXPERTS, "it would convert the routers"),
        ("h100", {"batch.micro_batch_size": 1, "data.sequence_length": 120}, "the 120 tokens of a micro-batch"),
    ],
)
def test_fp8_is_refused(device, fields, why):
    recipe = small_plan().recipe.with_(**FP8 | fields)
    with pytest.raises(RecipeError) as caught:
        resolve(recipe, Cluster(devices_per_node=2, device=device))
    (problem,) = caught.value.problems
    assert (problem.rule, problem.field, problem.fix) == ("kernels.fp8", "kernels.fp8", "--set kernels.fp8=off")
    assert why in problem.message


@pytest.mark.parametrize(
    ("tokens", "width", "vocabulary", "chunk"),
    [
        (8192, 4096, 128_256, 256),  # 32 times the width: 256 tokens each
        (8192, 4096, 32_000, 1024),
        (8000, 4096, 32_000, 1024),  # the next power of two
        (100, 64, 50, 100),  # the logits are no larger than the hidden states
        (3, 64, 128_000, 1),
    ],
)
def test_the_number_of_tokens_in_a_chunk_of_liger_is_known(tokens, width, vocabulary, chunk):
    assert liger_chunk(tokens, width, vocabulary) == chunk


def test_predicted_chunks_equal_those_of_liger():
    """As its own code has them (`ops/fused_linear_cross_entropy.py`), where it is installed."""
    triton = pytest.importorskip("triton", reason="needs triton: pip install -e '.[liger]'")
    for tokens, width, vocabulary in ((8192, 4096, 128_256), (16_384, 2048, 50_257), (37, 64, 256), (1, 8, 3)):
        factor = triton.cdiv(vocabulary, width)
        theirs = min(triton.next_power_of_2(triton.cdiv(tokens, factor)), tokens)
        assert liger_chunk(tokens, width, vocabulary) == theirs


def _on_gpu(**fields: object):
    return resolve(small_plan().recipe.with_(**fields), Cluster(devices_per_node=2, device="h100"))


def test_predicted_memory_includes_the_chunks_of_liger():
    large = {"model.config.vocab_size": 128_000, "batch.micro_batch_size": 4, "data.sequence_length": 1024}
    plan = _on_gpu(**large, **LIGER)
    assert chunks_loss(plan)
    tokens, width = 4096, 64
    chunk = 4  # 4,096 tokens / 2,000 widths of logits, to the next power of two
    of_head, of_hidden = 2 * 4 * 128_000 * width, 4 * width * tokens
    assert memory_of(plan).stages[-1].forward.logits == 4 * 128_000 * chunk + of_head + of_hidden


def test_printed_lines_name_the_kernels():
    assert kernel_lines(_on_gpu()) == []
    told = "kernels  Liger's norms, rotary positions and gated activations; Liger's fused loss"
    assert kernel_lines(_on_gpu(**LIGER)) == [told]
    (line,) = kernel_lines(_on_gpu(**FP8, **{"kernels.loss": "chunked"}))
    assert line == "kernels  products of the layers in fp8, tensorwise; loss in chunks of 1,024 tokens"


def test_missing_packages_are_named_before_anything_starts(monkeypatch):
    monkeypatch.setattr(installed, "find_spec", lambda name: None)
    problems = installed.missing_packages(_on_gpu(**LIGER | FP8))
    assert [(problem.rule, problem.field) for problem in problems] == [
        ("kernels.installed", "kernels.blocks"),
        ("kernels.installed", "kernels.loss"),
        ("kernels.installed", "kernels.fp8"),
    ]
    assert problems[0].message == "'liger' needs packages that are not installed: liger_kernel and triton"
    assert problems[0].fix == "pip install llmtrain[liger], or --set kernels.blocks=auto"
    assert problems[2].fix == "pip install llmtrain[fp8], or --set kernels.fp8=off"
    assert installed.missing_packages(_on_gpu()) == []


def test_a_dry_run_uses_cpu_kernels_instead():
    tiny = ModelConfig(architecture="llama", config=small_plan().recipe.model.config)
    shrunk = shrink.shrink_plan(_on_gpu(**LIGER | FP8), tiny)
    kernels = shrunk.plan.recipe.kernels
    assert (kernels.blocks, kernels.loss, kernels.fp8) == ("eager", "chunked", "off")
    told = {change.what: (change.plan, change.dry_run) for change in shrunk.changes}
    assert told["kernels"] == ("blocks liger, loss liger", "blocks eager, loss chunked")
    assert told["fp8"] == ("tensorwise", "off")
