"""A loss of one's own is tried before workers start: what depends on how a run is divided is refused, with its line."""

from __future__ import annotations

import inspect
import json
import sys

import pytest
import torch

from llmtrain import Cluster, Custom, ObjectiveConfig
from llmtrain.errors import RecipeError
from llmtrain.plan.facts.model_facts import model_facts
from llmtrain.plan.facts.own_loss import Sizes, check_loss, own_metrics
from llmtrain.plan.rules import resolve
from llmtrain.recipe.own_code import object_paths
from tests.helpers import own_losses
from tests.helpers.batches import tiny_recipe

LOSSES = "llmtrain.objectives:"
VOCABULARY = 64
SIZES = Sizes(VOCABULARY, VOCABULARY)
SUM = "is not a sum over its rows: "
HIDDEN = Custom(own_losses.hidden_tokens, hidden_states=True)
RIGHT = [
    Custom(own_losses.token_sum),
    Custom(own_losses.document_mean, unit="document"),
    Custom(own_losses.pair_margin, unit="pair"),
    HIDDEN,
    Custom(own_losses.hidden_documents, hidden_states=True, unit="document"),
    Custom(own_losses.even_tokens, count=own_losses.count_even),
    Custom(LOSSES + "z_loss", weight=0.1),
    Custom(LOSSES + "focal"),
    Custom(LOSSES + "classification", count=LOSSES + "classified", classes=[3, 4, 5]),
    Custom(LOSSES + "reward_model", unit="pair"),
    Custom(LOSSES + "regression", unit="document", columns=["score"]),
    Custom(own_losses.weighted, columns=["a", "b"]),
    Custom(own_losses.weighted_documents, columns=["a"], unit="document"),
    Custom(own_losses.pair_with_margin, columns=["margin"], unit="pair"),
    Custom(own_losses.heavy, columns=["a"], count=own_losses.count_heavy),
    Custom(own_losses.heavy, columns=["a"], count=own_losses.count_heavy, unit="document"),
    Custom(own_losses.class_of_column, columns=["kind"], unit="document"),
]
OUTPUTS = {LOSSES + "classification": 3, LOSSES + "reward_model": 1, LOSSES + "regression": 1}
"""Those of losses for another head than that over the vocabulary."""
WRONG = {
    own_losses.mean_of_tokens: SUM + "as 'loss' it returns the sum",
    own_losses.mean_of_rows: SUM,
    own_losses.mixes_rows: SUM,
    own_losses.first_row_counts_double: SUM,
    own_losses.mixes_gradients: SUM + "its gradient differs from that of each row alone by",
    own_losses.counts_padding: "returns the count 24 for labels [4, 6], which have 12 items with objective.unit=token",
    own_losses.trains_padding: SUM,
    own_losses.needs_neighbours: "their left and right halves, which may be on different ranks",
    own_losses.nan_without_targets: "returns nan as a sum or count of 'loss'",
    own_losses.infinite: "returns inf as a sum or count of 'loss'",
    own_losses.detached: "returns a sum that does not depend on the logits",
    own_losses.not_reduced: "returns a tensor [4, 6] as a sum or count of 'loss'",
    own_losses.only_a_sum: "returns Tensor as 'loss' instead of a sum and a count",
    own_losses.without_loss: "returns a dictionary without 'loss', but with cross_entropy",
    own_losses.mean_as_metric: SUM + "as 'log_z' it returns the sum",
    own_losses.reserved_name: "returns a metric 'grad_norm'",
}


@pytest.mark.parametrize("objective", RIGHT, ids=lambda objective: objective.name.partition(":")[2])
def test_losses_that_can_be_divided_are_accepted(objective):
    check_loss(objective, None, Sizes(VOCABULARY, OUTPUTS.get(objective.name, VOCABULARY)))


def test_a_loss_whose_gradient_of_the_head_depends_on_other_rows_is_refused():
    objective = Custom(own_losses.mixes_weight_gradients, hidden_states=True, unit="document")
    with pytest.raises(RecipeError, match="its gradient differs from that of each row alone"):
        check_loss(objective, None, SIZES)


