"""Translates the settings of another program into fields of a recipe, with a line for each setting."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from llmtrain.errors import format_value

Kind = Literal["same", "different", "unsupported"]


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

    def __str__(self) -> str:
        given = f"{self.key}: {format_value(self.value)}" if self.key else ""
        became = f"{given} → {self.field}" if given and self.field else given or self.field
        return ": ".join(part for part in (became, self.text) if part)


class Settings:
    """The settings of a file. What nobody takes is reported as unknown."""

    def __init__(self, values: Mapping[str, Any], prefix: str = "") -> None:
        """prefix: what stands before a key in a report, for example the name of the file."""
        self._values, self._taken, self.prefix = dict(values), set[str](), prefix

    def __contains__(self, key: str) -> bool:
        return self._find(key)[0]

    def take(self, key: str, default: Any = None) -> Any:
        """Returns the value of a dotted key, and notes that it was read. A null counts as missing."""
        found, value = self._find(key)
        self._taken.add(key)
        return value if found and value is not None else default

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

    def set(self, name: str, value: Any, comment: str = "") -> None:
        """Sets a field of the recipe. comment: where the value comes from."""
        self.fields[name] = value
        if comment:
            self.comments[name] = comment

    def same(self, key: str, value: Any, name: str = "", text: str = "") -> None:
        """Notes a setting that was taken over. name: the field that has its value now."""
        self.lines.append(Line("same", key, value, name, text))

    def different(self, key: str, value: Any, text: str, name: str = "") -> None:
        """Notes what behaves differently here, with the consequence. key: empty for what no setting causes."""
        self.lines.append(Line("different", key, value, name, text))

    def unsupported(self, key: str, value: Any, text: str) -> None:
        """Notes a setting that nothing here does, with what comes nearest."""
        self.lines.append(Line("unsupported", key, value, "", text))

    def of(self, kind: Kind) -> list[Line]:
        """Returns the lines of a kind."""
        return [line for line in self.lines if line.kind == kind]

    def apply(self, settings: Settings, table: Iterable[Setting]) -> None:
        """Translates the settings that a table has. Others remain untaken."""
        for setting in table:
            given = setting.key in settings
            value = settings.take(setting.key, setting.default)
            if value is not None:
                self._apply(setting, value, settings.prefix, given)

    def report_untaken(self, settings: Settings) -> None:
        """Notes every setting that was not read."""
        for key, value in settings.untaken().items():
            if value is not None:
                self.unsupported(settings.prefix + key, value, f"is not a setting of {self.program} that is known here")

    def _apply(self, setting: Setting, value: Any, prefix: str, given: bool) -> None:
        key = prefix + setting.key
        if setting.unsupported:
            self.unsupported(key, value, setting.unsupported)
        elif not setting.field:
            self.same(key, value, text=setting.harmless)
        else:
            try:
                translated = _translated(setting, value)
            except ValueError as error:
                self.unsupported(key, value, str(error))
                return
            self.set(setting.field, translated, key if given else f"{self.program}'s default for {key}")
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
