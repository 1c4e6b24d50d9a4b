"""Sizes that no machine has are refused at once with a field, a value and a fix."""

from __future__ import annotations

import functools
import json
import math
import re
import time
from pathlib import Path

import pytest
from pydantic import ValidationError

from llmtrain.errors import DataError, RecipeError
from llmtrain.plan import Plan
from llmtrain.plan.facts import model_facts as facts_module
from llmtrain.plan.facts import pretrained_config, vocabulary
from llmtrain.plan.facts.model_facts import MAX_LAYERS, MAX_SIZE, model_facts
from llmtrain.plan.load import load_recipe
from llmtrain.plan.rules import resolve
from llmtrain.plan.search.nearest import nearest_plans
from llmtrain.plan.stages import balance
from llmtrain.recipe import MAX_NUMBER, ModelConfig
from llmtrain.recipe.cluster import MAX_RANKS, Cluster
from llmtrain.system.hub import stored_file
from tests.helpers.small_plan import small_plan

ROOT = Path(__file__).parents[2]
H100 = Cluster(device="h100")
SECONDS = 10.0
"""Of the processor, imports of libraries included; a hang takes for ever."""


@pytest.fixture(autouse=True)
def _at_once():
    started = time.process_time()
    yield
    assert time.process_time() - started < SECONDS


@pytest.fixture(scope="module")
def llama():
    recipe = load_recipe(str(ROOT / "recipes/llama_1b.py"), [])[0]
    return recipe.with_(**{"model.attention": "auto", "kernels": "auto", "parallel.zero_stage": 1})


def refusal(recipe, cluster, **fields):
    with pytest.raises(RecipeError) as caught:
        resolve(recipe.with_(**{name.replace("__", "."): value for name, value in fields.items()}), cluster)
    return caught.value.problems


@pytest.mark.parametrize("field", ["batch.global_batch_size", "data.sequence_length", "train.max_steps"])
@pytest.mark.parametrize("value", [10**30, MAX_NUMBER + 1, 0, -1])
def test_numbers_of_a_recipe_have_bounds(llama, field, value):
    with pytest.raises(RecipeError) as caught:
        llama.with_(**{field: value})
    (problem,) = caught.value.problems
    assert problem.field == field
    assert str(value) in problem.message


def test_more_expert_ranks_than_replicas_are_refused():
    """The memory of such a plan is not computed."""
    recipe = load_recipe(str(ROOT / "recipes/tiny.py:moe"), [])[0]
    found = refusal(recipe, Cluster(devices_per_node=8, device="h100"), parallel__pipeline=4, parallel__expert=4)
    assert "layout.expert_divides" in {one.rule for one in found}


