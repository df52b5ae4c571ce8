"""Converted data files on disk: ``$VERL_CACHE/data`` (default ``~/.cache/verl/data``), safe to remove at any time.

An entry is two files, ``<key>.arrow`` and ``<key>.json`` (its columns and its own fingerprint). The key is made of the
fingerprint of the user's file, its ending and our format, so a changed file gets another entry. Both files appear
whole, by renaming; an entry that is incomplete, cut or altered is made again. Several processes may make the same entry
at once: the content is the same, and whoever has an older file open keeps it.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import json
import mmap
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from verl.atomic import PARTIAL, atomic_write
from verl.errors import DataError
from verl.models.model_cache import cache_root
from verl.run_dir import write_atomic

FORMAT = 1  # of the converted files; another number makes other keys
WHOLE_BYTES = 2**26  # up to 64 MiB a fingerprint reads the whole file
SAMPLES, SAMPLE_BYTES = 64, 2**20
ABANDONED_AFTER = 24 * 3600.0  # seconds since a half-written file was last written to


def data_cache() -> Path:
    """The cache folder, made if it is not there. Raises DataError: it cannot be made."""
    folder = cache_root() / "data"
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise _unwritable(folder, error) from error
    return folder


def fingerprint(path: Path) -> str:
    """What stands for a file's content, in hexadecimal; a few milliseconds even for a large file.

    Up to 64 MiB: SHA-256 of size and content. Above: of size, modification time and 64 blocks of 1 MiB spread evenly
    from the first byte to the last. A larger file that is changed elsewhere, keeping size and time, is not noticed.
    """
    status = path.stat()
    digest = hashlib.sha256(str(status.st_size).encode())
    with path.open("rb") as file:
        if status.st_size <= WHOLE_BYTES:
            while block := file.read(SAMPLE_BYTES):
                digest.update(block)
        else:
            digest.update(str(status.st_mtime_ns).encode())
            for i in range(SAMPLES):
                file.seek((status.st_size - SAMPLE_BYTES) * i // (SAMPLES - 1))
                digest.update(file.read(SAMPLE_BYTES))
    return digest.hexdigest()


def entry(path: Path, write: Callable[[Any], list[str]]) -> tuple[list[str], mmap.mmap]:
    """Columns and map of the converted ``path``. ``write``: converts into a binary file that is open for writing, and
    returns the columns' names. Raises DataError: the cache cannot be written, the file changes while it is read;
    whatever ``write`` raises."""
    folder = data_cache()
    for _ in range(2):
        before = fingerprint(path)
        key = f"{before[:32]}{path.suffix.lower()}-{FORMAT}"
        found = _open(folder, key)
        if found is None:
            _make(folder, key, write)
            found = _open(folder, key)
        if found is not None and fingerprint(path) == before:
            return found
    raise DataError("A data file changes while it is read.", path, "wait until its writer is done")


def _open(folder: Path, key: str) -> tuple[list[str], mmap.mmap] | None:
    """None where there is no such entry, or one that is not what was written."""
    file = folder / f"{key}.arrow"
    try:
        note = json.loads((folder / f"{key}.json").read_bytes())
        if note["fingerprint"] != fingerprint(file):
            return None
        with file.open("rb") as opened:
            return [str(name) for name in note["columns"]], mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ)
    except OSError as error:
        if error.errno == errno.EMFILE:
            fix = "raise the limit with ulimit -n, or join the files with verl data convert"
            raise DataError("More data files than this process may open.", None, fix) from error
        return None
    except (ValueError, KeyError, TypeError):
        return None


def _make(folder: Path, key: str, write: Callable[[Any], list[str]]) -> None:
    _sweep(folder)
    file = folder / f"{key}.arrow"
    try:
        with atomic_write(file) as opened:
            with contextlib.suppress(OSError):
                fcntl.flock(opened, fcntl.LOCK_SH)  # whatever the clock says, this is no abandoned file
            columns = write(opened)
        write_atomic(folder / f"{key}.json", json.dumps({"fingerprint": fingerprint(file), "columns": columns}))
    except OSError as error:
        raise _unwritable(folder, error) from error


def _sweep(folder: Path) -> None:
    """Remove what killed writers left half done."""
    for path in folder.glob(f".*{PARTIAL}*"):
        with contextlib.suppress(OSError):
            if time.time() - path.stat().st_mtime > ABANDONED_AFTER:
                with path.open("rb") as file:
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)  # its writer, if it lives, holds it
                    path.unlink()


def _unwritable(folder: Path, error: OSError) -> DataError:
    fix = "free disk space, make the folder writable, or set VERL_CACHE to another folder"
    return DataError(f"The data cache cannot be written: {error.strerror or error}.", error.filename or folder, fix)
