"""Data files in, plain Python rows out.

Parquet and JSON lines are read (and a ``.json`` file that holds either lines or one list). A file is used whole or
not at all: one that is missing, cut or of another kind is a :class:`~verl.errors.DataError` that names it. Text is
UTF-8 whatever the locale says, and JSON lines are split on newline bytes only: U+2028 and its kin are legal inside a
JSON string and must not end a row.
"""

from __future__ import annotations

import glob
import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from verl.config.names import nearest
from verl.errors import DataError

PARQUET_MAGIC = b"PAR1"
# Hugging Face feature types that say nothing about how Arrow's own columns are to be understood.
_PLAIN = ("Value", "ClassLabel", "Sequence", "List", "LargeList", "Translation", "TranslationVariableLanguages", "Json")
_MEDIA = ("Image", "Audio", "Video", "Pdf", "Nifti", "Array2D", "Array3D", "Array4D", "Array5D")
KNOWN_FEATURES = frozenset(_PLAIN + _MEDIA)


@dataclass(frozen=True)
class RawRow:
    """One row as the file has it, with the words that lead a person back to it."""

    file: str
    where: str  # "row 3 (counted from 0)", "line 4"
    values: dict[str, Any]

    def __str__(self) -> str:
        return f"{self.file}, {self.where}"


def _nearest_file(path: Path) -> tuple[str | None, list[str]]:
    """The file beside ``path`` whose name is most like its own, and the names of all files there."""
    names = sorted(p.name for p in path.parent.iterdir() if p.is_file())
    # Endings say little about which file was meant, so stems are compared.
    stems = {Path(name).stem: name for name in reversed(names)}
    close = nearest(path.stem, stems, cutoff=0.6)
    return (stems[close] if close else None), names


def expand_files(files: str | Iterable[str], key: str = "data.train_files") -> list[Path]:
    """Paths of one file, many files, or glob patterns, in the order given and each pattern sorted by name.

    Raises:
        DataError: a file is missing (with the nearest name in its folder), a pattern matches nothing, nothing is named,
            or one file is named twice.
    """
    patterns = [files] if isinstance(files, str | Path) else list(files)
    if not patterns:
        raise DataError("No data file is given.", fix=f"set {key} to a parquet or jsonl file")
    found: list[Path] = []
    for pattern in map(str, patterns):
        path = Path(pattern).expanduser()
        # A file whose own name holds a bracket is a file first and a pattern second.
        if path.exists() or not glob.has_magic(pattern):
            found.append(_existing(path, key))
            continue
        matches = sorted(p for p in glob.glob(str(path), recursive=True) if Path(p).is_file())
        if not matches:
            raise DataError(f"A pattern in {key} matches no file.", pattern, "check the folder and the ending")
        found.extend(map(Path, matches))
    seen: set[Path] = set()
    for path in found:
        if path.resolve() in seen:
            raise DataError(f"A file is named twice in {key}.", path, "its rows would count double: name it once")
        seen.add(path.resolve())
    return found


def _existing(path: Path, key: str) -> Path:
    if path.is_file():
        return path
    if path.is_dir():
        raise DataError(f"{key} names a folder, not a file.", path, f'name its files, for example "{path}/*.parquet"')
    folder = path.parent
    if not folder.is_dir():
        raise DataError(f"A file in {key} does not exist, nor does its folder.", path, f"check the folder {folder}")
    close, names = _nearest_file(path)
    shown = ", ".join(names[:10]) or "no files"
    fix = f"did you mean {folder / close}?" if close else f"the folder holds: {shown}"
    raise DataError(f"A file in {key} does not exist.", path, fix)


