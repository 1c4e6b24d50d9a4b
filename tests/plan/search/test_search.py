"""The search finds what enumerating by hand finds, shows options to paste, and explains why other plans are slower."""

from __future__ import annotations

import itertools
import json
import shlex
from pathlib import Path

import pytest

from llmtrain.errors import RecipeError
from llmtrain.plan.draft import Draft
from llmtrain.plan.facts.model_facts import model_facts
from llmtrain.plan.load import load_recipe
from llmtrain.plan.predict import Shortage, memory_shortage
from llmtrain.plan.predict.time import predict
from llmtrain.plan.rules import LEGALITY, RULES, assemble, broken, resolve
from llmtrain.plan.search.search import FitChecker, loses, search_plans
from llmtrain.plan.search.search_report import UNKNOWN_MEMORY, document, lines
from llmtrain.recipe import parse_assignments
from llmtrain.recipe.cluster import Cluster
from tests.helpers.legal_plans import legal_plans

ROOT = Path(__file__).parents[3]
NODE = Cluster(devices_per_node=8, device="h100")
GIB = 2**30


@pytest.fixture(scope="module")
def llama():
    recipe = load_recipe(str(ROOT / "recipes/llama_1b.py"), [])[0]
    batch = {"batch.global_batch_size": 64, "batch.micro_batch_size": 4}
    return recipe.with_(**batch, **{"model.attention": "auto", "kernels": "auto"})


def _kind(parallel):
    return (parallel.pipeline > 1, parallel.tensor > 1, parallel.sequence > 1, parallel.expert > 1, parallel.zero_stage)


def brute_force(recipe, cluster, facts, rules):
    """Every combination that the rules let pass, asked one by one."""
    devices, found = cluster.world_size, set()
    sizes = [size for size in (1, 2, 4, 8) if size <= devices]
    stores = tuple(itertools.product(("none", "cpu"), repeat=2))
    orders = (("1f1b", 1), ("interleaved", 2), ("zero_bubble", 2), ("zero_bubble", 4))
    for pp, tp, sp, ep, stage, order in itertools.product(sizes, sizes, sizes, sizes, range(4), orders):
        if devices % (pp * tp * sp) or (pp == 1 and order != orders[0]):
            continue
        for micro, (optimizer, parameters), again in itertools.product(
            (1, 2, 4, 8, 16, 32, 64), stores, ("none", "selective", "full")
        ):
            degrees = {"pipeline": pp, "tensor": tp, "sequence": sp, "expert": ep, "zero_stage": stage}
            degrees |= {"pipeline_schedule": order[0], "pipeline_chunks": order[1]}
            stored = {"offload_optimizer": optimizer, "offload_param": parameters, "activation_checkpointing": again}
            part = recipe.parallel.model_copy(update=degrees | stored)
            batch = recipe.batch.model_copy(update={"micro_batch_size": micro})
            candidate = recipe.model_copy(update={"parallel": part, "batch": batch})
            if not broken(Draft(candidate, cluster, facts), rules)[0]:
                found.add((pp, tp, sp, ep, stage, *order, micro, optimizer, parameters, again))
    return found


def _key(draft):
    one = draft.parallel
    degrees = (one.pipeline, one.tensor, one.sequence, one.expert, one.zero_stage)
    degrees += (one.pipeline_schedule, one.pipeline_chunks)
    stored = (one.offload_optimizer, one.offload_param, one.activation_checkpointing)
    return (*degrees, draft.recipe.batch.micro_batch_size, *stored)


@pytest.mark.parametrize(
    "devices",
    [
        pytest.param(2, marks=pytest.mark.slow),
        pytest.param(4, marks=pytest.mark.breadth),
        pytest.param(8, marks=pytest.mark.breadth),
    ],
)
def test_exactly_the_legal_plans_are_considered(llama, devices):
    facts, cluster = model_facts(llama.model, llama.vocab_size), Cluster(devices_per_node=devices, device="h100")
    drafts = [draft for _, draft in legal_plans(llama, cluster, facts)]
    found = [_key(draft) for draft in drafts]
    assert len(found) == len(set(found))
    assert set(found) == brute_force(llama, cluster, facts, LEGALITY)
    fit_checker = FitChecker(memory_shortage)
    fitting = {_key(draft) for draft in drafts if fit_checker.fits(draft)}
    assert fitting == brute_force(llama, cluster, facts, RULES)
    assert fitting
    assert devices > 4 or len(fitting) < len(found)


def test_the_best_come_first_and_can_be_pasted(llama):
    result = search_plans(llama, NODE)
    rates = [one.time.tokens_per_second for one in result.best]
    assert len(rates) == 10
    assert rates == sorted(rates, reverse=True)
    for one in (*result.best, *result.slower):
        words = shlex.split(one.arguments)
        fields = parse_assignments([word for word in words if word != "--set"])
        pasted = resolve(llama.with_(**fields) if fields else llama, NODE)
        assert pasted == one.plan
        assert predict(pasted) == one.time


