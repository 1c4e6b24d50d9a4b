"""Resolves a recipe on a cluster into a plan, or refuses it with all its faults."""

from __future__ import annotations

from llmtrain.cluster import Cluster
from llmtrain.errors import Problem, RecipeError
from llmtrain.plan.draft import Draft, assemble
from llmtrain.plan.model_facts import model_facts
from llmtrain.plan.plan import ModelFacts, Plan
from llmtrain.recipe import Recipe
from llmtrain.rules import broken

__all__ = ["assemble", "resolve"]


def resolve(recipe: Recipe, cluster: Cluster, facts: ModelFacts | None = None) -> Plan:
    """Returns the plan of a recipe on a cluster.

    `facts` are determined from the recipe if they are not given. Raises RecipeError with all faults at once: those of
    the model's configuration, and every broken rule.
    """
    faults: list[Problem] = []
    if facts is None:
        try:
            facts = model_facts(recipe.model, recipe.vocab_size)
        except RecipeError as error:
            faults.extend(error.problems)
    draft = Draft(recipe, cluster, facts)
    refusals, notes = broken(draft)
    faults.extend(refusals)
    if faults:
        raise RecipeError(faults)
    return assemble(draft, notes)
