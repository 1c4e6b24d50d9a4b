"""What the parts of a recipe are made of."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, TypeVar

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, field_validator

from llmtrain.system.untrusted import json_fault

T = TypeVar("T")
Many = Annotated[Sequence[T], AfterValidator(tuple)]
"""A recipe may use a list; the frozen model stores a tuple."""
LARGEST = 10**12
"""Upper bound of every number in a recipe: far beyond any run, and small enough for fast arithmetic."""
PositiveInt = Annotated[int, Field(gt=0, le=LARGEST)]
NonNegativeInt = Annotated[int, Field(ge=0, le=LARGEST)]
PositiveFloat = Annotated[float, Field(gt=0)]
NonNegativeFloat = Annotated[float, Field(ge=0)]
Fraction = Annotated[float, Field(ge=0, lt=1)]


class Part(BaseModel):
    """A part of a recipe: frozen, with strict types and no undeclared fields."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", strict=True, use_attribute_docstrings=True, allow_inf_nan=False
    )

    @field_validator("*")
    @classmethod
    def _is_data(cls, value: Any) -> Any:
        if isinstance(value, (str, dict)) and (fault := json_fault(value)):
            raise ValueError(fault)
        return value
