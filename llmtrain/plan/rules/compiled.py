"""What `torch.compile` makes no graph of."""

from __future__ import annotations

from collections.abc import Iterator

from llmtrain.plan.draft import Draft
from llmtrain.plan.rules.rule import Fault, assignment, rule

_EAGER = assignment(kernels__blocks="eager")


@rule(
    "kernels.compiled_experts",
    "How many rows of a product each expert takes only the data tell, which a graph of fixed shapes cannot follow.",
    "run",
)
def experts(draft: Draft) -> Iterator[Fault]:
    """Compiled layers with experts (`transformers/integrations/moe.py:grouped_mm_experts_forward`)."""
    facts = draft.facts
    if facts is not None and facts.experts and draft.recipe.kernels.blocks == "compiled":
        message = f"'compiled' was given, but the layers of '{facts.model_type}' have experts"
        yield Fault("kernels.blocks", message, _EAGER)


@rule(
    "kernels.compiled_copies",
    "nn.DataParallel copies modules to each device, and a copy would call the compiled layer of the first.",
    "read",
)
def copies(draft: Draft) -> Iterator[Fault]:
    """Compiled layers that are copied (`torch/nn/parallel/replicate.py`)."""
    if draft.parallel.strategy == "data_parallel" and draft.recipe.kernels.blocks == "compiled":
        message = "'compiled' was given, but nn.DataParallel copies layers without what they are compiled to"
        yield Fault("kernels.blocks", message, _EAGER)


RULES = (experts, copies)
