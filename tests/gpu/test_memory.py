"""The memory of a real GPU: what torch can use, what a plan takes, and the error if there is too little."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from llmtrain.errors import Exit
from llmtrain.plan.predict import memory_of
from llmtrain.plan.predict.memory import CONTEXT
from llmtrain.recipe.cluster import DEVICES, GIB, device_of
from tests.cuda_on_host.test_memory import CLOSE, FULL, MODEL, assert_close, batch_of, zero
from tests.gpu.conftest import EMULATED, faults_of
from tests.gpu.worker import GPU, engine_of, plan_of
from tests.helpers.batches import tiny_recipe
from tests.helpers.commands import llmtrain

LARGE = {
    "model.config.hidden_size": 1024,
    "model.config.intermediate_size": 2816,
    "model.config.num_hidden_layers": 12,
    "model.config.num_attention_heads": 8,
}
"""More than 2 GiB, of which the blocks of 512 bytes and the workspaces of attention are below 1%."""
VARLEN = {} if EMULATED else {"model.attention": "varlen"}
"""What stands for its kernel on the emulated device allocates all scores."""
PLANS: dict[str, dict[str, Any]] = {
    "ZeRO-0": zero(0),
    "ZeRO-1, bf16": zero(1, "bf16"),
    "ZeRO-2, bf16, varlen, recomputed": zero(2, "bf16", **FULL, **VARLEN),
    "ZeRO-3, bf16": zero(3, "bf16"),
    "FSDP2, bf16": {
        "parallel.backend": "accelerate",
        "parallel.accelerate": "fsdp2",
        **zero(3, "bf16"),
    },
}


def recipe_of(name: str) -> Any:
    return tiny_recipe(**MODEL | ({} if EMULATED else LARGE) | {"model.attention": "sdpa"} | PLANS[name])


def _peak(name: str) -> int:
    """Bytes of three steps, without the workspaces that cuBLAS keeps: one for this thread, and one for autograd's."""
    for dtype in (torch.float32, torch.bfloat16):
        square = torch.ones(256, 256, dtype=dtype, device=GPU, requires_grad=True)
        (square @ square).sum().backward()
    del square
    before = torch.cuda.memory_allocated()  # with what earlier engines of DeepSpeed leave behind in autograd's hooks
    torch.cuda.reset_peak_memory_stats()
    plan, (engine, _) = plan_of(recipe_of(name)), engine_of(recipe_of(name))
    for step in range(3):
        engine.train_step(batch_of(plan, step, 0))
    return torch.cuda.max_memory_allocated() - before


@pytest.mark.parametrize("name", PLANS)
def test_peaks_are_predicted(gpu, name):
    memory = memory_of(plan_of(recipe_of(name)))
    assert memory
    assert_close(gpu(_peak, name), memory.stages[0], CLOSE)


def _whole() -> tuple[str, int, int]:
    """The GPU's name, what torch can use of it, and what is in use besides torch's allocator."""
    torch.ones(64, 64, device=GPU) @ torch.ones(64, 64, device=GPU)
    free, total = torch.cuda.mem_get_info()
    properties = torch.cuda.get_device_properties(0)
    assert total == properties.total_memory
    return properties.name, total, total - free - torch.cuda.memory_reserved()


def test_the_catalogue_has_what_torch_can_use(fresh_gpu):
    """No other process may use the GPU."""
    name, total, others = fresh_gpu(_whole)
    assert others <= CONTEXT
    known = DEVICES[device_of(name)].memory_bytes
    if known is None or (device_of(name) == "a100" and total < 60 * GIB):
        pytest.skip(f"the catalogue of devices does not have this CUDA GPU, {name}")
    assert 0.98 * total < known <= total


_held: list[torch.Tensor] = []


def _leave(free: int) -> None:
    """Takes all memory but `free` bytes, as another process on the GPU might."""
    torch.cuda.empty_cache()
    _held.append(torch.empty(torch.cuda.mem_get_info()[0] - free, dtype=torch.uint8, device=GPU))


def _release() -> None:
    _held.clear()


def test_too_little_memory_is_an_error_of_the_worker(gpu, gpu_environment, small_recipe, tmp_path):
    """One tensor of the feed-forward layer does not fit: 1 GiB, or 4."""
    samples, free = (64, GIB // 2) if EMULATED else (256, 3 * GIB)
    settings = {
        "model.config.num_hidden_layers": 1,
        "model.config.intermediate_size": 2**16,
        "batch.global_batch_size": samples,
        "batch.micro_batch_size": samples,
        "kernels.loss": "whole",
        "kernels.blocks": "eager",
        "model.attention": "sdpa",
        "parallel.precision": "fp32",
    }
    options = [part for name, value in settings.items() for part in ("--set", f"{name}={value}")]
    if not EMULATED:
        gpu(_leave, free)
    given = gpu_environment(faults_of(free))
    done = llmtrain("train", small_recipe, "--nproc", 1, *options, "--run-dir", tmp_path / "run", **given)
    gpu(_release)
    assert done.returncode == Exit.WORKER, done.stderr + done.stdout
    assert "OutOfMemoryError" in done.stderr
    assert "out of memory" in done.stderr
    assert "rank_0.log" in done.stderr
