"""Distribution of decoder layers over pipeline stages."""

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
    """Splits the layers into contiguous stages so that the cost of the costliest one is minimal.

    costs: one per decoder layer, in any unit; the embedding's is part of the first, the head's of the last. Raises
    RecipeError if there are more stages than layers.
    """
    layers = len(costs)
    if not 1 <= stages <= layers:
        message = f"{stages} was given: the model has {layers} layers, and every stage needs at least one"
        raise RecipeError(Problem("pipeline.layers", "parallel.pipeline", message, f"--set parallel.pipeline={layers}"))
    sums = [0.0]
    for cost in costs:
        sums.append(sums[-1] + cost)
    # Of layers [0, end) in the stages so far.
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
    """Returns the best splits into `stage` stages, from those into one fewer; of equal ones that with the longest last.

    If the last cut moves on, the stages before it cost more and the last one less: the best cut lies where the two
    meet, and moves on with the end. All ends thus need only one walk along the layers.
    """
    best: Best = {}
    cut = stage - 1
    for end in range(stage, len(sums)):
        while cut < end - 1 and previous[cut][0] < sums[end] - sums[cut]:
            cut += 1
        candidates = [cut - 1, cut] if cut > stage - 1 else [cut]
        cost, chosen = min((max(previous[one][0], sums[end] - sums[one]), one) for one in candidates)
        while chosen > stage - 1 and max(previous[chosen - 1][0], sums[end] - sums[chosen - 1]) == cost:
            chosen -= 1
        best[end] = cost, chosen
    return best
