"""The data types of the linter: a parsed configuration, and a finding in it."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any, Literal

from llmtrain_lint.errors import printable, truncate
from llmtrain_lint.schema import KeyPath, Schema, schema

Severity = Literal["error", "warning"]
Effect = Literal["refuses", "ignores", "changes", "misreads", "allows"]
"""The effect on a setting; an allowed setting has a risk or a cost."""
EFFECTS: dict[Effect, str] = {
    "refuses": "refused",
    "ignores": "ignored",
    "changes": "changed",
    "misreads": "misread",
    "allows": "allowed",
}
Reader = Literal["trainer", "accelerate", "lightning", "deepspeed"]
"""The program that reads the file; all others hand it to DeepSpeed after filling in what they know."""
READERS: dict[Reader, str] = {
    "trainer": "the Trainer",
    "accelerate": "Accelerate",
    "lightning": "Lightning",
    "deepspeed": "DeepSpeed",
}
_BOOLEAN_WORDS = {
    **dict.fromkeys(("true", "t", "yes", "y", "on", "1"), True),
    **dict.fromkeys(("false", "f", "no", "n", "off", "0"), False),
}
LARGEST_NUMBER = 2**63
"""Larger numbers are not accepted as counts; the bound limits the length of products and messages."""


@dataclass(frozen=True)
class Finding:
    """One fault of a configuration file: rule, severity, dotted key and position (counted from 1; 0 if unknown).

    `by` does to the key what `effect` says, for the reason in `message`.
    """

    rule: str
    severity: Severity
    field: str
    message: str
    fix: str = ""
    line: int = 0
    column: int = 0
    effect: Effect = "refuses"
    by: str = "DeepSpeed"

    @property
    def text(self) -> str:
        """Returns what happens, why, and what to do."""
        fix = f"; fix: {self.fix}" if self.fix else ""
        if self.rule == "lint.unreadable":
            return f"it {self.message}{fix}"
        joint = ", but" if self.effect == "allows" else ":"
        return f"{self.by} {self.effect} this{joint} {self.message}{fix}"


def truth(value: Any) -> bool | None:
    """Parses a text such as "yes" or "off" as pydantic parses a boolean; None if it is none."""
    return _BOOLEAN_WORDS.get(value.lower()) if isinstance(value, str) else None


class Unreadable(Exception):  # noqa: N818  (it carries the finding)
    """The file contains no configuration."""

    def __init__(self, message: str, line: int = 0, column: int = 0, fix: str = "") -> None:
        self.finding = Finding(
            "lint.unreadable", "error", "file", printable(truncate(message)), printable(fix), line, column
        )
        super().__init__(message)


class NotDeepSpeed(Exception):  # noqa: N818  (nothing is wrong)
    """The file configures another program, as its message says, and is skipped."""


@dataclass(frozen=True)
class Configuration:
    """A parsed configuration with the positions (line, column) of its keys.

    The methods below return what the release of DeepSpeed would use if a value has the right type, and treat the key as
    absent if it has not: a wrong type is reported once, by its own rule. Keys that only other releases know are absent.
    """

    values: dict[str, Any]
    places: dict[KeyPath, list[tuple[int, int]]]
    repeated: tuple[KeyPath, ...]
    schema: Schema = field(default_factory=schema)
    reader: Reader = "deepspeed"
    world_size: int | None = None
    data_parallel: int | None = None
    arguments: dict[str, Any] = field(default_factory=dict)
    """The Trainer's arguments, to compare."""
    strict_json_fault: tuple[int, int, str] | None = None
    """The place and the reason if the text is not strict JSON, though DeepSpeed can read it."""
    accelerate: dict[str, Any] | None = None
    """The file's content if it is Accelerate's own configuration; `values` are what DeepSpeed gets."""
    constants: bool = False
    """Whether it has NaN or Infinity, which DeepSpeed's parser reads differently."""

    def at(self, *where: str) -> Any:
        """Returns the value at a path, or None."""
        value: Any = self.values
        for length, key in enumerate(where, 1):
            value = (
                value.get(key) if isinstance(value, dict) and where[:length] not in self.schema.other_releases else None
            )
        return value

    def has(self, *where: str) -> bool:
        """Whether the key is present, whatever its value."""
        block = self.at(*where[:-1])
        return isinstance(block, dict) and where[-1] in block and where not in self.schema.other_releases

    def block(self, *where: str) -> dict[str, Any]:
        """Returns the object at a path, or an empty one."""
        value = self.at(*where)
        return value if isinstance(value, dict) else {}

    def on(self, *where: str) -> bool:
        """Whether a switch is present and on."""
        value = self.at(*where)
        return value is True or (type(value) is int and value == 1) or truth(value) is True

    def off(self, *where: str) -> bool:
        """Whether a switch is present and off."""
        value = self.at(*where)
        return value is False or (type(value) is int and value == 0) or truth(value) is False

    def number(self, *where: str) -> float | None:
        """Returns the finite number at a path, or None."""
        value = self.at(*where)
        fits = type(value) in (int, float) and abs(value) < LARGEST_NUMBER
        return value if fits else None

    def count(self, *where: str) -> int | None:
        """Returns the positive integer at a path, or None; a float such as 5e8 counts if it is an integer."""
        value = self.number(*where)
        return int(value) if value is not None and value > 0 and value == int(value) else None

    def word(self, *where: str) -> str:
        """Returns the text at a path, or an empty one."""
        value = self.at(*where)
        return value if isinstance(value, str) else ""

    def since(self, release: str) -> bool:
        """Whether the file is read by a release of DeepSpeed or a later one."""
        return self.schema.since(release)

    @property
    def filled(self) -> bool:
        """Whether the Trainer or Accelerate fill the file in, which the Trainer does through Accelerate."""
        return self.reader in ("trainer", "accelerate")

    @property
    def stage(self) -> float:
        """The ZeRO stage that DeepSpeed would use; NaN, which is unlike every stage, if it is filled in later."""
        if self.at("zero_optimization") is True:  # DeepSpeed's old form
            return 1
        if self.filled and self.at("zero_optimization", "stage") == "auto":
            return math.nan
        stage = self.number("zero_optimization", "stage")
        if self.word("zero_optimization", "stage") in ("1", "2", "3"):  # pydantic converts it
            stage = int(self.word("zero_optimization", "stage"))
        return int(stage) if stage in (1, 2, 3) else 0

    def offload(self, what: str) -> str:
        """Returns the target of `offload_optimizer` or `offload_param`: none, cpu or nvme."""
        old = {"offload_optimizer": "cpu_offload", "offload_param": "cpu_offload_param"}[what]
        if self.on("zero_optimization", old):
            return "cpu"
        device = self.word("zero_optimization", what, "device")
        return device if device in ("cpu", "nvme") else "none"

    @property
    def tensor_parallel(self) -> int:
        """The number of ranks among which AutoTP splits the layers."""
        return self.count("tensor_parallel", "autotp_size") or 1

    @property
    def pipeline(self) -> bool:
        """Whether the file has a pipeline block; only the training script knows whether there is a pipeline."""
        return bool(self.block("pipeline"))
