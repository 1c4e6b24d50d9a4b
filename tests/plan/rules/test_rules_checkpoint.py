"""Options of retention, evaluation and samples without an effect are refused."""

from __future__ import annotations

import pytest

from llmtrain.errors import RecipeError
from llmtrain.plan.rules import resolve
from llmtrain.recipe.cluster import Cluster

ACCURACY = "tests.helpers.own_metrics:accuracy"
SAVED = {"checkpoint.every_steps": 10, "evaluation.every_steps": 5, "train.max_steps": 100, "checkpoint.keep_last": 2}


@pytest.mark.parametrize(
    ("fields", "broken"),
    [
        ({"checkpoint.keep_last": None, "checkpoint.keep_best": 1}, ["checkpoint.keeps_all"]),
        ({"checkpoint.keep_last": None, "checkpoint.keep_every_steps": 20}, ["checkpoint.keeps_all"]),
        ({"checkpoint.keep_every_steps": 15}, ["checkpoint.never_saved"]),
        ({"checkpoint.keep_every_steps": 20, "checkpoint.every_steps": 0}, ["checkpoint.never_saved"]),
        ({"checkpoint.keep_best": 1, "evaluation.every_steps": 0}, ["checkpoint.never_evaluated"]),
        ({"checkpoint.keep_best": 1, "evaluation.every_steps": 51}, ["checkpoint.never_evaluated"]),
        ({"checkpoint.keep_best": 1, "checkpoint.keep_every_steps": 20}, []),
        ({"checkpoint.keep_best": 1, "evaluation.every_steps": 25}, []),
        ({"evaluation.every_steps": 0, "evaluation.sources": [{"name": "a"}]}, ["evaluation.never"]),
        ({"evaluation.every_steps": 0, "evaluation.sets.b": [{"name": "a"}]}, ["evaluation.never"]),
        ({"evaluation.sets.b": [{"name": "a", "weight": 2.0}]}, ["evaluation.weight"]),
        ({"evaluation.every_steps": 0, "evaluation.at_start": True}, ["evaluation.never"]),
        ({"evaluation.every_steps": 0, "evaluation.at_start": False}, []),
        ({"evaluation.every_steps": 0, "evaluation.metrics": {"a": ACCURACY}}, ["evaluation.never"]),
        ({"evaluation.metrics": {"perplexity": ACCURACY, "a_by_set": ACCURACY}}, ["evaluation.metrics"] * 2),
        ({"evaluation.metrics": {"a": ACCURACY}, "checkpoint.best_metric": "a"}, []),
        ({"evaluation.metrics": {"a": ACCURACY}, "checkpoint.best_metric": "b"}, ["evaluation.metric"]),
        ({"evaluation.sources": [{"name": "a"}], "data.eval_fraction": 0.2}, ["evaluation.fraction"]),
        ({"evaluation.sources": [{"name": "a"}], "data.eval_fraction": 0.0}, []),
        ({"evaluation.sources": [{"name": "a"}], "data.eval_fraction": 0.01, "evaluation.at_start": True}, []),
        ({"evaluation.sources": [{"name": "a", "weight": 2.0}], "data.eval_fraction": 0.0}, ["evaluation.weight"]),
        ({"tasks.limit": 5}, ["tasks.never"]),
        ({"tasks.names": ["a"], "tasks.every_steps": 15}, ["tasks.never"]),
        ({"tasks.names": ["a"], "export.at_end": False}, ["tasks.never"]),
        ({"tasks.names": ["a"], "tasks.every_steps": 20, "export.at_end": False}, []),
        ({"samples.every_steps": 5}, ["samples.never"]),
        ({"samples.prompts": ["a"]}, ["samples.never"]),
        ({"samples.prompts": ["a"], "samples.every_steps": 5}, []),
    ],
)
def test_checkpoint_fields_without_effect_are_refused(tiny, fields, broken):
    recipe = tiny.with_(**{**SAVED, **fields})
    try:
        resolve(recipe, Cluster())
    except RecipeError as error:
        found = [problem.rule for problem in error.problems]
    else:
        found = []
    assert found == broken


STOPPING = {"train.early_stopping": {"patience": 3}}


@pytest.mark.parametrize(
    ("fields", "broken"),
    [
        (STOPPING, []),
        ({**STOPPING, "evaluation.every_steps": 0}, ["early_stopping.never"]),
        ({"train.early_stopping": {"patience": 20}}, ["early_stopping.never"]),
        ({"train.early_stopping": {"patience": 3, "metric": "perplexty"}}, ["evaluation.metric"]),
        ({"train.early_stopping": {"patience": 3, "metric": "eval_loss_by_set/web"}}, ["evaluation.metric"]),
        (
            {
                "train.early_stopping": {"patience": 3, "metric": "eval_loss_by_set/web"},
                "evaluation.sets.web": [{"name": "a"}],
            },
            [],
        ),
        ({"checkpoint.best_metric": "reward_accuracy", "checkpoint.keep_best": 1}, ["evaluation.metric"]),
        ({"checkpoint.best_metric": "eval_loss_by_source/a", "checkpoint.keep_best": 1}, []),
    ],
)
def test_metrics_that_no_evaluation_has_are_refused(tiny, fields, broken):
    try:
        resolve(tiny.with_(**{**SAVED, **fields}), Cluster())
    except RecipeError as error:
        found = [problem.rule for problem in error.problems]
    else:
        found = []
    assert found == broken