@pytest.mark.parametrize("name", ["x" * 5000, "/" + "x" * 5000])
def test_names_that_are_too_long_for_a_path(name, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(DataError, match="is neither a file"):
        vocabulary.named_template(name)
    assert stored_file(name, "tokenizer.json") is None
    assert facts_module.pretrained_vocabulary(ModelConfig(pretrained=name)) is None


@pytest.mark.parametrize("key", ["hidden_size", "num_attention_heads", "vocab_size", "intermediate_size"])
def test_sizes_of_a_model_have_bounds(llama, key):
    (problem,) = refusal(llama, H100, **{f"model__config__{key}": MAX_SIZE + 1})
    assert (problem.rule, problem.field) == ("model.size", f"model.config.{key}")
    assert f"{MAX_SIZE + 1:,}" in problem.message


@pytest.mark.parametrize(("family", "key"), [("llama", "num_hidden_layers"), ("gpt2", "n_layer")])
def test_layers_are_bounded_before_they_are_counted(family, key):
    with pytest.raises(RecipeError, match=f"must be at most {MAX_LAYERS:,}"):
        model_facts(ModelConfig(architecture=family, config={key: 10**9, "vocab_size": 50}), None)


def test_layers_are_bounded_before_they_are_built():
    model = ModelConfig(architecture="phi", config={"num_hidden_layers": 10**9})
    with pytest.raises(RecipeError, match=f"must be at most {MAX_LAYERS:,}"):
        model_facts(model, 50)


def test_a_trillion_parameters_do_not_fit_on_one_device(llama):
    sizes = {"hidden_size": 102_400, "intermediate_size": 409_600, "num_hidden_layers": 8}
    (problem,) = refusal(llama, H100, **{f"model__config__{key}": size for key, size in sizes.items()})
    assert problem.rule == "memory.fits"
    assert "of 79.1 GiB on a h100" in problem.message
    assert "optimizer 8,955.1 GiB" in problem.message


@pytest.mark.parametrize(
    ("nodes", "per_node", "field"),
    [
        (10**12, 8, "nodes"),
        (10**30, 1, "nodes"),
        (10**9, 8, "devices_per_node"),
        (0, 1, "nodes"),
        (1, -1, "devices_per_node"),
    ],
)
def test_clusters_have_bounds(nodes, per_node, field):
    with pytest.raises(ValidationError) as caught:
        Cluster(nodes=nodes, devices_per_node=per_node)
    assert [error["loc"] for error in caught.value.errors()] == [(field,)]


def test_a_batch_size_with_few_divisors_is_refused(llama):
    """Primes, and nearly so: neither the nearest sizes nor the nearest plans are found by trying all."""
    batch = {"batch__global_batch_size": 999_999_999_989, "batch__micro_batch_size": 999_999_999}
    cluster = Cluster(devices_per_node=7, device="h100")
    (problem, *_) = refusal(llama, cluster, **batch)
    assert problem.rule == "batch.divides"
    huge = llama.with_(**{name.replace("__", "."): value for name, value in batch.items()})
    nearest_plans(huge.with_(**{"parallel.pipeline": 7}), cluster)


def test_the_largest_number_of_ranks_is_refused_by_the_batch(llama):
    cluster = Cluster(nodes=MAX_RANKS, device="h100")
    assert refusal(llama, cluster)[0].rule == "batch.divides"
    nearest_plans(llama, cluster)


def test_a_thousand_layers_are_balanced_over_many_stages():
    costs = [1.0 + math.sin(layer) / 2 for layer in range(MAX_LAYERS)]
    bounds = balance(costs, 64)
    assert [bound.first for bound in bounds][1:] == [bound.end for bound in bounds][:-1]
    shares = [sum(costs[bound.first : bound.end]) for bound in bounds]
    assert max(shares) < sum(costs) / 64 + max(costs)


def test_a_model_of_the_hub_is_refused_if_the_hub_is_unreachable(monkeypatch, tmp_path):
    """A missing model is reported at once, with what to download."""
    monkeypatch.setattr(pretrained_config, "hub_has", lambda name, revision: None)
    with pytest.raises(RecipeError) as caught:
        model_facts(ModelConfig(pretrained="nobody/knows-this"), None)
    (problem,) = caught.value.problems
    assert problem.field == "model.pretrained"
    assert "cannot be reached" in problem.message
    assert "hf download nobody/knows-this" in problem.fix


def test_an_unreachable_hub_is_queried_once(monkeypatch):
    import huggingface_hub

    asked = []

    def refused(url, **_):
        asked.append(url)
        raise ConnectionError("nobody there")

    monkeypatch.setattr(huggingface_hub, "get_hf_file_metadata", refused)
    with pytest.raises(RecipeError, match="cannot be reached"):
        model_facts(ModelConfig(pretrained="nobody/knows-this"), None)
    assert len(asked) == 1


@pytest.mark.parametrize(
    ("field", "value", "said"),
    [
        ("model.layers", 10**12, "of at most 100,000"),
        ("model.hidden_size", 10**400, "is larger than 1e+30"),
        ("recipe.parallel.pipeline", 1000, "fewer devices"),
        ("batch.gradient_accumulation_steps", 0, "a smaller batch"),
    ],
)
def test_a_plan_from_a_file_that_no_recipe_leads_to_is_refused(field, value, said):
    document = small_plan().model_dump(mode="json")
    *parts, last = field.split(".")
    functools.reduce(dict.__getitem__, parts, document)[last] = value
    with pytest.raises(ValidationError, match=re.escape(said)):
        Plan.model_validate_json(json.dumps(document))
