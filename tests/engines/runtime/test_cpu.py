"""A rank on a CPU keeps the memory that it frees, and multiplies matrices in the fastest way."""

from __future__ import annotations

import ctypes
import itertools
import os
import platform
import resource
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from llmtrain.engines.runtime import cpu
from llmtrain.engines.runtime.cpu import keep_freed_memory, matmul_of, use_kernels_of_cpu
from llmtrain.errors import RecipeError
from llmtrain.overrides import onednn
from llmtrain.overrides.onednn import multiply_by_onednn
from llmtrain.plan.predict import memory_of
from tests.helpers.batches import tiny_recipe
from tests.helpers.harness import run_ranks
from tests.helpers.traces import engine_of, plan_of

FLOATS, TURNS = 2**25, 20  # 128 MiB, 32,768 pages; more than any threshold that glibc moves by itself
PAGES = FLOATS * 4 // resource.getpagesize()


def _page_faults(rank: int, setting: dict[str, str]) -> int:
    """Of filling and freeing a large tensor many times, once the rank has its engine and has done so as often before.

    Until a piece of the heap fits, some tensors have a new one: up to ten were seen.
    """
    os.environ.update(setting)
    engine_of(plan_of(tiny_recipe(), 1))
    for _ in range(2):
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        for _ in range(TURNS):
            torch.empty(FLOATS).fill_(1.0)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before


@pytest.fixture
def untold(monkeypatch) -> None:
    """A test that tells glibc fails."""
    monkeypatch.setattr(ctypes, "CDLL", lambda _: pytest.fail("glibc was told"))


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="only glibc is told")
def test_freed_memory_is_kept():
    assert run_ranks(1, _page_faults, {})[0] < PAGES
    assert run_ranks(1, _page_faults, {"MALLOC_ARENA_MAX": "8"})[0] >= TURNS * PAGES


@pytest.mark.parametrize("setting", [{"GLIBC_TUNABLES": "glibc.malloc.check=0"}, {"MALLOC_ARENA_MAX": "8"}])
def test_a_setting_of_the_user_is_kept(setting, monkeypatch, untold):
    for name, value in setting.items():
        monkeypatch.setenv(name, value)
    keep_freed_memory(plan_of(tiny_recipe(), 1))


def test_another_libc_is_not_configured(monkeypatch):
    monkeypatch.setattr(ctypes, "CDLL", lambda _: object())
    keep_freed_memory(plan_of(tiny_recipe(), 1))


@pytest.mark.parametrize(
    ("bytes_of", "granted"),
    [("memory_bytes", 2**20), ("memory_limit", 2**20)],
)
def test_freed_memory_is_returned_on_a_host_without_room(bytes_of, granted, monkeypatch, untold):
    monkeypatch.setattr(cpu, bytes_of, lambda: granted)
    keep_freed_memory(plan_of(tiny_recipe(), 1))


def test_all_ranks_of_a_host_need_room(monkeypatch):
    plan = plan_of(tiny_recipe(**{"parallel.zero_stage": 1, "parallel.offload_optimizer": "cpu"}), 2)
    memory = memory_of(plan)
    assert memory
    assert memory.stages[0].host
    needed = memory.needed + memory.stages[0].host + memory.stages[0].host_copies
    told = []
    monkeypatch.setattr(ctypes, "CDLL", lambda _: SimpleNamespace(mallopt=lambda *values: told.append(values)))
    for missing in (1, 0):
        monkeypatch.setattr(cpu, "memory_bytes", lambda: 6 * needed - missing)  # noqa: B023
        keep_freed_memory(plan)
        assert bool(told) is not bool(missing)


def test_freed_memory_is_returned_if_the_memory_of_the_plan_is_unknown(monkeypatch, untold):
    monkeypatch.setattr(cpu, "memory_of", lambda plan: None)
    keep_freed_memory(plan_of(tiny_recipe(), 1))


@pytest.fixture
def products(monkeypatch):
    """The shapes of the products that oneDNN has computed."""
    found = []
    computed = onednn._product

    def product(left: Tensor, right: Tensor, bias: Tensor | None = None) -> Tensor:
        found.append((left.shape[0], right.shape[1]))
        return computed(left, right, bias)

    monkeypatch.setattr(onednn, "_product", product)
    monkeypatch.setattr(onednn, "_is_twice_as_fast", lambda: True)
    multiply_by_onednn(True)
    yield found
    multiply_by_onednn(False)


LARGE = torch.randn(700, 900, generator=torch.Generator().manual_seed(0))
LEFT = {
    "rows of a larger matrix": LARGE[5:305, 7:207],
    "transposed": LARGE[:200, :300].t(),
    "one row, repeated": LARGE[:1, :200].expand(300, 200),
    "one column, repeated": LARGE[:300, :1].expand(300, 200),
    "not aligned": LARGE.view(-1)[3 : 3 + 300 * 200].view(300, 200),
    "every third column": LARGE[::2, ::3][:300, :200],
}
RIGHT = {
    "contiguous": LARGE[:200, :400].contiguous(),
    "contiguous, transposed": LARGE[:400, :200].contiguous().t(),
    "rows of a larger matrix": LARGE[:200, :400],
    "transposed": LARGE[:400, :200].t(),
    "one row, repeated": LARGE[:1, :400].expand(200, 400),
    "one column, repeated": LARGE[:200, :1].expand(200, 400),
    "every second column": LARGE[1:601:3, 2:802:2],
}
BIAS = {
    "none": None,
    "of columns": LARGE[0, :400],
    "one number": LARGE[0, :1].expand(400),
    "every second element": LARGE[0, :800:2],
    "one row": LARGE[:1, :400],
    "a matrix": LARGE[:300, :400],
}