def read_rows(path: str | Path) -> list[RawRow]:
    """All rows of one file.

    Raises:
        DataError: the file cannot be read whole, naming it and what is wrong with it.
    """
    path = Path(path)
    try:
        with path.open("rb") as file:
            head = file.read(len(PARQUET_MAGIC))
    except OSError as error:
        raise DataError("A data file cannot be opened.", path, error.strerror) from error
    if not head:
        raise DataError("A data file has zero bytes.", path, "write it again; the write was probably interrupted")
    suffix = path.suffix.lower()
    if suffix in (".parquet", ".pq") or head == PARQUET_MAGIC:
        return _read_parquet(path)
    if suffix in (".jsonl", ".ndjson"):
        return _read_json_lines(path)
    if suffix == ".json":
        return _read_json(path)
    raise DataError("A data file is of a kind that is not read.", path, "give a .parquet or .jsonl file")


def _read_parquet(path: Path) -> list[RawRow]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        # A schema of our own reading: Arrow is asked for the file as it is, not for a dataset around it.
        with pq.ParquetFile(str(path)) as file:
            _check_features(path, (file.schema_arrow.metadata or {}).get(b"huggingface"))
            table = file.read()
        values = table.to_pylist()
    except (pa.ArrowException, OSError, ValueError, KeyError) as error:
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        fix = f"{reason}; copy or write the file again"
        raise DataError("A parquet file cannot be read; it is cut, damaged or not parquet.", path, fix) from error
    return [RawRow(str(path), f"row {i} (counted from 0)", row) for i, row in enumerate(values)]


def _check_features(path: Path, metadata: bytes | None) -> None:
    """Refuse a file whose writer declared a column type that we would misread as plain storage."""
    if not metadata:
        return
    try:
        features = json.loads(metadata).get("info", {}).get("features", {})
    except (ValueError, AttributeError):
        raise DataError(
            "A parquet file carries feature metadata that is not JSON.", path, "write the file again"
        ) from None
    for column, feature in features.items() if isinstance(features, dict) else ():
        for kind in _feature_kinds(feature):
            if kind not in KNOWN_FEATURES:
                what = f"A parquet file declares a feature type that is not known, in column {column!r}."
                raise DataError(what, f"{path}: {kind}", "write the file again without its huggingface metadata")


def _feature_kinds(feature: Any) -> Iterable[str]:
    if isinstance(feature, list):
        for part in feature:
            yield from _feature_kinds(part)
    elif isinstance(feature, dict):
        kind = feature.get("_type")
        if isinstance(kind, str):
            yield kind
        for part in feature.values():
            yield from _feature_kinds(part)


def _decode(path: Path, where: str, raw: bytes) -> str:
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError as error:
        what = "A data file is not UTF-8 text."
        raise DataError(
            what, f"{path}, {where}: byte {error.start} is {raw[error.start]:#04x}", "save it as UTF-8"
        ) from None


def _parse(path: Path, where: str, text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        shown = text if len(text) <= 80 else text[:77] + "..."
        raise DataError(
            "A line is not JSON; the file is cut or damaged.", f"{path}, {where}: {shown}", str(error)
        ) from None


def _row(path: Path, where: str, value: Any) -> RawRow:
    if not isinstance(value, dict):
        what = "A row is not a JSON object."
        raise DataError(what, f"{path}, {where}: {type(value).__name__}", 'each row is like {"prompt": ...}')
    return RawRow(str(path), where, value)


def _read_json_lines(path: Path) -> list[RawRow]:
    rows = []
    lines = path.read_bytes().removeprefix(b"\xef\xbb\xbf").split(b"\n")
    for number, raw in enumerate(lines, start=1):
        if raw.strip():
            where = f"line {number}"
            rows.append(_row(path, where, _parse(path, where, _decode(path, where, raw))))
    return rows


def _read_json(path: Path) -> list[RawRow]:
    raw = path.read_bytes().removeprefix(b"\xef\xbb\xbf")
    if not raw.lstrip().startswith(b"["):
        return _read_json_lines(path)
    values = _parse(path, "its only list", _decode(path, "its only list", raw))
    return [_row(path, f"row {i} (counted from 0)", value) for i, value in enumerate(values)]
