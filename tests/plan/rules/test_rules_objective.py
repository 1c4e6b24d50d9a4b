"""Unsupported objectives are refused with the reason."""

from __future__ import annotations

import pytest
import torch

from llmtrain.errors import RecipeError
from llmtrain.models import build_model, model_configuration
from llmtrain.plan.described import split_lines
from llmtrain.plan.rules import resolve
from llmtrain.recipe.cluster import Cluster
from tests.helpers.batches import tiny_recipe

DPO = {"objective.name": "dpo", "data.sources": [{"name": "pairs.jsonl"}]}
GPT2 = {"model.architecture": "gpt2", "model.config": {"vocab_size": 256, "n_embd": 32, "n_layer": 1, "n_head": 2}}
CPMANT = {
    "model.architecture": "cpmant",
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
        (CPMANT, "objective.documents", "objective.name"),
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
    resolve(tiny_recipe(**kto, **CPMANT, **{"data.packing": "none"}), Cluster())
    with pytest.raises(RecipeError, match="lets packed documents influence"):
        resolve(tiny_recipe(**kto, **CPMANT), Cluster())


def test_dropout_of_the_configuration_is_off_unless_the_recipe_asks_for_it():
    def noted(**fields):
        notes = resolve(tiny_recipe(**GPT2, **fields), Cluster()).notes
        return [note["message"] for note in notes if note["rule"] == "objective.dropout"]

    assert noted() == []
    assert noted(**DPO) == [
        "the dropout of the model's configuration is off with 'dpo': resid_pdrop, embd_pdrop, attn_pdrop"
    ]
    model = build_model(tiny_recipe(**GPT2, **DPO), torch.float32, torch.device("cpu"))
    rates = {name: one.p for name, one in model.named_modules() if isinstance(one, torch.nn.Dropout)}
    assert set(rates.values()) == {0.0}
    kept = tiny_recipe(**GPT2, **DPO, **{"model.config.embd_pdrop": 0.1})
    assert build_model(kept, torch.float32, torch.device("cpu")).transformer.drop.p == 0.1
    assert model_configuration(tiny_recipe(**GPT2, **DPO)).resid_pdrop == 0.1  # an export's


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
