"""Computes the decoder layers, the parameters and the share of the work of each pipeline stage."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from itertools import groupby

from llmtrain.plan.bounds import StageBounds, balance
from llmtrain.plan.flops import attention_flops, head_parameters
from llmtrain.plan.plan import ModelFacts, StagePlan


def layer_costs(facts: ModelFacts, sequence_length: int) -> list[float]:
    """Returns the FLOPs per token of each decoder layer, the head's in the last one; see `flops_per_token`.

    An embedding is looked up, which takes almost no time; in a mixture of experts only the experts count that a token
    is routed to.
    """
    attention = attention_flops(facts, sequence_length)
    costs = [
        6.0 * (parameters - idle) + attention
        for parameters, idle in zip(facts.layer_parameters, facts.layer_idle_parameters, strict=True)
    ]
    costs[-1] += 6.0 * head_parameters(facts)
    return costs


def stage_bounds(facts: ModelFacts, stages: int, sequence_length: int) -> list[StageBounds]:
    """Returns the layers of each stage, balanced by cost. Raises RecipeError if there are more stages than layers."""
    return balance(layer_costs(facts, sequence_length), stages)


@lru_cache(maxsize=4096)  # a search requests the same few repeatedly
def plan_stages(facts: ModelFacts, stages: int, sequence_length: int) -> tuple[StagePlan, ...]:
    """Returns all stages; empty without a pipeline. Raises as `stage_bounds` does.

    The input tables count for the first stage, the final norm and the head for the last, where a tied head is a copy.
    Families whose later layers look up other tables have those in addition.
    """
    if stages == 1:
        return ()
    costs = layer_costs(facts, sequence_length)
    bounds = balance(costs, stages)
    parameters = [sum(facts.layer_parameters[bound.first : bound.last]) for bound in bounds]
    parameters[0] += facts.embedding_parameters
    outside = facts.parameters - sum(facts.layer_parameters) - facts.embedding_parameters
    parameters[-1] += outside + (head_parameters(facts) if facts.tied_embeddings else 0)
    return tuple(
        StagePlan(
            layers=(bound.first, bound.last - 1),
            parameters=held,
            cost_share=sum(costs[bound.first : bound.last]) / sum(costs),
        )
        for bound, held in zip(bounds, parameters, strict=True)
    )


def described(stages: Sequence[StagePlan]) -> list[str]:
    """Returns a line for each stage; neighbouring stages that are equal share one."""
    lines = []
    for (layers, parameters, work), alike in groupby(enumerate(stages), key=lambda item: _looks(item[1])):
        members = list(alike)
        (number, first), (last_number, last) = members[0], members[-1]
        name = f"stage {number}" if len(members) == 1 else f"stages {number} to {last_number}"
        each = "" if len(members) == 1 else f"; each {layers} layers"
        held = f"layers {first.layers[0]} to {last.layers[1]}{each}, {parameters:,} parameters"
        lines.append(f"{name:<15} {held}, {work} of the work")
    return lines


def _looks(stage: StagePlan) -> tuple[int, int, str]:
    """Returns what is shown of a stage, except for its number."""
    return stage.layers[1] - stage.layers[0] + 1, stage.parameters, f"{stage.cost_share:.1%}"
