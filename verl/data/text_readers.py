"""Rows of JSON lines, JSON lists and CSV, one after another in bounded memory.

Each row comes as the bytes of one JSON object, exactly as the file has it (what JSON can hold and Arrow's columns
cannot, such as one key with text here and a number there, survives). A row that cannot be used comes with the reason
instead; a file that ends in the middle of a row is cut, and refused as a whole.
"""

from __future__ import annotations

import csv
import io
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from verl.errors import DataError

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
    """One row: its bytes, or what is wrong with it.

    Attributes:
        line: number of its line, counted from 1; None in a JSON list.
        names: keys of the object, in order.
    """

    line: int | None
    raw: bytes = b""
    names: tuple[str, ...] = ()
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
