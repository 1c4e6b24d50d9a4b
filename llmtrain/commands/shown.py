"""Prints a plan in lines."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from llmtrain.plan import Plan
    from llmtrain.plan.memory import PlanMemory


def print_plan(plan: Plan, console: Any, memory: PlanMemory | None) -> None:
    """Prints model, layout, memory, predicted time and notes."""
    from llmtrain.plan.described import model_line, split_lines
    from llmtrain.plan.time import described as described_time
    from llmtrain.plan.time import predict

    lines = [model_line(plan), *split_lines(plan), *(memory.described() if memory else ())]
    if time := predict(plan):
        lines.append(described_time(time))
    for line in lines:
        console.print(line, highlight=False, soft_wrap=True)
    for one in plan.notes:
        console.print(f"note: {one['message']} [{one['rule']}]", highlight=False, markup=False, soft_wrap=True)
