"""A plan with all that is predicted for it and rendered from it. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from llmtrain.ds_config import render
from llmtrain.plan import Plan
from llmtrain.plan.described import model_line, split_lines
from llmtrain.predict import PlanMemory
from llmtrain.predict.time import StepTime, describe_time, predict


@dataclass(frozen=True)
class Planned:
    """A legal plan, its predictions and its configuration. Printed, it is what `llmtrain plan` prints.

    memory: None for a model that is not a chain of layers.
    """

    plan: Plan
    memory: PlanMemory | None

    @cached_property
    def time(self) -> StepTime | None:
        """The predicted time of a step; None for devices of unknown speed."""
        return predict(self.plan)

    @cached_property
    def ds_config(self) -> dict[str, Any]:
        """The configuration for DeepSpeed; empty for a plan without DeepSpeed."""
        return render(self.plan)

    def document(self) -> dict[str, Any]:
        """Returns what `llmtrain plan --json` prints."""
        known = {"memory": self.memory and self.memory.summary(), "time": self.time and self.time.model_dump()}
        return {**self.plan.summary(), **known, "ds_config": self.ds_config or None}

    def lines(self) -> Iterator[str]:
        """Yields lines for people: model, layout, memory, predicted time and notes."""
        yield from (model_line(self.plan), *split_lines(self.plan), *(self.memory.described() if self.memory else ()))
        if self.time:
            yield describe_time(self.time, measured=self.plan.cluster.measured is not None)
        for one in self.plan.notes:
            yield f"note: {one['message']} [{one['rule']}]"

    def __str__(self) -> str:
        return "\n".join(self.lines())
