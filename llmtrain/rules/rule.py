"""A rule of legality: the refused combinations, the reason, and the evidence."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal

from llmtrain.errors import Problem
from llmtrain.plan.axes import Axis
from llmtrain.plan.draft import Draft

ENGINE = "DeepSpeed 0.19.8"

Seen = Literal["run", "read", "arithmetic"]
"""`run`: on the real engine, by a test; `read`: in its source; `arithmetic`: follows from the numbers."""


@dataclass(frozen=True)
class Fault:
    """One violation: the field, what was given and why it is refused, and what to do."""

    field: str
    message: str
    fix: str = ""


Check = Callable[[Draft], Iterator[Fault]]


@dataclass(frozen=True)
class Rule:
    """A rule with its reason and evidence; `check` yields the faults of a draft to which it applies."""

    id: str
    reason: str
    seen: Seen
    check: Check
    axis: Axis | None = None
    """The rule applies only to drafts in which this axis has a degree above 1; None: to all."""
    refuses: bool = True
    """False: the plan is legal, but gets a note."""

    def faults(self, draft: Draft) -> Iterator[Fault]:
        """Yields the faults of a draft."""
        return self.check(draft) if self.axis is None or self.axis.degree(draft.parallel) > 1 else iter(())

    def problems(self, draft: Draft) -> list[Problem]:
        """Returns the faults of a draft as problems with this rule's id."""
        return [Problem(self.id, fault.field, fault.message, fault.fix) for fault in self.faults(draft)]


def rule(
    id_: str, reason: str, seen: Seen, *, axis: Axis | None = None, refuses: bool = True
) -> Callable[[Check], Rule]:
    """Turns a check into a rule; a module lists its rules in `RULES`."""
    return lambda check: Rule(id_, reason, seen, check, axis, refuses)


def assignment(**fields: object) -> str:
    """Returns a fix to paste: `--set parallel.zero_stage=1`; `__` stands for the dot."""
    return " ".join(f"--set {name.replace('__', '.')}={value}" for name, value in fields.items())
