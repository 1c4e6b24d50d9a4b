"""A whole recipe: its parts, its values by dotted name, and the faults of both."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any, Self

from pydantic import Field, ValidationError, model_validator

from llmtrain.errors import Problem, RecipeError, did_you_mean, format_value, truncate
from llmtrain.recipe.aliases import FIELD_OF_ALIAS
from llmtrain.recipe.execution import (
    CallbackConfig,
    CallbackOrPath,
    CheckpointConfig,
    EvalConfig,
    ExportConfig,
    GuardConfig,
    KernelsConfig,
    LoggingConfig,
    ParallelConfig,
    ProfileConfig,
    SamplesConfig,
    TasksConfig,
    WatchdogConfig,
)
from llmtrain.recipe.own_code import NAME, PATH, import_path, object_paths
from llmtrain.recipe.parts import Many, Part
from llmtrain.recipe.training import (
    BatchConfig,
    DataConfig,
    ModelConfig,
    ObjectiveConfig,
    OptimConfig,
    TrainConfig,
    TrainedTokenizer,
)
from llmtrain.system.untrusted import TOO_DEEP, TOO_LARGE, json_fault


class Recipe(Part):
    """Everything that defines a training run, except for the machine."""

    name: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")
    """Names the run directory and the run in trackers."""
    model: ModelConfig
    data: DataConfig
    objective: ObjectiveConfig = ObjectiveConfig()
    optim: OptimConfig
    batch: BatchConfig
    parallel: ParallelConfig = ParallelConfig()
    train: TrainConfig
    evaluation: EvalConfig = EvalConfig()
    samples: SamplesConfig = SamplesConfig()
    tasks: TasksConfig = TasksConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    guard: GuardConfig = GuardConfig()
    kernels: KernelsConfig = KernelsConfig()
    logging: LoggingConfig = LoggingConfig()
    watchdog: WatchdogConfig = WatchdogConfig()
    profile: ProfileConfig = ProfileConfig()
    export: ExportConfig = ExportConfig()
    callbacks: Many[CallbackOrPath] = ()
    """Code of your own that the run calls between its steps, in this order."""
    code_dir: str | None = None
    """Folder of the modules that the recipe names in import paths such as `mine:build_model`; installed packages come
    after it. Default: the folder of the recipe's file."""

    @model_validator(mode="after")
    def _formats_of_the_objective(self) -> Self:
        formats = {source.format for source in (*self.data.sources, *self.evaluation.all_sources.values())}
        if others := sorted(formats - set(self.objective.formats)):
            raise ValueError(
                f"a source has the format {', '.join(others)}, but objective.name={self.objective.name} reads "
                f"{', '.join(self.objective.formats)}"
            )
        return self

    @property
    def own_objects(self) -> dict[str, str]:
        """The import path of each object of the user's own code, by its dotted field."""
        return dict(object_paths(self))

    @property
    def gradient_callbacks(self) -> tuple[CallbackConfig, ...]:
        """The callbacks that change gradients."""
        return tuple(callback for callback in self.callbacks if callback.changes_gradients)

    @property
    def held_out_fraction(self) -> float:
        """The fraction of the training sources that is held out for evaluation."""
        return 0.0 if self.evaluation.sources else self.data.eval_fraction

    @property
    def evaluates_at_start(self) -> bool:
        """Whether the run evaluates before the first step."""
        at_start = self.evaluation.at_start
        wanted = self.model.pretrained is not None if at_start is None else at_start
        return wanted and self.evaluation.every_steps > 0

    @property
    def vocab_size(self) -> int | None:
        """Rows of the embedding: `model.config.vocab_size`, else that of a trained tokenizer, else None."""
        tokenizer = self.data.tokenizer
        trained = tokenizer.vocab_size if isinstance(tokenizer, TrainedTokenizer) else None
        return self.model.config.get("vocab_size", trained)

    def with_(self, **fields: Any) -> Recipe:
        """Returns a copy with dotted fields replaced: `recipe.with_(**{"parallel.zero_stage": 1})`.

        Raises RecipeError with every field that does not exist or whose value is invalid.
        """
        values = self.model_dump(mode="json")
        problems = [problem for path, value in fields.items() if (problem := _assign(values, path, value))]
        if problems:
            raise RecipeError(problems)
        return parse_recipe(values)

    def dotted(self, exclude_defaults: bool = False) -> dict[str, Any]:
        """Returns every value by its dotted field, as `with_` takes them; list items are numbered.

        exclude_defaults: leave out values that equal their defaults.
        """
        return dict(_leaves(self.model_dump(mode="json", exclude_defaults=exclude_defaults)))


