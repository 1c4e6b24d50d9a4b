"""Reads documents from files: plain text, JSON, CSV, Parquet, Arrow.

Files are read directly, one batch at a time, rather than through `datasets`. Memory use therefore stays bounded, no
second copy is written besides the token store, and errors name the file and the position.
"""

from __future__ import annotations

import base64
import codecs
import csv
import gzip
import io
import json
import os
import re
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, NamedTuple, cast

from llmtrain.data.cache import key_of
from llmtrain.errors import DataError, Problem, did_you_mean
from llmtrain.system.untrusted import BYTE_ORDER_MARK, is_unicode

if TYPE_CHECKING:
    import pyarrow

BATCH_ROWS = 1000
PEEKED_BYTES = 1 << 16
"""Bytes in which a JSON file begins, after white space."""
READ_BYTES = 1 << 20
"""Bytes of a JSON array that are read at once; more only for a longer object."""
MAX_CELL_CHARACTERS = 1 << 28
"""Characters of a cell of a CSV file: a quote that is never closed is noticed there."""
MAX_ESCAPE_CHARACTERS = 12
"""Characters of the longest text that cannot be decoded in part: an escaped surrogate pair."""
_NOT_SPACE = re.compile(r"[^ \t\r\n]")
_DECODER = json.JSONDecoder()


def _as_text(value: Any) -> str:
    """Returns a value that JSON lacks as text: bytes, such as those of an image, as a data URL."""
    return f"data:;base64,{base64.b64encode(value).decode()}" if isinstance(value, bytes) else str(value)


AS_JSON = json.JSONEncoder(ensure_ascii=False, default=_as_text)


class Document(NamedTuple):
    """A text, with its position in the corpus."""

    text: str
    fraction: float
    """Fraction of the input that has been read so far, from 0 to 1."""
    place: str = ""
    """Position of the document, for messages: a file, or a line or row of it."""
    row: dict[str, Any] | None = None
    """The parsed row, if `text` is its JSON and was read from JSON; avoids parsing it again."""
    values: tuple[float, ...] = ()
    """The numbers in the columns that the loss is given (`objective.columns`)."""
    folder: Path | None = None
    """Folder of the file that it was read from, to which the paths of images are relative."""


DocumentReader = Callable[[Path, str | None], Iterator[Document]]
"""Reads the documents of a file from a column; if the column is None, each row becomes a JSON object."""


def read_document(path: Path, column: str | None) -> Iterator[Document]:
    """Yields the file as one document, without a byte order mark and with its line ends. `column` is not used."""
    with open_decompressed(path) as (file, _):
        yield Document(decode(file.read(), path).removeprefix(BYTE_ORDER_MARK), 1.0, str(path))


def read_json_lines(path: Path, column: str | None) -> Iterator[Document]:
    """Yields a document per line, from the field `column`. Skips blank lines and null texts."""
    size = max(1, path.stat().st_size)
    offset = 0
    with open_decompressed(path) as (file, raw):
        for number, line in enumerate(file, start=1):
            text = decode(line, path, offset)
            offset += len(line)
            row = _json_row(text.removeprefix(BYTE_ORDER_MARK), path, number)
            if row is None:
                continue
            place = f"{path}, line {number}"
            fraction = min(1.0, (offset if file is raw else raw.tell()) / size)
            yield from from_row(row, place, column, fraction)


def read_json(path: Path, column: str | None) -> Iterator[Document]:
    """Yields a document per object of a JSON array, without reading it as a whole; any other file is JSON lines."""
    with open_decompressed(path) as (file, _):
        start = file.read(PEEKED_BYTES).removeprefix(codecs.BOM_UTF8).lstrip()
    if not start.startswith(b"["):
        yield from read_json_lines(path, column)
        return
    size = max(1, path.stat().st_size)
    with open_decompressed(path) as (file, raw):
        for number, row in enumerate(_array_objects(file, path), start=1):
            place = f"{path}, row {number}"
            fraction = min(1.0, raw.tell() / size)
            yield from from_row(row, place, column, fraction)


def read_csv(path: Path, column: str | None, delimiter: str = ",") -> Iterator[Document]:
    """Yields a document per row. The first row has the names of the columns; an empty cell is null."""
    size = max(1, path.stat().st_size)
    csv.field_size_limit(MAX_CELL_CHARACTERS)  # the default, 131,072, is less than many documents
    with open_decompressed(path) as (file, raw):
        rows = csv.reader(_decoded_lines(file, path), delimiter=delimiter, strict=True)
        try:
            if (names := next(rows, None)) is None:
                return
            _require_one_column(path, column, names)
            for cells in filter(None, rows):
                place = f"{path}, line {rows.line_num}"
                if len(cells) != len(names):
                    raise csv.Error(f"{len(cells)} cells, but {len(names)} names of columns")
                row = {name: cell or None for name, cell in zip(names, cells, strict=True)}
                fraction = min(1.0, raw.tell() / size)
                yield from from_row(row, place, column, fraction)
        except csv.Error as error:
            fix = "write fields that contain delimiters, quotes or line ends in double quotes, or convert it to .jsonl"
            place = f"{path}, line {rows.line_num}"
            raise DataError(Problem("data.csv", place, f"is not a row of a table: {error}", fix)) from None


