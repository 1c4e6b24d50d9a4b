"""A metric of one's own is tried before workers start: what depends on the layout is refused, with its line."""

from __future__ import annotations

import inspect

import pytest
import torch

from llmtrain import Cluster, Custom, EvalConfig, ObjectiveConfig
from llmtrain.errors import RecipeError
from llmtrain.plan.facts.own_loss import Sizes
from llmtrain.plan.facts.own_metrics import check_metrics
from llmtrain.plan.rules import resolve
from tests.helpers import own_losses, own_metrics
from tests.helpers.batches import CLASSIFIER, tiny_recipe

SIZES = Sizes(64, 64)
SUM = "is not a sum over tokens: it returns the "
WRONG = {
    own_metrics.mean: SUM + "sum 0.5",
    own_metrics.mean_with_count: SUM + "sum 0.5",
    own_metrics.needs_neighbours: SUM + "sum",
    own_metrics.only_a_sum: "returns Tensor instead of a sum and a count",
    own_metrics.of_tokens: "returns a tensor [12] as its sum, which must be a number",
    own_metrics.words: "returns str as its sum, which must be a number",
    own_metrics.infinite: "returns the sum ",
    own_metrics.in_place: "changes the logits or the labels",
    own_metrics.random: "draws random numbers",
}


def _checked(objective=None, sizes=SIZES, **metrics) -> None:
    check_metrics(EvalConfig(metrics=metrics).metrics, objective or ObjectiveConfig(), None, sizes)


def test_sums_over_tokens_are_accepted_and_random_numbers_are_left_as_they_were():
    before = torch.get_rng_state()
    _checked(accuracy=own_metrics.accuracy, p=own_metrics.probability, even=own_metrics.entropy_of_even)
    _checked(CLASSIFIER["objective"], Sizes(64, 3), share=own_metrics.accuracy)
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("metric", WRONG, ids=lambda metric: metric.__name__)
def test_metrics_that_cannot_be_summed_are_refused_with_their_line(metric):
    with pytest.raises(RecipeError) as error:
        _checked(mine=metric)
    (problem,) = error.value.problems
    assert (problem.rule, problem.field) == ("code.metric", "evaluation.metrics.mine")
    line = inspect.getsourcelines(metric)[1]
    path = f"tests.helpers.own_metrics:{metric.__name__}"
    assert problem.message.startswith(f"{own_metrics.__file__}, line {line}: {path} {WRONG[metric]}")


def test_the_plan_reports_the_faults_of_all_metrics_at_once():
    metrics = {"a": own_metrics.mean, "b": own_metrics.raises, "c": own_metrics.without_labels}
    recipe = tiny_recipe(evaluation=EvalConfig(every_steps=5, metrics={**metrics, "d": own_metrics.accuracy}))
    with pytest.raises(RecipeError) as error:
        resolve(recipe, Cluster())
    found = [(problem.rule, problem.field) for problem in error.value.problems]
    fields = [f"evaluation.metrics.{name}" for name in metrics]
    assert found == [*zip(("code.metric", "code.raises", "code.raises"), fields, strict=True)]
    assert "raises fails for logits [12, 256]: IndexError" in error.value.problems[1].message


def test_files_of_metrics_are_recorded():
    recipe = tiny_recipe(evaluation=EvalConfig(every_steps=5, metrics={"right": own_metrics.accuracy}))
    assert recipe.evaluation.metrics == {"right": "tests.helpers.own_metrics:accuracy"}
    assert any(name.endswith("own_metrics.py") for name in resolve(recipe, Cluster()).code.files)


def test_a_metric_cannot_have_the_name_of_one_of_the_loss():
    objective = Custom(own_losses.document_mean, unit="document")
    with pytest.raises(RecipeError, match=r"is a metric that tests\.helpers\.own_losses:document_mean returns; use"):
        _checked(objective, length=own_metrics.accuracy)
