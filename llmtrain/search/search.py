"""Ranks all legal plans of a recipe on a cluster by predicted tokens per second.

The model, the data, the global batch, the precision and the backend stay the same. The search varies how the run is
split and stored: degrees, ZeRO stage, micro-batch, activation checkpointing and offload.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from llmtrain.cluster import Cluster
from llmtrain.errors import Problem, RecipeError
from llmtrain.plan.draft import Draft
from llmtrain.plan.model_facts import model_facts
from llmtrain.plan.plan import ModelFacts, Plan
from llmtrain.predict import Shortage
from llmtrain.predict.time import StepTime, predict, unknown
from llmtrain.recipe import Recipe
from llmtrain.rules import LEGALITY, allowed, assemble, backends, broken, layout, pipeline, precision, zero
from llmtrain.search.nearest import as_arguments
from llmtrain.search.variants import (
    CHECKPOINTING,
    DEGREES,
    EVERY,
    MICRO_BATCH,
    OFFLOAD_INPUTS,
    SCHEDULE,
    ZERO_STAGE,
    Fields,
    changed,
    degrees,
    micro_batches,
    recomputations,
    stores,
    value_of,
)

MOST = 10
"""Number of best plans that are shown."""
MOST_MISSES = 16
"""Number of slower plans that are shown."""
MOST_TOO_LARGE = 6
"""Number of shown plans that do not fit."""
MOST_ASKED = 1000
"""Number of plans whose shortage is computed, at a millisecond each. After that, plans that cannot fit are skipped."""
MOST_SIZES = 16
"""Number of micro-batch sizes that are tried (the smallest ones), in addition to the recipe's own."""
WHATEVER_BATCH = (*zero.RULES, *pipeline.RULES, *precision.RULES, *backends.RULES)
"""Rules that do not depend on the batch. A layout that they refuse is refused for every micro-batch size."""

Timed = tuple[StepTime, Fields, Draft]
"""A legal plan: its predicted time, its changes to the recipe, and its draft."""
Fits = Callable[[Plan], Shortage | None]
"""Returns how much memory a plan lacks; None if it fits."""


@dataclass(frozen=True)
class RankedPlan:
    """A plan found by the search."""

    arguments: str
    """The `--set` arguments that turn the recipe into this plan; empty for the unchanged recipe."""
    plan: Plan
    time: StepTime
    why: str = ""
    """Why it is slower than the best plan or does not fit; empty for one of the best plans."""


@dataclass(frozen=True)
class SearchResult:
    """The result of a search."""

    best: tuple[RankedPlan, ...]
    """The best plans, the fastest first."""
    too_large: tuple[RankedPlan, ...]
    """Plans that are faster than the first of `best` but do not fit, the smallest shortage first. Empty if memory is
    unknown."""
    slower: tuple[RankedPlan, ...]
    """The fastest plan of each combination of ZeRO stage and kinds of parallelism that is not among the best."""
    legal: int
    """Number of plans that were compared."""
    memory_known: bool
    """Whether the memory of the plans was checked."""


def search_plans(recipe: Recipe, cluster: Cluster, fits: Fits | None = None) -> SearchResult:
    """Returns the fastest legal plans, and near misses.

    fits: may take milliseconds, because it is only called for the fastest plans, one by one. None if memory is unknown;
    no plan is then excluded for its memory. Raises RecipeError if the model's configuration is wrong, if the devices'
    datasheet is unknown, if no plan is legal, or if none fits.
    """
    facts = model_facts(recipe.model, recipe.vocab_size)
    timed = timed_plans(recipe, cluster, facts)
    if not timed:
        raise RecipeError(_nothing(recipe, cluster, facts))
    room = Room(fits) if fits else None
    best: list[RankedPlan] = []
    too_large: list[tuple[Shortage, Timed]] = []
    slower: list[RankedPlan] = []
    for time, fields, draft in timed:
        if len(best) == MOST and len(slower) == MOST_MISSES:
            break
        shown = best if len(best) < MOST else slower
        known = _saves_in_vain if shown is best else _alike
        if any(known(draft, one.plan.recipe) for one in (*best, *slower)):
            continue
        if room and not best and len(too_large) < MOST_ASKED:
            if shortage := room.lacking(draft):
                too_large.append((shortage, (time, fields, draft)))
                continue
        elif room and not room.has(draft):
            continue
        why = loses(time, best[0].time) if shown is slower else ""
        shown.append(_found(recipe, cluster, facts, fields, time, why))
    misses = tuple(_found(recipe, cluster, facts, fields, time, why) for why, (time, fields, _) in _nearest(too_large))
    if not best:
        raise RecipeError(_too_large(recipe, misses))
    return SearchResult(tuple(best), misses, tuple(slower), len(timed), fits is not None)


