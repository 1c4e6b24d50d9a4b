"""Triton kernels compiled for GPUs are within the limits of each GPU, as the page says; a fault is named."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from tests.cuda_on_host.kernels import GPUS, cases, compile_cases, environment_of, groups
from tests.helpers.triton_on_cpu import needs_liger
from tools import kernels
from tools.page import ROOT

PAGE = (ROOT / kernels.PAGE).read_text(encoding="utf-8")
REPRESENTATIVE = "liger llama"
FAULTS = """
import triton, triton.language as tl

@triton.jit
def multiplies_large_blocks(a, b, out, BLOCK: tl.constexpr):
    rows = tl.arange(0, BLOCK)
    places = rows[:, None] * BLOCK + rows[None, :]
    tl.store(out + places, tl.dot(tl.load(a + places), tl.load(b + places)))

@triton.jit
def rounds_to_fp8(a, out):
    places = tl.arange(0, 128)
    tl.store(out + places, tl.load(a + places).to(tl.float8e4nv))
"""
"""Kernels that an A100 cannot run: more shared memory than a block may have, and a type that it cannot convert to."""
PROGRAM = f"""
import json, torch, faults
from tests.cuda_on_host import kernels

def said(launch):
    try:
        launch(torch.empty(512, 512, dtype=torch.float16, device="cuda"))
    except Exception as error:
        return type(error).__name__ + ": " + str(error)

kernels.install()
found = kernels.compile_case("a100", kernels.cases()["{REPRESENTATIVE}"])
with kernels.shapes():
    large = said(lambda x: faults.multiplies_large_blocks[(1,)](x, x, x, BLOCK=256, num_warps=8))
    rounded = said(lambda x: faults.rounds_to_fp8[(1,)](x, x.to(torch.float8_e4m3fn)))
    grid = said(lambda x: faults.multiplies_large_blocks[(1, 2**16)](x, x, x, BLOCK=16))
print(json.dumps([found, large, rounded, grid]))
"""


def rows(group: str) -> dict[str, dict[str, str]]:
    """Returns the cells of a group on the page, by kernel and device."""
    table = PAGE.partition(f"\n## {group}\n")[2].partition("\n## ")[0]
    lines = [line.strip("| ").split(" | ") for line in table.splitlines() if line.startswith("| `")]
    return {name.strip("`"): dict(zip(GPUS, cells, strict=True)) for name, _, *cells in lines}


def numbers(cell: str) -> list[int]:
    return [int(number.replace(",", "")) for number in cell.split(" / ")]


def test_the_page_lists_every_case():
    for group, names in groups().items():
        assert f"\n## {group}\n\nOf: {', '.join(sorted(names))}.\n" in PAGE


@needs_liger
@pytest.mark.slow
def test_kernels_are_compiled_and_unsupported_ones_are_named(libraries, tmp_path):
    (tmp_path / "faults.py").write_text(FAULTS)
    given = environment_of(libraries, "a100") | {"TRITON_CACHE_DIR": str(tmp_path / "cache")}
    given["PYTHONPATH"] += f":{tmp_path}"
    done = subprocess.run([sys.executable, "-c", PROGRAM], env=given, capture_output=True, text=True)
    assert not done.returncode, done.stderr
    kernels, large, rounded, grid = json.loads(done.stdout.splitlines()[-1])
    assert large == (
        "BeyondLimits: the kernel multiplies_large_blocks needs 262144 bytes of shared memory, "
        "and a block has at most 166912"
    )
    assert rounded.startswith("CompilationError:")
    assert "rounds_to_fp8" in rounded
    assert "fp8e4nv not supported" in rounded
    assert grid == "ValueError: the kernel multiplies_large_blocks is launched on a grid of (1, 65536, 1) blocks"
    told = rows(cases()[REPRESENTATIVE].group)
    assert len(kernels) > 7
    for one in kernels:
        needed = [one[what] for what in ("registers", "spilled", "shared")]
        most = numbers(told[one["name"]]["a100"])
        assert all(mine <= other for mine, other in zip(needed, most, strict=True)), one


@needs_liger
@pytest.mark.breadth
@pytest.mark.parametrize("device", GPUS)
@pytest.mark.parametrize("group", groups())
def test_resources_of_kernels_match_the_page(libraries, device, group):
    if group == "fp8":
        pytest.importorskip("torchao", reason="needs torchao: pip install -e '.[fp8]'")
    results = compile_cases(libraries, device, groups()[group])
    told = {kernel: cell for kernel, of_device in rows(group).items() if (cell := of_device[device]) != "—"}
    assert {name: cell for name, (_, cell) in kernels.cells(results).items()} == told
    for why in kernels.refusals(results).values():
        assert f": {why}\n" in PAGE
