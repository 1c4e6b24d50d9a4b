"""Types of weights, gradients and arithmetic that the engine does not run, or runs as something else."""

from __future__ import annotations

from collections.abc import Iterator

from llmtrain.plan.draft import Draft
from llmtrain.plan.rules.rule import Fault, assignment, rule

RULES = ()
