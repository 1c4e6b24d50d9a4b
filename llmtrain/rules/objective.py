"""Rules for objectives that compare the completions of pairs."""

from __future__ import annotations

from collections.abc import Iterator

from llmtrain.plan.draft import Draft
from llmtrain.rules.model import MIXES_DOCUMENTS
from llmtrain.rules.rule import Fault, assignment, rule


@rule("objective.whole_pairs", "The log-probability of a part of a completion is not that of the completion.", "read")
def whole_pairs(draft: Draft) -> Iterator[Fault]:
    """Refuses what splits or cuts conversations (`llmtrain/data/packing.py`)."""
    data = draft.recipe.data
    if not draft.recipe.objective.compares_pairs:
        return
    if data.packing == "concat":
        message = "`concat` cuts sequences anywhere, but a pair is never split"
        yield Fault("data.packing", message, assignment(data__packing="best_fit"))
    if data.too_long == "cut_turns":
        message = "`cut_turns` is not possible: completions are compared whole, and pairs that are too long are dropped"
        yield Fault("data.too_long", message, assignment(data__too_long="drop"))


@rule("objective.completions", "A pair has one prompt, whose tokens both completions share.", "arithmetic")
def completions(draft: Draft) -> Iterator[Fault]:
    """Refuses to count the prompt's tokens."""
    if draft.recipe.objective.compares_pairs and draft.recipe.data.train_on == "all":
        message = "`all` has no effect: only the turns of the assistant in the completions are compared"
        yield Fault("data.train_on", message, assignment(data__train_on="assistant"))


@rule(
    "objective.documents",
    "Both completions of a pair lie in one sequence: the second one would follow from the first.",
    "read",
)
def documents(draft: Draft) -> Iterator[Fault]:
    """Refuses documents that see each other, and families that carry state from one to the next."""
    facts = draft.facts
    if not draft.recipe.objective.compares_pairs:
        return
    if not draft.recipe.data.mask_documents:
        message = "pairs would be compared with the rejected completion reading the chosen one"
        yield Fault("data.mask_documents", message, assignment(data__mask_documents="true"))
    elif facts is not None and facts.model_type in MIXES_DOCUMENTS:
        message = (
            f"'{facts.model_type}' carries state from each packed document to the next, whatever the attention mask: "
            "the rejected completion would be computed from the chosen one"
        )
        yield Fault("objective.name", message, "use a model of another family, such as llama or qwen3")


RULES = (whole_pairs, completions, documents)
