"""Rows of JSON lines, JSON lists and CSV, and record batches of parquet and Arrow files, checked, in bounded memory.

A row of text comes as the bytes of one JSON object, exactly as the file has it (what JSON can hold and Arrow's columns
cannot, such as one key with text here and a number there, survives). A row that cannot be used comes with the reason
instead; a file that ends in the middle of a row is cut, and refused as a whole.
"""

from __future__ import annotations

import contextlib
import csv
import io
import json
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

from verl.errors import DataError

if TYPE_CHECKING:
    import pyarrow as pa

MAX_ROW_BYTES = 2**28  # 256 MiB: what is longer is no row but a file of another kind
MAX_DEPTH = 100  # levels of lists and objects in a row
READ_BYTES = 2**20
BOM = b"\xef\xbb\xbf"
CUT = "A data file ends in the middle of a row; it is cut."
WRITE_AGAIN = "copy or write the file again"
# A whole string at once, its closing quote in the group (empty: it goes on behind the end), or what gives structure.
_JSON_TOKEN = re.compile(rb'"(?:[^"\\]|\\.)*+("?)|[\[\]{},]', re.DOTALL)


@dataclass(frozen=True)
class TextRow:
    """One row: its bytes, or what is wrong with it."""

    line: int | None  # number of its line, counted from 1; None in a JSON list
    raw: bytes = b""
    names: tuple[str, ...] = ()  # keys of the object, in order
    problem: str | None = None


def read_json_lines(path: Path) -> Iterator[TextRow]:
    """One row a line that is not blank; lines end at newline bytes and at nothing else."""
    with path.open("rb") as file:
        _skip_bom(file)
        number = 0
        while line := file.readline(MAX_ROW_BYTES + 1):
            number += 1
            _check_size(path, f"line {number}", len(line))
            if line.isspace():
                continue
            row = _row(number, line.strip())
            if row.problem and not line.endswith(b"\n") and not _is_json(line):
                raise DataError(CUT, f"{path}, line {number}: {row.problem}", WRITE_AGAIN)
            yield row


def read_json(path: Path) -> Iterator[TextRow]:
    """A ``.json`` file: one list of objects, or lines."""
    with path.open("rb") as file:
        _skip_bom(file)
        while (first := file.read(1)).isspace():
            pass
        if first == b"[":
            for raw in _list_elements(file, path):
                yield _row(None, raw)
            return
        if first == b"{" and not _is_json(first + file.readline(MAX_ROW_BYTES)):
            file.seek(0)
            if _is_json(file.read(MAX_ROW_BYTES).removeprefix(BOM)):
                fix = "give a list of objects, or one object a line"
                raise DataError("A JSON file holds one object instead of rows.", path, fix)
    yield from read_json_lines(path)


def _list_elements(file: BinaryIO, path: Path) -> Iterator[bytes]:
    """Bytes of each element of the list whose opening bracket has just been read."""
    buffer, start, at, depth, count = b"", 0, 0, 1, 0
    while depth:
        token = _JSON_TOKEN.search(buffer, at)
        if token is None or token.group(1) == b"":
            at = len(buffer) if token is None else token.start()
            buffer, at, start = buffer[start:], at - start, 0
            _check_size(path, f"row {count} (counted from 0)", len(buffer))
            # As much again as there is, so that a long element is not scanned over and over.
            more = file.read(max(READ_BYTES, len(buffer)))
            if not more:
                raise DataError(CUT, f"{path}, row {count} (counted from 0): the list is not closed", WRITE_AGAIN)
            buffer += more
            continue
        at = token.end()
        mark = token.group()
        depth += (mark in (b"[", b"{")) - (mark in (b"]", b"}"))
        if depth == 0 or (depth == 1 and mark == b","):
            element = buffer[start : token.start()].strip()
            if element or depth or count:  # all but the nothing between the brackets of []
                yield element
            start, count = at, count + 1
    rest = buffer[at:] + file.read(READ_BYTES)
    if rest.strip():
        raise DataError("A JSON file goes on behind its list.", path, "give one list, or one object a line")


