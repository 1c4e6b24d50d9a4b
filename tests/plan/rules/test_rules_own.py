"""The rules for models of a user's own, on the engine: what they refuse trains something else, or fails there.

That plans which they allow train correctly is tested in `tests/trials/verify/test_own_model.py`.
"""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from llmtrain.models.build import build_model
from llmtrain.models.own_facts import answer
from llmtrain.plan.draft import Draft
from llmtrain.plan.facts.model import ModelFacts
from llmtrain.plan.facts.own_model import KnownModel
from llmtrain.plan.rules import broken, resolve
from llmtrain.recipe import ModelConfig, Recipe
from llmtrain.recipe.cluster import Cluster
from tests.helpers.batches import tiny_recipe
from tests.helpers.harness import run_ranks
from tests.helpers.own_models import SPLIT
from tests.helpers.traces import Trace, engine_of, plain_run, trace, worst

ROOT = str(Path(__file__).parents[3])
STEPS = 2
FP32 = 1e-5
"""The bound of the project for fp32; see test_parity.py."""
STAGES = {"parallel.pipeline": 2, "parallel.zero_stage": 1, "batch.micro_batch_size": 2}
SLICES = {"parallel.sequence": 2, "parallel.zero_stage": 1}
TENSOR = {"parallel.tensor": 2, "parallel.zero_stage": 1}
ROWS_FOR_COLUMNS = SPLIT | {"layers.*.attention.k": "rowwise"}
CASES: dict[str, tuple[str, str, dict[str, Any], int, dict[str, Any]]] = {
    # name, rule or none, model, fields of ModelConfig, ranks, fields of the recipe
    "a mean over earlier documents": ("own.documents", "MixesDocuments", {}, 1, {}),
    "a mask of its own": ("own.documents", "OwnMask", {}, 1, {}),
    "positions are data": ("", "Decoder", {}, 1, {}),
    "the last layer reads the first": ("own.stages", "Skips", {"config": {"depth": 4}}, 2, STAGES),
    "each layer reads the one before": ("", "Decoder", {"config": {"depth": 4}}, 2, STAGES),
    "two layers share a weight": ("", "TiedLayers", {"config": {"depth": 4}}, 2, STAGES),
    "slices of a mean": ("own.sequence", "MixesDocuments", {}, 2, SLICES | {"data.packing": "none"}),
    "slices of a loss": ("own.sequence", "Auxiliary", {}, 2, SLICES),
    "slices": ("", "Decoder", {}, 2, SLICES),
    "no plan for its matrices": ("own.tensor", "Decoder", {}, 2, TENSOR),
    "rows for columns": ("own.tensor", "Decoder", {"tp_plan": ROWS_FOR_COLUMNS}, 2, TENSOR),
    "a plan for its matrices": ("", "Decoder", {"tp_plan": SPLIT}, 2, TENSOR),
}


def _recipe(name: str) -> Recipe:
    _, model, fields, _, others = CASES[name]
    config = {"vocab_size": 256, **fields.get("config", {})}
    own = ModelConfig(**{"build": f"tests.helpers.own_models:{model}", **fields, "config": config})
    return tiny_recipe(**{"optim.name": "sgd", "optim.lr": 0.1, "optim.clip_grad_norm": 0.0}).with_(
        model=own, code_dir=ROOT, **others
    )


def _trained(rank: int, facts: dict[str, ModelFacts]) -> dict[str, Trace | str]:
    """The run of each plan, or its error."""
    found: dict[str, Trace | str] = {}
    for name, of_model in facts.items():
        recipe, ranks = _recipe(name), CASES[name][3]
        try:
            plan = resolve(recipe, Cluster(devices_per_node=ranks), of_model)
            engine, batch = engine_of(plan), plan.batch
            sizes = (batch.micro_batch_size, batch.gradient_accumulation_steps)
            found[name] = trace(engine, range(STEPS), *sizes, engine.data_parallel_rank, plan.data_parallel_size)
        except Exception as error:
            found[name] = f"{type(error).__name__}: {error}"
    return found


@cache
def _facts_of(model: str) -> ModelFacts:
    """What the helper process finds, in this process. model: its fields, as JSON."""
    request = {"model": json.loads(model), "vocab_size": 256, "folder": ROOT}
    return KnownModel.model_validate_json(answer(request)["known"]).facts


def _without_trials(facts: ModelFacts) -> ModelFacts:
    """The facts, as if the trials had found nothing."""
    assert facts.trials is not None
    nothing = facts.trials.model_copy(update={"documents": "", "stages": "", "sequence": "", "tensor": ""})
    return facts.model_copy(update={"trials": nothing})


@pytest.mark.slow
def test_refused_plans_train_something_else_and_allowed_ones_do_not():
    facts: dict[int, dict[str, ModelFacts]] = {1: {}, 2: {}}
    for name, (rule, _, _, ranks, _) in CASES.items():
        recipe = _recipe(name)
        found = _facts_of(recipe.model.model_dump_json())
        refused, _ = broken(Draft(recipe, Cluster(devices_per_node=ranks), found))
        assert {one.rule for one in refused} == ({rule} if rule else set()), name
        facts[ranks][name] = _without_trials(found)
    for ranks, of_models in facts.items():
        for of_rank in run_ranks(ranks, _trained, of_models):
            for name, run in of_rank.items():
                recipe = _recipe(name)
                expected = plain_run(recipe, STEPS, recipe.batch.micro_batch_size)
                deviation = 1.0 if isinstance(run, str) else worst(run.losses, expected.losses)
                assert deviation > 1e-4 if CASES[name][0] else deviation < FP32, (name, run)
                assert not isinstance(run, str) or "FamilyError: parallel." in run


def test_copies_of_nn_data_parallel_would_call_the_original_module():
    model = build_model(_recipe("positions are data"), torch.float32, torch.device("cpu"))
    assert model._replicate_for_data_parallel()._user[0] is model._user[0]
