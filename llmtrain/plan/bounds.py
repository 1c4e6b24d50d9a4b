"""Which decoder layers each pipeline stage has."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from llmtrain.errors import Problem, RecipeError


@dataclass(frozen=True)
class StageBounds:
    """Decoder layers [first, last) of one stage."""

    first: int
    last: int


def balance(costs: Sequence[float], stages: int) -> list[StageBounds]:
    """Cuts the layers into contiguous stages, the costliest of which costs as little as possible.

    costs: one per decoder layer, in any unit; the embedding's is part of the first, the head's of
    the last. Raises RecipeError where there are more stages than layers.
    """
    layers = len(costs)
    if not 1 <= stages <= layers:
        message = f"{stages} was given: the model has {layers} layers, and a stage without one has nothing to run"
        raise RecipeError(Problem("pipeline.layers", "parallel.pipeline", message, f"--set parallel.pipeline={layers}"))
    sums = [0.0]
    for cost in costs:
        sums.append(sums[-1] + cost)
    # best[end]: (costliest stage, beginning of the last stage) of layers [0, end) in the stages so far.
    best = {end: (sums[end], 0) for end in range(1, layers + 1)}
    tables = [best]
    for stage in range(2, stages + 1):
        previous = tables[-1]
        tables.append(
            {
                end: min((max(previous[cut][0], sums[end] - sums[cut]), cut) for cut in range(stage - 1, end))
                for end in range(stage, layers + 1)
            }
        )
    bounds, end = [], layers
    for table in reversed(tables):
        cut = table[end][1]
        bounds.append(StageBounds(cut, end))
        end = cut
    return bounds[::-1]
