"""Rules for adapters: what a strategy would train differently from PEFT."""

from __future__ import annotations

from collections.abc import Iterator

from llmtrain.plan.draft import Draft
from llmtrain.rules.rule import Fault, assignment, rule


@rule(
    "adapter.dora",
    "DoRA reads the whole matrix of a layer in each pass. ZeRO-3 has freed it by then, and tensor parallel ranks have "
    "a part, of whose rows the norm is another one.",
    "run",
)
def dora(draft: Draft) -> Iterator[Fault]:
    """Refuses DoRA where a rank does not hold whole matrices (`peft/tuners/lora/dora.py:forward`)."""
    adapter, parallel = draft.recipe.model.adapter, draft.parallel
    if adapter is None or not adapter.dora:
        return
    if parallel.tensor > 1:
        message = "DoRA computes norms of whole matrices, which tensor parallel ranks split"
        yield Fault("model.adapter.dora", message, f"{assignment(parallel__tensor=1)}, or train without DoRA")
    if parallel.strategy == "deepspeed" and parallel.zero_stage == 3:
        message = "DoRA reads matrices outside of their layers, where ZeRO-3 has not gathered them"
        yield Fault("model.adapter.dora", message, f"{assignment(parallel__zero_stage=2)}, or train without DoRA")


RULES = (dora,)
