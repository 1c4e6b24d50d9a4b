"""Tries a plan's changes to its model on tiny copies, before any worker starts.

Whether a model family can be split into stages is only known by trying. The check therefore loads torch and compares a
split tiny copy with an unsplit one.
"""

from __future__ import annotations

from collections.abc import Sequence

from llmtrain.errors import RecipeError
from llmtrain.plan import Plan
from llmtrain.search.cheapest import suggesting
from llmtrain.search.enumerate import NamedPlan, RefusedPlan
from llmtrain.system.streams import plain_console, quiet_libraries


def check_stages(plan: Plan) -> None:
    """Tries the plan's adapters and pipeline stages on tiny copies of the model. Loads torch.

    Raises RecipeError if one of them fails.
    """
    if plan.recipe.model.is_frozen_in_part:
        with quiet_libraries():
            from llmtrain.models import check_trained

            check_trained(plan.recipe)
    if not plan.stages:
        return
    from llmtrain.models import find_stages

    text = f"comparing a tiny copy of the model in {plan.parallel.stages} stages with the whole model"
    with suggesting(plan.recipe, plan.cluster, {"parallel.pipeline": 1}), plain_console(stderr=True).status(text):
        find_stages(plan.recipe, plan.parallel.stages, plan.parallel.tensor)


def without_uncut(
    plans: Sequence[NamedPlan], refused: Sequence[RefusedPlan]
) -> tuple[list[NamedPlan], list[RefusedPlan]]:
    """Returns both lists, with pipelines whose model cannot be split into their stages moved to the refused plans.

    Raises RecipeError if no plan is left.
    """
    faults: dict[tuple[int, int], RecipeError | None] = {}
    kept, out = [], list(refused)
    for one in plans:
        stages = (one.plan.parallel.stages, one.plan.parallel.tensor)
        if stages not in faults:
            try:
                check_stages(one.plan)
                faults[stages] = None
            except RecipeError as error:
                faults[stages] = error
        fault = faults[stages]
        if fault is None:
            kept.append(one)
        else:
            out.append(RefusedPlan(one.name, fault.problems[0]))
    if plans and not kept:
        raise RecipeError(dict.fromkeys(fault.problems[0] for fault in faults.values() if fault))
    return kept, out
