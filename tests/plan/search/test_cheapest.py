"""A plan that does not fit is refused with the fastest ones that do."""

from __future__ import annotations

import json

import pytest

from llmtrain.errors import RecipeError
from llmtrain.plan.facts.model_facts import model_facts
from llmtrain.plan.load import load_recipe
from llmtrain.plan.predict import memory_of, memory_shortage
from llmtrain.plan.predict.time import predict
from llmtrain.plan.rules import assemble, resolve
from llmtrain.plan.search.cheapest import EQUAL, cheapest_plans, suggesting
from llmtrain.recipe import parse_assignments
from llmtrain.recipe.cluster import DEVICES, Cluster, Device
from tests.helpers.legal_plans import legal_plans

NODE = Cluster(devices_per_node=8, device="h100")
LARGE = load_recipe("recipes/llama3_8b.py", [])[0].with_(
    **{"parallel.zero_stage": 1, "parallel.activation_checkpointing": "none", "batch.global_batch_size": 64}
)
MICRO_64 = load_recipe("recipes/llama_1b.py", [])[0].with_(
    **{"model.attention": "auto", "kernels": {"loss": "whole"}, "parallel.zero_stage": 1, "batch.micro_batch_size": 64}
)
FACTS = model_facts(LARGE.model, LARGE.vocab_size)


def refusal(recipe, cluster) -> RecipeError:
    with pytest.raises(RecipeError) as raised, suggesting(recipe, cluster):
        resolve(recipe, cluster)
    return raised.value


@pytest.fixture(scope="module")
def refused():
    return refusal(LARGE, NODE)


def test_each_suggested_plan_fits_and_is_the_same_run(refused):
    assert len(refused.nearest) == 3
    for arguments in refused.nearest:
        changed = LARGE.with_(**parse_assignments(arguments.replace("--set ", "").split()))
        memory = memory_of(resolve(changed, NODE))
        assert memory.needed <= memory.capacity
        assert changed.batch.global_batch_size == LARGE.batch.global_batch_size
        same = {"parallel": LARGE.parallel, "batch": LARGE.batch}
        assert changed.model_copy(update=same) == LARGE


def test_suggested_plans_are_the_fastest_that_fit():
    ways = cheapest_plans(LARGE, NODE, FACTS)
    rates = [way.time.tokens_per_second for way in ways]
    assert rates == sorted(rates, reverse=True)
    fitting = [plan for _, draft in legal_plans(LARGE, NODE, FACTS) if not memory_shortage(plan := assemble(draft))]
    assert rates[0] >= (1 - EQUAL) * max(predict(plan).tokens_per_second for plan in fitting)
    # None of them changes all fields of another one, and more.
    fields = [way.changes.keys() for way in ways]
    assert not any(one < other for one in fields for other in fields)


def test_figures_are_shown_and_options_have_their_own_lines():
    refused = refusal(MICRO_64, Cluster(device="a100"))
    text = refused.report().splitlines()
    start = text.index("cheapest ways to make it fit, with the same global batch:")
    assert [line.strip() for line in text[start + 1 :: 2]] == list(refused.nearest)
    assert all("tokens/s predicted, " in line and " GiB" in line for line in text[start + 2 :: 2])
    offloaded = ["offload" in plan for plan in refused.nearest]
    assert ["of host memory" in line for line in text[start + 2 :: 2]] == offloaded
    assert any(offloaded)
    assert json.loads(json.dumps(refused.as_dict()))["nearest"] == list(refused.nearest)


def test_one_change_is_suggested_if_it_is_enough():
    whole = DEVICES["a100"].model_copy(update={"memory_bytes": 80 * 2**30})  # the second plan needs 79.6 GiB
    first, second, third = refusal(MICRO_64, Cluster(device="a100", own_devices=[whole])).nearest
    assert first == "--set batch.micro_batch_size=8"
    assert second == "--set parallel.zero_stage=2 --set parallel.activation_checkpointing=full"
    assert third == "--set parallel.activation_checkpointing=full --set parallel.offload_optimizer=cpu"


def test_three_plans_are_suggested_even_if_all_change_the_same_field():
    recipe = load_recipe("recipes/llama3_70b.py:pipeline", [])[0].with_(**{"parallel.pipeline": 8})
    ways = refusal(recipe, Cluster(devices_per_node=8, device="a100")).nearest
    assert len(set(ways)) == 3
    assert all("parallel.offload_optimizer=cpu" in way for way in ways)


@pytest.mark.parametrize(
    ("nodes", "devices", "device"),
    [(1, 8, "a100"), (1, 1, "h100"), pytest.param(8, 8, "h100", marks=pytest.mark.breadth)],
)
def test_a_trillion_parameters_are_refused_with_the_arithmetic(nodes, devices, device):
    sizes = {"hidden_size": 25_600, "num_hidden_layers": 128, "num_attention_heads": 160, "intermediate_size": 81_920}
    huge = LARGE.with_(**{f"model.config.{name}": value for name, value in sizes.items()})
    text = refusal(huge, Cluster(nodes=nodes, devices_per_node=devices, device=device))
    (problem,) = text.problems
    assert problem.rule == "memory.fits"
    assert "GiB of 79.1 GiB" in problem.message
    assert "gradients" in problem.message
    assert "more devices" in problem.fix
    assert "cheapest" not in text.report() or text.nearest


def test_without_a_prediction_the_nearest_are_named():
    """A device of which nothing but its memory is known."""
    mine = Device(name="mine", memory_bytes=80 * 2**30, peak_flops={})
    cluster = Cluster(devices_per_node=8, device="mine", own_devices=[mine])
    assert cheapest_plans(LARGE, cluster, FACTS) == []
    text = refusal(LARGE, cluster)
    assert len(text.nearest) == 3
    assert text.nearest_figures == ()


def test_a_very_large_cluster_takes_no_long_time():
    recipe = LARGE.with_(**{"batch.global_batch_size": 7 * 10**6, "batch.micro_batch_size": 1})
    huge = recipe.with_(**{"data.sequence_length": 2**20, "model.config.max_position_embeddings": 2**20})
    refusal(huge, Cluster(nodes=10**6, devices_per_node=7, device="h100"))