def read_parquet(path: Path, column: str | None) -> Iterator[Document]:
    """Yields a document per row."""
    import pyarrow
    import pyarrow.parquet

    with _arrow_errors(path), path.open("rb") as raw, pyarrow.parquet.ParquetFile(raw) as file:
        _require_one_column(path, column, file.schema_arrow.names)
        batches = file.iter_batches(batch_size=BATCH_ROWS, columns=None if column is None else [column])
        yield from read_batches(with_fraction(batches, file.metadata.num_rows), column, str(path))


def read_arrow(path: Path, column: str | None) -> Iterator[Document]:
    """Yields a document per row of an Arrow IPC file or stream (`datasets` writes streams)."""
    import pyarrow

    with _arrow_errors(path), pyarrow.memory_map(os.fsencode(path)) as source:
        is_file = source.read(6) == b"ARROW1"
        source.seek(0)
        reader = pyarrow.ipc.open_file(source) if is_file else pyarrow.ipc.open_stream(source)
        _require_one_column(path, column, reader.schema.names)
        if is_file:
            count = reader.num_record_batches
            batches = ((reader.get_batch(number), (number + 1) / count) for number in range(count))
        else:
            batches = ((batch, source.tell() / source.size()) for batch in reader)
        yield from read_batches(batches, column, str(path))


def with_fraction(batches: Iterable[pyarrow.RecordBatch], rows: int) -> Iterator[tuple[pyarrow.RecordBatch, float]]:
    """Yields each record batch with the fraction of `rows` that has been read, including this batch."""
    done = 0
    for batch in batches:
        done += batch.num_rows
        yield batch, done / max(1, rows)


def read_batches(
    batches: Iterable[tuple[pyarrow.RecordBatch, float]], column: str | None, place: str
) -> Iterator[Document]:
    """Yields the documents of Arrow record batches, which come with the fraction read. place: their name in errors."""
    row = 0
    for batch, fraction in batches:
        values = batch.to_struct_array() if column is None else batch.column(batch.schema.get_field_index(column))
        for value in values:
            row += 1
            try:
                text = value.as_py()
            except UnicodeDecodeError as error:
                raise DataError(_not_utf8(f"{place}, row {row}", error, 0)) from None
            if column is None:
                text = {name: _without_nulls(part) for name, part in text.items()}
            yield from _document(text, f"{place}, row {row}", column, fraction)


READERS: dict[str, DocumentReader] = {
    ".txt": read_document,
    ".jsonl": read_json_lines,
    ".ndjson": read_json_lines,
    ".json": read_json,
    ".csv": read_csv,
    ".tsv": partial(read_csv, delimiter="\t"),
    ".parquet": read_parquet,
    ".arrow": read_arrow,
}
COMPRESSIONS = (".gz", ".zst")
COMPRESSED = (".parquet", ".arrow")
"""Formats with a compression of their own."""


def kind_of(path: Path) -> str | None:
    """Returns the suffix in `READERS` that determines how a file is read, ignoring compression, or None."""
    suffixes = [suffix.lower() for suffix in path.suffixes]
    compressed = bool(suffixes) and suffixes[-1] in COMPRESSIONS
    if compressed:
        suffixes.pop()
    kind = suffixes[-1] if suffixes else ""
    return kind if kind in READERS and not (compressed and kind in COMPRESSED) else None


@contextmanager
def open_decompressed(path: Path) -> Iterator[tuple[IO[bytes], IO[bytes]]]:
    """Opens a file for decompressed reading.

    Yields the stream and the underlying file, whose position shows how much has been read.
    """
    suffix = path.suffix.lower()
    try:
        with path.open("rb") as raw:
            if suffix == ".gz":
                with gzip.open(raw) as file:
                    yield cast(IO[bytes], file), raw
            elif suffix == ".zst":
                import pyarrow  # provides the zstd codec

                stream = pyarrow.CompressedInputStream(pyarrow.PythonFile(raw, mode="r"), "zstd")
                with io.BufferedReader(stream) as file:
                    yield file, raw
            else:
                yield raw, raw
    except (OSError, EOFError, zlib.error) as error:
        raise DataError(Problem("data.read", str(path), f"cannot be read: {error}")) from error


