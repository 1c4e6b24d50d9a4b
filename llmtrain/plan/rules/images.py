"""Rules for multimodal models that are trained on images."""

from __future__ import annotations

from collections.abc import Iterator

from llmtrain.plan.axes import used
from llmtrain.plan.draft import Draft
from llmtrain.plan.facts.images import FIELD, IMAGE_FAMILIES
from llmtrain.plan.rules.model import masked_attention
from llmtrain.plan.rules.rule import Fault, assignment, fault_for, rule

MASKED = ("sdpa", "eager")
"""Attention implementations that separate documents by masks."""
WHOLE = ("deepspeed", "ddp", "fsdp2")
"""Strategies that are compared with the plain loop on images."""
WITHOUT = f"or {assignment(model__images='false')} trains the text model on texts"


@rule("model.images_layout", "read")
def images_layout(draft: Draft) -> Iterator[Fault]:
    """Refuses to divide a model that reads images. Stages, slices of matrices or sequences, and distributed experts are
    those of a text model; a tower, and the places of its features in the sequence, would have to be divided as well.
    Horovod and `nn.DataParallel` are not given images."""
    recipe, parallel = draft.recipe, draft.parallel
    if not recipe.model.images:
        return
    for axis in used(parallel):
        message = f"must be 1, not {axis.degree(parallel)}, with {FIELD}: only text models are divided"
        yield Fault(axis.field, message, f"--set {axis.field}=1 with parallel.zero_stage, {WITHOUT}")
    if parallel.strategy not in WHOLE:
        message = f"'{parallel.backend}' is not supported with {FIELD}"
        yield Fault("parallel.backend", message, f"{assignment(parallel__backend='deepspeed')}, {WITHOUT}")


@rule("model.images_kernels", "read")
def images_kernels(draft: Draft) -> Iterator[Fault]:
    """Refuses kernels that would also run in the tower, or that replace parts of known text models. The tower would be
    given the boundaries of documents in place of those of images."""
    recipe = draft.recipe
    if not recipe.model.images:
        return
    if recipe.model.attention_kernel not in MASKED:
        message = f"'{recipe.model.attention}' would be given the boundaries of documents in the tower, too"
        yield Fault("model.attention", message, masked_attention(draft))
    if recipe.kernels.blocks not in ("auto", "eager"):
        message = f"'{recipe.kernels.blocks}' is not supported with {FIELD}"
        yield Fault("kernels.blocks", message, assignment(kernels__blocks="eager"))
    if recipe.kernels.loss == "liger":
        yield Fault("kernels.loss", f"'liger' is not supported with {FIELD}", assignment(kernels__loss="chunked"))
    if recipe.kernels.fp8 != "off":
        message = f"'{recipe.kernels.fp8}' is not supported with {FIELD}"
        yield Fault("kernels.fp8", message, assignment(kernels__fp8="off"))
    if recipe.parallel.tiled_mlp:
        message = f"is not supported with {FIELD}"
        yield Fault("parallel.tiled_mlp", message, assignment(parallel__tiled_mlp="false"))


@rule("model.images_data", "read")
def images_data(draft: Draft) -> Iterator[Fault]:
    """Refuses objectives and data that are not defined with images, and quantized weights. Completions are compared,
    and own losses computed, from tokens alone; a text that is read as the token of an image would need an image. A
    whole multimodal model was not trained from quantized weights."""
    recipe, facts = draft.recipe, draft.facts
    if not recipe.model.images:
        return
    reasons = {
        f"objective.name is '{recipe.objective.name}'": recipe.objective.name != "language_model",
        "samples.prompts are texts to continue": bool(recipe.samples.prompts),
        "data.special_tokens=parse reads texts as tokens of images": recipe.data.special_tokens == "parse",
        f"{recipe.model.pretrained} is quantized": bool(facts and facts.quantization),
    }
    yield from fault_for(reasons, FIELD, "is not supported", f"change these fields, {WITHOUT}")


@rule("model.tower", "read", refuses=False)
def tower(draft: Draft) -> Iterator[Fault]:
    """Notes what is trained of a multimodal model that reads images, and what a plan predicts of its tower."""
    facts = draft.facts
    if facts is None or (found := facts.tower) is None:
        return
    weights = facts.weights.outside if facts.weights else ()
    trained = sum(weight.elements for weight in weights if weight.trained and weight.name.startswith(found.prefixes))
    state = "frozen" if not trained else "trained" if trained == found.parameters else f"{trained:,} of them trained"
    names = ", ".join(f"{prefix}*" for prefix in found.prefixes)
    message = (
        f"of '{facts.model_type}', {names} reads images ({found.parameters:,} parameters, "
        f"{state}): {found.patches_per_token} patches of an image for each of its tokens; memory is predicted for "
        "sequences of image tokens alone, and the time of the tower is not predicted"
    )
    family = IMAGE_FAMILIES[facts.model_type]
    fix = "" if not trained else f"model.trainable={list(family.language)} freezes it"
    yield Fault(FIELD, message, fix)
