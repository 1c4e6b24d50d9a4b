"""Translates the settings of another program into fields of a recipe, with a line for each setting."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from llmtrain.errors import RecipeError, format_value
from llmtrain.plan.load.write import nested
from llmtrain.plan.migrate.files import ForeignFile
from llmtrain.recipe import Recipe, parse_recipe

SECRETS = frozenset(
    {"token", "hub_token", "use_auth_token", "push_to_hub_token", "hf_token", "api_key", "wandb_api_key"}
)
"""Settings whose values are not shown."""
Kind = Literal["same", "different", "unsupported", "missing"]


@dataclass(frozen=True, kw_only=True)
class Setting:
    """What a setting of another program becomes. The tables of these settings are also the tables of the guides."""

    key: str
    """Name of the setting; dots separate the keys of nested mappings."""
    field: str = ""
    """Dotted field of a recipe that takes the value; empty if none does."""
    default: Any = None
    """The program's value where the file has none, if it differs from the recipe's default."""
    values: Mapping[Any, Any] | None = None
    """The program's values → those of the field. Other values are not supported."""
    convert: Callable[[Any], Any] | None = None
    """Returns the field's value for the program's. Raises ValueError with a reason if there is none."""
    different: str = ""
    """What happens here instead, and the consequence."""
    unsupported: str = ""
    """For a setting without a field: why, and what comes nearest."""
    harmless: str = ""
    """For a setting without a field that training does not depend on: why nothing has to be set."""
    joint: str = ""
    """How it is translated together with other settings. A table shows this; the program's module does it."""
    older: bool = False
    """Whether only earlier releases of the program have it."""


def without_counterpart(reasons: Mapping[str, str], *, harmless: bool = False) -> tuple[Setting, ...]:
    """Returns settings without a field of a recipe, by what is said of them.

    reasons: reason → keys, separated by spaces. harmless: whether training does not depend on them.
    """
    return tuple(
        Setting(key=key, harmless=reason) if harmless else Setting(key=key, unsupported=reason)
        for reason, keys in reasons.items()
        for key in keys.split()
    )


@dataclass(frozen=True)
class Line:
    """What became of a setting."""

    kind: Kind
    key: str
    """The setting, as the program names it; empty for what differs whatever the file says."""
    value: Any
    field: str
    """The field that it became, or empty."""
    text: str
    """What differs or is missing, with the consequence; or a remark."""

    @property
    def given(self) -> str:
        """The setting with its value, as the program has it; empty if no setting causes the line."""
        return f"{self.key}: {format_value(self.value)}" if self.key and self.value is not None else self.key

    @property
    def became(self) -> str:
        """What became of it."""
        return ": ".join(part for part in (f"→ {self.field}" if self.field else "", self.text) if part)

    def __str__(self) -> str:
        joint = " " if self.field else ": "
        return joint.join(part for part in (self.given, self.became) if part)


