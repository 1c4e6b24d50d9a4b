"""Every legal plan of a recipe on a cluster."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import replace

from llmtrain.plan.draft import Draft
from llmtrain.plan.facts.model import ModelFacts
from llmtrain.plan.search.search import legal_layouts
from llmtrain.plan.search.variants import MICRO_BATCH, Fields, changed
from llmtrain.recipe import Recipe
from llmtrain.recipe.cluster import Cluster


def legal_plans(recipe: Recipe, cluster: Cluster, facts: ModelFacts) -> Iterator[tuple[Fields, Draft]]:
    """Yields every legal way to split and store the run: its changes to the recipe, and its draft."""
    for layout in legal_layouts(recipe, cluster, facts):
        for micro, (fields, draft) in itertools.product(layout.sizes, layout.again):
            sized = replace(draft, recipe=changed(draft.recipe, {MICRO_BATCH: micro}))
            yield layout.fields | fields | {MICRO_BATCH: micro}, sized
