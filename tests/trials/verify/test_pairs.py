"""Objectives that compare pairs are certified under every strategy, and every planted bug is detected."""

from __future__ import annotations

import pytest

from tests.helpers.harness import run_ranks
from tests.helpers.small_pairs import small_pairs, write_pairs
from tests.helpers.small_verify import MOE, certified, job_of, plant, refer

SLOW, BREADTH = pytest.mark.slow, pytest.mark.breadth
DPO = {"objective.name": "dpo", "objective.label_smoothing": 0.1, "objective.sft_weight": 0.3}
KTO = {"objective.name": "kto", "objective.beta": 0.5, "objective.undesirable_weight": 1.5}
LORA = {"model.adapter": {"rank": 4, "alpha": 12.0}}
"""Its reference is the base with the adapter off: a new adapter changes nothing."""
FUSED = {"model.adapter": {"rank": 4, "targets": ["q_proj"], "target_parameters": ["experts.*_proj"]}}
COMPILED = {"kernels.blocks": "compiled", "model.attention": "varlen"}
SELECTIVE = {"parallel.activation_checkpointing": "selective"}
SHARED = ["dp1-pp2-zero1-acc4", "dp1-sp2-zero3-acc1", "dp1-tp2-zero1-acc4"]
FLAT = ["dp2-zero2-acc2", "dp2-zero3-acc2", "dp2-ddp-acc2", "dp2-fsdp2-acc2"]
THREE = ["dp1-pp2-sp2-zero1-acc4", "dp1-pp2-tp2-zero1-acc4", "dp1-tp2-sp2-zero1-acc4", "dp2-pp2-zero1-acc2"]


@pytest.fixture(scope="session")
def pairs(tmp_path_factory):
    return write_pairs(tmp_path_factory.mktemp("pairs"))


@pytest.fixture(scope="session")
def labelled(tmp_path_factory):
    return write_pairs(tmp_path_factory.mktemp("labelled"), labelled=True)


@pytest.mark.parametrize(
    ("names", "fields"),
    [
        pytest.param(["dp1-zero2-acc4"], DPO, marks=BREADTH),
        pytest.param(SHARED, DPO, marks=SLOW),
        pytest.param(FLAT, DPO, marks=BREADTH),
        pytest.param(THREE, DPO, marks=BREADTH),
        pytest.param([*FLAT, *SHARED], {"objective.name": "ipo", "objective.beta": 0.5}, marks=BREADTH),
        pytest.param([*FLAT, *SHARED], {"objective.name": "orpo"}, marks=BREADTH),
        pytest.param([*FLAT[:2], FLAT[3], *SHARED], DPO | {"parallel.precision": "bf16"}, marks=BREADTH),
        pytest.param(FLAT, DPO | {"parallel.precision": "autocast_bf16"}, marks=BREADTH),
        pytest.param(["dp1-zero0-acc4", *SHARED], DPO | {"kernels.loss": "chunked"}, marks=BREADTH),
        pytest.param(["dp2-zero2-acc2", "dp1-pp2-zero1-acc4"], DPO | LORA, marks=BREADTH),
        pytest.param([*FLAT, *SHARED], DPO | LORA, marks=BREADTH),
        pytest.param(FLAT[:2], DPO | LORA | COMPILED, marks=BREADTH),
        pytest.param(FLAT[:2], DPO | LORA | SELECTIVE, marks=BREADTH),
        pytest.param(["dp2-zero0-acc2", "dp2-zero3-acc2"], DPO | MOE, marks=BREADTH),
        pytest.param(["dp2-zero3-acc2"], DPO | MOE | FUSED, marks=BREADTH),
    ],
    ids=lambda value: "-".join(map(str, value)),
)
def test_clean_plans_are_certified(names, fields, pairs, tmp_path):
    job = job_of(small_pairs(pairs, **fields), names, nproc=4)
    run_ranks(1, refer, job, tmp_path)
    found = {}
    for world in {plan.workers for plan in job.plans.values()}:
        found |= run_ranks(world, certified, job, tmp_path, timeout=600)[0]
    assert found == dict.fromkeys(names, True)


@pytest.mark.parametrize(
    ("names", "fields"),
    [
        pytest.param(["dp2-zero2-acc2", "dp1-pp2-zero1-acc4"], KTO, marks=SLOW),
        pytest.param(FLAT, KTO, marks=BREADTH),
        pytest.param(SHARED, KTO, marks=BREADTH),
        pytest.param(THREE, KTO, marks=BREADTH),
        pytest.param(["dp1-zero0-acc4", *SHARED], KTO | {"kernels.loss": "chunked"}, marks=BREADTH),
        pytest.param([*FLAT, *SHARED], KTO | LORA, marks=BREADTH),
        pytest.param(["dp2-zero0-acc2", "dp2-zero3-acc2"], KTO | MOE, marks=BREADTH),
        pytest.param(FLAT, KTO | {"data.packing": "none"}, marks=BREADTH),
    ],
    ids=lambda value: "-".join(map(str, value)),
)
def test_clean_plans_of_labelled_completions_are_certified(names, fields, labelled, tmp_path):
    test_clean_plans_are_certified(names, fields, labelled, tmp_path)


@pytest.mark.parametrize(
    ("plan", "bugs"),
    [
        pytest.param("dp2-zero2-acc2", "COMPARED", marks=BREADTH),
        pytest.param("dp1-sp2-zero1-acc4", "SLICED", marks=SLOW),
        pytest.param("dp2-zero3-acc2", "COMPARED", marks=BREADTH),
    ],
)
def test_every_planted_bug_is_detected(plan, bugs, pairs, tmp_path):
    _all_are_caught(plan, bugs, small_pairs(pairs, **DPO), tmp_path)


@pytest.mark.parametrize(
    ("plan", "bugs"),
    [
        pytest.param(
            "dp2-zero2-acc2",
            ("label_swapped_on_one_rank", "divergence_per_micro_batch", "divergence_with_gradient"),
            marks=SLOW,
            id="some",
        ),
        pytest.param("dp2-zero1-acc2", "LABELLED", marks=BREADTH),
    ],
)
def test_every_planted_bug_of_labelled_completions_is_detected(plan, bugs, labelled, tmp_path):
    _all_are_caught(plan, bugs, small_pairs(labelled, **KTO), tmp_path)


def _all_are_caught(plan, bugs, recipe, folder):
    job = job_of(recipe, [plan])
    run_ranks(1, refer, job, folder)
    found = run_ranks(2, plant, job, folder, "planted_pairs", bugs, timeout=600)[0]
    assert found.pop("none") == [plan]
    assert found
    assert {name for name, plans in found.items() if plans} == set()
