"""Files that appear whole or not at all."""

from __future__ import annotations

import contextlib
import os
import secrets
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

PARTIAL = ".partial-"
"""In the name of every file or directory that is not complete yet."""


def partial_name(path: Path) -> Path:
    """A fresh hidden name beside ``path`` for something that is being written."""
    return path.with_name(f".{path.name}{PARTIAL}{secrets.token_hex(4)}")


@contextlib.contextmanager
def atomic_write(path: Path) -> Iterator[BinaryIO]:
    """A binary file that takes the place of ``path`` when the block ends without an error.

    Synced before the rename, and the directory after it; on any error the temporary file is removed.

    Raises:
        OSError: the file cannot be written.
    """
    partial = partial_name(path)
    try:
        with open(partial, "xb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(partial, path)
    except BaseException:
        with contextlib.suppress(OSError):
            partial.unlink()
        raise
    sync(path.parent)


def sync(path: Path) -> None:
    """Force a file or directory to disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