def read_csv(path: Path) -> Iterator[TextRow]:
    """One row a record, by the names in the first line; every value is text."""
    csv.field_size_limit(MAX_ROW_BYTES)
    with path.open("rb") as file:
        _skip_bom(file)
        # Undecodable bytes become lone surrogates, which no decoded text has: the row is then known to be bad.
        text = io.TextIOWrapper(file, encoding="utf-8", errors="surrogateescape", newline="")
        lines = _Lines(text, path)
        reader = csv.reader(lines, strict=True)
        header: tuple[str, ...] | None = None
        while True:
            try:
                record = next(reader)
            except StopIteration:
                return
            except csv.Error as error:
                if str(error).startswith(("unexpected end of data", "field larger")):
                    raise DataError(CUT, f"{path}, line {reader.line_num}: {error}", WRITE_AGAIN) from None
                if header is None:
                    raise DataError("The first line of a CSV file is not CSV.", path, str(error)) from None
                yield TextRow(reader.line_num, problem=f"not CSV ({error})")
                continue
            if not record:
                continue
            if header is None:
                header = _header(path, record)
                continue
            row = _csv_row(reader.line_num, header, record)
            if row.problem and lines.open:
                raise DataError(CUT, f"{path}, line {row.line}: {row.problem}", WRITE_AGAIN)
            yield row


class _Lines(Iterator[str]):
    """Lines of a text file; ``open`` while the latest has no line break, which only the last of a file may lack."""

    def __init__(self, text: io.TextIOWrapper, path: Path) -> None:
        self._text, self._path, self._number, self.open = text, path, 0, False

    def __next__(self) -> str:
        line = self._text.readline(MAX_ROW_BYTES + 1)
        if not line:
            raise StopIteration
        self._number += 1
        _check_size(self._path, f"line {self._number}", len(line))
        self.open = not line.endswith(("\n", "\r"))
        return line


def _header(path: Path, names: list[str]) -> tuple[str, ...]:
    double = next((name for name in names if names.count(name) > 1), None)
    if double is not None or not all(names) or not _decodable("".join(names)):
        shown = ", ".join(map(ascii, names[:20]))
        fix = "its first line gives every column a name of its own, in UTF-8"
        raise DataError("The first line of a CSV file does not name its columns.", f"{path}: {shown}", fix)
    return tuple(names)


def _csv_row(line: int, header: tuple[str, ...], record: list[str]) -> TextRow:
    if len(record) != len(header):
        return TextRow(line, problem=f"{len(record)} fields, the first line names {len(header)}")
    if not all(map(_decodable, record)):
        return TextRow(line, problem="not UTF-8 text")
    raw = json.dumps(dict(zip(header, record, strict=True)), ensure_ascii=False).encode()
    return TextRow(line, raw, header)


