"""Rules for optimizers."""

from __future__ import annotations

from collections.abc import Iterator

from pydantic import ValidationError

from llmtrain.errors import nearest, shown
from llmtrain.plan.draft import Draft
from llmtrain.plan.optimizers import optimizer_of
from llmtrain.rules.rule import Fault, assignment, rule


@rule("optim.options", "Each optimizer has options of its own; an unknown one would be ignored.", "arithmetic")
def options(draft: Draft) -> Iterator[Fault]:
    """Refuses options that the optimizer does not have, and values that they cannot have."""
    optim = draft.recipe.optim
    model = optimizer_of(optim).options
    known = tuple(model.model_fields)
    try:
        model.model_validate(optim.options)
    except ValidationError as error:
        for one in error.errors(include_url=False):
            name = str(one["loc"][0])
            if one["type"] == "extra_forbidden":
                message = f"'{optim.name}' has no such option{nearest(name, known)}"
                fix = f"options of {optim.name}: {', '.join(known)}" if known else assignment(optim__options="{}")
            else:
                message = f"{shown(one['input'])} was given: {one['msg'].replace('Input should be', 'must be', 1)}"
                fix = ""
            yield Fault(f"optim.options.{name}", message, fix)


RULES = (options,)
