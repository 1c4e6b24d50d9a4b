"""Fixes to paste lead to a legal plan: each removes its fault, and none gives a field a value that is refused next."""

from __future__ import annotations

import random
import re
from typing import Any

import pytest

from llmtrain.errors import Problem
from llmtrain.plan.draft import Draft
from llmtrain.plan.facts.model_facts import model_facts
from llmtrain.plan.rules import broken
from llmtrain.recipe import Recipe, parse_assignments
from llmtrain.recipe.cluster import Cluster
from tests.helpers.random_plans import BACKENDS, CHOICES, plan_of

OPTIONS = re.compile(r"--set \S+=\S+( --set \S+=\S+)*")
MORE: dict[str, tuple[Any, ...]] = {
    **CHOICES,
    "model.attention": ("sdpa", "eager", "varlen", "flash_attention_2", "flash_attention_3", "flex_attention"),
    "kernels.blocks": ("eager", "compiled", "liger"),
    "kernels.loss": ("whole", "chunked", "liger", "compiled"),
    "kernels.matmul": ("auto", "onednn"),
    "kernels.fp8": ("off", "tensorwise", "rowwise"),
    "parallel.tiled_mlp": (False, True),
    "parallel.sequence_ring": (1, 2),
    "optim.name": ("adamw", "muon", "lion", "adafactor", "adamw_8bit", "schedule_free_adamw"),
    "train.neftune_alpha": (0.0, 5.0),
}
_WITHOUT_SDPA = {"vocab_size": 256, "hidden_size": 32, "num_hidden_layers": 4, "num_attention_heads": 4}
MODELS = (
    {},
    {},
    {"model.architecture": "gemma2", "model.config": {**_WITHOUT_SDPA, "num_key_value_heads": 2, "head_dim": 512}},
    {"model.architecture": "gpt_oss", "model.config": {**_WITHOUT_SDPA, "num_local_experts": 4}},
)


def _faults(recipe: Recipe, cluster: Cluster) -> list[Problem]:
    return broken(Draft(recipe, cluster, model_facts(recipe.model, recipe.vocab_size)))[0]


def _fix(faults: list[Problem]) -> tuple[Problem, dict[str, Any]] | None:
    """The first fault with options to paste, and their fields."""
    for fault in faults:
        for part in fault.fix.split(", or "):
            if OPTIONS.fullmatch(part):
                return fault, parse_assignments(part.split()[1::2])
    return None


@pytest.mark.parametrize("seed", range(0, 200, 50))
def test_fixes_lead_to_a_legal_plan(seed):
    for number in range(seed, seed + 50):
        _follow_fixes(random.Random(number))


def _follow_fixes(draw: random.Random) -> None:
    cluster = Cluster(devices_per_node=draw.choice((1, 2, 4)), device=draw.choice(("cpu", "h100", "b200")))
    recipe = plan_of({}, {}, 1).draft.recipe.with_(**draw.choice(MODELS))
    fields = draw.sample(sorted(MORE), 8)
    recipe = recipe.with_(**{field: draw.choice(MORE[field]) for field in fields})
    if draw.random() < 0.3:
        backend, accelerate = draw.choice(BACKENDS)
        recipe = recipe.with_(**{"parallel.backend": backend, "parallel.accelerate": accelerate})
    faults = _faults(recipe, cluster)
    for _ in range(20):
        if (found := _fix(faults)) is None:
            break
        fault, change = found
        recipe = recipe.with_(**change)
        known, faults = {(one.rule, one.field) for one in faults}, _faults(recipe, cluster)
        assert fault not in faults, fault
        refused = [one for one in faults if one.field in change and (one.rule, one.field) not in known]
        assert not refused, (fault, refused)
    else:
        pytest.fail(f"fixes repeat: {faults}")