def decode(data: bytes, path: Path, offset: int = 0) -> str:
    """Decodes UTF-8 text. Raises DataError with the file and the offset of an invalid byte, counted from `offset`."""
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise DataError(_not_utf8(str(path), error, offset)) from None


def require_column(place: str, column: str | None, columns: Any) -> None:
    """Raises DataError if a text column is missing; the message lists the existing columns."""
    if column is None or column in columns:
        return
    names = [str(name) for name in columns]
    message = f"has no column '{column}'{did_you_mean(column, names)} (columns: {', '.join(names) or 'none'})"
    fix = "set text_column of the source to the column that contains the text"
    raise DataError(Problem("data.column", place, message, fix))


def _require_one_column(path: Path, column: str | None, names: list[str]) -> None:
    """Raises DataError if a text column is missing, or several have its name; if it is None, this counts for all."""
    require_column(str(path), column, names)
    for name, count in Counter(names).items():
        if count > 1 and column in (None, name):
            message = f"has {count} columns '{name}'"
            raise DataError(Problem("data.column", str(path), message, "rename or remove all but one of them"))


def _not_utf8(place: str, error: UnicodeDecodeError, offset: int) -> Problem:
    message = f"is not UTF-8: byte 0x{error.object[error.start]:02x} at offset {offset + error.start:,}"
    return Problem("data.utf8", place, message, "convert the file (iconv -f OLD -t UTF-8), or leave it out")


def _json_row(line: str, path: Path, number: int) -> dict[str, Any] | None:
    if not line.strip():
        return None
    try:
        row = json.loads(line)
    except ValueError as error:
        reason = f"not JSON ({error})"
    except RecursionError:
        reason = "nested too deeply"
    else:
        if isinstance(row, dict):
            return row
        reason = f"a {type(row).__name__}, not an object"
    fix = 'each line must be a JSON object {"text": ...}; a .json file may also be one array of such objects'
    raise DataError(Problem("data.json", f"{path}, line {number}", f"is {reason}", fix))


def _decoded_lines(file: IO[bytes], path: Path) -> Iterator[str]:
    offset = 0
    for line in file:
        yield decode(line, path, offset).removeprefix("" if offset else BYTE_ORDER_MARK)
        offset += len(line)


def _array_objects(file: IO[bytes], path: Path) -> Iterator[dict[str, Any]]:
    """Yields the objects of the JSON array in a file; holds one of them, or `READ_BYTES`, at a time."""
    text = _JsonReader(file, path)
    text.take("[")
    while text.next() != "]":
        if text.row:
            text.take(",")
        text.row += 1
        yield text.next_object()
    text.take("]")
    text.take("")


class _JsonReader:
    """A JSON file that is read piece by piece."""

    def __init__(self, file: IO[bytes], path: Path) -> None:
        self.buffer = ""
        self.position = 0
        """Position in the buffer up to which it has been read."""
        self.row = 0
        """Number of the row that is read."""
        self._file, self._path, self._offset = file, path, 0
        self._decoder = codecs.getincrementaldecoder("utf-8-sig")()

    def more(self) -> bool:
        """Drops what was read from the buffer, and doubles the rest; returns False at the end of the file."""
        rest = self.buffer[self.position :]
        data = self._file.read(max(READ_BYTES, len(rest)))
        pending = len(self._decoder.getstate()[0])
        try:
            text = self._decoder.decode(data, final=not data)
        except UnicodeDecodeError as error:
            raise DataError(_not_utf8(str(self._path), error, self._offset - pending)) from None
        self._offset += len(data)
        self.buffer, self.position = rest + text, 0
        return bool(data)

    def next(self) -> str:
        """Returns the next character that is not white space, without reading it; empty at the end of the file."""
        while (found := _NOT_SPACE.search(self.buffer, self.position)) is None:
            self.position = len(self.buffer)
            if not self.more():
                return ""
        self.position = found.start()
        return found[0]

    def take(self, expected: str) -> None:
        """Reads the next character; the empty one is the end of the file. Raises DataError for another."""
        if (found := self.next()) != expected:
            what = f"by {found!r}" if found else "by the end of the file"
            raise self._fault(f"is followed {what} where {expected or 'the end of the file'!r} is expected")
        self.position += len(expected)

    def next_object(self) -> dict[str, Any]:
        """Reads the next object. Raises DataError for other values."""
        if (found := self.next()) != "{":
            raise self._fault(f"begins with {found!r}, so it is not an object")
        while True:
            try:
                row, self.position = _DECODER.raw_decode(self.buffer, self.position)
                return cast(dict[str, Any], row)
            except json.JSONDecodeError as error:
                # A part of an object fails at its end, or where its last string begins.
                is_part = len(self.buffer) - error.pos < MAX_ESCAPE_CHARACTERS or error.msg.startswith("Unterminated")
                if not is_part or not self.more():
                    raise self._fault(f"is not JSON ({error.msg})") from None
            except RecursionError:
                raise self._fault("is nested too deeply") from None

    def _fault(self, message: str) -> DataError:
        fix = 'a .json file is an array of objects [{"text": ...}, ...], or has one such object in each line'
        return DataError(Problem("data.json", f"{self._path}, row {self.row}", message, fix))


