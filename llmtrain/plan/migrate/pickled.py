"""Reads `training_args.bin`, a pickle of arguments, without loading what it names.

Every class and function in the pickle is replaced with an object that only keeps what it is given, so nothing of the
pickle runs. A name outside of the libraries that write such files is refused.
"""

from __future__ import annotations

import io
import pickle
import zipfile
from pathlib import Path
from typing import Any

from llmtrain.errors import Problem, RecipeError, truncate
from llmtrain.system.untrusted import UNREADABLE, file_fault, read_bytes

MAX_FILE = 1 << 20
MAX_VALUES = 10_000
"""Largest number of values in the arguments; files in use have some hundred."""
PACKAGES = frozenset(
    {"transformers", "trl", "accelerate", "torch", "deepspeed", "peft", "llamafactory", "swift", "alignment"}
)
"""Packages whose names may occur."""
PLAIN = frozenset(
    {
        *(("collections", name) for name in ("OrderedDict", "defaultdict")),
        *(("pathlib", name) for name in ("Path", "PosixPath", "PurePosixPath", "WindowsPath")),
        *(("builtins", name) for name in ("set", "frozenset")),
        *(("__builtin__", name) for name in ("set", "frozenset")),
        ("datetime", "timedelta"),
        ("__main__", "TrainingArguments"),
        ("copyreg", "_reconstructor"),
        ("builtins", "object"),
    }
)
"""Further names that may occur."""
RUN_TIME = frozenset(
    {
        *("distributed_state", "deepspeed_plugin", "hf_deepspeed_config", "mixed_precision", "fsdp_plugin_args"),
        *("trackio_static_space_id_", "xla_fsdp_config", "parallelism_plugin"),
    }
)
"""Attributes that are no settings: the Trainer computes them when it starts."""


class _Kept:
    """Stands for an object of the pickle, and keeps what it is made from."""

    name = ""
    """Dotted name of its class, or of the function that makes it."""
    values: tuple[Any, ...]
    state: Any

    def __new__(cls, *values: Any, **_: Any) -> _Kept:
        kept = object.__new__(cls)
        kept.values, kept.state = values, {}
        return kept

    def __init__(self, *_: Any, **__: Any) -> None: ...

    def __setstate__(self, state: Any) -> None:
        self.state = state

    def __setitem__(self, key: Any, value: Any) -> None:
        self.state[key] = value

    def append(self, _: Any) -> None:
        """Ignores an item of what is no list."""


class _Reader(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if module.partition(".")[0] in PACKAGES or (module, name) in PLAIN:
            return type("Kept", (_Kept,), {"name": f"{module}.{name}"})
        raise pickle.UnpicklingError(f"names {truncate(f'{module}.{name}')}, which arguments do not need")

    def persistent_load(self, pid: Any) -> Any:
        raise pickle.UnpicklingError("contains a tensor, which arguments do not")


def read_pickled(path: Path) -> tuple[str, dict[str, Any]]:
    """Returns the class of the arguments, and their plain values. Raises RecipeError."""
    try:
        content = read_bytes(path, MAX_FILE)
        with zipfile.ZipFile(io.BytesIO(content)) as archive:
            member = next((name for name in archive.namelist() if name.endswith("/data.pkl")), None)
            if member is None:
                raise ValueError("has no data.pkl, so torch.save has not written it")
            with archive.open(member) as file:
                pickled = file.read(MAX_FILE + 1)
        if len(pickled) > MAX_FILE:
            raise ValueError(f"contains more than {MAX_FILE:,} bytes")
        read = _Reader(io.BytesIO(pickled)).load()
    except UNREADABLE as error:
        raise _refused(path, file_fault(error)) from None
    except Exception as error:  # a damaged pickle raises anything; nothing of it has run
        raise _refused(path, str(error) or type(error).__name__) from None
    state = read.state if isinstance(read, _Kept) else None
    if not isinstance(state, dict) or not all(isinstance(key, str) for key in state):
        raise _refused(path, "contains no object with arguments")
    name = read.name.rpartition(".")[2]
    left = [MAX_VALUES]
    values = {}
    for key, value in state.items():
        if key.startswith("_") or key in RUN_TIME:
            continue
        try:
            values[key] = _plain(value, left, 0)
        except ValueError as error:
            raise _refused(path, f"{truncate(key)}: {error}") from None
    return name, values


def _refused(path: Path, reason: str) -> RecipeError:
    return RecipeError(Problem("import.pickle", str(path), f"cannot be read: {truncate(reason)}"))


def _plain(value: Any, left: list[int], depth: int) -> Any:
    """Returns plain data; an enum is its value, another object its attributes."""
    left[0] -= 1
    if left[0] < 0 or depth > 8:
        raise ValueError("contains too many values")
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, (list, tuple)):
        return [_plain(item, left, depth + 1) for item in value]
    if isinstance(value, dict):
        return {str(key): _plain(item, left, depth + 1) for key, item in value.items()}
    if isinstance(value, _Kept):
        if value.values and not value.state:  # an enum, a device or a path
            parts = [_plain(item, left, depth + 1) for item in value.values]
            return parts[0] if len(parts) == 1 else parts
        return _plain(value.state, left, depth + 1)
    return value.name if isinstance(value, type) and issubclass(value, _Kept) else type(value).__name__
