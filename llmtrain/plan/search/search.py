"""Ranks all legal plans of a recipe on a cluster by predicted tokens per second.

The model, the data, the global batch, the precision and the backend stay the same. The search varies how the run is
split and stored: degrees, ZeRO stage, micro-batch, activation checkpointing and offload.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from heapq import heapify, heappop, heappush
from typing import Any, NamedTuple

from llmtrain.errors import Problem, RecipeError
from llmtrain.plan.draft import Draft
from llmtrain.plan.facts.model import ModelFacts
from llmtrain.plan.facts.model_facts import model_facts
from llmtrain.plan.plan import Plan
from llmtrain.plan.predict import Shortage
from llmtrain.plan.predict.time import StepTime, TimeBound, predict, unknown
from llmtrain.plan.rules import DEEPSPEED_RULES, LEGALITY, allowed, assemble, backends, broken, kernels, layout
from llmtrain.plan.rules.deepspeed import pipeline_interleaved
from llmtrain.plan.rules.rule import rules_of
from llmtrain.plan.search.nearest import as_arguments
from llmtrain.plan.search.variants import (
    CHECKPOINT_EVERY,
    CHECKPOINTING,
    DEGREES,
    HPZ,
    MICRO_BATCH,
    NVME_PATH,
    OFFLOAD_INPUTS,
    OFFLOADS,
    SCHEDULE,
    ZERO_STAGE,
    Fields,
    changed,
    degrees,
    has_mean_loss,
    micro_batches,
    recomputations,
    value_of,
    zero_placements,
)
from llmtrain.recipe import ParallelConfig, Recipe
from llmtrain.recipe.cluster import Cluster

MAX_BEST = 10
"""Number of best plans that are shown."""
MAX_SLOWER = 16
"""Number of slower plans that are shown."""
MAX_TOO_LARGE = 6
"""Number of shown plans that do not fit."""
MAX_CHECKED = 1000
"""Number of plans whose shortage is computed, at a millisecond each. After that, plans that cannot fit are skipped."""
MAX_SIZES = 16
"""Number of micro-batch sizes that are tried (the smallest ones), in addition to the recipe's own."""
MICRO_BATCH_RULES = (kernels.fp8, layout.divides, pipeline_interleaved)
"""Rules that depend on the size of a micro-batch, and on no recomputation. Of what is stored where, they depend on the
ZeRO stage only."""
RECOMPUTATION_RULES = tuple(rule for rule in rules_of(kernels) if rule.id.startswith("recompute."))
"""Rules that depend on the recomputation. They do not depend on the micro-batch size."""
SPLIT_RULES = tuple(rule for rule in (*rules_of(layout), *layout.DIVISIBILITY) if rule not in MICRO_BATCH_RULES)
"""Rules that are checked once for the degrees and the schedule."""
FIRST_RULES = (*DEEPSPEED_RULES, *rules_of(backends))
"""Rules that refuse most layouts. They are checked first."""
LAYOUT_RULES = tuple(
    rule for rule in dict.fromkeys((*FIRST_RULES, *LEGALITY)) if rule not in (*MICRO_BATCH_RULES, *RECOMPUTATION_RULES)
)
"""Rules that are checked once for each layout."""
UNTIMED_FIELDS = (HPZ, *OFFLOADS, NVME_PATH)
"""Fields on which `TimeBound` does not depend."""

Timed = tuple[StepTime, Fields, Draft]
"""A legal plan: its predicted time, its changes to the recipe, and its draft."""
Kind = tuple[Any, ...]
"""Values that alike plans have in common."""
Fits = Callable[[Plan], Shortage | None]
"""Returns by how much memory a plan does not fit; None if it fits."""


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
    facts = model_facts(recipe.model, recipe.vocab_size, recipe.code_dir)
    found = list(legal_layouts(recipe, cluster, facts))
    legal = sum(
        len(legal_layout.sizes) * sum(not unknown(draft) for _, draft in legal_layout.again) for legal_layout in found
    )
    if not legal:
        raise RecipeError(_nothing(recipe, cluster, facts))
    fit_checker = FitChecker(fits) if fits else None
    best: list[RankedPlan] = []
    too_large: list[tuple[Shortage, Timed]] = []
    slower: list[RankedPlan] = []
    kinds, distinct = set[Kind](), set[Kind]()

    def is_skipped(fields: Fields, draft: Draft) -> bool:
        is_known = _kind(fields) in kinds if len(best) == MAX_BEST else _without_savings(fields) in distinct
        if is_known:
            return True
        if fit_checker is None or (not best and len(too_large) < MAX_CHECKED):  # it counts even if it does not fit
            return False
        return not fit_checker.fits(draft, fields[MICRO_BATCH])

    for time, fields, draft in timed_plans(found, is_skipped):
        if len(best) == MAX_BEST and len(slower) == MAX_SLOWER:
            break
        if fit_checker and (shortage := fit_checker.shortage(draft)):
            too_large.append((shortage, (time, fields, draft)))
            continue
        shown = best if len(best) < MAX_BEST else slower
        why = loses(time, best[0].time) if shown is slower else ""
        shown.append(_found(recipe, cluster, facts, fields, time, why))
        kinds.add(_kind(fields))
        distinct.add(_without_savings(fields))
    misses = tuple(_found(recipe, cluster, facts, fields, time, why) for why, (time, fields, _) in _nearest(too_large))
    if not best:
        tried = "; ".join(f"{miss.arguments or 'as it is'}: {miss.why}" for miss in misses[:3])
        message = f"no legal plan of {recipe.name} fits: {tried}"
        raise RecipeError(Problem("search.fits", "parallel", message, "use more devices"))
    return SearchResult(tuple(best), misses, tuple(slower), legal, fits is not None)


