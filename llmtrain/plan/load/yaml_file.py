"""Recipes in YAML files, which have the fields of `Recipe`, and `extends`, `variants` and `cluster`."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError

from llmtrain.errors import Problem, RecipeError
from llmtrain.plan.load.file import RecipeFile, check_file, check_variant, located
from llmtrain.recipe import Recipe, parse_recipe, recipe_problems
from llmtrain.recipe.cluster import Cluster
from llmtrain.recipe.parts import described_schema
from llmtrain.system.untrusted import UNREADABLE, file_fault, json_fault, read_text
from llmtrain_lint.yaml_text import KeyPositions, YamlError, parse_yaml

OWN_KEYS = ("extends", "variants", "cluster")
"""Top-level keys in addition to the fields of a recipe."""


class CoreLoader(yaml.SafeLoader):  # type: ignore[misc]
    """Reads plain values as in YAML 1.2: `2e-3` is a number, and `on` is a text. PyYAML itself implements YAML 1.1."""

    yaml_implicit_resolvers: dict[str, Any] = {}  # noqa: RUF012  (as the class declares it)


def _add(tag: str, pattern: str, first: str, convert: Callable[[str], Any]) -> None:
    CoreLoader.add_implicit_resolver(f"tag:yaml.org,2002:{tag}", re.compile(f"(?:{pattern})$"), list(first))
    CoreLoader.add_constructor(f"tag:yaml.org,2002:{tag}", lambda _, node: convert(node.value))


_add("null", "~|null|Null|NULL|", "~nN", lambda _: None)
CoreLoader.yaml_implicit_resolvers.setdefault("", []).append(("tag:yaml.org,2002:null", re.compile("$")))
_add("bool", "true|True|TRUE|false|False|FALSE", "tTfF", lambda text: text.lower() == "true")
_add("int", "[-+]?[0-9]+", "-+0123456789", int)
_add("float", r"[-+]?(?:\.[0-9]+|[0-9]+(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?", "-+.0123456789", float)


class YamlRecipe:
    """A YAML file and the recipe that it extends."""

    def __init__(
        self, path: Path, opened: Callable[[Path, tuple[Path, ...]], RecipeFile], extending: tuple[Path, ...]
    ) -> None:
        """opened: function that opens the file which this one extends. extending: the files that extend this one."""
        self.path = path
        self._values, self._places = read_with_places(path)
        self._base, self._base_variant = self._extended(opened, (*extending, path.resolve()))

    def variants(self) -> list[str]:
        """Returns the names of the variants, in the order of the file."""
        return list(self._own("variants"))

    def recipe(self, variant: str = "") -> Recipe:
        """Returns the extended recipe, overridden by the fields of the file and then by those of the variant."""
        values = self._base.recipe(self._base_variant).model_dump(mode="json") if self._base else {}
        fields = {key: value for key, value in self._values.items() if key not in OWN_KEYS}
        values = _merged(values, fields)
        if variant:
            check_variant(self.path, variant, self.variants())
            changed = self._own("variants")[variant]
            if not isinstance(changed, dict):
                message = "is not a mapping of the fields that it changes"
                raise RecipeError(Problem("recipe.value", self._place(f"variants.{variant}"), message))
            values = _merged(values, changed)
        try:
            return parse_recipe(values)
        except RecipeError as error:
            raise self._located(error.problems, variant=variant) from None

    def cluster(self, variant: str = "") -> Cluster | None:
        """Returns the cluster of the file or, if it has none, of the recipe that it extends."""
        if "cluster" not in self._values:
            return self._base.cluster(self._base_variant) if self._base else None
        try:
            return Cluster.model_validate_json(json.dumps(self._own("cluster")))
        except ValidationError as error:
            raise self._located(recipe_problems(error), "cluster.") from None

    def lines(self, variant: str = "") -> dict[str, str]:
        """Returns dotted field name → file and line, for the fields that the file sets."""
        lines = {".".join(where): f"{self.path}:{line}" for where, ((line, _), *_) in self._places.items()}
        own = f"variants.{variant}."
        return lines | {name.removeprefix(own): line for name, line in lines.items() if name.startswith(own)}

    def _own(self, key: str) -> dict[str, Any]:
        """Returns the mapping under a top-level key, or an empty one. Raises RecipeError for another type."""
        value = self._values.get(key) or {}
        if not isinstance(value, dict):
            raise RecipeError(Problem("recipe.value", self._place(key), "is not a mapping"))
        return value

    def _extended(
        self, opened: Callable[[Path, tuple[Path, ...]], RecipeFile], extending: tuple[Path, ...]
    ) -> tuple[RecipeFile | None, str]:
        spec = self._values.get("extends")
        if spec is None:
            return None, ""
        place = self._place("extends")
        if not isinstance(spec, str):
            raise RecipeError(Problem("recipe.value", place, "is not the path of a recipe", "extends: tiny.py:zero3"))
        name, _, variant = located(spec).partition(":")
        path = self.path.parent / name
        if path.resolve() in extending:
            raise RecipeError(Problem("recipe.extends", place, f"'{spec}' itself extends this file"))
        try:
            check_file(path)
        except RecipeError as error:
            raise RecipeError(
                replace(problem, field=f"{place}: {problem.field}") for problem in error.problems
            ) from None
        return opened(path, extending), variant

    def _located(self, problems: Iterable[Problem], prefix: str = "", variant: str = "") -> RecipeError:
        """Returns an error in which each problem has the line of its field, or of the nearest enclosing one."""
        return RecipeError(replace(problem, field=self._place(prefix + problem.field, variant)) for problem in problems)

    def _place(self, field: str, variant: str = "") -> str:
        lines, around = self.lines(variant), field
        while around and around not in lines:
            around = around.rpartition(".")[0]
        return f"{lines.get(around, self.path)}: {field}"


def _merged(values: Any, given: Any) -> Any:
    """Returns values overridden by the given ones: objects are merged, and everything else is replaced."""
    if not (isinstance(values, dict) and isinstance(given, dict) and given):
        return given
    return values | {key: _merged(values.get(key), value) for key, value in given.items()}


def read_with_places(path: Path) -> tuple[dict[str, Any], KeyPositions]:
    """Returns the content of a file, and the positions of its keys. Raises RecipeError."""
    try:
        values, places = parse_yaml(read_text(path), CoreLoader, dict)
    except YamlError as error:
        at = f":{error.line}:{error.column}" if error.line else ""
        raise RecipeError(Problem("recipe.yaml", f"{path}{at}", str(error))) from None
    except UNREADABLE as error:
        raise RecipeError(Problem("recipe.file", str(path), f"cannot be read: {file_fault(error)}")) from None
    if values is None:
        values = {}
    if not isinstance(values, dict):
        raise RecipeError(Problem("recipe.yaml", str(path), "is not a mapping of the fields of a recipe"))
    if repeated := [(where, lines) for where, lines in places.items() if len(lines) > 1]:
        raise RecipeError(
            Problem("recipe.yaml", f"{path}:{lines[1][0]}: {'.'.join(where)}", f"is already in line {lines[0][0]}")
            for where, lines in repeated
        )
    if fault := json_fault(values):
        raise RecipeError(Problem("recipe.yaml", str(path), fault))
    return values, places


class CoreDumper(yaml.SafeDumper):  # type: ignore[misc]
    """Quotes the texts that `CoreLoader` would read as something else."""

    yaml_implicit_resolvers = CoreLoader.yaml_implicit_resolvers


def as_yaml(recipe: Recipe, cluster: Cluster | None, with_defaults: bool = False) -> str:
    """Returns the text of a YAML file that declares a recipe and its cluster.

    with_defaults: whether to include fields that have their default value.
    """
    values = recipe.model_dump(mode="json", exclude_defaults=not with_defaults)
    if cluster:
        values["cluster"] = cluster.model_dump(mode="json", exclude_unset=not with_defaults)
    text: str = yaml.dump(values, Dumper=CoreDumper, sort_keys=False, allow_unicode=True, width=120)
    return text


def recipe_schema() -> dict[str, Any]:
    """Returns the JSON schema of YAML recipes, for editors.

    The schema requires no field, because the extended recipe may have it. Loading a recipe reports missing fields.
    """
    described = described_schema(Recipe)
    machine = described_schema(Cluster)
    parts = described.pop("$defs") | machine.pop("$defs")
    for part in (described, machine, *parts.values()):
        part.pop("required", None)
    fields = dict(described["properties"])
    described["properties"] |= {
        "extends": {"type": "string", "description": "A recipe whose fields this file changes: FILE[:VARIANT]."},
        "cluster": machine,
        "variants": {
            "type": "object",
            "description": "Variants by name, with the fields that each changes.",
            "additionalProperties": {"type": "object", "properties": fields, "additionalProperties": False},
        },
    }
    return {"$schema": "https://json-schema.org/draft/2020-12/schema"} | described | {"$defs": parts}