class Settings:
    """The settings of a file. What nobody takes is reported as unknown."""

    def __init__(self, values: Mapping[str, Any], prefix: str = "", file: ForeignFile | None = None) -> None:
        """prefix: what stands before a key in a report, for example the name of the file. file: where they are from."""
        self._values, self._taken, self.prefix, self._file = dict(values), set[str](), prefix, file

    @property
    def stem(self) -> str:
        """The name of the file without its suffix; empty if it is unknown."""
        return self._file.path.stem if self._file else ""

    def shown(self, key: str) -> str:
        """Returns a key as a report shows it: with the prefix, and as the file writes it."""
        written = self._file.written.get(key, key) if self._file else key
        return self.prefix + written

    def place(self, key: str) -> str:
        """Returns the file, the line and the key for a message; the key alone if the file is unknown."""
        return f"{self._file.place(key)}: {self.shown(key)}" if self._file else self.shown(key)

    def __contains__(self, key: str) -> bool:
        return self._find(key)[0]

    def take(self, key: str, default: Any = None) -> Any:
        """Returns the value of a dotted key, and notes that it was read. A null counts as missing."""
        found, value = self._find(key)
        self._taken.add(key)
        return value if found and value is not None else default

    def rest(self, key: str) -> Any:
        """Returns and takes the value of a dotted key: of a mapping that was read in part, the keys that were not."""
        found, value = self._find(key)
        if isinstance(value, Mapping) and any(taken.startswith(f"{key}.") for taken in self._taken):
            value = {name.removeprefix(f"{key}."): item for name, item in self._untaken(value, f"{key}.")}
        self._taken.add(key)
        return value if found else None

    def taken(self) -> dict[str, Any]:
        """Returns the settings that were read, by dotted key, without those that are missing or null."""
        values = {key: self._find(key)[1] for key in sorted(self._taken)}
        return {key: value for key, value in values.items() if value is not None}

    def absent(self) -> set[str]:
        """Returns the settings that were asked for, and that the file does not have, by dotted key."""
        return {key for key in self._taken if key not in self}

    def untaken(self) -> dict[str, Any]:
        """Returns the settings that were not read, by dotted key; those of mappings read in part one by one."""
        return dict(self._untaken(self._values, ""))

    def _find(self, key: str) -> tuple[bool, Any]:
        value: Any = self._values
        for name in key.split("."):
            if not isinstance(value, Mapping) or name not in value:
                return False, None
            value = value[name]
        return True, value

    def _untaken(self, values: Mapping[str, Any], path: str) -> Iterable[tuple[str, Any]]:
        for name, value in values.items():
            key = f"{path}{name}"
            if key in self._taken:
                continue
            if isinstance(value, Mapping) and any(taken.startswith(f"{key}.") for taken in self._taken):
                yield from self._untaken(value, f"{key}.")
            else:
                yield key, value