@pytest.mark.parametrize("with_out", [False, True])
def test_onednn_equals_torch_for_every_layout(products, with_out):
    for left, right, bias in itertools.product(LEFT.values(), RIGHT.values(), BIAS.values()):
        expected = left.double() @ right.double() + (0 if bias is None else bias.double())
        into = {"out": torch.empty(300, 400)} if with_out else {}
        found = torch.mm(left, right, **into) if bias is None else torch.addmm(bias, left, right, **into)
        # A sum of 200 products in fp32 deviates by at most 200 × 2⁻²⁴ of the sum of their magnitudes.
        magnitude = left.abs().double() @ right.abs().double() + (0 if bias is None else bias.abs().double())
        assert ((found - expected).abs() <= 201 * 2**-24 * magnitude).all()
    # Right matrices with gaps, and biases with two dimensions, are left to torch.
    assert len(products) == len(LEFT) * 2 * 4


def test_linear_layers_and_their_gradients_use_onednn(products):
    inputs, weight, bias = torch.randn(3, 100, 200), torch.randn(400, 200), torch.randn(400)
    whole = [one.double().requires_grad_() for one in (inputs, weight, bias)]
    own = [one.requires_grad_() for one in (inputs, weight, bias)]
    functional.linear(*own).square().sum().backward()
    assert products == [(300, 400), (300, 200), (400, 200)]
    functional.linear(*whole).square().sum().backward()
    for one, other in zip(own, whole, strict=True):
        torch.testing.assert_close(one.grad.double(), other.grad, rtol=1e-4, atol=1e-4 * other.grad.abs().max().item())


def test_gradients_of_weights_use_torch_on_zen_4(products, monkeypatch):
    monkeypatch.setattr(onednn, "_is_twice_as_fast", lambda: False)
    inputs, weight = torch.randn(300, 200, requires_grad=True), torch.randn(400, 200, requires_grad=True)
    functional.linear(inputs, weight).square().sum().backward()
    assert products == [(300, 400), (300, 200)]


@pytest.mark.parametrize(
    ("vendor", "family", "expected"),
    [("AuthenticAMD", "25", False), ("AuthenticAMD", "26", True), ("GenuineIntel", "6", False), ("", "", False)],
)
def test_onednn_is_twice_as_fast_on_zen_5(vendor, family, expected, monkeypatch):
    monkeypatch.setattr(onednn, "processor_field", {"vendor_id": vendor, "cpu family": family}.get)
    assert onednn._is_twice_as_fast.__wrapped__() is expected


def test_unsupported_products_are_left_to_torch(products):
    ones = torch.ones(300, 200)
    assert torch.mm(ones.double(), ones.double().t()).dtype is torch.float64
    assert torch.mm(ones.long(), ones.long().t())[0, 0] == 200
    assert torch.addmm(torch.ones(300), ones, ones.t(), beta=2)[0, 0] == 202
    assert torch.mm(torch.ones(3, 0), torch.ones(0, 4)).eq(0).all()
    with pytest.raises(RuntimeError, match=r"cannot be multiplied \(300x200 and 300x200\)"):
        torch.mm(ones, ones)
    with pytest.raises(RuntimeError, match="dtype"):
        torch.mm(ones, ones.t().double())
    with pytest.raises(RuntimeError, match="dtype"):
        torch.mm(ones, ones.t(), out=torch.ones(300, 300, dtype=torch.int32))
    assert not products


def _rank_products(rank: int, matmul: str) -> list[bool]:
    """Of an engine's own process: whether oneDNN's products are used."""
    engine_of(plan_of(tiny_recipe(**{"kernels.matmul": matmul}), 1))
    return [onednn._replaced is not None]


@pytest.mark.parametrize("matmul", ["torch", "onednn"])
def test_an_engine_uses_the_matmul_kernel_of_its_recipe(matmul):
    assert run_ranks(1, _rank_products, matmul) == [[matmul == "onednn"]]


@pytest.mark.parametrize(
    ("vendor", "instructions", "precision", "expected"),
    [
        ("AuthenticAMD", "AVX512", "fp32", "onednn"),
        ("AuthenticAMD", "AVX512", "bf16", "torch"),
        ("AuthenticAMD", "AVX2", "fp32", "torch"),
        ("GenuineIntel", "AVX512", "fp32", "torch"),
    ],
)
def test_the_default_matmul_kernel_depends_on_the_processor(vendor, instructions, precision, expected, monkeypatch):
    monkeypatch.setattr(cpu, "processor_field", lambda field: vendor)
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: instructions)
    monkeypatch.setattr(torch.backends.mkl, "is_available", lambda: True)
    cpu._lacks_avx512_in_mkl.cache_clear()
    try:
        plan = plan_of(tiny_recipe(**{"parallel.precision": precision, "parallel.zero_stage": 1}), 1)
        assert matmul_of(plan) == expected
    finally:
        cpu._lacks_avx512_in_mkl.cache_clear()


def test_torch_without_onednn_is_reported(monkeypatch):
    monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: False)
    with pytest.raises(RecipeError, match=r"kernels\.matmul: 'onednn' is not included in this build"):
        use_kernels_of_cpu(plan_of(tiny_recipe(**{"kernels.matmul": "onednn"}), 1))
