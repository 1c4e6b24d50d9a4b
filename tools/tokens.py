"""The table of docs/reference/tokens.md: how many tokens of a sequence fit, by what is recomputed or offloaded."""

from __future__ import annotations

from typing import Any

from llmtrain.plan.draft import Draft
from llmtrain.plan.facts.model_facts import model_facts
from llmtrain.plan.load import load_recipe
from llmtrain.plan.plan import Plan
from llmtrain.plan.predict import memory_of
from llmtrain.plan.rules import LEGALITY, allowed, assemble
from llmtrain.recipe import Recipe
from llmtrain.recipe.cluster import Cluster
from tools.page import ROOT, Files, filled, table

RECIPE = load_recipe(str(ROOT / "recipes/llama3_8b.py"), [])[0]
STEP = 8192
"""Numbers of tokens are multiples of this."""
STEPS = 4096
DEVICE = "h100"
BASE = {
    "batch.global_batch_size": 1,
    "parallel.zero_stage": 3,
    "parallel.offload_optimizer": "cpu",
    "parallel.offload_param": "cpu",
    "parallel.activation_checkpointing": "none",
    "model.attention": "flash_attention_2",
    "kernels.blocks": "eager",
    "kernels.loss": "whole",
}
ROWS: dict[str, dict[str, Any]] = {
    "everything is kept": {},
    "`kernels.loss=chunked`": {"kernels.loss": "chunked"},
    "`activation_checkpointing=selective`": {"parallel.activation_checkpointing": "selective"},
    "`activation_checkpointing=full` instead": {"parallel.activation_checkpointing": "full"},
    "`offload_activations=true`": {"parallel.offload_activations": True},
    "`tiled_mlp=true`": {"parallel.tiled_mlp": True},
}
"""What each row adds to those above it."""
PUBLISHED = {1: "500,000", 8: "3,700,000"}
"""Devices → tokens of ALST on so many H100 of 80 GB."""


def plan_of(fields: dict[str, Any], devices: int, tokens: int) -> Plan | None:
    """Returns a plan with sequences of so many tokens, or None if no rule lets it pass."""
    long = {"data.sequence_length": tokens, "model.config.max_position_embeddings": tokens}
    changed: Recipe = RECIPE.with_(**BASE | fields | long | {"parallel.sequence": devices})
    draft = Draft(
        changed, Cluster(devices_per_node=devices, device=DEVICE), model_facts(changed.model, changed.vocab_size)
    )
    return assemble(draft) if allowed(draft, LEGALITY) else None


def most_tokens(fields: dict[str, Any], devices: int) -> tuple[int, int]:
    """Returns the longest sequence that fits, and the bytes of host memory that all ranks take for it."""

    def memory(steps: int) -> Any:
        plan = plan_of(fields, devices, steps * STEP)
        assert plan is not None, f"{fields} is not legal"
        return memory_of(plan)

    fitting, beyond = 0, STEPS
    while beyond - fitting > 1:
        middle = (fitting + beyond) // 2
        fitting, beyond = (middle, beyond) if memory(middle).fits else (fitting, middle)
    return fitting * STEP, devices * memory(max(fitting, 1)).stages[0].host


def files() -> Files:
    """Returns the page."""
    rows, fields = [], dict[str, Any]()
    for name, added in ROWS.items():
        fields |= added
        cells = [name]
        for devices in PUBLISHED:
            tokens, host = most_tokens(fields, devices)
            cells += [f"{tokens:,}", f"{host / 2**30:,.0f} GiB"]
        rows.append(cells)
    rows.append(["ALST, published", PUBLISHED[1], "", PUBLISHED[8], ""])
    columns = ("", "1 device", "host memory", "8 devices", "host memory, all ranks")
    counted = f"Lengths are multiples of {STEP:,} tokens.\n\n"
    return filled("docs/reference/tokens.md", tokens=counted + table(columns, rows))
