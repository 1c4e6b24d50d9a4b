"""Reads the pickles of torch, DeepSpeed and `torch.distributed.checkpoint` as data.

Nothing that a pickle names is imported or called. Tensors become places in the file, which are read when they are
needed, and known classes become records of what they were made from. Every other name is refused.
"""

from __future__ import annotations

import io
import math
import pickle
import pickletools
import zipfile
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn, TypeVar

import torch
from torch import Tensor

from llmtrain.errors import CheckpointError, Problem, abbreviate, printable, truncate
from llmtrain.system.untrusted import file_fault, open_regular

T = TypeVar("T")
MOST_BYTES = 256 << 20
"""Size of the longest pickle, without its tensors."""
MEMO = frozenset({"PUT", "BINPUT", "LONG_BINPUT"})
"""Operations whose argument is the index of a table that the unpickler allocates."""

DTYPES = {
    "FloatStorage": torch.float32,
    "DoubleStorage": torch.float64,
    "HalfStorage": torch.float16,
    "BFloat16Storage": torch.bfloat16,
    "LongStorage": torch.int64,
    "IntStorage": torch.int32,
    "ShortStorage": torch.int16,
    "CharStorage": torch.int8,
    "ByteStorage": torch.uint8,
    "BoolStorage": torch.bool,
}
"""Name of a storage in `torch` → type of its elements."""
DTYPE_NAMES = {str(dtype).removeprefix("torch."): dtype for dtype in DTYPES.values()} | {
    name: getattr(torch, name) for name in ("float8_e4m3fn", "float8_e5m2")
}

RECORDS = frozenset(
    {
        "argparse.Namespace",
        *(f"{module}.PosixPath" for module in ("pathlib", "pathlib._local")),
        "_codecs.encode",
        "signal.Signals",
        "numpy.dtype",
        "torch.device",
        "torch.serialization._get_layout",
        "deepspeed.checkpoint.universal_checkpoint.SubparamShape",
        *(f"numpy.{core}.multiarray.scalar" for core in ("core", "_core")),
        *(f"deepspeed.runtime.fp16.loss_scaler.{name}" for name in ("LossScaler", "DynamicLossScaler")),
        "deepspeed.runtime.zero.config.ZeroStageEnum",
        "deepspeed.runtime.zero.offload_config.OffloadDeviceEnum",
        *(f"deepspeed.utils.{module}.fragment_address" for module in ("tensor_fragment", "mixed_precision_linkage")),
        *(
            f"torch.distributed.checkpoint.metadata.{name}"
            for name in (
                *("Metadata", "TensorStorageMetadata", "BytesStorageMetadata", "ChunkStorageMetadata"),
                *("TensorProperties", "MetadataIndex", "StorageMeta", "_MEM_FORMAT_ENCODING"),
            )
        ),
        *(f"torch.distributed._shard.{name}" for name in ("sharded_tensor.metadata.TensorProperties",)),
        *(f"torch.distributed._shard.sharded_tensor.metadata.{name}" for name in ("MEM_FORMAT_ENCODING",)),
        "torch.distributed.checkpoint.filesystem._StorageInfo",
        *(f"torch.distributed.checkpoint.planner.{name}" for name in ("SavePlan", "WriteItem", "TensorWriteData")),
        "torch.distributed.checkpoint.planner.WriteItemType",
        *(f"megatron.core.enums.{name}" for name in ("ModelType", "Fp4Recipe", "Fp8Recipe")),
        *(f"megatron.core.transformer.enums.{name}" for name in ("AttnBackend", "CudaGraphScope")),
        *(f"megatron.core.dist_checkpointing.strategies.torch.{name}" for name in ("MCoreMetadata", "MCoreSavePlan")),
    }
)
"""Full names of classes and functions whose arguments and attributes are kept as a `Record`."""


class _Sealed:
    """Base of the objects that a pickle can reach: it cannot set their attributes."""

    __slots__ = ()

    def __setstate__(self, state: object) -> None:
        raise pickle.UnpicklingError("sets attributes of a tensor or a function")


