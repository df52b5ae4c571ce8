"""Writing data files: complete or not at all, in bounded memory."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

from verl.atomic import atomic_write, partial_name
from verl.errors import DataError
from verl.json_lines import json_line

if TYPE_CHECKING:
    import pyarrow as pa

OUTPUT_ENDINGS = (".parquet", ".jsonl")
ROWS_AT_ONCE = 8192
Row = dict[str, Any]


def check_writable(paths: Iterable[Path], endings: Sequence[str] = OUTPUT_ENDINGS) -> None:
    """Make the folders, and refuse what cannot be written before any work is done."""
    for path in paths:
        if path.suffix.lower() not in endings:
            kinds = " or ".join(ending.removeprefix(".") for ending in endings)
            raise DataError(f"The output is a {kinds} file.", path, f"name it {path.stem or 'data'}{endings[0]}")
        if path.is_dir():
            raise DataError("The output file is a folder.", path, "give the name of a file")
        probe = partial_name(path)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            probe.touch(exist_ok=False)
            probe.unlink()
        except OSError as error:
            raise DataError("A folder cannot be written.", path.parent, error.strerror or "choose another") from error


def refuse_inputs(out: Path, inputs: Iterable[str | Path]) -> None:
    """Refuse an output file that is one of the files read."""
    if any(Path(path).expanduser().resolve() == out.resolve() for path in inputs):
        raise DataError("The output is one of the inputs.", out, "give another name")


def write_rows(make: Callable[[], Iterable[Row]], path: Path) -> int:
    """Write rows to ``path``, JSON lines or parquet by its ending, and return their number. ``make``: gives the rows;
    parquet asks twice, since its column types must be known before the first row is written. Raises DataError: the file
    cannot be written, or a parquet column would hold values of several types."""
    write = _write_jsonl if path.suffix.lower() == ".jsonl" else _write_parquet
    try:
        with atomic_write(path) as file:
            return write(make, file)
    except OSError as error:
        raise DataError("A data file cannot be written.", path, error.strerror or str(error)) from error


def _write_jsonl(make: Callable[[], Iterable[Row]], file: BinaryIO) -> int:
    count = 0
    for row in make():
        file.write(json_line(row).encode() + b"\n")
        count += 1
    return count


def _write_parquet(make: Callable[[], Iterable[Row]], file: BinaryIO) -> int:
    import pyarrow as pa
    import pyarrow.parquet as pq

    schema: pa.Schema | None = None
    for rows in _chunks(make()):
        found = _table(rows, None).schema
        try:
            schema = found if schema is None else pa.unify_schemas([schema, found], promote_options="permissive")
        except pa.ArrowException as error:
            raise _mixed(str(error).splitlines()[0]) from error
    if schema is None:
        schema = pa.schema([])
    count = 0
    try:
        with pq.ParquetWriter(file, schema) as writer:
            for rows in _chunks(make()):
                writer.write_table(_table(rows, schema))
                count += len(rows)
    except pa.ArrowException as error:  # a type that parquet does not have, such as an object without any key
        raise _mixed(str(error).splitlines()[0]) from error
    return count


def _chunks(rows: Iterable[Row]) -> Iterator[list[Row]]:
    rows = iter(rows)
    while chunk := list(islice(rows, ROWS_AT_ONCE)):
        yield chunk


def _table(rows: list[Row], schema: pa.Schema | None) -> pa.Table:
    import pyarrow as pa

    try:
        return pa.Table.from_pylist(rows, schema=schema)
    except (pa.ArrowException, OverflowError, ValueError, TypeError) as error:
        raise _mixed(_culprit(rows, schema) or str(error).splitlines()[0]) from error


def _culprit(rows: list[Row], schema: pa.Schema | None) -> str | None:
    """Name of the first column (or column.key) that alone cannot be made an Arrow array."""
    import pyarrow as pa

    for name in dict.fromkeys(name for row in rows for name in row):
        values = [row.get(name) for row in rows]
        try:
            pa.array(values, schema.field(name).type if schema else None)
        except (pa.ArrowException, OverflowError, ValueError, TypeError, KeyError):
            objects = [value for value in values if isinstance(value, dict)]
            inner = _culprit(objects, None) if len(objects) == len(values) else None
            return f"{name}.{inner}" if inner else name
    return None


def _mixed(where: str) -> DataError:
    fix = "give --out a name that ends in .jsonl, which can hold them"
    return DataError("Values of a column do not fit one parquet type.", where, fix)


def parse_value(text: str) -> Any:
    """``3`` int, ``0.5`` and ``1e-3`` float, ``true``/``false`` bool, ``null``/``none`` None, JSON lists, objects and
    quoted text; anything else is text as it stands."""
    stripped = text.strip()
    words = {"true": True, "false": False, "null": None, "none": None}
    if stripped.lower() in words:
        return words[stripped.lower()]
    for kind in (int, float):
        try:
            value = kind(stripped)
        except ValueError:
            continue
        if math.isfinite(value):
            return value
    if stripped[:1] in ("[", "{", '"'):
        try:
            return json.loads(stripped)
        except ValueError as error:
            raise DataError("An option's value is not JSON.", text, str(error)) from None
    return text


def parse_pairs(pairs: Iterable[str]) -> dict[str, str]:
    """``["prompt=question"]`` to a dict of text. Raises DataError: a pair without ``=`` or without a name, or a name
    given twice."""
    found: dict[str, str] = {}
    for pair in pairs:
        name, equals, value = pair.partition("=")
        name = name.strip()
        if not equals or not name:
            raise DataError("An option is not of the form name=value.", pair, "for example min_terms=2")
        if name in found:
            raise DataError("An option is given twice.", name, "give it once")
        found[name] = value
    return found


def parse_options(pairs: Iterable[str]) -> dict[str, Any]:
    """``["min_terms=2", ...]`` to a dict of what :func:`parse_value` reads; raises as :func:`parse_pairs`."""
    return {name: parse_value(value) for name, value in parse_pairs(pairs).items()}