def _nearest(too_large: list[tuple[Shortage, Timed]]) -> list[tuple[str, Timed]]:
    """Returns the plans with the smallest shortages: one for each ZeRO stage and combination of parallelism kinds."""
    found: list[tuple[str, Timed]] = []
    for shortage, timed in sorted(too_large, key=lambda miss: miss[0].size):
        if len(found) == MAX_TOO_LARGE:
            break
        if _kind(timed[1]) not in {_kind(other[1]) for _, other in found}:
            found.append((shortage.text, timed))
    return found


@dataclass(frozen=True, eq=False)
class LegalLayout:
    """A way to split and store the run, with all legal micro-batches and recomputations."""

    fields: Fields
    """Its changes to the recipe."""
    sizes: tuple[int, ...]
    """Sizes of micro-batches, each legal with every recomputation."""
    again: tuple[tuple[Fields, Draft], ...]
    """Recomputations, and the draft of each with a micro-batch of one sequence."""


def _with_micro_batch(draft: Draft, size: int) -> Draft:
    return Draft(changed(draft.recipe, {MICRO_BATCH: size}), draft.cluster, draft.facts)


class Candidate(NamedTuple):
    """A plan in a queue that is ordered by predicted time, or by its bound until the time has been predicted."""

    rate: float
    """Tokens per second, negative. The most that the bound allows if `time` is unknown."""
    is_timed: bool
    place: int
    """Its place among all legal plans, which orders equally fast ones."""
    fields: Fields
    draft: Draft
    """With a micro-batch of one sequence if `time` is unknown."""
    time: StepTime | None = None


def timed_plans(layouts: Iterable[LegalLayout], skips: Callable[[Fields, Draft], bool]) -> Iterator[Timed]:
    """Yields the plans of some layouts with their predicted times, the fastest first; of equally fast ones, the first.

    Plans of unknown speed are left out, and those for which `skips` is true when their bound or their time has its
    turn. A plan is only timed if none with a known time is faster than its bound.
    """
    queue = list(_candidates(layouts))
    heapify(queue)
    while queue:
        candidate = heappop(queue)
        if skips(candidate.fields, candidate.draft):
            continue
        if candidate.time is not None:
            yield candidate.time, candidate.fields, candidate.draft
            continue
        draft = _with_micro_batch(candidate.draft, candidate.fields[MICRO_BATCH])
        time = predict(assemble(draft))
        assert time is not None, "those of unknown speed are left out"
        heappush(queue, candidate._replace(rate=-time.tokens_per_second, is_timed=True, draft=draft, time=time))


