"""From what a user names (files, patterns, folders) to tables of rows in memory-mapped Arrow: of any size, read row by
row, never whole in memory.

A file is converted once, in one pass and bounded memory, into an Arrow file that is then mapped. Conversions of small
files are kept in memory; those of larger ones in the cache folder (:mod:`verl.data.cache`).
"""

from __future__ import annotations

import glob
import json
import mmap
import os
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, count
from pathlib import Path
from typing import TYPE_CHECKING, Any

from verl.config.names import nearest_path
from verl.data import cache, readers
from verl.errors import DataError

if TYPE_CHECKING:
    import pyarrow as pa

PARQUET_ENDINGS = (".parquet", ".pq")
JSON_LINES_ENDINGS = (".jsonl", ".ndjson")
ARROW_ENDINGS = (".arrow", ".feather", ".ipc")
DATA_ENDINGS = (*PARQUET_ENDINGS, *JSON_LINES_ENDINGS, ".json", ".csv", *ARROW_ENDINGS)
# Files of a Hugging Face folder that end as data does and hold none.
_NOT_DATA = ("dataset_info.json", "dataset_infos.json", "dataset_dict.json", "state.json")


def expand_entries(files: str | Iterable[str], key: str = "data.train_files") -> list[list[Path]]:
    """The files of each entry, in the order given: a file, a glob pattern (matches sorted by name), or a folder.

    ``~`` and environment variables are expanded; ``**`` in a pattern goes through sub-folders. A folder stands for the
    data files in it (sorted by name, sub-folders apart), or, saved by Hugging Face's ``save_to_disk``, for its shards.
    Raises DataError: a file is missing (with the nearest name in its folder), a pattern or folder holds none, nothing
    is named, or one file is named twice.
    """
    patterns = [files] if isinstance(files, str | Path) else list(files)
    if not patterns:
        raise DataError("No data file is given.", fix=f"set {key} to a parquet or jsonl file")
    entries = [_expand(str(pattern), key) for pattern in patterns]
    seen: set[Path] = set()
    for path in (path for entry in entries for path in entry):
        if path.resolve() in seen:
            raise DataError(f"A file is named twice in {key}.", path, "its rows would count double: name it once")
        seen.add(path.resolve())
    return entries


def expand_files(files: str | Iterable[str], key: str = "data.train_files") -> list[Path]:
    """All files of all entries; see :func:`expand_entries`."""
    return [path for entry in expand_entries(files, key) for path in entry]


def _expand(pattern: str, key: str) -> list[Path]:
    path = Path(os.path.expandvars(pattern)).expanduser()
    try:
        # A file whose own name holds a bracket is a file first and a pattern second.
        if path.is_file():
            return [path]
        if path.is_dir():
            return _folder(path, key)
        if glob.has_magic(str(path)):
            matches = sorted(Path(name) for name in glob.glob(str(path), recursive=True) if Path(name).is_file())
            if matches:
                return matches
            raise DataError(f"A pattern in {key} matches no file.", pattern, "check the folder and the ending")
        raise _missing(path, key)
    except (OSError, ValueError) as error:  # a name too long, a null byte, a folder that may not be listed
        raise DataError(f"A name in {key} cannot be looked up.", pattern, str(error)) from error


def _missing(path: Path, key: str) -> DataError:
    variable = next((part for part in path.parts if part.startswith("$")), None)
    if variable:
        return DataError(f"A file in {key} does not exist: {variable} is not set.", path, f"set {variable}")
    folder, near = path.parent, nearest_path(path)
    if not folder.is_dir():
        what, otherwise = f"A file in {key} does not exist, nor does its folder.", f"check the folder {folder}"
    else:
        names = sorted(p.name for p in folder.iterdir() if p.is_file())
        what, otherwise = f"A file in {key} does not exist.", f"the folder holds: {', '.join(names[:10]) or 'no files'}"
    return DataError(what, path, f"did you mean {near}?" if near else otherwise)