def _decodable(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _row(line: int | None, raw: bytes) -> TextRow:
    """The object in ``raw``, or why it is none."""
    try:
        value: Any = json.loads(raw.decode())
    except UnicodeDecodeError as error:
        return TextRow(line, problem=f"not UTF-8 text (byte {error.start} is {raw[error.start]:#04x})")
    except (ValueError, RecursionError) as error:
        shown = raw[:60].decode(errors="replace") + ("..." if len(raw) > 60 else "")
        return TextRow(line, problem=f"not JSON ({error}): {shown}")
    if not isinstance(value, dict):
        return TextRow(line, problem=f"not a JSON object but {type(value).__name__}")
    if raw.count(b"[") + raw.count(b"{") > MAX_DEPTH and _deeper(value, MAX_DEPTH):
        return TextRow(line, problem=f"nested more than {MAX_DEPTH} levels deep")
    return TextRow(line, raw, tuple(value))


def _deeper(value: Any, limit: int) -> bool:
    """Whether lists and objects lie more than ``limit`` deep: Python cannot take any depth, wherever it is called."""
    level = [value]
    for _ in range(limit):
        values = (item.values() if isinstance(item, dict) else item for item in level)
        level = [inner for items in values for inner in items if isinstance(inner, dict | list)]
        if not level:
            return False
    return True


def _is_json(raw: bytes) -> bool:
    try:
        json.loads(raw)
    except (ValueError, RecursionError):
        return False
    return True


def _skip_bom(file: BinaryIO) -> None:
    if file.read(len(BOM)) != BOM:
        file.seek(0)


def _check_size(path: Path, where: str, size: int) -> None:
    if size > MAX_ROW_BYTES:
        what = f"A row is larger than {MAX_ROW_BYTES // 2**20} MiB."
        raise DataError(what, f"{path}, {where}", "check that the file is what its ending says")


BATCH_ROWS = 1024
PARQUET_MAGIC = b"PAR1"
ARROW_MAGIC = b"ARROW1"
STREAM_END = b"\xff\xff\xff\xff\x00\x00\x00\x00"
# Hugging Face feature types that say nothing about how Arrow's own columns are to be understood.
_PLAIN = ("Value", "ClassLabel", "Sequence", "List", "LargeList", "Translation", "TranslationVariableLanguages", "Json")
_MEDIA = ("Image", "Audio", "Video", "Pdf", "Nifti", "Array2D", "Array3D", "Array4D", "Array5D")
KNOWN_FEATURES = frozenset(_PLAIN + _MEDIA)


def read_parquet(path: Path) -> Iterator[pa.RecordBatch]:
    """At least one batch (which may have no row), none over ``BATCH_ROWS`` rows. Raises DataError: the file is cut,
    damaged or not parquet, or declares a column type that is not known."""
    import pyarrow.parquet as pq

    with _named_errors("parquet", path), pq.ParquetFile(str(path), buffer_size=2**20, pre_buffer=False) as file:
        _check_features(path, (file.schema_arrow.metadata or {}).get(b"huggingface"))
        yield _empty(file.schema_arrow)
        yield from file.iter_batches(batch_size=BATCH_ROWS)


def read_arrow(path: Path) -> Iterator[pa.RecordBatch]:
    """Batches of an Arrow file (also called Feather) or stream; as :func:`read_parquet`."""
    import pyarrow as pa

    with _named_errors("Arrow", path), pa.memory_map(str(path)) as source:
        if source.read(len(ARROW_MAGIC)) == ARROW_MAGIC:
            reader = pa.ipc.open_file(source)
            batches: Iterable[pa.RecordBatch] = map(reader.get_batch, range(reader.num_record_batches))
        else:
            source.seek(max(source.size() - len(STREAM_END), 0))
            if source.read() != STREAM_END:
                raise ValueError("the stream has no end")
            source.seek(0)
            batches = reader = pa.ipc.open_stream(source)
        _check_features(path, (reader.schema.metadata or {}).get(b"huggingface"))
        yield _empty(reader.schema)
        for batch in batches:
            batch.validate()  # before anything follows its offsets: damaged ones may point anywhere
            if batch.num_rows and not batch.nbytes:  # a damaged number of rows could be any
                raise ValueError(f"{batch.num_rows} rows without a value")
            for start in range(0, batch.num_rows, BATCH_ROWS):
                yield batch.slice(start, BATCH_ROWS)


def _empty(schema: pa.Schema) -> pa.RecordBatch:
    import pyarrow as pa

    return pa.RecordBatch.from_arrays([pa.array([], field.type) for field in schema], schema=schema)


@contextlib.contextmanager
def _named_errors(kind: str, path: Path) -> Iterator[None]:
    import pyarrow as pa

    try:
        yield
    except (pa.ArrowException, OSError, ValueError, KeyError, MemoryError, RecursionError) as error:
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        what = f"A data file cannot be read; it is cut, damaged or not {kind}."
        raise DataError(what, path, f"{reason}; copy or write the file again") from error


def _check_features(path: Path, metadata: bytes | None) -> None:
    """Refuse a file whose writer declared a column type that we would misread as plain storage."""
    if not metadata:
        return
    try:
        features = json.loads(metadata).get("info", {}).get("features", {})
    except (ValueError, AttributeError, RecursionError):
        what = "A data file carries feature metadata that is not JSON."
        raise DataError(what, path, "write the file again") from None
    for column, feature in features.items() if isinstance(features, dict) else ():
        for kind in re.findall(r'"_type": "([^"]*)"', json.dumps(feature)):
            if kind not in KNOWN_FEATURES:
                what = f"A data file declares a feature type that is not known, in column {column!r}."
                raise DataError(what, f"{path}: {kind}", "write the file again without its huggingface metadata")
