"""What is evaluated on: options that would do nothing are refused."""

from __future__ import annotations

from collections.abc import Iterator

from llmtrain.plan.draft import Draft
from llmtrain.plan.rules.rule import Fault, assignment, rule
from llmtrain.recipe import DataConfig

DEFAULT_FRACTION = DataConfig.model_fields["eval_fraction"].default


@rule("evaluation.never", "Where `every_steps` is 0, there is no evaluation at all.", "arithmetic")
def never(draft: Draft) -> Iterator[Fault]:
    """Refuses what asks for an evaluation where there is none."""
    evaluation = draft.recipe.evaluation
    if evaluation.every_steps:
        return
    fix = assignment(evaluation__every_steps=draft.recipe.train.max_steps)
    if evaluation.sources:
        yield Fault("evaluation.sources", "sources were given, and evaluation.every_steps is 0: never", fix)
    if evaluation.at_start:
        yield Fault("evaluation.at_start", "true was given, and evaluation.every_steps is 0: never", fix)


@rule("evaluation.fraction", "Where `evaluation.sources` are given, nothing else is held out.", "arithmetic")
def fraction(draft: Draft) -> Iterator[Fault]:
    """Refuses a share to hold out beside sources of their own."""
    given = draft.recipe.data.eval_fraction
    if draft.recipe.evaluation.sources and given not in (0, DEFAULT_FRACTION):
        message = f"{given} was given, and evaluation.sources, beside which nothing is held out"
        yield Fault("data.eval_fraction", message, assignment(data__eval_fraction=0))


@rule("evaluation.weight", "An evaluation reads each source as it is.", "arithmetic")
def weight(draft: Draft) -> Iterator[Fault]:
    """Refuses weights of sources that are only evaluated on."""
    for number, source in enumerate(draft.recipe.evaluation.sources):
        if source.weight != 1:
            message = f"{source.weight} was given, and weights mix the training data only"
            yield Fault(f"evaluation.sources.{number}.weight", message, "leave it out")


RULES = (never, fraction, weight)
