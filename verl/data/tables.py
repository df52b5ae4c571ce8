"""A data file as a table of rows in memory-mapped Arrow: of any size, read row by row, never whole in memory.

A file is converted once, in one pass and bounded memory, into an Arrow file that is then mapped. Conversions of small
files are kept in memory; those of larger ones in the cache folder (:mod:`verl.data.cache`).
"""

from __future__ import annotations

import json
import mmap
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, count
from pathlib import Path
from typing import TYPE_CHECKING, Any

from verl.data import arrow_readers, cache, files, text_readers
from verl.errors import DataError

if TYPE_CHECKING:
    import pyarrow as pa

SMALL_BYTES = 2**22  # files of a dataset that are no larger together are converted in memory
BATCH_BYTES = 2**23  # of text rows in one record batch
_JSON, _LINE, _PROBLEM = "__json__", "__line__", "__problem__"
# How a file begins that is none of ours, and what to do about it.
_FOREIGN = {
    b"\x1f\x8b": ("is compressed with gzip", "unpack it with gunzip"),
    b"\x28\xb5\x2f\xfd": ("is compressed with zstd", "unpack it with unzstd"),
    b"BZh": ("is compressed with bzip2", "unpack it with bunzip2"),
    b"\xfd7zXZ": ("is compressed with xz", "unpack it with unxz"),
    b"PK\x03\x04": ("is a zip archive", "unpack it"),
    b"\xff\xfe": ("is UTF-16 text", "save it as UTF-8"),
    b"\xfe\xff": ("is UTF-16 text", "save it as UTF-8"),
    b"version https://git-lfs": ("is a pointer of Git LFS, not the data", "fetch the data with git lfs pull"),
}


@dataclass(frozen=True)
class RawRow:
    """One row as the file has it, with the words that lead a person back to it.

    Attributes:
        where: "line 4", or "row 3 (counted from 0)".
        problem: why the row cannot be used; ``values`` is empty then.
    """

    file: str
    where: str
    values: dict[str, Any]
    problem: str | None = None

    def __str__(self) -> str:
        return f"{self.file}, {self.where}"


Columns = dict[str, None]  # their names in order of appearance, which a conversion learns on its way
Converter = Callable[[Path, Columns], "Iterator[pa.RecordBatch]"]


class RowTable:
    """The rows of one converted file.

    Args:
        path: the user's file, for messages.
        columns: names that any row has.
        buffer: the Arrow file: bytes in memory, or a map of it.
    """

    def __init__(self, path: Path, columns: list[str], buffer: pa.Buffer | mmap.mmap) -> None:
        import pyarrow as pa

        self.path, self.columns = path, columns
        self._map = buffer if isinstance(buffer, mmap.mmap) else None
        self._reader = pa.ipc.open_file(pa.py_buffer(buffer))
        sizes = (self._reader.get_batch(i).num_rows for i in range(self._reader.num_record_batches))
        self._starts = [0, *accumulate(sizes)]

    def __len__(self) -> int:
        return self._starts[-1]

    def read(self, start: int, stop: int) -> list[RawRow]:
        """Rows ``start`` to ``stop`` (excluded). What was paged in for them is let go again."""
        rows: list[RawRow] = []
        while start < min(stop, len(self)):
            number = bisect_right(self._starts, start) - 1
            first, end = self._starts[number], min(self._starts[number + 1], stop)
            batch = self._reader.get_batch(number).slice(start - first, end - start)
            rows += [self._row(start + i, values) for i, values in enumerate(_python_rows(batch))]
            start = end
        if self._map is not None:
            self._map.madvise(mmap.MADV_DONTNEED)
        return rows

    def __iter__(self) -> Iterator[RawRow]:
        for start in range(0, len(self), arrow_readers.BATCH_ROWS):
            yield from self.read(start, start + arrow_readers.BATCH_ROWS)

    def _row(self, number: int, values: dict[str, Any]) -> RawRow:
        problem, line, raw = values.pop(_PROBLEM), values.pop(_LINE, None), values.pop(_JSON, None)
        where = f"row {number} (counted from 0)" if line is None else f"line {line}"
        if problem is not None:
            return RawRow(str(self.path), where, {}, problem)
        return RawRow(str(self.path), where, values if raw is None else json.loads(raw))


def _python_rows(batch: pa.RecordBatch) -> list[dict[str, Any]]:
    try:
        return batch.to_pylist()
    except (ValueError, OverflowError, ArithmeticError) as error:  # dates and decimals that Python does not have
        if batch.num_rows > 1:
            return [row for i in range(batch.num_rows) for row in _python_rows(batch.slice(i, 1))]
        return [{_PROBLEM: f"a value that Python cannot hold ({error})"}]


def read_rows(path: str | Path) -> list[RawRow]:
    """All rows of a file that is small and whole. Raises DataError: the file cannot be read, or a row of it cannot."""
    rows = list(open_table(Path(path)))
    for row in rows:
        if row.problem:
            raise DataError("A row of a data file cannot be read.", str(row), row.problem)
    return rows


def open_tables(paths: Sequence[Path]) -> list[RowTable]:
    """The rows of each file, converted now or found in the cache. Raises DataError: a file cannot be read as a whole,
    with what is wrong; the cache cannot be written."""
    converters = [_converter(path) for path in paths]  # before the work: what is wrong with any file's kind
    small = sum(path.stat().st_size for path in paths) <= SMALL_BYTES
    return [_open(path, convert, small) for path, convert in zip(paths, converters, strict=True)]


