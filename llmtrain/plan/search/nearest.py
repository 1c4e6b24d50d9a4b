"""Finds the legal plans nearest to a refused one: the same run on the same devices, with another layout or storage."""

from __future__ import annotations

import heapq
import itertools
import json
import math
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from llmtrain.errors import RecipeError
from llmtrain.plan.axes import CHOSEN
from llmtrain.plan.draft import Draft, divisors
from llmtrain.plan.facts.model import ModelFacts
from llmtrain.plan.facts.model_facts import model_facts
from llmtrain.plan.installed import check_runnable
from llmtrain.plan.rules import assemble, broken, resolves
from llmtrain.plan.search.variants import DEGREES, MICRO_BATCH, SCHEDULE, Fields, changed, choices, sizes, value_of
from llmtrain.recipe import Recipe
from llmtrain.recipe.cluster import Cluster

MAX_SUGGESTIONS = 3
"""Number of suggestions."""
TRIALS = 1_500
"""Number of variants that are tried, at about 50 µs each."""
PATIENCE_S = 1.5
"""Seconds after which no further variant is tried. A variant takes long for a model with thousands of layers."""

WIDTH = 8
"""Number of values of a field that are tried."""

WEIGHTS = {
    # Changes that only affect the layout come first, then those that cost time, then those that change the results.
    MICRO_BATCH: 0.5,
    "parallel.zero_stage": 0.75,
    "parallel.hierarchical_partition": 1.0,
    **dict.fromkeys((*DEGREES, *SCHEDULE), 1.0),
    "parallel.activation_checkpointing": 1.0,
    "parallel.checkpoint_every": 1.0,
    "parallel.offload_activations": 1.0,
    "parallel.tiled_mlp": 1.0,
    "parallel.nvme_path": 0.5,
    "parallel.offload_optimizer": 1.5,
    "parallel.offload_param": 1.5,
    "parallel.grad_accum_dtype": 2.0,
    "parallel.precision": 3.0,
    "parallel.backend": 3.0,
}
"""Fields that may be changed → distance of one change."""
RELATED = {
    # Fields that can lower the memory of a rank.
    "parallel": (
        MICRO_BATCH,
        "parallel.zero_stage",
        "parallel.activation_checkpointing",
        "parallel.checkpoint_every",
        "parallel.offload_activations",
        *DEGREES,
        "parallel.offload_optimizer",
        "parallel.offload_param",
    ),
    "batch.global_batch_size": (MICRO_BATCH, *DEGREES[:3]),
    "parallel.grad_accum_dtype": ("parallel.precision", "parallel.offload_optimizer"),
    "parallel.nvme_path": ("parallel.offload_optimizer", "parallel.offload_param"),
    **dict.fromkeys(SCHEDULE, SCHEDULE),
}
"""Field that a rule reports → other fields on which the rule depends."""


def nearest_plans(recipe: Recipe, cluster: Cluster, forced: Mapping[str, Any] | None = None) -> tuple[str, ...]:
    """Returns changes that make a refused recipe legal on its cluster, nearest first, as `--set` arguments to paste.

    The model, the data and the global batch stay the same. forced: changes that every suggestion must include. Returns
    an empty tuple if no layout helps, or if the model's configuration is wrong.
    """
    try:
        facts = model_facts(recipe.model, recipe.vocab_size, recipe.code_dir)
    except RecipeError:
        return ()
    return tuple(as_arguments(fields) for fields in search(recipe, cluster, facts, dict(forced or {})))


def search(recipe: Recipe, cluster: Cluster, facts: ModelFacts, forced: Fields) -> list[Fields]:
    """Returns such changes as fields, by increasing distance.

    A legal plan must differ in at least one field on which a broken rule depends. A variant is therefore only changed
    further in the fields of one of its broken rules: the one with the fewest possible changes.
    """
    values = _values(recipe, cluster, facts)
    order = itertools.count()  # breaks ties: of equally distant variants, the earlier one comes first
    queue: list[tuple[float, int, Fields]] = [(0.0, next(order), forced)]
    seen: set[frozenset[tuple[str, Any]]] = set()
    found: list[Fields] = []
    deadline = time.monotonic() + PATIENCE_S
    for _ in range(TRIALS):
        if not queue or len(found) == MAX_SUGGESTIONS or time.monotonic() > deadline:
            break
        distance, _, changes = heapq.heappop(queue)
        if any(legal.items() <= changes.items() for legal in found):
            continue  # a found plan with needless additional changes
        draft = Draft(changed(recipe, changes), cluster, facts)
        named = _named(draft)
        if not named and changes and resolves(recipe, cluster, facts, changes):
            found.append(changes)
        ways = ([*_ways(draft, field, values, changes)] for field in named)
        for field, value in min(ways, key=len, default=[]):
            further = {**changes, field: value}
            key = frozenset(further.items())
            if key not in seen:
                seen.add(key)
                far = distance + _distance(field, value_of(recipe, field), value)
                heapq.heappush(queue, (far, next(order), further))
    return found


def _named(draft: Draft) -> list[str]:
    """Returns the fields that broken rules report, each once; if no rule is broken, those that cannot be run here."""
    problems = broken(draft)[0]
    if not problems:
        try:
            check_runnable(assemble(draft))
        except RecipeError as error:
            problems = list(error.problems)
    return list(dict.fromkeys(problem.field for problem in problems))


def _ways(draft: Draft, named: str, values: Mapping[str, Sequence[Any]], changes: Fields) -> Iterator[tuple[str, Any]]:
    """Yields changes that may satisfy a rule which reports the field `named`.

    They change this field, its related fields, and the fields on which most rules depend.
    """
    fields = [named] if named in WEIGHTS else []
    fields += [
        *RELATED.get(named, ()),
        "parallel.zero_stage",
        *(field for field in DEGREES if value_of(draft.recipe, field) > 1),
    ]
    for field in dict.fromkeys(fields):
        if field not in changes:
            present = value_of(draft.recipe, field)
            others = [value for value in values[field] if value != present]
            others.sort(key=lambda value: _distance(field, present, value))
            # Distant values are left out, except a degree of 1.
            near = others[:WIDTH] if 1 in others[:WIDTH] or field not in DEGREES else [*others[:WIDTH], 1]
            yield from ((field, value) for value in near if value != present)


def _values(recipe: Recipe, cluster: Cluster, facts: ModelFacts) -> dict[str, Sequence[Any]]:
    """Returns the values that each field can have."""
    numbers: dict[str, Sequence[Any]] = {
        **{axis.field: sizes(axis, cluster.world_size, facts.layers, facts.experts) for axis in CHOSEN},
        SCHEDULE[1]: (1, 2, 4),
        MICRO_BATCH: divisors(recipe.batch.global_batch_size),
    }
    return {field: numbers[field] if field in numbers else choices(recipe)[field] for field in WEIGHTS}


def _distance(field: str, present: Any, value: Any) -> float:
    """Returns the distance of two values: by ratio for numbers, and by difference for ZeRO stages."""
    steps = 1.0
    if field == "parallel.zero_stage":
        steps = abs(value - present)
    elif isinstance(value, int) and not isinstance(value, bool):
        steps += abs(math.log2(value / present))
    return WEIGHTS[field] * steps


def as_arguments(fields: Fields) -> str:
    """Formats changes as `--set` arguments to paste."""
    order = list(WEIGHTS)
    items = sorted(fields.items(), key=lambda item: order.index(item[0]) if item[0] in WEIGHTS else len(order))
    return " ".join(f"--set {field}={value if isinstance(value, str) else json.dumps(value)}" for field, value in items)