@pytest.mark.parametrize("objective", [objective for objective in RIGHT if objective.name in OUTPUTS])
def test_a_loss_for_another_head_is_refused_without_it(objective):
    with pytest.raises(RecipeError, match=f"has 64 outputs for a token, not {OUTPUTS[objective.name]}: set model.num_"):
        check_loss(objective, None, SIZES)


@pytest.mark.parametrize("loss", WRONG, ids=lambda loss: loss.__name__)
def test_losses_that_cannot_be_divided_are_refused_with_their_line(loss):
    with pytest.raises(RecipeError) as error:
        check_loss(Custom(loss), None, SIZES)
    (problem,) = error.value.problems
    assert (problem.rule, problem.field) == ("code.loss", "objective.name")
    line = inspect.getsourcelines(loss)[1]
    assert problem.message.startswith(f"{own_losses.__file__}, line {line}: tests.helpers.own_losses:{loss.__name__} ")
    assert WRONG[loss] in problem.message


@pytest.mark.parametrize(
    ("objective", "message"),
    [
        (Custom(own_losses.all_documents_normalised, unit="document"), SUM),
        (Custom(own_losses.token_sum, unit="document"), "which have 4 items with objective.unit=document"),
        (Custom(own_losses.document_mean, unit="pair"), "which have 2 items with objective.unit=pair"),
        (Custom(own_losses.even_tokens), "items with objective.unit=token"),
        (Custom(own_losses.token_sum, count=own_losses.count_even), "items by tests.helpers.own_losses:count_even"),
        (Custom(own_losses.document_mean, count=own_losses.count_rows), "returns nan as a sum or count of 'loss'"),
        (Custom(own_losses.normalised_weights, columns=["a"]), SUM),
        (Custom(own_losses.weights_of_neighbours, columns=["a"], unit="document"), SUM),
        (Custom(own_losses.heavy, columns=["a"]), "items with objective.unit=token"),
    ],
)
def test_units_and_counts_that_are_not_those_of_the_loss_are_refused(objective, message):
    with pytest.raises(RecipeError) as error:
        check_loss(objective, None, SIZES)
    assert error.value.problems[0].rule == "code.loss"
    assert message in error.value.problems[0].message


@pytest.mark.parametrize(
    ("loss", "columns"),
    [
        (own_losses.raises, ()),
        (own_losses.option_missing, ()),
        (own_losses.in_place, ()),
        (own_losses.token_sum, ("score",)),
        (own_losses.weighted_documents, ("a", "score")),
    ],
)
def test_a_loss_that_raises_is_reported(loss, columns):
    with pytest.raises(RecipeError) as error:
        check_loss(Custom(loss, columns=columns), None, SIZES)
    (problem,) = error.value.problems
    assert problem.rule == "code.raises"
    assert f"own_losses:{loss.__name__} fails for logits [4, 6, {VOCABULARY}]: " in problem.message


def test_the_trial_leaves_random_numbers_as_they_were():
    before = torch.get_rng_state()
    assert own_metrics(RIGHT[1], None, SIZES) == ("length",)
    check_loss(RIGHT[0], None, SIZES)
    assert torch.equal(torch.get_rng_state(), before)


def test_a_function_its_path_and_a_part_of_a_recipe_are_the_same():
    objective = Custom(own_losses.even_tokens, count=own_losses.count_even, weight=0.5)
    paths = {"name": "tests.helpers.own_losses:even_tokens", "count": "tests.helpers.own_losses:count_even"}
    assert objective == ObjectiveConfig(**paths, options={"weight": 0.5})
    assert dict(object_paths(objective)) == paths


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"name": "dpo", "options": {"weight": 1}}, "options would have no effect on 'dpo'"),
        ({"name": "dpo", "unit": "pair"}, "unit would have no effect on 'dpo'"),
        ({"columns": ["score"]}, "columns would have no effect on 'language_model'"),
        ({"name": "mine:loss", "columns": ["the score"]}, "'the score' cannot be the name of an argument; rename it"),
        ({"name": "mine:loss", "columns": ["class"]}, "'class' cannot be the name of an argument; rename it"),
        ({"name": "mine:loss", "columns": ["labels"]}, "the loss would be given 'labels' twice"),
        ({"name": "mine:loss", "columns": ["a", "b", "a"]}, "the loss would be given 'a' twice"),
        ({"name": "mine:loss", "columns": ["a"], "options": {"a": 1}}, "the loss would be given 'a' twice"),
        ({"count": "mine:count"}, "count would have no effect on 'language_model'"),
        (
            {"name": "mine:loss", "beta": 0.2},
            "beta would have no effect on 'mine:loss', which uses unit, count, columns, hidden_states, options",
        ),
    ],
)
def test_fields_of_other_losses_are_refused(fields, message):
    with pytest.raises(ValueError, match=message):
        ObjectiveConfig(**fields)


