"""The lint rules, in the order in which `docs/reference/lint.md` lists them."""

from __future__ import annotations

from llmtrain.lint.rules import batch, features, optimizer, precision, readers, structure, zero
from llmtrain.lint.rules.rule import LintRule

RULES: tuple[LintRule, ...] = (
    *structure.RULES,
    *readers.RULES,
    *batch.RULES,
    *zero.RULES,
    *precision.RULES,
    *optimizer.RULES,
    *features.RULES,
)