class Record:
    """What a pickle says about an object of a known class: nothing of that class is imported."""

    name = ""
    """Full name of the class."""

    arguments: tuple[Any, ...]
    """What the class was called with."""
    attributes: dict[str, Any]
    """What was set on the object."""

    def __new__(cls, *arguments: Any) -> Record:
        """Keeps the arguments: a pickle may make an object without initialising it."""
        record = super().__new__(cls)
        record.arguments, record.attributes = arguments, {}
        return record

    def __setstate__(self, state: Any) -> None:
        parts = state if isinstance(state, tuple) and len(state) == 2 else (state,)
        for part in parts:
            if isinstance(part, dict):
                self.attributes.update(part)
        if not any(isinstance(part, dict) for part in parts):
            self.arguments = state if isinstance(state, tuple) else (state,)

    def get(self, name: str, default: Any = None) -> Any:
        """Returns an attribute."""
        return self.attributes.get(name, default)


class _Elements(_Sealed):
    """The type of a storage's elements."""

    __slots__ = ("dtype",)

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype


class _Storage(_Sealed):
    """The bytes of a storage in a file."""

    __slots__ = ("dtype", "offset", "size")

    def __init__(self, dtype: torch.dtype, offset: int, size: int) -> None:
        self.dtype, self.offset, self.size = dtype, offset, size