@dataclass
class Translation:
    """A recipe in the making, and what became of each setting."""

    program: str
    """The program that the settings are for, as its users write it."""
    fields: dict[str, Any] = field(default_factory=dict)
    """Dotted field of a recipe → value, in the order in which they are written."""
    comments: dict[str, str] = field(default_factory=dict)
    """Dotted field → the setting or the reason that it comes from, written as a comment."""
    lines: list[Line] = field(default_factory=list)
    places: dict[str, str] = field(default_factory=dict)
    """Dotted field → file, line and setting that it comes from, for messages about its value."""

    def set(self, name: str, value: Any, comment: str = "", place: str = "") -> None:
        """Sets a field of the recipe. comment: where the value comes from. place: the same, as a file and a line."""
        self.fields[name] = value
        if comment:
            self.comments[name] = comment
        if place:
            self.places[name] = place

    def check(self) -> Recipe:
        """Returns the recipe. Raises RecipeError, which names the settings that have wrong values."""
        try:
            return parse_recipe(nested(self.fields))
        except RecipeError as error:
            raise RecipeError(
                replace(problem, field=f"{self._place(problem.field)} ({self.program} → {problem.field})")
                for problem in error.problems
            ) from None

    def _place(self, name: str) -> str:
        """Returns where a field, or else the nearest enclosing one, comes from."""
        while name and name not in self.places:
            name = name.rpartition(".")[0]
        return self.places.get(name, "recipe")

    def same(self, key: str, value: Any, name: str = "", text: str = "") -> None:
        """Notes a setting that was taken over. name: the field that has its value now."""
        self._add("same", key, value, name, text)

    def different(self, key: str, value: Any, text: str, name: str = "") -> None:
        """Notes what behaves differently here, with the consequence, in place of a line that it was taken over.

        key: empty for what no setting causes.
        """
        self.lines = [line for line in self.lines if not (key and line.kind == "same" and line.key == key)]
        self._add("different", key, value, name, text)

    def unsupported(self, key: str, value: Any, text: str) -> None:
        """Notes a setting that nothing here does, with what comes nearest."""
        self._add("unsupported", key, value, "", text)

    def missing(self, name: str, text: str, value: Any = None) -> None:
        """Notes what the settings do not say, and the user has to fill in. value: that of the field until then."""
        if not any(line.kind == "missing" and line.key == name for line in self.lines):
            self.lines.append(Line("missing", name, value, "", text))

    def _add(self, kind: Kind, key: str, value: Any, name: str, text: str) -> None:
        hidden = isinstance(value, str) and re.split(r"\W+", key)[-1] in SECRETS
        self.lines.append(Line(kind, key, "…" if hidden else value, name, text))

    def of(self, kind: Kind) -> list[Line]:
        """Returns the lines of a kind."""
        return [line for line in self.lines if line.kind == kind]

    def apply(self, settings: Settings, table: Iterable[Setting]) -> None:
        """Translates the settings that a table has. Others remain untaken."""
        for setting in table:
            if setting.joint:
                continue
            given = setting.key in settings
            value = settings.take(setting.key, setting.default) if setting.field else settings.rest(setting.key)
            if value is not None and value != {}:
                self._apply(setting, value, settings, given)

    def same_as_read(self, settings: Settings, name: str) -> None:
        """Notes that all settings that were read, and have no line yet, were taken over. name: the field for them."""
        noted = {line.key for line in self.lines}
        for key, value in settings.taken().items():
            if settings.shown(key) not in noted:
                self.same(settings.shown(key), value, name)

    def report_untaken(self, settings: Settings, program: str = "") -> None:
        """Notes every setting that was not read, or of whose value nothing was made.

        program: whose they are; by default the translated one.
        """
        text = f"is no setting of {program or self.program} that is known here"
        self._without_absent(frozenset(map(settings.shown, settings.absent())))
        if not settings.prefix:
            self.lines = [
                replace(line, key=settings.shown(line.key)) if line.key in settings else line for line in self.lines
            ]
        for key, value in settings.untaken().items():
            if value is not None:
                self.unsupported(settings.shown(key), value, text)
        noted = [line.key for line in self.lines]
        for key, value in settings.taken().items():
            if any(settings.shown(key) in name for name in noted):
                continue
            if not value:
                self.same(settings.shown(key), value, text="off")
            else:
                text = f"has a value that {program or self.program} does not document: set the recipe's field by hand"
                self.unsupported(settings.shown(key), value, text)

    def _without_absent(self, keys: frozenset[str]) -> None:
        """Drops lines that settings which the file does not have were taken over; other lines no longer name these."""
        kept = [line for line in self.lines if line.kind != "same" or line.key not in keys]
        self.lines = [
            replace(line, key="", value=None) if line.kind == "different" and line.key in keys else line
            for line in kept
        ]

    def _apply(self, setting: Setting, value: Any, settings: Settings, given: bool) -> None:
        key = settings.shown(setting.key)
        if setting.unsupported and not value:
            self.same(key, value, text="off")
        elif setting.unsupported:
            self.unsupported(key, value, setting.unsupported)
        elif not setting.field:
            self.same(key, value, text=setting.harmless)
        else:
            try:
                translated = _translated(setting, value)
            except ValueError as error:
                self.unsupported(key, value, str(error))
                return
            comment = key if given else f"default of {key}"
            self.set(setting.field, translated, comment, settings.place(setting.key))
            if setting.different:
                self.different(key, value, setting.different, setting.field)
            elif given:
                self.same(key, value, setting.field)


def _translated(setting: Setting, value: Any) -> Any:
    if setting.values is not None:
        try:
            return setting.values[value]
        except (KeyError, TypeError):
            known = ", ".join(str(name) for name in setting.values)
            raise ValueError(f"has no counterpart; these have: {known}") from None
    return setting.convert(value) if setting.convert else value


def joined(lines: Sequence[Line]) -> Iterator[Line]:
    """Yields lines for people: those without a field and with the same text are one."""
    seen = set()
    for line in lines:
        alike = [other for other in lines if not line.field and not other.field and other.text == line.text]
        if len(alike) < 2 or not line.key:
            yield line
        elif line.text not in seen:
            seen.add(line.text)
            yield replace(line, key=", ".join(other.given for other in alike), value=None)