def _nearest(too_large: list[tuple[Shortage, Timed]]) -> list[tuple[str, Timed]]:
    """Returns the plans with the smallest shortages: one for each ZeRO stage and combination of parallelism kinds."""
    found: list[tuple[str, Timed]] = []
    for shortage, timed in sorted(too_large, key=lambda miss: miss[0].size):
        if len(found) == MOST_TOO_LARGE:
            break
        if not any(_alike(timed[2], other[2].recipe) for _, other in found):
            found.append((shortage.said, timed))
    return found


def timed_plans(recipe: Recipe, cluster: Cluster, facts: ModelFacts) -> list[Timed]:
    """Returns every legal plan with its predicted time, the fastest first; empty if nothing can be predicted."""
    legal = legal_plans(recipe, cluster, facts)
    timed = [(time, fields, draft) for fields, draft in legal if (time := predict(assemble(draft)))]
    return sorted(timed, key=lambda item: -item[0].tokens_per_second)


def legal_plans(recipe: Recipe, cluster: Cluster, facts: ModelFacts) -> Iterator[tuple[Fields, Draft]]:
    """Yields every legal way to split and store the run: its changes to the recipe, and its draft."""
    groups = sorted({recipe.parallel.hierarchical_partition, cluster.devices_per_node} - {1})
    for split in degrees(cluster.world_size, facts.layers, facts.experts):
        draft = Draft(changed(recipe, split), cluster, facts)
        if not allowed(draft, layout.RULES):
            continue
        for stored in stores(recipe, groups):
            draft = Draft(changed(recipe, {**split, **stored}), cluster, facts)
            if allowed(draft, WHATEVER_BATCH):
                yield from _batches(draft, {**split, **stored})


def _batches(stored: Draft, fields: Fields) -> Iterator[tuple[Fields, Draft]]:
    """Yields the legal combinations of micro-batch size and recomputation for a draft."""
    assert stored.data_parallel_size is not None, "the rules of layout have refused the rest"
    sizes = _micro_batches(stored.recipe, stored.data_parallel_size)
    for micro, again in itertools.product(sizes, recomputations(stored.recipe)):
        batch = {MICRO_BATCH: micro, **again}
        draft = Draft(changed(stored.recipe, batch), stored.cluster, stored.facts)
        if allowed(draft, LEGALITY):
            yield fields | batch, draft


def _micro_batches(recipe: Recipe, dp: int) -> tuple[int, ...]:
    """Returns the smallest micro-batch sizes and the recipe's own."""
    sizes, own = micro_batches(recipe, dp), recipe.batch.micro_batch_size
    return tuple(size for number, size in enumerate(sizes) if number < MOST_SIZES or size == own)


def loses(time: StepTime, best: StepTime) -> str:
    """Describes the part of a step in which a plan loses the most time against the best plan."""
    parts, others = _parts(time), _parts(best)
    part = max(parts, key=lambda name: parts[name] - others.get(name, 0.0))
    share = parts[part] / time.step_s
    return {
        "bubble": f"bubble {time.bubble:.0%}",
        "compute": f"computes {parts[part] / others['compute'] - 1:.0%} longer",
        "recompute": f"computes {share:.0%} of the step again",
        "update": f"update {share:.0%} of the step",
    }.get(part, f"{part.replace('_', '-')} {share:.0%} of the step")


