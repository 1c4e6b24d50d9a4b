"""What the pipeline engine does not take, or silently falsifies."""

from __future__ import annotations

from collections.abc import Iterator

from llmtrain.plan.draft import Draft
from llmtrain.plan.rules.rule import Fault, assignment, rule


@rule(
    "pipeline.zero_stage",
    "The pipeline engine asserts ZeRO below 2, after launch; at 0 it clips each stage alone.",
    "read",
)
def zero_stage(draft: Draft) -> Iterator[Fault]:
    """ZeRO 2 and 3 fail under pipelines; ZeRO 0 in fp32 does not clip the whole gradient."""
    parallel, clip = draft.parallel, draft.recipe.optim.clip_grad_norm
    if parallel.pipeline == 1:
        return
    if parallel.zero_stage >= 2:
        message = f"{parallel.zero_stage} was given: pipeline stages keep their gradients whole, so ZeRO 1 is the most"
        yield Fault("parallel.zero_stage", message, assignment(parallel__zero_stage=1))
    if parallel.zero_stage == 0 and clip:
        message = (
            f"0 was given with clip_grad_norm = {clip:g}: the norm over all stages is not taken, and nothing is clipped"
        )
        yield Fault("parallel.zero_stage", message, assignment(parallel__zero_stage=1))


@rule("pipeline.layers", "A stage without a layer has nothing to run.", "arithmetic")
def layers(draft: Draft) -> Iterator[Fault]:
    """More stages than layers."""
    degree, facts = draft.parallel.pipeline, draft.facts
    if facts is not None and degree > facts.layers:
        message = f"{degree} was given: the model has {facts.layers} layers"
        yield Fault("parallel.pipeline", message, assignment(parallel__pipeline=facts.layers))


@rule(
    "pipeline.tied_accumulation",
    "Gradients that are accumulated beside the weights skip the reduction of tied ones: the copies drift apart.",
    "read",
)
def tied_accumulation(draft: Draft) -> Iterator[Fault]:
    """Tied embeddings under pipelines with gradients in another type, unless the bf16 optimizer takes them."""
    parallel, facts = draft.parallel, draft.facts
    if parallel.pipeline == 1 or facts is None or not facts.tied_embeddings:
        return
    if draft.weight_dtype == parallel.grad_accum_dtype:
        return
    takes_them = parallel.precision == "bf16" and parallel.zero_stage == 1 and parallel.offload_optimizer == "none"
    if not takes_them:
        message = (
            f"'{parallel.grad_accum_dtype}' was given for {parallel.precision} weights: the copies of the tied "
            "embedding on the first and the last stage would drift apart"
        )
        yield Fault("parallel.grad_accum_dtype", message, assignment(parallel__grad_accum_dtype=draft.weight_dtype))


@rule("pipeline.bubble", "1F1B idles (p−1)/(m+p−1) of the time.", "arithmetic", refuses=False)
def bubble(draft: Draft) -> Iterator[Fault]:
    """Notes pipelines that idle more than a third of the time."""
    stages, micro_batches = draft.parallel.pipeline, draft.accumulation
    if stages == 1 or micro_batches is None:
        return
    idle = (stages - 1) / (micro_batches + stages - 1)
    if idle > 1 / 3:
        message = f"{micro_batches} micro-batches in {stages} stages idle {idle:.0%} of the time"
        yield Fault("parallel.pipeline", message, "use more micro-batches per step, or fewer stages")


RULES = (zero_stage, layers, tied_accumulation, bubble)
