"""Rules for objectives that compare whole completions."""

from __future__ import annotations

from collections.abc import Iterator

from llmtrain.plan.draft import Draft
from llmtrain.plan.facts.families import MIXES_DOCUMENTS
from llmtrain.plan.rules.rule import Fault, assignment, rule


@rule("objective.whole_pairs", "A part of a completion has another log-probability than the whole completion.", "read")
def whole_pairs(draft: Draft) -> Iterator[Fault]:
    """Refuses options that split, cut or separate conversations (`llmtrain/data/packing.py`)."""
    data = draft.recipe.data
    if not draft.recipe.objective.is_preference:
        return
    if data.packing == "concat":
        message = "`concat` cuts sequences anywhere, but completions are never split"
        yield Fault("data.packing", message, assignment(data__packing="best_fit"))
    if data.packing == "none" and draft.recipe.objective.compares_pairs:
        message = "with `none` a sequence is one document, but a pair is two conversations in one sequence"
        yield Fault("data.packing", message, assignment(data__packing="best_fit"))
    if data.too_long == "cut_turns":
        message = "`cut_turns` is not possible: completions are read whole, and those that are too long are dropped"
        yield Fault("data.too_long", message, assignment(data__too_long="drop"))


@rule("objective.completions", "The loss depends on the probability of a completion, given its prompt.", "arithmetic")
def completions(draft: Draft) -> Iterator[Fault]:
    """Refuses losses that include the prompt's tokens."""
    if draft.recipe.objective.is_preference and draft.recipe.data.train_on == "all":
        message = "`all` has no effect: only the turns of the assistant in completions count"
        yield Fault("data.train_on", message, assignment(data__train_on="assistant"))


@rule(
    "objective.documents",
    "One sequence contains several completions: each would depend on the previous one.",
    "read",
)
def documents(draft: Draft) -> Iterator[Fault]:
    """Refuses attention across documents, and families that carry state from one document to the next."""
    facts = draft.facts
    if not draft.recipe.objective.is_preference or draft.recipe.data.packing == "none":
        return
    if not draft.recipe.data.mask_documents:
        message = "each completion would be computed from those before it in its sequence, such as the chosen one"
        yield Fault("data.mask_documents", message, assignment(data__mask_documents="true"))
    elif facts is not None and facts.text_type in MIXES_DOCUMENTS:
        message = (
            f"'{facts.text_type}' lets packed documents influence each other, whatever the attention mask: "
            "each completion would be computed from those before it in its sequence, such as the chosen one"
        )
        yield Fault("objective.name", message, "use a model of another family, such as llama or qwen3")


@rule("objective.dropout", "The reference's log-probabilities are computed without dropout.", "read", refuses=False)
def dropout(draft: Draft) -> Iterator[Fault]:
    """Gives a note for dropout of the model's configuration, which is turned off (`training_configuration`)."""
    objective, facts = draft.recipe.objective, draft.facts
    if facts is None or not objective.is_preference:
        return
    off = {name: rate for name, rate in facts.dropout if name not in draft.recipe.model.config}
    if off:
        message = f"the dropout of the model's configuration is off with '{objective.name}': {', '.join(off)}"
        fix = "to keep it: " + assignment(**{f"model__config__{name}": rate for name, rate in off.items()})
        yield Fault("model.config", message, fix)


RULES = (whole_pairs, completions, documents, dropout)