def _parts(time: StepTime) -> dict[str, float]:
    return {
        "compute": time.compute_s - time.recompute_s,
        "recompute": time.recompute_s,
        "bubble": time.bubble_s,
        "update": time.update_s,
        **time.communication_s,
    }


def changes_of(recipe: Recipe, fields: Fields) -> Fields:
    """Returns the fields whose values differ from the recipe's."""
    return {field: value for field, value in fields.items() if value_of(recipe, field) != value}


def _found(recipe: Recipe, cluster: Cluster, facts: ModelFacts, fields: Fields, time: StepTime, why: str) -> RankedPlan:
    """Returns the plan that a user gets by adding the changed fields to the command line."""
    own = changes_of(recipe, fields)
    draft = Draft(recipe.with_(**own) if own else recipe, cluster, facts)
    return RankedPlan(as_arguments(own), assemble(draft, broken(draft, LEGALITY)[1]), time, why)


def _saves_in_vain(draft: Draft, other: Recipe) -> bool:
    """Whether a plan differs from a faster one that fits only by saving memory."""
    degrees = (*DEGREES, *SCHEDULE, ZERO_STAGE, MICRO_BATCH)
    return all(value_of(draft.recipe, field) == value_of(other, field) for field in degrees)


def _alike(draft: Draft, other: Recipe) -> bool:
    """Whether two plans have the same ZeRO stage and kinds of parallelism, regardless of the degrees."""
    one = draft.recipe
    kinds = all((value_of(one, field) == 1) == (value_of(other, field) == 1) for field in DEGREES)
    return kinds and one.parallel.zero_stage == other.parallel.zero_stage


def _nothing(recipe: Recipe, cluster: Cluster, facts: ModelFacts) -> Problem:
    """Returns the problem that there is no plan to rank: none is legal, or the speed of the device is unknown."""
    first = next(legal_plans(recipe, cluster, facts), None)
    if first is None:
        message = f"no plan of this recipe is legal on {cluster.nodes} × {cluster.devices_per_node} {cluster.device}"
        return Problem("search.legal", "parallel", message, "`llmtrain plan` without --search reports why")
    fix = "describe it in the recipe file's cluster(): Cluster(device=..., own_devices=[Device(...)])"
    return Problem("search.device", "cluster.device", unknown(assemble(first[1])) or "", fix)


def _too_large(recipe: Recipe, misses: tuple[RankedPlan, ...]) -> Problem:
    """Returns the problem that no legal plan fits."""
    tried = "; ".join(f"{one.arguments or 'as it is'}: {one.why}" for one in misses[:3])
    return Problem("search.fits", "parallel", f"no legal plan of {recipe.name} fits: {tried}", "use more devices")


class Room:
    """Checks whether plans fit. If the leanest variants of a layout do not, its other variants are not checked."""

    def __init__(self, fits: Fits) -> None:
        self._fits = fits
        self._hopeless: dict[Any, bool] = {}

    def lacking(self, draft: Draft) -> Shortage | None:
        """Returns how much memory a legal draft lacks, or None if it fits."""
        return self._fits(assemble(draft))

    def is_hopeless(self, draft: Draft) -> bool:
        """Whether a legal draft's layout does not fit for any micro-batch size, even with activation checkpointing.

        The smallest size has the fewest activations. The largest size has no gradients at the same time. Every other
        variant needs more memory than one of these two.
        """
        plain = {MICRO_BATCH: 1, CHECKPOINTING: "full", EVERY: 1, OFFLOAD_INPUTS: draft.parallel.offload_activations}
        key = changed(draft.recipe, plain).parallel
        if key not in self._hopeless:
            assert draft.data_parallel_size is not None, "a legal draft has whole degrees"
            share = draft.recipe.batch.global_batch_size // draft.data_parallel_size
            leanest = (
                Draft(changed(draft.recipe, {**plain, MICRO_BATCH: size}), draft.cluster, draft.facts)
                for size in (1, share)
            )
            self._hopeless[key] = all(self.lacking(one) for one in leanest)
        return self._hopeless[key]

    def has(self, draft: Draft) -> bool:
        """Whether a legal draft fits."""
        return not self.is_hopeless(draft) and not self.lacking(draft)
