"""A model that brings its own code trains as any other: planned, cut into stages, compared, exported with its code."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from llmtrain.errors import FamilyError, RecipeError
from llmtrain.models import build_model, find_cut_and_split
from llmtrain.plan.facts.built_model import _without_gradient
from llmtrain.plan.facts.model_facts import model_facts
from llmtrain.recipe import Recipe
from llmtrain.train.start import check_pretrained
from tests.helpers.batches import tiny_recipe
from tests.helpers.harness import run_ranks
from tests.helpers.own_code import write_folder
from tests.helpers.traces import Trace, assert_same, plain_run, plan_of, trace_plan, worst

STEPS = 5
FP32 = 1e-5  # as in test_parity.py


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return write_folder(tmp_path_factory.mktemp("own"))


def _recipe(folder: Path, **fields: object) -> Recipe:
    model = {"architecture": None, "config": {}, "pretrained": str(folder), "trust_remote_code": True}
    sgd = {"optim.name": "sgd", "optim.lr": 0.1}
    return tiny_recipe(**{"model": {**tiny_recipe().model.model_dump(), **model}, **sgd, **fields})


def _pipeline(folder: Path) -> Recipe:
    return _recipe(folder, **{"parallel.pipeline": 2, "parallel.zero_stage": 1, "batch.micro_batch_size": 2})


DDP = {"parallel.backend": "accelerate", "parallel.accelerate": "ddp", "parallel.zero_stage": 0}
FSDP2 = {"parallel.backend": "accelerate", "parallel.accelerate": "fsdp2", "parallel.zero_stage": 3}


def _train_each(rank: int, recipes: list[Recipe]) -> list[Trace]:
    plans = [plan_of(recipe, 2) for recipe in recipes]
    return [trace_plan(plan, STEPS, rank if plan.data_parallel_size > 1 else 0) for plan in plans]


def _train(rank: int, folder: Path) -> Trace:
    return trace_plan(plan_of(_pipeline(folder), 2), STEPS, rank=0)


def test_a_field_that_own_code_does_not_have_is_refused(folder):
    with pytest.raises(RecipeError, match=r"model\.config\.widht: 'own_of_the_tests' has no such configuration"):
        model_facts(_recipe(folder, **{"model.config": {"widht": 8}}).model, None)


def test_a_plan_has_the_size_of_own_code(folder):
    recipe = _pipeline(folder)
    facts = model_facts(recipe.model, recipe.vocab_size)
    assert (facts.model_type, facts.layers, facts.tied_embeddings) == ("own_of_the_tests", 3, True)
    layer = 2 * 32 + 4 * 32 * 32 + 32 + 4 * 32 * 32 + 64 + 32
    assert facts.layer_parameters == (layer,) * 3
    assert facts.parameters == 3 * layer + 256 * 32 + 64 * 32 + 64


def test_two_stages_of_own_code_match_the_plain_loop(folder):
    expected = plain_run(_recipe(folder), STEPS)
    for run in run_ranks(2, _train, folder):
        assert worst(run.losses, expected.losses) < FP32
        assert worst(run.grad_norms, expected.grad_norms) < FP32
        assert run.weights.keys() == expected.weights.keys()
        for name, value in run.weights.items():
            np.testing.assert_allclose(value, expected.weights[name], rtol=0, atol=1e-5, err_msg=name)


def test_code_that_is_not_trusted_is_not_run(folder):
    recipe = _pipeline(folder).with_(**{"model.trust_remote_code": False})
    with pytest.raises(RecipeError) as error:
        model_facts(recipe.model, recipe.vocab_size)
    assert error.value.problems[0].fix == "--set model.trust_remote_code=true"


def test_own_code_that_cannot_be_cut_is_refused(tmp_path):
    """Its forward asks each layer for a part that only a layer of its own has."""
    folder = write_folder(tmp_path)
    code = folder / "modeling_own.py"
    code.write_text(
        code.read_text().replace(
            "for layer in self.layers:", "for layer in self.layers:\n            layer.norm.weight"
        )
    )
    with pytest.raises(FamilyError, match="own_of_the_tests"):
        find_cut_and_split(_pipeline(folder), 2)


NORM = "self.norm = nn.LayerNorm(config.hidden_size)"
UNUSED = f"{NORM}\n        self.unused = nn.Linear(config.hidden_size, 8)"
FROZEN = f"{UNUSED}.requires_grad_(False)"


def test_a_parameter_without_a_gradient_is_frozen_and_named(tmp_path):
    recipe = _recipe(write_folder(tmp_path, {NORM: UNUSED}))
    plan = plan_of(recipe, 2)
    (note,) = (one for one in plan.notes if one["rule"] == "model.without_gradient")
    assert note["message"].startswith("the loss of texts does not depend on unused (2 weights): they are frozen")
    model = build_model(recipe, torch.float32, torch.device("cpu"))
    assert {name for name, one in model.named_parameters() if not one.requires_grad} == {"unused.weight", "unused.bias"}
    assert plan.model.trained_parameters == plan.model.parameters - (32 * 8 + 8)


@pytest.mark.breadth
@pytest.mark.parametrize("code", [UNUSED, FROZEN], ids=["unused", "frozen"])
def test_a_frozen_parameter_does_not_change(code, tmp_path):
    folder = write_folder(tmp_path, {NORM: code})
    expected = plain_run(_recipe(folder), STEPS)
    strategies = [{"parallel.zero_stage": 1}, {"parallel.zero_stage": 3}, DDP, FSDP2]
    for runs in run_ranks(2, _train_each, [_recipe(folder, **one) for one in strategies] + [_pipeline(folder)]):
        for number, run in enumerate(runs):
            assert_same(run, expected, number)


def test_parameters_without_gradient_are_found_in_code_that_reads_positions():
    """`transformers` looks at positions where it is given no mask."""
    config = AutoConfig.for_model("llama", hidden_size=32, intermediate_size=32, num_hidden_layers=1)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
        model.unused = torch.nn.Linear(3, 3, bias=False)
    assert _without_gradient(model) == ("unused.weight",)
    model.unused.requires_grad_(False)
    assert _without_gradient(model) == ()


def test_own_code_is_tried_with_packed_documents(folder, tmp_path):
    check_pretrained(_recipe(folder))
    (tmp_path / "mixing").mkdir()
    sums = {"self.lm_head(self.norm(hidden))": "self.lm_head(self.norm(hidden + hidden.cumsum(1)))"}
    mixing = _recipe(write_folder(tmp_path / "mixing", sums))
    with pytest.raises(RecipeError, match="'own_of_the_tests' lets packed documents influence each other"):
        check_pretrained(mixing)
    check_pretrained(mixing.with_(**{"data.packing": "none"}))
