"""Attention by document boundaries matches the plain loop with masks, however the model is split."""

from __future__ import annotations

import pytest

from llmtrain.errors import RecipeError
from llmtrain.plan import installed
from llmtrain.plan.draft import Draft
from llmtrain.plan.facts.model_facts import model_facts
from llmtrain.plan.rules import assemble
from llmtrain.recipe.cluster import Cluster
from tests.helpers import flash_stand_in
from tests.helpers.batches import tiny_recipe
from tests.helpers.harness import run_ranks
from tests.helpers.traces import Trace, assert_same, engine_of, plain_run, plan_of, trace_plan, worst

STEPS = 6
EAGER = {"model.attention": "eager"}
VARLEN = {"model.attention": "varlen", "batch.micro_batch_size": 2}
STAGES = {"parallel.pipeline": 2, "parallel.zero_stage": 1}
FULL = {"parallel.activation_checkpointing": "full"}
SHARED = {
    "ZeRO-3, checkpointing": {"parallel.zero_stage": 3, **FULL},
    "sequence, checkpointing": {"parallel.sequence": 2, "parallel.zero_stage": 1, **FULL},
    "tensor": {"parallel.tensor": 2},
    "stages, checkpointing": {**STAGES, **FULL},
}
OTHERS = {
    "ZeRO-0": {},
    "ZeRO-1": {"parallel.zero_stage": 1},
    "ZeRO-2": {"parallel.zero_stage": 2},
    "ZeRO-3": {"parallel.zero_stage": 3},
    "sequence, ZeRO-3": {"parallel.sequence": 2, "parallel.zero_stage": 3},
    "stages": STAGES,
    "DDP": {"parallel.backend": "accelerate", "parallel.accelerate": "ddp"},
    "FSDP2": {"parallel.backend": "accelerate", "parallel.accelerate": "fsdp2", "parallel.zero_stage": 3},
}
FOUR_RANKS = {
    "stages of tensor ranks": {**STAGES, "parallel.tensor": 2, **FULL},
    "stages of sequence ranks": {**STAGES, "parallel.sequence": 2, **FULL},
    "tensor and sequence": {"parallel.tensor": 2, "parallel.sequence": 2, "parallel.zero_stage": 1},
    "four stages": {"parallel.pipeline": 4, "parallel.zero_stage": 1, "model.config.num_hidden_layers": 4, **FULL},
}
WINDOW = {"model.architecture": "mistral", "model.config.sliding_window": 5}


def _train(rank: int, recipes: dict, ranks: int) -> dict[str, Trace]:
    return {name: trace_plan(plan_of(recipe, ranks), STEPS, _replica(recipe, rank)) for name, recipe in recipes.items()}


def _replica(recipe, rank: int) -> int:
    """As engines number them; a pipeline's ranks are laid out otherwise, and here has one replica."""
    parallel = recipe.parallel
    return 0 if parallel.pipeline > 1 else rank // (parallel.tensor * parallel.sequence)


def _reference(**fields) -> Trace:
    return plain_run(tiny_recipe(**EAGER, **fields), STEPS)


def _compare(ranks: int, cases: dict, **fields) -> None:
    recipes = {name: tiny_recipe(**VARLEN, **fields, **case) for name, case in cases.items()}
    layers = {recipe.model.config["num_hidden_layers"] for recipe in recipes.values()}
    expected = {count: _reference(**fields, **{"model.config.num_hidden_layers": count}) for count in layers}
    for runs in run_ranks(ranks, _train, recipes, ranks):
        for name, run in runs.items():
            assert_same(run, expected[recipes[name].model.config["num_hidden_layers"]], name)


@pytest.mark.parametrize(
    "cases", [SHARED, pytest.param(OTHERS, marks=pytest.mark.breadth)], ids=["each way", "all others"]
)
def test_attention_by_document_boundaries_matches_the_plain_loop(cases):
    _compare(2, cases)


@pytest.mark.breadth
def test_windows_within_documents_match_the_plain_loop():
    _compare(2, SHARED, **WINDOW)


@pytest.mark.breadth
def test_ranks_that_share_stages_or_heads_match_the_plain_loop():
    _compare(4, FOUR_RANKS)


def test_one_rank_matches_the_plain_loop():
    """In rows that have other numbers of documents, in one micro-batch and in many."""
    expected = _reference()
    for micro_batch in (1, 4):
        recipe = tiny_recipe(**VARLEN | {"batch.micro_batch_size": micro_batch})
        run = plain_run(recipe, STEPS, micro_batch)
        assert_same(run, expected, micro_batch)


@pytest.mark.breadth
def test_lower_precision_stays_near_the_fp32_loop():
    """The bounds are those of `test_parity`."""
    expected = _reference()
    cases = {one: tiny_recipe(**VARLEN, **STAGES, **{"parallel.precision": one}) for one in ("bf16", "autocast_bf16")}
    for runs in run_ranks(2, _train, cases, 2):
        for name, run in runs.items():
            assert worst(run.losses, expected.losses) < 2**-8, name
            assert worst(run.grad_norms, expected.grad_norms) < 2**-6, name


FLASH = {"model.attention": "flash_attention_2", "batch.micro_batch_size": 2}


def _train_on_flash(rank: int, recipes: dict, ranks: int) -> dict[str, tuple[Trace, int]]:
    """With a stand-in for the kernel; how often it was called too."""
    runs = {}
    with pytest.MonkeyPatch.context() as patch:
        told = flash_stand_in.install(patch)
        patch.setattr(installed, "PACKAGES_OF_KERNELS", {})
        for name, recipe in recipes.items():
            told.clear()
            # Past the rules, which know of no such kernel on a CPU.
            facts = model_facts(recipe.model, recipe.vocab_size)
            plan = assemble(Draft(recipe, Cluster(devices_per_node=ranks), facts))
            runs[name] = trace_plan(plan, STEPS, _replica(recipe, rank)), len(told)
    return runs


@pytest.mark.slow
def test_a_flash_kernel_gets_the_boundaries_of_all_rows():
    expected = _reference()
    recipes = {name: tiny_recipe(**FLASH, **case) for name, case in SHARED.items()}
    for runs in run_ranks(2, _train_on_flash, recipes, 2):
        for name, (run, calls) in runs.items():
            assert calls, name
            assert_same(run, expected, name)


def _refusal(rank: int, recipe) -> str:
    with pytest.raises(RecipeError) as error:
        engine_of(plan_of(recipe, 1))
    return str(error.value)
