"""A legality rule: the refused combinations, the reason, and the evidence."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from types import ModuleType
from typing import Literal

from llmtrain.errors import Problem
from llmtrain.plan.axes import Axis
from llmtrain.plan.draft import Draft

ENGINE = "DeepSpeed 0.19.8"

Evidence = Literal["run", "read", "arithmetic"]
"""Evidence: `run` (a test on the real engine), `read` (the engine's source) or `arithmetic` (follows from numbers)."""


@dataclass(frozen=True)
class Fault:
    """One violation of a rule: the field, a message with the given value and the reason, and how to fix it."""

    field: str
    message: str
    fix: str = ""


Check = Callable[[Draft], Iterator[Fault]]


@dataclass(frozen=True)
class Rule:
    """A rule and its evidence. `check` yields the faults of a draft to which the rule applies."""

    id: str
    text: str
    """What it refuses, and why."""
    evidence: Evidence
    check: Check
    axis: Axis | None = None
    """The rule only applies to drafts in which this axis has a degree above 1. None: it applies to all drafts."""
    refuses: bool = True
    """False if the plan is legal, but gets a note."""

    def faults(self, draft: Draft) -> Iterator[Fault]:
        """Yields the faults of a draft; none if the rule does not apply to it."""
        return self.check(draft) if self.axis is None or self.axis.degree(draft.parallel) > 1 else iter(())

    def problems(self, draft: Draft) -> list[Problem]:
        """Returns the faults of a draft as problems with this rule's id."""
        return [Problem(self.id, fault.field, fault.message, fault.fix) for fault in self.faults(draft)]


def rule(id_: str, evidence: Evidence, *, axis: Axis | None = None, refuses: bool = True) -> Callable[[Check], Rule]:
    """Returns a decorator that turns a check into a rule, whose text is the docstring of the check."""
    return lambda check: Rule(id_, " ".join((check.__doc__ or "").split()), evidence, check, axis, refuses)


def fault_for(reasons: Mapping[str, bool], field: str, message: str, fix: str) -> Iterator[Fault]:
    """Yields a fault with those of several reasons that hold, if any does."""
    if any(reasons.values()):
        yield Fault(field, f"{message}: {'; '.join(reason for reason, holds in reasons.items() if holds)}", fix)


def rules_of(*modules: ModuleType) -> tuple[Rule, ...]:
    """Returns every rule of some modules, in the order of their definitions."""
    return tuple(item for module in modules for item in vars(module).values() if isinstance(item, Rule))


def assignment(**fields: object) -> str:
    """Returns options to paste, such as `--set parallel.zero_stage=1`. In argument names, `__` stands for the dot."""
    return " ".join(f"--set {name.replace('__', '.')}={value}" for name, value in fields.items())
