"""Weights without a gradient in a step: frozen ones, experts without tokens, modules that a step does not run."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from llmtrain.data import prepare
from llmtrain.plan.search.enumerate import enumerate_plans
from llmtrain.recipe import Recipe
from llmtrain.trials.verify import choose_plans, train
from llmtrain.trials.verify.batches import Batches
from tests.helpers.harness import run_ranks
from tests.helpers.moe import CONFIGS, INDEXED
from tests.helpers.own_code import SPARSE, write_folder
from tests.helpers.small_verify import CPU, STEPS, certified, job_of, plant, refer, small

PLANS = {
    "FROZEN": ("dp1-zero1-acc4", "dp2-zero[0-3]-acc2*", "dp1-pp2-zero1-acc4", "dp2-ddp-*", "dp2-fsdp2-acc2"),
    "UNMET": ("dp1-zero0-acc4", "dp2-*-acc2*", "dp1-sp2-*", "dp1-tp2-*", "dp1-pp2-*"),
    "SOMETIMES": ("dp1-ddp-acc4", "dp2-ddp-*"),
}
"""Of each kind the plan that bugs are planted into, on one rank, and the plans of two ranks that are tried."""


FEWER = {old: new.replace("256", "32") for old, new in SPARSE.items()}
"""The model of own code, with as many experts as leave some of them unmet."""


def _sized(config: dict[str, Any]) -> dict[str, Any]:
    """For the vocabulary of the recipe's tokenizer."""
    return {key: value for key, value in config.items() if key != "vocab_size"}


@pytest.fixture
def recipe(kind, verify_corpus, tmp_path) -> Recipe:
    few_tokens = {"batch.global_batch_size": 4, "batch.micro_batch_size": 1}
    if kind == "FROZEN":
        return small(verify_corpus, model={"architecture": "deepseek_v32", "config": _sized(INDEXED)}, **few_tokens)
    if kind == "UNMET":
        config = _sized(CONFIGS["mixtral"]) | {"num_local_experts": 32, "num_experts_per_tok": 1}
        return small(verify_corpus, model={"architecture": "mixtral", "config": config}, **few_tokens)
    tokenizer = prepare(small(verify_corpus)).tokenizer.folder
    folder = str(write_folder(Path(shutil.copytree(tokenizer, tmp_path / "own")), FEWER, vocab_size=300))
    model = {"architecture": None, "config": {}, "pretrained": folder, "trust_remote_code": True}
    return small(verify_corpus, model=model, **{"data.tokenizer": folder}, **few_tokens)


def _without_gradient(recipe: Recipe) -> Iterator[set[str]]:
    """Of each step the weights that it gives no gradient; of experts that are one tensor, the numbers of such ones."""
    loop = train._reference(recipe, CPU)
    for sequences in Batches(recipe, prepare(recipe), STEPS).whole():
        loop.train_step(sequences)
        found = {name for name, weight in loop.masters.items() if weight.grad is None}
        for name, weight in loop.masters.items():
            if weight.ndim == 3:
                found |= {f"{name} {expert}" for expert, part in enumerate(weight.grad) if not part.any()}
        yield found


@pytest.mark.parametrize(
    "kind",
    [
        pytest.param("FROZEN", marks=pytest.mark.slow),
        pytest.param("UNMET", marks=pytest.mark.breadth),
        pytest.param("SOMETIMES", marks=pytest.mark.breadth),
    ],
)
def test_weights_without_a_gradient_are_treated_as_in_plain_torch(kind, recipe, tmp_path):
    first, *others = _without_gradient(recipe)
    assert first
    assert (first.union(*others) == first.intersection(*others)) is (kind == "FROZEN")
    name = PLANS[kind][0]
    job = job_of(recipe, [name], nproc=1)
    run_ranks(1, refer, job, tmp_path)
    (found,) = run_ranks(1, plant, job, tmp_path, "planted_idle", kind)
    assert found.pop("none") == [name]
    assert found
    assert {bug for bug, plans in found.items() if plans} == set()


SLOW = ("dp2-fsdp2-acc2",)


@pytest.mark.parametrize(
    ("kind", "names"),
    [
        pytest.param(kind, names, marks=pytest.mark.slow if names in SLOW else pytest.mark.breadth)
        for kind, (_, *of_kind) in PLANS.items()
        for names in of_kind
    ],
)
def test_every_strategy_treats_weights_without_a_gradient_alike(kind, names, recipe, tmp_path):
    plans = [one.name for one in choose_plans(*enumerate_plans(recipe, 2), names)]
    job = job_of(recipe, plans)
    run_ranks(1, refer, job, tmp_path)
    for verdicts in run_ranks(2, certified, job, tmp_path, timeout=600):
        assert verdicts == dict.fromkeys(plans, True)