class StoredTensor(_Sealed):
    """A tensor in a file, which is read on demand."""

    __slots__ = ("_file", "_offset", "_stride", "dtype", "shape")

    def __init__(
        self, file: Path, dtype: torch.dtype, offset: int, shape: tuple[int, ...], stride: tuple[int, ...]
    ) -> None:
        """offset: of the first element, in bytes from the beginning of the file."""
        self._file, self._offset, self._stride = file, offset, stride
        self.dtype, self.shape = dtype, shape

    @property
    def numel(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    def read(self, first: int = 0, end: int | None = None) -> Tensor:
        """Returns elements `first` to `end` of the flat tensor; by default all of them, in its shape."""
        if not 0 <= first <= (self.numel if end is None else end) <= self.numel:
            raise _refused(
                self._file, f"has a tensor of {self.numel:,} elements, of which {first:,} to {end:,} are needed"
            )
        is_flat = self._stride == _contiguous(self.shape)
        span = self.numel if is_flat else _span(self.shape, self._stride)
        start, stop = (first, self.numel if end is None else end) if is_flat else (0, span)
        content = torch.empty(stop - start, dtype=self.dtype)
        raw: memoryview = content.view(torch.uint8).numpy().data if content.numel() else memoryview(b"")
        with open_regular(self._file) as file:
            file.seek(self._offset + start * content.element_size())
            done = 0
            while done < len(raw):
                count = file.readinto(raw[done:])
                if not count:
                    raise _refused(self._file, "ends before the last of its tensors")
                done += count
        if not is_flat:
            whole = content.as_strided(self.shape, self._stride).contiguous()
            return whole if (first, end) == (0, None) else whole.flatten()[first:end]
        return content.view(self.shape) if (first, end) == (0, None) else content

    def scalar(self) -> float:
        """Returns the value of a tensor with one element."""
        return float(self.read().item())


class _Rebuild(_Sealed):
    """Stands for torch's functions that rebuild a tensor."""

    __slots__ = ("_file", "_kind")

    def __init__(self, file: Path, kind: str) -> None:
        self._file, self._kind = file, kind

    def __call__(self, *arguments: Any) -> StoredTensor:
        if self._kind == "_rebuild_parameter":
            return _of(StoredTensor, arguments[0])
        if self._kind == "_rebuild_from_type_v2":
            return _of(_Rebuild, arguments[0])(*arguments[2])
        storage, offset, shape, stride = _of(_Storage, arguments[0]), *arguments[1:4]
        dtype = storage.dtype
        if self._kind == "_rebuild_tensor_v3":
            dtype = _of(_Elements, arguments[6]).dtype
        shape, stride = tuple(shape), tuple(stride)
        numbers = (offset, *shape, *stride)
        if len(shape) != len(stride) or not all(type(number) is int and 0 <= number < 2**63 for number in numbers):
            raise pickle.UnpicklingError("has a tensor whose shape is not one")
        held = storage.size // dtype.itemsize
        if math.prod(shape) > held or offset + _span(shape, stride) > held:
            needed = max(math.prod(shape), offset + _span(shape, stride))
            message = f"has a tensor of the shape {truncate(str(shape))}, which needs {needed:,} elements of a "
            raise pickle.UnpicklingError(f"{message}storage of {held:,}")
        return StoredTensor(self._file, dtype, storage.offset + offset * dtype.itemsize, shape, stride)


def _of(kind: type[T], value: Any) -> T:
    if not isinstance(value, kind):
        raise pickle.UnpicklingError(f"has a {type(value).__name__} where a {kind.__name__.strip('_')} is needed")
    return value


def _contiguous(shape: Sequence[int]) -> tuple[int, ...]:
    stride, step = [], 1
    for size in reversed(shape):
        stride.append(step)
        step *= max(size, 1)
    return tuple(reversed(stride))


def _span(shape: Sequence[int], stride: Sequence[int]) -> int:
    """Returns the number of elements from the first to the last of a tensor."""
    return 0 if 0 in shape else 1 + sum((size - 1) * step for size, step in zip(shape, stride, strict=True))


class _Unpickler(pickle.Unpickler):
    def __init__(self, content: bytes, file: Path, archive: zipfile.ZipFile | None, start: int) -> None:
        super().__init__(io.BytesIO(content))
        self._file, self._archive, self._start = file, archive, start
        self.refused: list[str] = []
        self._made: dict[str, type[Record]] = {}

    def find_class(self, module: str, name: str) -> Any:
        module = {"__builtin__": "builtins"}.get(module, module)  # its name in protocol 2
        full = f"{module}.{name}"
        if full in ("collections.OrderedDict", "torch.Size", "builtins.set"):
            return {"OrderedDict": OrderedDict, "Size": tuple, "set": set}[name]
        if module in ("torch", "torch.storage"):
            if name in DTYPES:
                return _Elements(DTYPES[name])
            if name == "UntypedStorage":
                return _Elements(torch.uint8)
            if name in DTYPE_NAMES:
                return _Elements(DTYPE_NAMES[name])
        if module in ("torch._utils", "torch._tensor") and name in (
            *("_rebuild_tensor", "_rebuild_tensor_v2", "_rebuild_tensor_v3"),
            *("_rebuild_parameter", "_rebuild_from_type_v2"),
        ):
            return _Rebuild(self._file, name)
        if full in ("torch.Tensor", "torch.nn.parameter.Parameter"):
            return _Sealed()  # names the type of a tensor, which nothing asks for
        if full not in RECORDS:  # goes on, so that the error names all of them
            self.refused.append(printable(truncate(full)))
        return self._made.setdefault(full, type("Record", (Record,), {"name": full}))

    def persistent_load(self, pid: Any) -> _Storage:
        if (
            self._archive is None
            or not isinstance(pid, tuple)
            or len(pid) != 5
            or pid[0] != "storage"
            or not isinstance(pid[2], str)
        ):
            raise pickle.UnpicklingError("refers to something that is not a storage of its file")
        dtype, key, numel = _of(_Elements, pid[1]).dtype, pid[2], pid[4]
        pickled = next(name for name in self._archive.namelist() if name.endswith("data.pkl"))
        name = f"{pickled.removesuffix('data.pkl')}data/{key}"
        try:
            record = self._archive.getinfo(name)
        except KeyError:
            raise pickle.UnpicklingError(f"refers to a storage that is not in it: {truncate(key)}") from None
        size = numel * dtype.itemsize if type(numel) is int and numel < 2**63 else -1
        if record.compress_type != zipfile.ZIP_STORED or not 0 <= size <= record.file_size:
            message = f"says that storage {truncate(key)} has {size:,} bytes, and has {record.file_size:,}"
            raise pickle.UnpicklingError(message)
        with self._archive.open(record) as opened:  # checks the entry's own header
            opened.read(0)
        return _Storage(dtype, self._start + _data_offset(self._archive, record), size)


def _data_offset(archive: zipfile.ZipFile, record: zipfile.ZipInfo) -> int:
    assert archive.fp is not None
    archive.fp.seek(record.header_offset + 26)
    lengths = archive.fp.read(4)
    return record.header_offset + 30 + int.from_bytes(lengths[:2], "little") + int.from_bytes(lengths[2:], "little")


class _Window(io.RawIOBase):
    """A range of a file as a file."""

    def __init__(self, file: io.RawIOBase, start: int, length: int) -> None:
        self._file, self._start, self._length, self._at = file, start, length, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = 0) -> int:
        self._at = max(0, offset + (0, self._at, self._length)[whence])
        return self._at

    def tell(self) -> int:
        return self._at

    def readinto(self, buffer: Any) -> int:
        view = memoryview(buffer)[: max(0, self._length - self._at)]
        self._file.seek(self._start + self._at)
        count = self._file.readinto(view) or 0
        self._at += count
        return count


