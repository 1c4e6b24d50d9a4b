"""The table of all rules of legality."""

from llmtrain.errors import Problem
from llmtrain.plan.draft import Draft
from llmtrain.plan.rules import batch, layout, model, pipeline, precision, slices, zero
from llmtrain.plan.rules.rule import ENGINE, Fault, Rule

RULES: tuple[Rule, ...] = (
    *model.RULES,
    *layout.RULES,
    *batch.RULES,
    *precision.RULES,
    *zero.RULES,
    *pipeline.RULES,
    *slices.RULES,
)

__all__ = ["ENGINE", "RULES", "Fault", "Rule", "broken"]


def broken(draft: Draft) -> tuple[list[Problem], list[Problem]]:
    """What a draft breaks: refusals, and notes on what is legal but worth knowing."""
    refusals = [problem for rule in RULES if rule.refuses for problem in rule.problems(draft)]
    notes = [problem for rule in RULES if not rule.refuses for problem in rule.problems(draft)]
    return refusals, notes
