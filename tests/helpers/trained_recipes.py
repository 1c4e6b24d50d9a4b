"""Trains recipes on one rank for a few steps, one after the other in the same process."""

from __future__ import annotations

import gc
import json
from collections.abc import Mapping

from llmtrain import library
from llmtrain.recipe import Recipe, parse_recipe
from llmtrain.recipe.cluster import Cluster
from tests.helpers.harness import run_ranks


def losses_of(recipes: Mapping[str, Recipe], steps: int) -> dict[str, list[float]]:
    """Returns the losses of the first steps of each recipe."""
    (losses,) = run_ranks(1, _train, {name: recipe.model_dump_json() for name, recipe in recipes.items()}, steps)
    return dict(losses)


def _train(rank: int, recipes: dict[str, str], steps: int) -> dict[str, list[float]]:
    import torch

    from llmtrain.data import BatchLoader, prepare
    from llmtrain.engines import build_engine
    from llmtrain.engines.reference_model import with_references
    from llmtrain.plan.ds_config import render

    losses = {}
    for name, text in recipes.items():
        recipe = parse_recipe(json.loads(text))
        plan = library.plan(recipe, Cluster(nodes=1, devices_per_node=1, device="cpu")).plan
        prepared = prepare(plan.recipe)
        engine = build_engine(plan, render(plan), torch.device("cpu"))
        if plan.recipe.objective.needs_reference:
            prepared = with_references(engine, plan, prepared)
        loader = BatchLoader.of(plan, prepared, 0)
        firsts = range(0, steps * recipe.batch.global_batch_size, recipe.batch.global_batch_size)
        losses[name] = [engine.train_step(loader.train_batch(first)).loss.item() for first in firsts]
        del engine
        gc.collect()
    return losses
