"""From what a user names (files, patterns, folders) to the files that are read.

Folders hold data files side by side, or are what ``datasets.Dataset.save_to_disk`` of Hugging Face leaves behind.
"""

from __future__ import annotations

import glob
import json
import os
from collections.abc import Iterable
from pathlib import Path

from verl.config.names import nearest_path
from verl.errors import DataError

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

    Raises:
        DataError: a file is missing (with the nearest name in its folder), a pattern or folder holds none, nothing is
            named, or one file is named twice.
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