def test_no_plan_is_faster_than_the_best(llama):
    facts = model_facts(llama.model, llama.vocab_size)
    plans = [assemble(draft) for _, draft in legal_plans(llama, NODE, facts)]
    fastest = max(predict(plan).tokens_per_second for plan in plans)
    assert search_plans(llama, NODE).best[0].time.tokens_per_second == fastest


def test_a_plan_that_does_not_fit_is_a_near_miss(llama):
    def fits(plan):
        if plan.parallel.zero_stage == 3 and plan.parallel.tensor > 1:
            return None
        size = 3 if plan.parallel.zero_stage == 3 else 4
        return Shortage(size + plan.data_parallel_size, f"does not fit by {size} GiB on stage 0")

    result = search_plans(llama, NODE, fits)
    assert {(one.plan.parallel.zero_stage, one.plan.parallel.tensor > 1) for one in result.best} == {(3, True)}
    assert result.too_large
    assert len(result.too_large) == 6
    kinds = [_kind(one.plan.parallel) for one in result.too_large]
    assert len({*kinds}) == len(kinds)
    lack = [fits(one.plan).size for one in result.too_large]
    assert lack == sorted(lack)
    assert [one.why for one in result.too_large] == [fits(one.plan).text for one in result.too_large]
    assert all(one.time.tokens_per_second > result.best[0].time.tokens_per_second for one in result.too_large)
    assert UNKNOWN_MEMORY not in lines(result)
    with pytest.raises(RecipeError, match=r"no legal plan of llama_1b fits: .*needs 99 GiB"):
        search_plans(llama, NODE, lambda plan: Shortage(99, "needs 99 GiB"))


def test_a_schedule_loses_by_its_bubble():
    recipe, cluster = load_recipe(str(ROOT / "recipes/llama3_70b.py:pipeline"), [])
    recipe = recipe.with_(**{"kernels.blocks": "eager"})  # compiled layers have no such schedule
    zero_bubble = recipe.with_(**{"parallel.pipeline_schedule": "zero_bubble", "parallel.pipeline_chunks": 2})
    times = [predict(resolve(one, cluster)) for one in (recipe, zero_bubble)]
    assert loses(*times) == "bubble 19%"


@pytest.mark.parametrize(
    ("name", "collective"),
    [("gpt2_124m", "all-to-all"), pytest.param("llama3_70b", "all-gather", marks=pytest.mark.breadth)],
)
def test_slower_plans_state_the_reason(name, collective):
    recipe, cluster = load_recipe(str(ROOT / f"recipes/{name}.py"), [])
    result = search_plans(recipe.with_(**{"kernels.blocks": "eager"}), cluster)
    assert result.legal > 1000
    whys = [one.why for one in result.slower]
    assert any(why.startswith(f"{collective} ") for why in whys)
    assert not any(why.startswith("bubble ") for why in whys)  # another schedule is better
    assert len({_kind(one.plan.parallel) for one in result.slower}) == len(result.slower)
    assert not {_kind(one.plan.parallel) for one in result.slower} & {_kind(one.plan.parallel) for one in result.best}
    told = document(result)
    assert json.loads(json.dumps(told))["best"][0]["set"] == result.best[0].arguments
    assert UNKNOWN_MEMORY in lines(result)


def test_experts_keep_the_micro_batch_that_their_router_loss_depends_on():
    recipe = load_recipe(str(ROOT / "recipes/qwen3_30b_a3b.py"), [])[0]
    recipe = recipe.with_(**{"model.config.output_router_logits": True})
    facts = model_facts(recipe.model, recipe.vocab_size)
    found = list(legal_plans(recipe, Cluster(nodes=2, devices_per_node=8, device="h200"), facts))
    assert {draft.recipe.batch.micro_batch_size for _, draft in found} == {recipe.batch.micro_batch_size}
    assert {draft.parallel.expert for _, draft in found} >= {1, 8, 16}


def test_an_impossible_search_is_reported(llama, tiny):
    with pytest.raises(RecipeError, match="the datasheet of cpu lacks peak_flops") as error:
        search_plans(tiny, Cluster(devices_per_node=2))
    assert error.value.problems[0].rule == "search.device"
    with pytest.raises(RecipeError) as error:
        search_plans(llama.with_(**{"parallel.grad_accum_dtype": "fp16"}), NODE)
    assert error.value.problems[0].rule == "search.legal"
    with pytest.raises(RecipeError) as error:
        search_plans(llama.with_(**{"model.config.hidden_sise": 7}), NODE)
    assert error.value.problems[0].rule == "model.config_key"
