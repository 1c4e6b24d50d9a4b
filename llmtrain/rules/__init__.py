"""The table of all rules of legality, and the plan of a recipe that breaks none of them."""

from __future__ import annotations

from collections.abc import Sequence

from llmtrain.cluster import Cluster
from llmtrain.errors import Problem, RecipeError
from llmtrain.plan.draft import Draft, assemble
from llmtrain.plan.model_facts import model_facts
from llmtrain.plan.plan import ModelFacts, Plan
from llmtrain.plan.vocabulary import grown
from llmtrain.recipe import Recipe
from llmtrain.rules import (
    adapter,
    backends,
    checkpoint,
    expert,
    kernels,
    layout,
    model,
    objective,
    optimizer,
    pipeline,
    precision,
    recompute,
    tensor,
    zero,
)
from llmtrain.rules.rule import ENGINE, Fault, Rule

DEEPSPEED_RULES: tuple[Rule, ...] = (
    *precision.RULES,
    *zero.RULES,
    *pipeline.RULES,
    *tensor.RULES,
    *expert.RULES,
)
"""Rules for plans that DeepSpeed does not run correctly; other engines have rules of their own."""

LEGALITY: tuple[Rule, ...] = (
    *model.RULES,
    *adapter.RULES,
    *objective.RULES,
    *optimizer.RULES,
    *kernels.RULES,
    *recompute.RULES,
    *layout.RULES,
    *checkpoint.RULES,
    *DEEPSPEED_RULES,
    *backends.RULES,
)
"""Rules that do not depend on the amount of memory."""

RULES: tuple[Rule, ...] = (*LEGALITY, *layout.MEMORY)

__all__ = ["ENGINE", "RULES", "Fault", "Rule", "allowed", "broken", "resolve"]


def broken(draft: Draft, rules: Sequence[Rule] = RULES) -> tuple[list[Problem], list[Problem]]:
    """Returns the rules that a draft breaks: refusals, and notes on legal but notable choices."""
    asked = _asked(draft, rules)
    refusals = [problem for rule in asked if rule.refuses for problem in rule.problems(draft)]
    notes = [problem for rule in asked if not rule.refuses for problem in rule.problems(draft)]
    return refusals, notes


def allowed(draft: Draft, rules: Sequence[Rule] = RULES) -> bool:
    """Whether no rule refuses a draft. Stops at the first refusal, since searches ask this of many drafts."""
    return not any(rule.refuses and any(rule.check(draft)) for rule in _asked(draft, rules))


def _asked(draft: Draft, rules: Sequence[Rule]) -> list[Rule]:
    """Returns the rules that apply to the draft's backend."""
    return [rule for rule in rules if draft.parallel.strategy == "deepspeed" or rule not in DEEPSPEED_RULES]


def resolve(recipe: Recipe, cluster: Cluster, facts: ModelFacts | None = None) -> Plan:
    """Returns the plan of a recipe on a cluster.

    `facts` are determined from the recipe if they are not given. Raises RecipeError with all faults at once: those of
    the model's configuration, and every broken rule.
    """
    faults: list[Problem] = []
    if facts is None:
        try:
            recipe = grown(recipe)
            facts = model_facts(recipe.model, recipe.vocab_size)
        except RecipeError as error:
            faults.extend(error.problems)
    draft = Draft(recipe, cluster, facts)
    refusals, notes = broken(draft)
    faults.extend(refusals)
    if faults:
        raise RecipeError(faults)
    return assemble(draft, notes)
