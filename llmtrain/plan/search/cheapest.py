"""The suggestions of a refusal: the nearest legal plans, or the ways to make a run fit that cost the least speed."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import count, takewhile

from llmtrain.errors import RecipeError
from llmtrain.plan.draft import Draft
from llmtrain.plan.facts.model import ModelFacts
from llmtrain.plan.facts.model_facts import model_facts
from llmtrain.plan.plan import Plan
from llmtrain.plan.predict import MemoryCache, memory_of, memory_shortage
from llmtrain.plan.predict.parts import readable
from llmtrain.plan.predict.time import StepTime
from llmtrain.plan.rules import assemble
from llmtrain.plan.search.nearest import MAX_SUGGESTIONS, as_arguments, nearest_plans
from llmtrain.plan.search.search import FitChecker, changes_of, legal_layouts, timed_plans
from llmtrain.plan.search.variants import Fields
from llmtrain.recipe import Recipe
from llmtrain.recipe.cluster import Cluster

EQUAL = 0.05
"""Predicted speeds with a smaller relative difference count as equal, because predictions are not more accurate
(`docs/guides/time.md`). Of such plans, the one with fewer changes is preferred."""
MAX_DEVICES = 1024
"""Largest number of devices. With more, the search takes longer than a user should wait for a refusal."""


@contextmanager
def suggesting(recipe: Recipe, cluster: Cluster, forced: dict[str, int] | None = None) -> Iterator[None]:
    """Adds the nearest legal plans to a refusal that is raised within the context.

    If the refused plan only needs too much memory, they are the fastest ones that fit. forced: changes that every
    suggestion must include, for a fault that no rule describes.
    """
    try:
        yield
    except RecipeError as error:
        if any(problem.rule.startswith("code.") for problem in error.problems):
            raise  # no plan repairs the user's code, which each would run again
        ways = []
        if not forced and {problem.rule for problem in error.problems} == {"memory.fits"}:
            ways = cheapest_plans(recipe, cluster, model_facts(recipe.model, recipe.vocab_size, recipe.code_dir))
            error.nearest = tuple(as_arguments(way.changes) for way in ways)
            error.nearest_figures = tuple(way.figures for way in ways)
            error.nearest_title = "cheapest ways to make it fit, with the same global batch"
        if not ways:
            error.nearest = nearest_plans(recipe, cluster, forced)
        raise


@dataclass(frozen=True)
class Suggestion:
    """A legal plan, as changes to a recipe."""

    changes: Fields
    """The changed fields of the recipe."""
    plan: Plan
    time: StepTime

    @property
    def figures(self) -> str:
        """Returns the predicted speed and memory of the plan."""
        memory, speed = memory_of(self.plan), f"{self.time.tokens_per_second:,.0f} tokens/s predicted"
        if memory is None:
            return speed
        host = max(stage.host for stage in memory.stages)
        on_host = f" and {readable(host)} of host memory per rank" if host else ""
        return f"{speed}, {readable(memory.needed)}{on_host}"


def cheapest_plans(recipe: Recipe, cluster: Cluster, facts: ModelFacts) -> list[Suggestion]:
    """Returns the fastest legal plans that fit. If possible, no two of them change the same fields.

    The model, the data and the global batch stay the same. Returns an empty list if nothing fits, if the devices' speed
    is unknown, or if the cluster is very large.
    """
    if cluster.world_size > MAX_DEVICES:
        return []
    fit_checker, found, ranked = (
        FitChecker(partial(memory_shortage, cache=MemoryCache())),
        list[Suggestion](),
        list[tuple[Suggestion, Draft]](),
    )
    timed = timed_plans(legal_layouts(recipe, cluster, facts), lambda fields, draft: fit_checker.never_fits(draft))

    def fastest_first() -> Iterator[tuple[Suggestion, Draft]]:
        """Yields the timed plans, and times further ones as long as the caller takes them."""
        for place in count():
            if place == len(ranked):
                following = next(timed, None)
                if following is None:
                    return
                time, fields, draft = following
                ranked.append((Suggestion(changes_of(recipe, fields), assemble(draft), time), draft))
            yield ranked[place]

    for like in (_changes_the_same, _goes_further, Suggestion.__eq__):  # the conditions become weaker
        for fastest, draft in fastest_first():
            if len(found) == MAX_SUGGESTIONS:
                break
            is_new = fastest.changes and not any(like(fastest, known) for known in found)
            if is_new and fit_checker.fits(draft):
                others = (entry for entry in fastest_first() if not any(like(entry[0], known) for known in found))
                found.append(_simplest(fastest, others, fit_checker))
    return sorted(found, key=lambda suggestion: -suggestion.time.tokens_per_second)


def _simplest(fastest: Suggestion, others: Iterable[tuple[Suggestion, Draft]], fit_checker: FitChecker) -> Suggestion:
    """Returns the suggestion with the fewest changes among those that are as fast as `fastest`.

    others: ways that come into question, the fastest first.
    """
    enough = (1 - EQUAL) * fastest.time.tokens_per_second
    as_fast = takewhile(lambda entry: entry[0].time.tokens_per_second >= enough, others)
    simpler = [entry for entry in as_fast if 0 < len(entry[0].changes) < len(fastest.changes)]
    simpler.sort(key=lambda entry: len(entry[0].changes))
    return next((way for way, draft in simpler if fit_checker.fits(draft)), fastest)


def _changes_the_same(suggestion: Suggestion, known: Suggestion) -> bool:
    """Whether a suggestion changes at least the fields of a known one, which is about as fast or faster."""
    return known.changes.keys() <= suggestion.changes.keys()


def _goes_further(suggestion: Suggestion, known: Suggestion) -> bool:
    """Whether a suggestion only adds changes to a known one."""
    return known.changes.items() <= suggestion.changes.items()