def resolved(objective: ObjectiveConfig, ranks: int = 2, **fields):
    """With known facts, so that the loss is not tried."""
    recipe = tiny_recipe(objective=objective, **fields)
    facts = model_facts(recipe.model, recipe.vocab_size)
    return resolve(recipe, Cluster(devices_per_node=ranks, device="cpu"), facts)


@pytest.mark.parametrize(
    ("objective", "fields", "rule", "fix"),
    [
        (RIGHT[1], {"parallel.sequence": 2}, "objective.slices", "parallel.sequence=1"),
        (HIDDEN, {"parallel.tensor": 2}, "objective.hidden_states", "objective.hidden_states=false"),
        (HIDDEN, {"parallel.backend": "data_parallel"}, "objective.hidden_states", "objective.hidden_states=false"),
        (HIDDEN, {"kernels.loss": "chunked"}, "kernels.loss", "kernels.loss=whole"),
        (RIGHT[1], {"data.packing": "concat"}, "objective.whole_pairs", "data.packing=best_fit"),
        (RIGHT[1], {"data.mask_documents": False}, "objective.documents", "data.mask_documents=true"),
        (RIGHT[2], {"data.packing": "none"}, "objective.whole_pairs", "data.packing=best_fit"),
        (RIGHT[1], {"kernels.loss": "chunked"}, "kernels.loss", "kernels.loss=whole"),
        (RIGHT[0], {"kernels.loss": "liger"}, "kernels.loss", "kernels.loss=chunked"),
        (RIGHT[0], {"kernels.loss": "compiled"}, "kernels.loss", "kernels.loss=chunked"),
    ],
)
def test_plans_that_cannot_be_right_are_refused(objective, fields, rule, fix):
    with pytest.raises(RecipeError) as error:
        resolved(objective, **fields)
    assert (rule, f"--set {fix}") in [(problem.rule, problem.fix) for problem in error.value.problems]


def test_tokens_may_be_divided_into_slices():
    assert resolved(RIGHT[0], **{"parallel.sequence": 2}).parallel.sequence == 2


def test_a_helper_process_tries_the_loss_with_the_vocabulary_of_the_model(tmp_path, monkeypatch):
    monkeypatch.setenv("LLMTRAIN_CACHE", str(tmp_path))
    monkeypatch.setattr(sys, "path", [*sys.path])
    (tmp_path / "mine_of_the_test.py").write_text(
        "def loss(logits, labels, token):\n"
        "    chosen = logits[..., token] * (labels >= 0)\n"
        "    return chosen.sum() / len(labels), (labels >= 0).sum()\n"
    )
    recipe = tiny_recipe(objective=Custom("mine_of_the_test:loss", token=255)).with_(code_dir=str(tmp_path))
    with pytest.raises(RecipeError) as error:
        resolve(recipe, Cluster(devices_per_node=1, device="cpu"))
    (problem,) = error.value.problems
    assert problem.message.startswith(f"{tmp_path}/mine_of_the_test.py, line 1: mine_of_the_test:loss {SUM}")
    assert "mine_of_the_test" not in sys.modules
    right = tmp_path / "mine_of_the_test.py"
    right.write_text(right.read_text().replace(" / len(labels)", ""))
    plan = resolve(recipe, Cluster(devices_per_node=2, device="cpu"))
    assert set(plan.code.files) == {"mine_of_the_test.py"}
    requests = list((tmp_path / "own_code").glob("*.json"))
    resolve(recipe.with_(**{"parallel.zero_stage": 3}), Cluster(devices_per_node=2, device="cpu"))
    assert list((tmp_path / "own_code").glob("*.json")) == requests, "other layouts must not be tried again"
    assert json.loads(requests[0].read_text())["files"]
