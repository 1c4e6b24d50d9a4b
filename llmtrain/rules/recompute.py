"""Rules for what is computed again in the backward pass."""

from __future__ import annotations

from collections.abc import Iterator

from llmtrain.plan.draft import Draft
from llmtrain.plan.kernels import TRACED
from llmtrain.rules.rule import Fault, assignment, rule

FULL = assignment(parallel__activation_checkpointing="full")


@rule("recompute.every", "Without activation checkpointing there is no layer to choose.", "arithmetic")
def every(draft: Draft) -> Iterator[Fault]:
    """Refuses `checkpoint_every` if nothing is computed again."""
    parallel = draft.parallel
    if parallel.checkpoint_every > 1 and parallel.activation_checkpointing == "none":
        message = f"{parallel.checkpoint_every} was given, but no layer is computed again"
        yield Fault("parallel.checkpoint_every", message, f"{FULL}, or {assignment(parallel__checkpoint_every=1)}")


@rule(
    "recompute.selective",
    "Selective checkpoints keep what torch's own operations return. Liger's rotation overwrites it, a break in a "
    "compiled layer's graph hides it, and nn.DataParallel copies the layer's method, but not what it is bound to.",
    "run",
)
def selective(draft: Draft) -> Iterator[Fault]:
    """Refuses selective checkpoints with what changes or hides the results that they keep."""
    if draft.parallel.activation_checkpointing != "selective":
        return
    reasons, kernels, attention = [], draft.recipe.kernels, draft.recipe.model.attention_kernel
    if kernels.blocks == "liger":
        reasons.append("Liger's rotation overwrites the products that are kept (kernels.blocks=liger)")
    if kernels.blocks == "compiled" and attention not in TRACED:
        reasons.append(f"'{attention}' breaks the graph of a compiled layer")
    if draft.parallel.strategy == "data_parallel":
        reasons.append("nn.DataParallel does not copy its methods correctly")
    if reasons:
        yield Fault("parallel.activation_checkpointing", f"'selective' was given, but {'; '.join(reasons)}", FULL)


RULES = (every, selective)