def read_torch(path: Path, start: int = 0, length: int | None = None) -> Any:
    """Returns what `torch.save` wrote: containers, numbers and texts, `StoredTensor`s and `Record`s.

    start, length: range of the file. Raises CheckpointError for what cannot be read, or names anything else.
    """
    with _refusing(path), open_regular(path) as file:
        size = file.seek(0, 2)
        length = size - start if length is None else length
        if start < 0 or length < 0 or start + length > size:
            raise ValueError(f"has {size:,} bytes, and is said to have {start + length:,}")
        window = io.BufferedReader(_Window(file, start, length))
        if not zipfile.is_zipfile(window):
            raise ValueError("is not in the format that torch has written since version 1.6")
        with zipfile.ZipFile(window) as archive:
            names = archive.namelist()
            pickles = [name for name in names if name.endswith("data.pkl")]
            if len(pickles) != 1:
                raise ValueError(f"has {len(pickles)} pickles, where torch writes one")
            order = [name for name in names if name.endswith("byteorder")]
            if order and archive.read(order[0]) != b"little":
                raise ValueError("was written on a machine of another byte order")
            record = archive.getinfo(pickles[0])
            if record.file_size > MOST_BYTES:
                raise ValueError(f"has a pickle of more than {MOST_BYTES:,} bytes")
            return _load(archive.read(record), path, archive, start)


def read_pickle(path: Path) -> Any:
    """Returns the content of a pickle without tensors, such as the metadata of a distributed checkpoint.

    Raises CheckpointError as `read_torch` does.
    """
    with _refusing(path), open_regular(path) as file:
        if file.seek(0, 2) > MOST_BYTES:
            raise ValueError(f"is longer than {MOST_BYTES:,} bytes")
        file.seek(0)
        return _load(file.readall(), path, None, 0)


def _load(content: bytes, path: Path, archive: zipfile.ZipFile | None, start: int) -> Any:
    for operation, argument, _ in pickletools.genops(content):
        if operation.name in MEMO and int(argument or 0) > len(content):
            raise ValueError("asks for more memory than it has content")
    unpickler = _Unpickler(content, path, archive, start)
    try:
        value = unpickler.load()
    except Exception as error:
        if unpickler.refused:  # the cause, most likely
            raise _names_refused(path, unpickler.refused) from None
        raise ValueError(str(error) or type(error).__name__) from None
    if unpickler.refused:
        raise _names_refused(path, unpickler.refused)
    return value


def _names_refused(path: Path, names: list[str]) -> CheckpointError:
    named = abbreviate(sorted(set(names)))
    message = f"is a pickle that would call {named} when loaded; only tensors and plain values are read"
    return _refused(path, message, "save it without these objects")


def _refused(path: Path, message: str, fix: str = "") -> CheckpointError:
    return CheckpointError(Problem("import.pickle", str(path), message, fix))


@contextmanager
def _refusing(path: Path) -> Iterator[None]:
    """Turns whatever fails while a hostile file is read into a CheckpointError."""
    try:
        yield
    except CheckpointError:
        raise
    except (Exception, RecursionError, MemoryError) as error:
        raise _refused(
            path, f"cannot be read: {file_fault(error) if isinstance(error, Exception) else error}"
        ) from None


def fail(path: Path, message: str, fix: str = "") -> NoReturn:
    """Raises the CheckpointError that a folder cannot be imported."""
    raise CheckpointError(Problem("import.folder", str(path), message, fix))
