"""A recipe on a cluster, resolved into a plan, or refused with every fault that it has."""

from __future__ import annotations

from llmtrain.cluster import Cluster
from llmtrain.errors import Problem, RecipeError
from llmtrain.plan.assemble import assemble
from llmtrain.plan.draft import Draft
from llmtrain.plan.model_facts import model_facts
from llmtrain.plan.plan import ModelFacts, Plan
from llmtrain.plan.rules import broken
from llmtrain.recipe import Recipe

__all__ = ["assemble", "resolve"]


def resolve(recipe: Recipe, cluster: Cluster, facts: ModelFacts | None = None) -> Plan:
    """The plan of a recipe on a cluster.

    `facts` are found from the recipe where they are not given. Raises RecipeError with all faults at
    once: those of the model's configuration, and every broken rule.
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
