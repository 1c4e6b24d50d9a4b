"""The lint rules, in the order in which `docs/reference/lint.md` lists them."""

from __future__ import annotations

from llmtrain_lint.rules import accelerate, batch, features, optimizer, precision, readers, structure, zero
from llmtrain_lint.rules.rule import LintRule

_SUBJECTS = (structure, readers, accelerate, batch, zero, precision, optimizer, features)
RULES = tuple(one for subject in _SUBJECTS for one in vars(subject).values() if isinstance(one, LintRule))
"""Every rule of these modules, in the order of their definitions."""
ACCELERATE = tuple(one for one in RULES if one in vars(accelerate).values())
"""The rules for Accelerate's own configuration alone."""
