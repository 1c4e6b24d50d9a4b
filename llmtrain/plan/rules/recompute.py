"""Rules for recomputation in the backward pass (activation checkpointing)."""

from __future__ import annotations

from collections.abc import Iterator

from llmtrain.plan.draft import Draft
from llmtrain.plan.kernels import TRACED
from llmtrain.plan.rules.rule import Fault, assignment, rule

FULL = assignment(parallel__activation_checkpointing="full")


@rule("recompute.every", "Without activation checkpointing, there are no layers to choose from.", "arithmetic")
def every(draft: Draft) -> Iterator[Fault]:
    """Refuses `checkpoint_every` if nothing is recomputed."""
    parallel = draft.parallel
    if parallel.checkpoint_every > 1 and parallel.activation_checkpointing == "none":
        message = f"{parallel.checkpoint_every} has no effect: activation_checkpointing is 'none'"
        yield Fault("parallel.checkpoint_every", message, f"{FULL}, or {assignment(parallel__checkpoint_every=1)}")


@rule(
    "recompute.selective",
    "Selective checkpoints keep what torch's own operations return. Liger's rotation overwrites it, a break in a "
    "compiled layer's graph hides it, and nn.DataParallel copies the layer's method, which stays bound to the original "
    "layer.",
    "run",
)
def selective(draft: Draft) -> Iterator[Fault]:
    """Refuses selective checkpointing together with options that change or hide the results to be kept."""
    if draft.parallel.activation_checkpointing != "selective":
        return
    reasons, kernels, attention = [], draft.recipe.kernels, draft.recipe.model.attention_kernel
    if kernels.blocks == "liger":
        reasons.append("Liger's rotation overwrites the products that are kept (kernels.blocks=liger)")
    if kernels.blocks == "compiled" and attention not in TRACED:
        reasons.append(f"'{attention}' breaks the graph of a compiled layer")
    if draft.parallel.strategy == "data_parallel":
        reasons.append("nn.DataParallel does not copy the replaced methods of layers correctly")
    if reasons:
        yield Fault("parallel.activation_checkpointing", f"'selective' cannot be used: {'; '.join(reasons)}", FULL)


@rule(
    "recompute.offload",
    "Only the inputs of fully recomputed layers are few enough to be copied while layers compute. nn.DataParallel runs "
    "its copies of a layer in threads, which would share one stream of copies.",
    "read",
)
def offload(draft: Draft) -> Iterator[Fault]:
    """Refuses activation offload without full checkpointing, which keeps layer inputs, or if threads run layers."""
    parallel = draft.parallel
    if not parallel.offload_activations:
        return
    if parallel.activation_checkpointing != "full":
        message = f"needs activation_checkpointing 'full', not '{parallel.activation_checkpointing}'"
        yield Fault("parallel.offload_activations", message, FULL)
    if parallel.strategy == "data_parallel":
        message = "is not supported with nn.DataParallel, which runs layers in threads"
        yield Fault("parallel.offload_activations", message, assignment(parallel__offload_activations="false"))


@rule(
    "recompute.tiles",
    "Tiles call the feed-forward part of a layer, which must give each token's result alone. Each family is tried on a "
    "tiny copy when the engine is built.",
    "run",
)
def tiles(draft: Draft) -> Iterator[Fault]:
    """Refuses tiled feed-forward layers for experts, and with options that change how a layer is called."""
    parallel = draft.parallel
    if not parallel.tiled_mlp:
        return
    reasons = []
    if draft.facts is not None and draft.facts.experts:
        reasons.append("routers choose experts for all tokens of a micro-batch together")
    if draft.recipe.kernels.blocks == "compiled":
        reasons.append("the graph of a compiled layer would contain each tile")
    if parallel.activation_checkpointing == "selective":
        reasons.append("selective checkpoints would keep the products of all tiles")
    if parallel.strategy == "data_parallel":
        reasons.append("nn.DataParallel does not copy the replaced methods of layers correctly")
    if reasons:
        message = f"cannot be used: {'; '.join(reasons)}"
        yield Fault("parallel.tiled_mlp", message, assignment(parallel__tiled_mlp="false"))


RULES = (every, selective, offload, tiles)