def open_table(path: Path) -> RowTable:
    """The rows of one file; as :func:`open_tables`."""
    return open_tables([path])[0]


def _open(path: Path, convert: Converter, small: bool) -> RowTable:
    import pyarrow as pa

    if not small:
        return RowTable(path, *cache.entry(path, lambda sink: _write(path, convert, sink)))
    sink = pa.BufferOutputStream()
    columns = _write(path, convert, sink)
    return RowTable(path, columns, sink.getvalue())


def _converter(path: Path) -> Converter:
    try:
        with path.open("rb") as file:
            head = file.read(32)
    except OSError as error:
        raise DataError("A data file cannot be opened.", path, error.strerror) from error
    if not head:
        raise DataError("A data file has zero bytes.", path, "write it again; the write was probably interrupted")
    suffix = path.suffix.lower()
    if suffix in files.PARQUET_ENDINGS or head.startswith(arrow_readers.PARQUET_MAGIC):
        return lambda path, columns: _checked(arrow_readers.read_parquet(path), path, columns)
    if suffix in files.ARROW_ENDINGS or head.startswith(arrow_readers.ARROW_MAGIC):
        return lambda path, columns: _checked(arrow_readers.read_arrow(path), path, columns)
    for magic, (what, fix) in _FOREIGN.items():
        if head.startswith(magic):
            raise DataError(f"A data file {what}.", path, fix)
    text = {
        **dict.fromkeys(files.JSON_LINES_ENDINGS, text_readers.read_json_lines),
        ".json": text_readers.read_json,
        ".csv": text_readers.read_csv,
    }
    if suffix not in text:
        raise DataError("A data file is of a kind that is not read.", path, f"give {', '.join(files.DATA_ENDINGS)}")
    return lambda path, columns: _packed(text[suffix](path), columns)


def _write(path: Path, convert: Converter, sink: Any) -> list[str]:
    import pyarrow as pa

    columns: Columns = {}
    try:
        batches = convert(path, columns)
        first = next(batches)
        with pa.ipc.new_file(sink, first.schema) as writer:
            writer.write_batch(first)
            for batch in batches:
                writer.write_batch(batch)
    except (pa.ArrowException, ValueError, KeyError, MemoryError, RecursionError, OverflowError) as error:
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise DataError("A data file holds what cannot be kept as a table; it may be damaged.", path, reason) from error
    return list(columns)


def _packed(rows: Iterable[text_readers.TextRow], columns: Columns) -> Iterator[pa.RecordBatch]:
    """Text rows as record batches: the bytes of each row, its line, its problem."""
    import pyarrow as pa

    types = {_JSON: pa.large_binary(), _LINE: pa.int64(), _PROBLEM: pa.string()}

    def batch(rows: list[text_readers.TextRow]) -> pa.RecordBatch:
        parts = ([row.raw for row in rows], [row.line for row in rows], [row.problem for row in rows])
        arrays = [pa.array(part, kind) for part, kind in zip(parts, types.values(), strict=True)]
        return pa.RecordBatch.from_arrays(arrays, names=list(types))

    held: list[text_readers.TextRow] = []
    size = 0
    yield batch([])
    for row in rows:
        columns.update(dict.fromkeys(row.names))
        held.append(row)
        size += len(row.raw)
        if len(held) == arrow_readers.BATCH_ROWS or size >= BATCH_BYTES:
            yield batch(held)
            held, size = [], 0
    if held:
        yield batch(held)


def _checked(batches: Iterable[pa.RecordBatch], path: Path, columns: Columns) -> Iterator[pa.RecordBatch]:
    """Batches whose every value can be read; a row with one that cannot is null and has its reason beside it."""
    import pyarrow as pa

    for batch in batches:
        names = batch.schema.names
        if not columns:
            columns.update(dict.fromkeys(names))
            if len(columns) < len(names):
                raise DataError("A data file has two columns of one name.", path, ", ".join(names))
        batch, problems = _readable(batch.replace_schema_metadata(None))
        arrays = [c.dictionary_decode() if pa.types.is_dictionary(c.type) else c for c in batch.columns]
        yield pa.RecordBatch.from_arrays([*arrays, pa.array(problems, pa.string())], names=[*names, _PROBLEM])


def _readable(batch: pa.RecordBatch) -> tuple[pa.RecordBatch, list[str | None]]:
    import pyarrow as pa

    try:
        batch.validate(full=True)
        return batch, [None] * batch.num_rows
    except pa.ArrowInvalid:
        pass
    problems = [_problem(batch.slice(i, 1)) for i in range(batch.num_rows)]
    good = [batch.slice(i, 1) for i, problem in enumerate(problems) if problem is None]
    number = count()
    places = pa.array([next(number) if problem is None else None for problem in problems], pa.int64())
    return pa.Table.from_batches(good, schema=batch.schema).take(places).combine_chunks().to_batches()[0], problems


def _problem(row: pa.RecordBatch) -> str | None:
    import pyarrow as pa

    try:
        row.validate(full=True)
    except pa.ArrowInvalid as error:
        return " ".join(str(error).split())
    return None