def _candidates(layouts: Iterable[LegalLayout]) -> Iterator[Candidate]:
    """Yields all plans of known speed, with their bounds."""
    place, known = itertools.count(), dict[tuple[Any, ...], TimeBound]()
    for legal_layout in layouts:
        bounds = []
        for again, draft in legal_layout.again:
            if unknown(draft):
                continue
            plan, fields = assemble(draft), legal_layout.fields | again
            key = tuple(value for field, value in fields.items() if field not in UNTIMED_FIELDS)
            if key not in known:
                known[key] = TimeBound.of(plan)
            bounds.append((fields, draft, plan.batch, known[key]))
        for size, (fields, draft, batch, least) in itertools.product(legal_layout.sizes, bounds):
            rate = batch.tokens_per_step / least.step_s(size, batch.gradient_accumulation_steps // size)
            yield Candidate(-rate, False, next(place), fields | {MICRO_BATCH: size}, draft)


def legal_layouts(recipe: Recipe, cluster: Cluster, facts: ModelFacts) -> Iterator[LegalLayout]:
    """Yields every layout that has a legal plan."""
    groups = sorted({recipe.parallel.hierarchical_partition, cluster.devices_per_node} - {1})
    for split in degrees(cluster.world_size, facts.layers, facts.experts):
        draft = Draft(changed(recipe, split), cluster, facts)
        if not allowed(draft, SPLIT_RULES):
            continue
        assert draft.data_parallel_size is not None, "the rules of layout have refused the rest"
        every_size = micro_batches(recipe, draft.data_parallel_size, has_mean_loss(facts))
        of_stage = dict[int, tuple[int, ...]]()
        # The smallest sizes, and the recipe's own.
        tried = (*every_size[:MAX_SIZES], *{recipe.batch.micro_batch_size} & {*every_size[MAX_SIZES:]})
        for stored in zero_placements(recipe, groups):
            draft = Draft(changed(recipe, {**split, **stored}), cluster, facts)
            if not allowed(draft, LAYOUT_RULES):
                continue
            stage = draft.parallel.zero_stage
            if stage not in of_stage:
                each = ((size, _with_micro_batch(draft, size)) for size in tried)
                of_stage[stage] = tuple(size for size, sized in each if allowed(sized, MICRO_BATCH_RULES))
            sizes = of_stage[stage]
            kinds = (
                (fields, Draft(changed(draft.recipe, {**fields, MICRO_BATCH: 1}), cluster, facts))
                for fields in recomputations(recipe)
            )
            again = tuple(kind for kind in kinds if allowed(kind[1], RECOMPUTATION_RULES))
            if sizes and again:
                yield LegalLayout({**split, **stored}, sizes, again)


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


def _without_savings(fields: Fields) -> Kind:
    """Returns what two plans have in common that differ only by saving memory: the slower one saves in vain."""
    return tuple(fields[field] for field in (*DEGREES, *SCHEDULE, ZERO_STAGE, MICRO_BATCH))


def _kind(fields: Fields) -> Kind:
    """Returns the ZeRO stage and the kinds of parallelism of a plan, regardless of the degrees."""
    return fields[ZERO_STAGE], *(fields[field] == 1 for field in DEGREES)


def _nothing(recipe: Recipe, cluster: Cluster, facts: ModelFacts) -> Problem:
    """Returns the problem that there is no plan to rank: none is legal, or the speed of the device is unknown."""
    first = next(legal_layouts(recipe, cluster, facts), None)
    if first is None:
        message = f"no plan of this recipe is legal on {cluster.nodes} × {cluster.devices_per_node} {cluster.device}"
        return Problem("search.legal", "parallel", message, "`llmtrain plan` without --search reports why")
    fix = "describe it in the recipe file's cluster(): Cluster(device=..., own_devices=[Device(...)])"
    return Problem("search.device", "cluster.device", unknown(first.again[0][1]) or "", fix)


class FitChecker:
    """Checks whether plans fit. If the leanest variants of a layout do not, its other variants are not checked."""

    def __init__(self, fits: Fits) -> None:
        self._fits = fits
        self._known: dict[tuple[ParallelConfig, int], Shortage | None] = {}
        self._hopeless: dict[ParallelConfig, bool] = {}

    def shortage(self, draft: Draft) -> Shortage | None:
        """Returns by how much memory a legal draft does not fit, or None if it fits."""
        key = draft.parallel, draft.recipe.batch.micro_batch_size
        if key not in self._known:
            self._known[key] = self._fits(assemble(draft))
        return self._known[key]

    def never_fits(self, draft: Draft) -> bool:
        """Whether a legal draft's layout does not fit for any micro-batch size, even with activation checkpointing.

        The smallest size has the fewest activations. The largest size has no gradients at the same time. Every other
        variant needs more memory than one of these two.
        """
        plain = {CHECKPOINTING: "full", CHECKPOINT_EVERY: 1, OFFLOAD_INPUTS: draft.parallel.offload_activations}
        leanest = Draft(changed(draft.recipe, plain), draft.cluster, draft.facts)
        if leanest.parallel not in self._hopeless:
            share = draft.recipe.batch.global_batch_size // (draft.data_parallel_size or 1)
            least = self.shortage(_with_micro_batch(leanest, 1))
            self._hopeless[leanest.parallel] = least is not None and (
                least.for_any_batch or self.shortage(_with_micro_batch(leanest, share)) is not None
            )
        return self._hopeless[leanest.parallel]

    def fits(self, draft: Draft, micro_batch: int | None = None) -> bool:
        """Whether a legal draft fits. micro_batch: another size of its micro-batch."""
        if self.never_fits(draft):
            return False
        return not self.shortage(_with_micro_batch(draft, micro_batch) if micro_batch else draft)
