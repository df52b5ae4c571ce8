"""The cache of converted models: every entry is built once, complete or absent, by one process at a time.

Layout: ``$VERL_CACHE/models/<name>/`` (default ``~/.cache/verl``), each with a ``verl_source.json`` that records what
it was made from. An entry made from something else (an older pin, an older conversion) is built again.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

from verl.errors import ModelError

Report = Callable[[str], None]
SOURCE_FILE = "verl_source.json"


def report_to_stderr(line: str) -> None:
    """Default receiver of progress lines: standard error, so that standard output stays for results."""
    print(line, file=sys.stderr, flush=True)


def cache_root() -> Path:
    """Folder of everything that can be fetched or built again: ``$VERL_CACHE`` or ``~/.cache/verl``."""
    configured = os.environ.get("VERL_CACHE")
    return Path(configured).expanduser().absolute() if configured else Path.home() / ".cache" / "verl"


def file_sha256(path: Path) -> str:
    """SHA-256 of a file's content, in hexadecimal."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def build_once(
    name: str, source: dict[str, object], build: Callable[[Path], None], report: Report = report_to_stderr
) -> Path:
    """Return the cache entry ``name``, calling ``build(empty_folder)`` first if it is missing or of another source.

    A crash leaves no half-built entry: the folder is built under a temporary name, flushed to disk and then renamed.
    A second process waits for the first and takes its result.

    Raises:
        ModelError: the cache folder cannot be written; whatever ``build`` raises.
    """
    entry = cache_root() / "models" / name
    if _is_current(entry, source):
        return entry
    try:
        entry.parent.mkdir(parents=True, exist_ok=True)
        with _locked(entry.parent / f".{name}.lock", name, report):
            if not _is_current(entry, source):
                _build_and_rename(entry, source, build)
    except OSError as error:
        raise ModelError(
            f"the model cache cannot be written: {error.strerror or error}",
            value=error.filename or entry,
            fix="free disk space, make the folder writable, or set VERL_CACHE to another folder",
        ) from error
    return entry


def _is_current(entry: Path, source: dict[str, object]) -> bool:
    try:
        return json.loads((entry / SOURCE_FILE).read_text(encoding="utf-8")) == source
    except (OSError, ValueError):
        return False


def _build_and_rename(entry: Path, source: dict[str, object], build: Callable[[Path], None]) -> None:
    prefix = f".{entry.name}.building-"
    # We hold the lock, so whatever carries the prefix was left by a process that died.
    for stale in entry.parent.glob(f"{prefix}*"):
        shutil.rmtree(stale, ignore_errors=True)
    with tempfile.TemporaryDirectory(prefix=prefix, dir=entry.parent) as scratch:
        folder = Path(scratch) / "entry"
        folder.mkdir()
        build(folder)
        (folder / SOURCE_FILE).write_text(json.dumps(source, indent=2) + "\n", encoding="utf-8")
        _flush(folder)
        if entry.exists():
            entry.rename(Path(scratch) / "replaced")
        folder.rename(entry)


def _flush(folder: Path) -> None:
    """Bring the content to disk before the rename: else a power cut could leave a complete name with empty files."""
    for path in [*(p for p in folder.rglob("*") if p.is_file()), folder]:
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


@contextlib.contextmanager
def _locked(path: Path, name: str, report: Report) -> Iterator[None]:
    """Hold an exclusive lock that the kernel releases when this process ends, however it ends."""
    with path.open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            report(f"{name}: another process is preparing it; waiting")
            fcntl.flock(file, fcntl.LOCK_EX)
        yield
