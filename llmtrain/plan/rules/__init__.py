"""The table of all rules of legality."""

from llmtrain.errors import Problem
from llmtrain.plan.draft import Draft
from llmtrain.plan.rules import (
    backends,
    batch,
    expert,
    layout,
    model,
    pipeline,
    precision,
    slices,
    tensor,
    zero,
)
from llmtrain.plan.rules.rule import ENGINE, Fault, Rule

DEEPSPEED_RULES: tuple[Rule, ...] = (
    *precision.RULES,
    *zero.RULES,
    *pipeline.RULES,
    *tensor.RULES,
    *slices.RULES,
    *expert.RULES,
)
"""What DeepSpeed does not run right; other engines have rules of their own."""

RULES: tuple[Rule, ...] = (
    *model.RULES,
    *layout.RULES,
    *batch.RULES,
    *DEEPSPEED_RULES,
    *backends.RULES,
)

__all__ = ["ENGINE", "RULES", "Fault", "Rule", "broken"]


def broken(draft: Draft) -> tuple[list[Problem], list[Problem]]:
    """What a draft breaks: refusals, and notes on what is legal but worth knowing."""
    asked = [rule for rule in RULES if draft.parallel.strategy == "deepspeed" or rule not in DEEPSPEED_RULES]
    refusals = [problem for rule in asked if rule.refuses for problem in rule.problems(draft)]
    notes = [problem for rule in asked if not rule.refuses for problem in rule.problems(draft)]
    return refusals, notes
