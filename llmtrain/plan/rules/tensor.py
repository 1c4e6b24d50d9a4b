"""Rules for tensor parallelism: model families whose declared plan splits them correctly."""

from __future__ import annotations

from collections.abc import Iterator

from llmtrain.plan.axes import TENSOR
from llmtrain.plan.draft import Draft
from llmtrain.plan.facts.families import EXPERT_TENSOR_FAMILIES, SLICED_FAMILIES
from llmtrain.plan.rules.rule import Fault, assignment, rule


@rule(
    "tensor.family",
    "Modules are split by the family's own tp_plan; without one, or with one that loses a gradient, the model would "
    "compute something else.",
    "run",
    axis=TENSOR,
)
def family(draft: Draft) -> Iterator[Fault]:
    """Refuses families whose tiny copy fails or deviates if it is split (`docs/reference/families_tensor.md`)."""
    parallel, facts = draft.parallel, draft.facts
    if facts is None:
        return
    message = ""
    if parallel.autotp_ranks > 1:
        if facts.experts and facts.model_type not in EXPERT_TENSOR_FAMILIES:
            message = f"the attention of '{facts.model_type}' has projections other than q, k, v and o"
    elif facts.model_type not in SLICED_FAMILIES:
        message = f"'{facts.model_type}' cannot be split correctly"
    if message:
        yield Fault("parallel.tensor", f"must be 1, not {parallel.tensor}: {message}", assignment(parallel__tensor=1))


@rule(
    "tensor.divides",
    "Each tensor parallel rank holds an equal part of every split weight.",
    "run",
    axis=TENSOR,
)
def divides(draft: Draft) -> Iterator[Fault]:
    """Refuses feed-forward layers and experts whose width is not a multiple of the degree."""
    ranks, facts = draft.parallel.split_ranks, draft.facts
    if facts is None or facts.weights is None:
        return
    rows = {weight for run in facts.weights.runs for weight in run.weights if "down_proj" in weight.name}
    uneven = sorted({weight.shape[-1] for weight in rows if weight.shape[-1] % ranks})
    if uneven:
        widths = " and ".join(str(width) for width in uneven)
        message = f"{ranks} does not divide the width {widths} of feed-forward layers"
        yield Fault("parallel.tensor", message, assignment(parallel__tensor=1))


RULES = (family, divides)
