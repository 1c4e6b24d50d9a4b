"""Search, verify and suggestions find the same plans as trying every number."""

from __future__ import annotations

import itertools

import pytest

from llmtrain.errors import RecipeError
from llmtrain.plan.facts.model_facts import model_facts
from llmtrain.plan.load import load_recipe
from llmtrain.plan.rules import resolve
from llmtrain.plan.search import nearest
from llmtrain.plan.search.enumerate import enumerate_plans
from llmtrain.plan.search.variants import DEGREES, NVME_PATH, OFFLOADS, SCHEDULE, ZERO_STAGE, degrees, value_of
from llmtrain.recipe.cluster import Cluster
from tests.helpers.legal_plans import legal_plans

QWEN = load_recipe("recipes/qwen3_30b_a3b.py", [])[0].with_(**{"batch.micro_batch_size": 1})
DENSE = load_recipe("recipes/tiny.py:verify", [])[0].with_(**{"batch.micro_batch_size": 1})
GPT2 = load_recipe("recipes/gpt2_124m.py", [])[0].with_(**{"batch.micro_batch_size": 1})
CLUSTERS = [
    (QWEN, 6),
    (GPT2, 4),
    *(pytest.param(recipe, 8, marks=pytest.mark.breadth) for recipe in (QWEN, DENSE)),
]


def splits_by_brute_force(recipe, devices: int):
    """(pipeline, tensor, sequence, expert, ZeRO stage) of all numbers up to the devices that resolve as they are."""
    facts, found = model_facts(recipe.model, recipe.vocab_size), set()
    plain = dict.fromkeys(OFFLOADS, "none") | {NVME_PATH: None}
    numbers = range(1, devices + 1)
    # Where three degrees leave no whole replica nothing is legal; to ask for that would take most of the time.
    triples = (one for one in itertools.product(numbers, repeat=3) if one[0] * one[1] * one[2] <= devices)
    for (split, expert), stage in itertools.product(itertools.product(triples, numbers), range(4)):
        candidate = recipe.with_(**dict(zip(DEGREES, (*split, expert), strict=True)), **plain, **{ZERO_STAGE: stage})
        try:
            resolve(candidate, Cluster(devices_per_node=devices), facts)
        except RecipeError:
            continue
        found.add((*split, expert, stage))
    return found


def _split(recipe):
    return tuple(value_of(recipe, field) for field in (*DEGREES, ZERO_STAGE))


@pytest.mark.parametrize(("recipe", "devices"), CLUSTERS, ids=lambda value: getattr(value, "name", value))
def test_search_verify_and_suggestions_find_every_legal_split(recipe, devices):
    legal = splits_by_brute_force(recipe, devices)
    cluster, facts = Cluster(devices_per_node=devices), model_facts(recipe.model, recipe.vocab_size)
    assert {_split(draft.recipe) for _, draft in legal_plans(recipe, cluster, facts)} == legal
    listed = {_split(one.plan.recipe) for one in enumerate_plans(recipe, devices)[0] if _is_own(one.plan, devices)}
    assert listed == legal
    values = nearest._values(recipe, cluster, facts)
    for number, field in enumerate((*DEGREES, ZERO_STAGE)):
        assert {split[number] for split in legal} <= set(values[field])


def _is_own(plan, devices):
    return plan.recipe.parallel.backend == "deepspeed" and plan.cluster.world_size == devices


def test_every_schedule_of_a_pipeline_is_tried_if_the_model_has_enough_layers():
    found = {(split[DEGREES[0]], *(split[field] for field in SCHEDULE)) for split in degrees(4, 12)}
    assert found == {
        *((degree, "1f1b", 1) for degree in (1, 2, 4)),
        *((degree, name, 2) for degree in (2, 4) for name in ("interleaved", "zero_bubble")),
        (2, "zero_bubble", 4),
    }


