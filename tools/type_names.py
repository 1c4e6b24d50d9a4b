"""Names of types as the reference pages show them: `int | None`, `tuple[float, float]`, `none | cosine`."""

from __future__ import annotations

import types
from typing import Annotated, Any, Literal, Union, get_args, get_origin


def type_name(annotation: Any) -> str:
    """Returns an annotation without constraints, modules and quotes, in which a Literal is replaced by its values."""
    origin, arguments = get_origin(annotation), get_args(annotation)
    if annotation is None or annotation is types.NoneType:
        return "None"
    if origin is Annotated:
        return type_name(arguments[0])
    if origin is Literal:
        return " | ".join(map(str, arguments))
    if origin in (Union, types.UnionType):
        return " | ".join(map(type_name, arguments))
    if annotation is ...:
        return "..."
    if origin is not None:
        return f"{'list' if origin.__name__ == 'Sequence' else origin.__name__}[{', '.join(map(type_name, arguments))}]"
    return getattr(annotation, "__name__", str(annotation))