def _leaves(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Yields dotted paths and values of nested JSON data; an empty list or object is a value."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    if not items:
        yield path, value
    for name, item in items:
        yield from _leaves(item, f"{path}.{name}" if path else str(name))


def parse_recipe(values: dict[str, Any]) -> Recipe:
    """Parses a JSON document into a recipe. Raises RecipeError with all faults at once."""
    try:
        return Recipe.model_validate_json(json.dumps(values))
    except ValidationError as error:
        raise RecipeError(recipe_problems(error)) from None


def parse_assignments(assignments: list[str]) -> dict[str, Any]:
    """Turns `--set KEY=VALUE` arguments into fields for `Recipe.with_`.

    A value is parsed as JSON if possible (numbers, true, null, lists, objects), and is text otherwise.
    """
    fields: dict[str, Any] = {}
    problems = []
    for assignment in assignments:
        key, equals, text = assignment.partition("=")
        if not equals or not key:
            message = f"{format_value(assignment)} is not KEY=VALUE"
            problems.append(Problem("set.form", "--set", message, "--set optim.lr=3e-4"))
            continue
        fields[key], fault = _json_or_text(text)
        if fault:
            problems.append(Problem("set.form", truncate(key), f"{format_value(text)} is invalid: {fault}"))
    if problems:
        raise RecipeError(problems)
    return fields


def _json_or_text(text: str) -> tuple[Any, str | None]:
    """Parses a value of `--set`; returns it and what is wrong with it, or None."""
    try:
        value = json.loads(text)
    except RecursionError:
        return None, TOO_DEEP
    except json.JSONDecodeError:
        value = text
    except ValueError:  # Python refuses to convert a text of that length to an integer
        return None, TOO_LARGE
    return value, json_fault(value)


# A part that a recipe file creates on its own does not know its place in the recipe, but its class does.
_PLACES = {"Source": "data.sources", "TrainedTokenizer": "data.tokenizer", "LoraConfig": "model.adapter"}


def recipe_problems(error: ValidationError) -> list[Problem]:
    """Converts a pydantic error to problems, with the closest name for a field that does not exist."""
    places = _PLACES | {
        part_in(field.annotation).__name__: name
        for name, field in Recipe.model_fields.items()
        if part_in(field.annotation)
    }
    errors = error.errors(include_url=False)
    # For `str | TrainedTokenizer`, an object is meant as the latter, so the message that it is not a string is dropped.
    relevant = [
        details
        for details in errors
        if not (details["loc"][-1:] == ("str",) and isinstance(details["input"], (dict, Part)))
    ]
    return [_problem(details, places.get(error.title, "")) for details in relevant or errors]


def _problem(details: Any, place: str) -> Problem:
    location = [str(part) for part in details["loc"] if str(part) not in ("str", "TrainedTokenizer", NAME, PATH)]
    field = ".".join(filter(None, (place, *location))) or "recipe"
    if details["type"] == "extra_forbidden":
        return _unknown_field(field)
    if details["type"] == "missing":
        return Problem("recipe.missing", field, "is required")
    message = details["msg"].removeprefix("Value error, ").replace("Input should be", "must be", 1)
    if details["type"] == "value_error" and isinstance(details["input"], (dict, Part)):
        return Problem("recipe.value", field, message)  # it names the fields of the part that do not fit together
    return Problem("recipe.value", field, f"{format_value(details['input'])} is invalid: {message}")


def _unknown_field(path: str) -> Problem:
    """Reports a field that does not exist, with the closest existing ones.

    Names the field that another tool calls so, a field with a similar spelling, and all fields of the part.
    """
    parent, _, name = path.rpartition(".")
    known = _fields_of(parent)
    alias = FIELD_OF_ALIAS.get(name) or _only_place_of(name)
    hint = f"; the field for that is '{alias}'" if alias else did_you_mean(name, known)
    names = parent.split(".")
    parts = (".".join(names[:size]) for size in range(min(len(names), 3), 0, -1) if parent)
    listing = next((f"fields of {part}: {', '.join(_fields_of(part))}" for part in parts if _fields_of(part)), "")
    if not listing:
        listing = f"a field has the form PART.NAME; the parts are {', '.join(Recipe.model_fields)}"
    field = truncate(path) if path.strip(" .") else format_value(path)
    return Problem("recipe.field", field, f"there is no such field{hint}", listing)


def _only_place_of(name: str) -> str | None:
    """Returns the dotted field of a name that exactly one part has, else None."""
    places = [f"{part}.{name}" for part in Recipe.model_fields if name in _fields_of(part)]
    return places[0] if len(places) == 1 else None


def _fields_of(path: str) -> list[str]:
    """Returns the names of the fields of the recipe part at a dotted path; empty if it has none."""
    part: Any = Recipe
    for name in filter(None, path.split(".")):
        if name.isdigit():
            continue
        annotation = part.model_fields[name].annotation if name in getattr(part, "model_fields", {}) else None
        part = part_in(annotation)
    return list(getattr(part, "model_fields", {}))


def part_in(annotation: Any) -> Any:
    """Returns the `Part` within an annotation such as `Sequence[Source]` or `str | TrainedTokenizer`."""
    if isinstance(annotation, type) and issubclass(annotation, Part):
        return annotation
    return next((found for argument in getattr(annotation, "__args__", ()) if (found := part_in(argument))), None)


def _plain(value: Any) -> Any:
    """Copies a field's value as JSON data, so that an override may also be a recipe part, a function or a class.

    It is a copy since a later assignment may change a field within it. Raises ValueError as `import_path` does.
    """
    if isinstance(value, Part):
        return value.model_dump(mode="json")
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    return import_path(value) if callable(value) else value


def _assign(values: dict[str, Any], path: str, value: Any) -> Problem | None:
    """Sets `values` at a dotted path. A last name that does not exist is added, so that validation reports it.

    Returns a problem if the path leads to no field or item.
    """
    target: Any = values
    names = path.split(".")
    for depth, name in enumerate(names, 1):
        if isinstance(target, list) and name not in map(str, range(len(target))):
            return Problem("recipe.field", truncate(path), f"has {len(target)} items, numbered from 0")
        if not (isinstance(target, (dict, list)) and name):
            return _unknown_field(".".join(names[: depth - 1]) or path)
        key: Any = int(name) if isinstance(target, list) else name
        if depth == len(names):
            try:
                target[key] = _plain(value)
            except ValueError as error:
                return Problem("recipe.value", truncate(path), str(error))
        elif isinstance(target, list):
            target = target[key]
        else:
            if target.get(key, 0) is None and _fields_of(".".join(names[:depth])):
                target[key] = {}  # an optional part, of which this is the first field
            target = target.get(key)
    return None