def test_degrees_of_experts_are_those_of_all_ranks_of_a_stage():
    found = {tuple(split[field] for field in DEGREES) for split in degrees(8, 48, 128)}
    assert {(1, 4, 1, 8), (1, 2, 2, 8), (1, 8, 1, 8), (2, 4, 1, 4)} <= found
    assert not {(2, 1, 1, 8), (3, 1, 1, 1)} & found


@pytest.mark.parametrize(("recipe", "devices"), [(QWEN, 8), (DENSE, 8)], ids=["experts", "dense"])
def test_the_nearest_plan_reverts_a_change_of_one_field(recipe, devices, monkeypatch):
    monkeypatch.setattr(nearest, "MAX_SUGGESTIONS", 6)
    cluster, facts = Cluster(devices_per_node=devices), model_facts(recipe.model, recipe.vocab_size)
    legal = {_split(draft.recipe): draft.recipe for _, draft in legal_plans(recipe, cluster, facts)}
    for split, plan in sorted(legal.items())[:: max(1, len(legal) // 4)]:
        for field, value in zip(DEGREES, split, strict=False):
            spoilt = plan.with_(**{field: 5 * value})
            found = nearest.search(spoilt, cluster, facts, {})
            assert {field: value} in found, (split, field)


def _stored(recipe, cluster):
    facts = model_facts(recipe.model, recipe.vocab_size)
    return [draft.recipe for _, draft in legal_plans(recipe, cluster, facts)]


def test_a_micro_batch_that_is_refused_does_not_hide_larger_ones():
    """fp8 wants the tokens of a micro-batch to divide by 16, which here only even sizes do."""
    fields = {"kernels.fp8": "tensorwise", "parallel.precision": "bf16", "data.sequence_length": 136}
    recipe = DENSE.with_(**fields, **{"batch.micro_batch_size": 2, "parallel.zero_stage": 1})
    sizes = {plan.batch.micro_batch_size for plan in _stored(recipe, Cluster(device="h100"))}
    assert sizes == {2, 4, 8}


def test_the_micro_batch_of_the_recipe_hides_no_layout():
    """With 4 sequences, two replicas have too few micro-batches to interleave, and four have no whole one."""
    one, four = (DENSE.with_(**{"batch.global_batch_size": 8, "batch.micro_batch_size": size}) for size in (1, 4))
    cluster = Cluster(devices_per_node=4, device="h100")
    assert {_order(plan) for plan in _stored(four, cluster)} == {_order(plan) for plan in _stored(one, cluster)}
    assert (1, 1, 1, 1, 1, "1f1b", 1, 2) in {_order(plan) for plan in _stored(four, cluster)}


def _order(recipe):
    return *_split(recipe), *(value_of(recipe, field) for field in SCHEDULE), recipe.batch.micro_batch_size


def test_a_recipe_that_names_a_disk_has_plans_with_and_without_it():
    fields = {"parallel.zero_stage": 3, OFFLOADS[0]: "nvme", NVME_PATH: "/local_nvme"}
    found = {
        tuple(value_of(plan, field) for field in (*OFFLOADS, NVME_PATH))
        for plan in _stored(DENSE.with_(**fields), Cluster())
        if plan.parallel.zero_stage == 3
    }
    places = set(itertools.product(("none", "cpu", "nvme"), repeat=2))
    assert found == {(*one, "/local_nvme" if "nvme" in one else None) for one in places}
    assert ("none", "cpu", None) in {
        tuple(value_of(plan, field) for field in (*OFFLOADS, NVME_PATH)) for plan in _stored(DENSE, Cluster())
    }


def test_the_micro_batch_of_the_recipe_is_among_the_candidates():
    recipe = DENSE.with_(**{"batch.global_batch_size": 720_720, "batch.micro_batch_size": 720_720})
    sizes = {plan.batch.micro_batch_size for plan in _stored(recipe, Cluster())}
    assert {*range(1, 17)} - {16} <= sizes
    assert 720_720 in sizes