def _folder(folder: Path, key: str) -> list[Path]:
    if (folder / "dataset_dict.json").is_file():
        splits = sorted(p.name for p in folder.iterdir() if p.is_dir())
        what = f"{key} names a folder of several splits."
        raise DataError(what, folder, f"name one of them: {', '.join(str(folder / split) for split in splits)}")
    if (folder / "state.json").is_file():
        return _saved_dataset(folder)
    found = sorted(
        p
        for p in folder.iterdir()
        if p.is_file()
        and p.suffix.lower() in DATA_ENDINGS
        and p.name not in _NOT_DATA
        and not p.name.startswith((".", "_"))
    )
    if found:
        return found
    inner = sorted(p.name for p in folder.iterdir() if p.is_dir())
    fix = f"its sub-folders: {', '.join(inner[:10])}" if inner else f"endings that are read: {', '.join(DATA_ENDINGS)}"
    raise DataError(f"{key} names a folder without data files.", folder, fix)


def _saved_dataset(folder: Path) -> list[Path]:
    """Shards in the order of ``state.json``."""
    what = "A Hugging Face dataset folder cannot be read."
    fix = "save it again with datasets' save_to_disk"
    try:
        state = json.loads((folder / "state.json").read_bytes())
        shards = [folder / entry["filename"] for entry in state["_data_files"]]
        chosen = state.get("_indices_data_files")
    except (OSError, ValueError, TypeError, KeyError, RecursionError) as error:
        raise DataError(what, folder / "state.json", f"{type(error).__name__}: {error}; {fix}") from error
    if chosen:
        raise DataError(what, folder, "it was saved with an index over its rows: call flatten_indices() first")
    missing = [shard.name for shard in shards if not shard.is_file()]
    if missing:
        raise DataError(what, f"{folder} lacks {', '.join(missing[:5])}", f"copy the missing files, or {fix}")
    if not shards:
        raise DataError(what, folder, f"state.json names no shard; {fix}")
    return shards


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
    """One row as the file has it, with the words that lead a person back to it."""

    file: str
    where: str  # "line 4", or "row 3 (counted from 0)"
    values: dict[str, Any]
    problem: str | None = None  # why the row cannot be used; ``values`` is empty then

    def __str__(self) -> str:
        return f"{self.file}, {self.where}"


Columns = dict[str, None]  # their names in order of appearance, which a conversion learns on its way
Converter = Callable[[Path, Columns], "Iterator[pa.RecordBatch]"]


class RowTable:
    """The rows of one converted file. ``path``: the user's file, for messages; ``columns``: names that any row has;
    ``buffer``: the Arrow file, in memory or mapped."""

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
        for start in range(0, len(self), readers.BATCH_ROWS):
            yield from self.read(start, start + readers.BATCH_ROWS)

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
    if suffix in PARQUET_ENDINGS or head.startswith(readers.PARQUET_MAGIC):
        return lambda path, columns: _checked(readers.read_parquet(path), path, columns)
    if suffix in ARROW_ENDINGS or head.startswith(readers.ARROW_MAGIC):
        return lambda path, columns: _checked(readers.read_arrow(path), path, columns)
    for magic, (what, fix) in _FOREIGN.items():
        if head.startswith(magic):
            raise DataError(f"A data file {what}.", path, fix)
    text = {
        **dict.fromkeys(JSON_LINES_ENDINGS, readers.read_json_lines),
        ".json": readers.read_json,
        ".csv": readers.read_csv,
    }
    if suffix not in text:
        raise DataError("A data file is of a kind that is not read.", path, f"give {', '.join(DATA_ENDINGS)}")
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


def _packed(rows: Iterable[readers.TextRow], columns: Columns) -> Iterator[pa.RecordBatch]:
    """Text rows as record batches: the bytes of each row, its line, its problem."""
    import pyarrow as pa

    types = {_JSON: pa.large_binary(), _LINE: pa.int64(), _PROBLEM: pa.string()}

    def batch(rows: list[readers.TextRow]) -> pa.RecordBatch:
        parts = ([row.raw for row in rows], [row.line for row in rows], [row.problem for row in rows])
        arrays = [pa.array(part, kind) for part, kind in zip(parts, types.values(), strict=True)]
        return pa.RecordBatch.from_arrays(arrays, names=list(types))

    held: list[readers.TextRow] = []
    size = 0
    yield batch([])
    for row in rows:
        columns.update(dict.fromkeys(row.names))
        held.append(row)
        size += len(row.raw)
        if len(held) == readers.BATCH_ROWS or size >= BATCH_BYTES:
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
