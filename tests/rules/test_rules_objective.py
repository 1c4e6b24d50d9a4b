"""Unsupported objectives are refused with the reason."""

from __future__ import annotations

import pytest

from llmtrain.cluster import Cluster
from llmtrain.errors import RecipeError
from llmtrain.plan.described import split_lines
from llmtrain.rules import resolve
from tests.helpers.batches import tiny_recipe

DPO = {"objective.name": "dpo", "data.sources": [{"name": "pairs.jsonl"}]}
MAMBA = {
    "model.architecture": "mamba",
    "model.config": {"vocab_size": 256, "hidden_size": 32, "num_hidden_layers": 2},
}


@pytest.mark.parametrize(
    ("fields", "rule", "field"),
    [
        ({"data.packing": "concat"}, "objective.whole_pairs", "data.packing"),
        ({"data.packing": "none"}, "objective.whole_pairs", "data.packing"),
        ({"data.too_long": "cut_turns"}, "objective.whole_pairs", "data.too_long"),
        ({"data.train_on": "all"}, "objective.completions", "data.train_on"),
        ({"data.mask_documents": False}, "objective.documents", "data.mask_documents"),
        (MAMBA, "objective.documents", "objective.name"),
    ],
)
def test_unsupported_preference_runs_are_refused(fields, rule, field):
    resolve(tiny_recipe(**DPO), Cluster())
    resolve(tiny_recipe(**fields), Cluster())  # without pairs it is allowed
    with pytest.raises(RecipeError) as caught:
        resolve(tiny_recipe(**DPO, **fields), Cluster())
    assert [(problem.rule, problem.field) for problem in caught.value.problems] == [(rule, field)]


def test_single_completions_may_be_unpacked():
    kto = DPO | {"objective.name": "kto"}
    resolve(tiny_recipe(**kto, **{"data.packing": "none"}), Cluster())
    resolve(tiny_recipe(**kto, **MAMBA, **{"data.packing": "none"}), Cluster())
    with pytest.raises(RecipeError, match="carries state from each packed document"):
        resolve(tiny_recipe(**kto, **MAMBA), Cluster())


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({}, "tokens a step"),
        (DPO, "tokens a step, at least 8 pairs"),
        (DPO | {"objective.name": "kto"}, "tokens a step, at least 8 completions"),
        (DPO | {"objective.name": "kto", "data.packing": "none"}, "tokens a step, 8 completions"),
    ],
)
def test_a_plan_says_how_many_pairs_or_completions_a_step_has(fields, said):
    plan = resolve(tiny_recipe(**fields, **{"batch.global_batch_size": 8}), Cluster())
    (line,) = (line for line in split_lines(plan) if line.startswith("batch"))
    assert line.endswith(said)


def test_liger_loss_is_refused_for_preferences():
    gpu = Cluster(device="h100")
    with pytest.raises(RecipeError, match="only known once all tokens of its completion are"):
        resolve(tiny_recipe(**DPO, **{"kernels.loss": "liger"}), gpu)
    for loss in ("whole", "chunked", "compiled"):
        resolve(tiny_recipe(**DPO, **{"kernels.loss": loss}), gpu)
