"""What a cluster needs to know about a job, given as `--slurm KEY=VALUE` or `--kubernetes KEY=VALUE`; pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeVar, get_origin

from pydantic import ValidationError

from llmtrain.errors import Problem, RecipeError, nearest
from llmtrain.recipe import Part

P = TypeVar("P", bound=Part)


def parse_site(kind: type[P], option: str, rule: str, assignments: Sequence[str]) -> P:
    """Parses assignments KEY=VALUE into the fields of `kind`; a key with several values is given once for each.

    Raises RecipeError with everything that is wrong with them.
    """
    fields = kind.model_fields
    problems: list[Problem] = []
    values: dict[str, Any] = {}
    for assignment in assignments:
        key, equals, value = assignment.partition("=")
        if key not in fields:
            known = f"known: {', '.join(fields)}"
            problems.append(Problem(rule, f"{option} {key}", f"is unknown{nearest(key, fields)}", known))
        elif not equals:
            problems.append(Problem(rule, f"{option} {key}", "has no value", f"{option} {key}=VALUE"))
        elif get_origin(fields[key].annotation) is tuple:
            values[key] = (*values.get(key, ()), value)
        elif key in values:
            problems.append(Problem(rule, f"{option} {key}", f"is given twice: {values[key]} and {value}"))
        else:
            values[key] = value
    try:
        options = kind(**values)
    except ValidationError as error:
        for one in error.errors(include_url=False):
            field = " ".join([option, *map(str, one["loc"][:1])])
            missing = one["type"] == "missing"
            message = "is required" if missing else str(one["msg"]).removeprefix("Value error, ")
            problems.append(Problem(rule, field, message, f"{field}=VALUE" if missing else ""))
    if problems:
        raise RecipeError(problems)
    return options