def from_row(row: dict[str, Any], place: str, column: str | None, fraction: float) -> Iterator[Document]:
    """Yields the document of a row that is JSON data; nothing if its text is null. Raises DataError as readers do."""
    require_column(place, column, row)
    if column is None:
        yield from _document(row, place, column, fraction, row)
    else:
        yield from _document(row[column], place, column, fraction)


def _document(
    value: Any, place: str, column: str | None, fraction: float, row: dict[str, Any] | None = None
) -> Iterator[Document]:
    """Yields the document of a cell; nothing if the cell is null. row: the parsed JSON row, if that is the document."""
    if value is None:
        return
    if column is None:
        value = AS_JSON.encode(value)
    if not isinstance(value, str):
        message = f"column '{column}' contains a {type(value).__name__}, not text"
        raise DataError(Problem("data.column", place, message, "set text_column of the source to a column of text"))
    if not value.isascii() and not is_unicode(value):
        # JSON can encode half of a surrogate pair ("\ud800"), which UTF-8 cannot represent.
        raise DataError(Problem("data.utf8", place, "contains a lone surrogate, which is not a character"))
    yield Document(value, fraction, place, row)


def _without_nulls(value: Any) -> Any:
    """Returns a value without null keys, because Arrow gives every object the keys of all objects in its column."""
    if isinstance(value, dict):
        return {name: _without_nulls(item) for name, item in value.items() if item is not None}
    return [_without_nulls(item) for item in value] if isinstance(value, list) else value


@contextmanager
def _arrow_errors(path: Path) -> Iterator[None]:
    import pyarrow

    try:
        yield
    except (pyarrow.ArrowException, OSError) as error:
        raise DataError(Problem("data.read", str(path), f"cannot be read: {error}")) from error


class Fingerprint(NamedTuple):
    """A hash of a file's content, with attributes by which a change is noticed without reading the file."""

    size: int
    """Size in bytes."""
    modified: int
    """Modification time in nanoseconds since the epoch."""
    hash: str


@dataclass(frozen=True)
class FileCorpus:
    """Documents of local files of one kind, in the order of their paths."""

    name: str
    kind: str
    """Suffix that determines how the files are read."""
    column: str | None
    """Column of the text; None to read whole rows."""
    files: tuple[Path, ...]
    prints: tuple[Fingerprint, ...]
    """The fingerprint of each file at the time it was hashed."""
    lenient: bool = False
    """Whether to skip a file that is not UTF-8 instead of refusing it."""

    @property
    def identity(self) -> str:
        """Identifies the content: the same for equal documents in the same order, wherever the files are."""
        column = None if self.has_texts else self.column
        return key_of("files", self.kind, column, [stored.hash for stored in self.prints], self.lenient)

    @property
    def has_texts(self) -> bool:
        """Whether a file is a text, without rows."""
        return READERS.get(self.kind, read_document) is read_document

    @property
    def is_one_document(self) -> bool:
        """Whether the corpus is a single text file."""
        return len(self.files) == 1 and self.has_texts

    def documents(self) -> Iterator[Document]:
        """Yields the documents with the fraction of bytes read. Raises DataError for an unreadable file."""
        reader = READERS.get(self.kind, read_document)
        total = max(1, sum(stored.size for stored in self.prints))
        done = 0
        for path, stored in zip(self.files, self.prints, strict=True):
            try:
                for document in reader(path, self.column):
                    fraction = (done + document.fraction * stored.size) / total
                    yield document._replace(fraction=fraction, folder=path.parent)
            except DataError as error:
                if not (self.lenient and error.problems[0].rule == "data.utf8"):
                    raise
            check_unchanged(path, stored)
            done += stored.size


def check_unchanged(path: Path, stored: Fingerprint) -> None:
    """Raises DataError if a file that was read has changed since it was hashed.

    The token store would otherwise be saved under the identity of the old content.
    """
    if stamp_of(path) != (stored.size, stored.modified):
        raise DataError(Problem("data.changed", str(path), "changed while it was read", "run again"))


def stamp_of(path: Path) -> tuple[int, int]:
    """Returns size and modification time of a file. Raises DataError if it does not exist."""
    try:
        status = path.stat()
    except OSError as error:
        raise DataError(Problem("data.read", str(path), f"cannot be read: {error.strerror}")) from error
    return status.st_size, status.st_mtime_ns
