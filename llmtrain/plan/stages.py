"""Distributes the decoder layers over pipeline stages by their FLOPs, and computes the share of each stage."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

from llmtrain.errors import Problem, RecipeError
from llmtrain.plan.facts.model import ModelFacts
from llmtrain.plan.flops import head_parameters, layer_costs
from llmtrain.plan.plan import StagePlan
from llmtrain.recipe import ParallelConfig


@dataclass(frozen=True)
class StageBounds:
    """Decoder layers [first, end) of one stage."""

    first: int
    end: int


def balance(costs: Sequence[float], stages: int) -> list[StageBounds]:
    """Splits the layers into contiguous stages so that the cost of the costliest one is minimal.

    costs: one per decoder layer, in any unit; the embedding's is part of the first, the head's of the last. Raises
    RecipeError if there are more stages than layers.
    """
    layers = len(costs)
    if not 1 <= stages <= layers:
        message = f"cannot cut {layers} layers into {stages} stages: every stage needs at least one layer"
        raise RecipeError(Problem("pipeline.layers", "parallel.pipeline", message, f"--set parallel.pipeline={layers}"))
    sums = [0.0]
    for cost in costs:
        sums.append(sums[-1] + cost)
    # The best splits of layers [0, end) into the stages so far.
    tables: list[Best] = [{end: (sums[end], 0) for end in range(1, layers + 1)}]
    for stage in range(2, stages + 1):
        tables.append(_one_more(stage, tables[-1], sums))
    bounds, end = [], layers
    for table in reversed(tables):
        cut = table[end][1]
        bounds.append(StageBounds(cut, end))
        end = cut
    return bounds[::-1]


Best = dict[int, tuple[float, int]]
"""Number of layers → cost of the costliest stage, and where the last stage begins."""


def _one_more(stage: int, previous: Best, sums: Sequence[float]) -> Best:
    """Returns the best splits into `stage` stages, from those into one fewer; if equal, with the longest last stage.

    As the last cut moves on, the stages before it cost more and the last one less. The best cut is where both costs
    meet, and it moves on with the end, so one walk along the layers serves all ends.
    """
    best: Best = {}
    cut = stage - 1
    for end in range(stage, len(sums)):
        while cut < end - 1 and previous[cut][0] < sums[end] - sums[cut]:
            cut += 1
        candidates = [cut - 1, cut] if cut > stage - 1 else [cut]
        cost, chosen = min(
            (max(previous[candidate][0], sums[end] - sums[candidate]), candidate) for candidate in candidates
        )
        while chosen > stage - 1 and max(previous[chosen - 1][0], sums[end] - sums[chosen - 1]) == cost:
            chosen -= 1
        best[end] = cost, chosen
    return best


def stage_bounds(facts: ModelFacts, stages: int, sequence_length: int) -> list[StageBounds]:
    """Returns the layers of each stage, balanced by cost. Raises RecipeError if there are more stages than layers."""
    return balance(layer_costs(facts, sequence_length), stages)


@lru_cache(maxsize=4096)  # a search requests the same few repeatedly
def plan_stages(facts: ModelFacts, stages: int, sequence_length: int) -> tuple[StagePlan, ...]:
    """Returns all stages of the pipeline; empty without one. Raises as `stage_bounds` does.

    The input tables count for the first stage, the final norm and the head for the last, where a tied head is a copy.
    Families whose later layers look up other tables have those in addition.
    """
    if stages == 1:
        return ()
    costs = layer_costs(facts, sequence_length)
    bounds = balance(costs, stages)
    parameters = [sum(facts.layer_parameters[bound.first : bound.end]) for bound in bounds]
    parameters[0] += facts.embedding_parameters
    outside = facts.parameters - sum(facts.layer_parameters) - facts.embedding_parameters
    parameters[-1] += outside + (head_parameters(facts) if facts.tied_embeddings else 0)
    return tuple(
        StagePlan(
            layers=(bound.first, bound.end - 1),
            parameters=held,
            cost_share=sum(costs[bound.first : bound.end]) / sum(costs),
        )
        for bound, held in zip(bounds, parameters, strict=True)
    )


def is_recomputed(parallel: ParallelConfig, layer: int) -> bool:
    """Whether a layer is computed again in the backward pass, in whole or in part; counted over all stages."""
    return parallel.activation_checkpointing != "none" and layer % parallel.checkpoint_every == 0
