"""Models of a user's own are certified under every strategy, and planted bugs in how they are divided are detected."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.helpers.harness import run_ranks
from tests.helpers.own_models import SPLIT
from tests.helpers.small_verify import certified, job_of, plant, refer, small

ROOT = Path(__file__).parents[3]
SLOW, BREADTH = pytest.mark.slow, pytest.mark.breadth
NANOGPT = {
    "model": {"build": "nanogpt:GPT", "config": {"n_layer": 4, "n_head": 4, "n_embd": 32, "block_size": 32}},
    "code_dir": str(ROOT / "examples/own_models"),
}
RECURRENCE = {
    "model": {"build": "recurrence:RecurrentModel", "config": {"width": 16, "state": 4, "depth": 2}},
    "code_dir": str(ROOT / "examples/own_models"),
}
EXPERTS = {
    "model": {"build": "experts:MixtureOfExperts", "config": NANOGPT["model"]["config"] | {"experts": 4}},
    "code_dir": str(ROOT / "examples/own_models"),
    "data.packing": "concat",
    "data.mask_documents": False,
}
DECODER = {
    "model": {"build": "tests.helpers.own_models:Decoder", "config": {"depth": 4}, "tp_plan": SPLIT},
    "code_dir": str(ROOT),
}
HIDDEN = {
    "model": {"build": "tests.helpers.own_models:ReturnsHidden", "config": {"depth": 4}, "parts": {"head": "score"}},
    "code_dir": str(ROOT),
}
RECOMPUTED = {"parallel.activation_checkpointing": "full"}
PLAIN = ["dp1-zero0-acc4", "dp2-zero1-acc2", "dp2-zero2-acc2", "dp2-zero3-acc2-offload", "dp2-ddp-acc2"]
PIPELINES = ["dp1-pp2-zero1-acc4", "dp1-pp2-interleaved2-zero1-acc4", "dp1-pp2-zero_bubble2-zero1-acc4"]
SLICES = ["dp1-sp2-zero3-acc4", "dp1-pp2-sp2-zero1-acc4"]
"""In the second of these, ZeRO cuts the decoder's tied table at other places in each stage."""


@pytest.mark.parametrize(
    ("names", "fields"),
    [
        pytest.param(["dp1-pp2-zero1-acc4"], NANOGPT, id="nanogpt"),
        pytest.param(["dp1-sp2-zero1-acc4"], NANOGPT, id="nanogpt-more", marks=SLOW),
        pytest.param([*PLAIN, "dp2-fsdp2-acc2", *PIPELINES[1:], *SLICES], NANOGPT, id="nanogpt-all", marks=BREADTH),
        pytest.param(
            ["dp1-pp2-tp2-zero1-acc4"],
            DECODER | RECOMPUTED,
            id="decoder",
            marks=SLOW,
        ),
        pytest.param(
            ["dp1-tp2-zero3-acc4", "dp1-tp2-sp2-zero1-acc4", *PIPELINES, *SLICES, *PLAIN],
            DECODER,
            id="decoder-all",
            marks=BREADTH,
        ),
        pytest.param(
            ["dp2-zero2-acc2", "dp1-pp2-zero1-acc4"], DECODER | {"parallel.precision": "bf16"}, id="bf16", marks=BREADTH
        ),
        pytest.param(
            ["dp2-zero3-acc2", "dp1-pp2-zero1-acc4", "dp2-ddp-acc2"],
            NANOGPT | {"kernels.loss": "chunked"},
            id="chunked",
            marks=BREADTH,
        ),
        pytest.param(["dp2-zero2-acc2"], DECODER | {"kernels.blocks": "compiled"}, id="compiled", marks=BREADTH),
        pytest.param(
            ["dp2-zero2-acc2", "dp1-pp2-zero1-acc4"],
            NANOGPT | {"model.attention": "varlen"},
            id="varlen",
            marks=BREADTH,
        ),
        pytest.param(["dp2-zero3-acc2"], HIDDEN, id="hidden", marks=BREADTH),
        pytest.param(["dp1-pp2-zero1-acc4"], RECURRENCE, id="recurrence", marks=SLOW),
        pytest.param(["dp2-zero3-acc2"], RECURRENCE, id="recurrence-more", marks=BREADTH),
        pytest.param(["dp2-fsdp2-acc2"], EXPERTS, id="experts", marks=SLOW),
    ],
)
def test_clean_plans_are_certified(names, fields, verify_corpus, tmp_path):
    job = job_of(small(verify_corpus).with_(**fields), names, nproc=4)
    run_ranks(1, refer, job, tmp_path)
    found = {}
    for world in {plan.workers for plan in job.plans.values()}:
        found |= run_ranks(world, certified, job, tmp_path, timeout=600)[0]
    assert found == dict.fromkeys(names, True)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("names", "fields", "bugs"),
    [
        (["dp2-zero1-acc2"], DECODER | RECOMPUTED, "ATTENTION"),
        (["dp2-zero1-acc2"], NANOGPT, "POSITIONS"),
        (["dp2-zero1-acc2"], EXPERTS, "AUXILIARY"),
    ],
)
def test_planted_bugs_are_detected(names, fields, bugs, verify_corpus, tmp_path):
    job = job_of(small(verify_corpus).with_(**fields), names)
    run_ranks(1, refer, job, tmp_path)
    verdicts = run_ranks(2, plant, job, tmp_path, "planted_own", bugs, timeout=900)[0]
    assert sorted(verdicts.pop("none")) == sorted(names)
    assert verdicts
    assert all(plans == [] for plans in verdicts.values()), verdicts
