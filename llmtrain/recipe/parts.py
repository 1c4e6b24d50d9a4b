"""The base class and the types of fields that all parts of a recipe share."""

from __future__ import annotations

import ast
import inspect
from collections.abc import Iterator, Sequence
from itertools import pairwise
from textwrap import dedent
from typing import Annotated, Any, TypeVar

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, field_validator

from llmtrain.system.untrusted import json_fault

T = TypeVar("T")
Many = Annotated[Sequence[T], AfterValidator(tuple)]
"""A recipe may use a list; the frozen model stores a tuple."""
MAX_NUMBER = 10**12
"""Upper bound of every number in a recipe: far beyond any run, and small enough for fast arithmetic."""
MAX_PRODUCT = 10**30
"""Upper bound of every integer of a plan, which may be a product of a recipe's numbers; floats can hold it."""
PositiveInt = Annotated[int, Field(gt=0, le=MAX_NUMBER)]
NonNegativeInt = Annotated[int, Field(ge=0, le=MAX_NUMBER)]
PositiveFloat = Annotated[float, Field(gt=0)]
NonNegativeFloat = Annotated[float, Field(ge=0)]
Fraction = Annotated[float, Field(ge=0, lt=1)]


class Part(BaseModel):
    """A part of a recipe: frozen, with strict types and no undeclared fields."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)

    @field_validator("*")
    @classmethod
    def _is_data(cls, value: Any) -> Any:
        if isinstance(value, (str, dict)) and (fault := json_fault(value)):
            raise ValueError(fault)
        for item in value if isinstance(value, tuple) else (value,):
            if isinstance(item, int) and abs(item) > MAX_PRODUCT:
                raise ValueError(f"is larger than {MAX_PRODUCT:.0e}")
        return value


def field_texts(part: type[Part]) -> dict[str, str]:
    """Returns the docstring of each field that has one.

    Pydantic has `use_attribute_docstrings` for this. It would read the source of all parts whenever they are imported,
    which takes each rank of a run 0.3 s.
    """
    texts = {}
    for base in reversed(part.__mro__[: part.__mro__.index(Part)]):
        [declared] = ast.parse(dedent(inspect.getsource(base))).body
        assert isinstance(declared, ast.ClassDef)
        for field, text in pairwise(declared.body):
            match field, text:
                case ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(value=ast.Constant(value=str(docstring))):
                    texts[name] = inspect.cleandoc(docstring)
    return texts


def described_schema(part: type[Part]) -> dict[str, Any]:
    """Returns the JSON schema of a part, with the docstrings of all fields as descriptions."""
    schema = part.model_json_schema()
    parts = {subclass.__name__: subclass for subclass in _subclasses(Part)}
    for name, definition in [(part.__name__, schema), *schema.get("$defs", {}).items()]:
        for field, text in field_texts(parts[name]).items():
            definition["properties"][field]["description"] = text
    return schema


def _subclasses(part: type[Part]) -> Iterator[type[Part]]:
    for subclass in part.__subclasses__():
        yield subclass
        yield from _subclasses(subclass)
