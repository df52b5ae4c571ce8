"""The manifest of a checkpoint: every file with size and checksum, the step, and what was noted.

CRC-32 is the checksum: it is there to notice torn writes and rotten bits, which it does for any burst up to 32 bits and
all but one in four billion others, at 2.7 GB/s of one core where SHA-256 makes 1.2 and BLAKE2b 0.6. Someone who can
alter the files could alter the manifest too, so a cryptographic hash would protect nothing more.
"""

from __future__ import annotations

import contextlib
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from verl import __version__
from verl.atomic import atomic_write
from verl.errors import CheckpointError, DataError
from verl.protocol import codec
from verl.protocol.files import FileRecord, advice, crc32_of

MANIFEST = "manifest.json"
_FORMAT = "verl.checkpoint/1"


@dataclass(frozen=True)
class Manifest:
    """What a checkpoint holds; ``files`` is keyed by path relative to the checkpoint."""

    step: int
    meta: dict[str, Any]
    files: dict[str, FileRecord]
    verl: str = __version__


@contextlib.contextmanager
def checkpoint_errors(action: str, path: Path) -> Iterator[None]:
    """Turn errors of the disk and of the codec into CheckpointError naming the file."""
    try:
        yield
    except OSError as error:
        where = error.filename if isinstance(error.filename, str) else str(path)
        raise CheckpointError(f"cannot {action}: {error.strerror or error}", where, advice(error)) from error
    except DataError as error:
        value = f"{path}: {error.value}" if error.value is not None and error.value != str(path) else str(path)
        raise CheckpointError(f"cannot {action}: {error.what}", value, error.fix) from error


def safe_name(name: str) -> str:
    """A relative path inside a checkpoint. Raises CheckpointError for one that leaves it."""
    parts = PurePosixPath(name)
    if not name or parts.is_absolute() or "\0" in name or not parts.parts or ".." in parts.parts:
        raise CheckpointError("a file of a checkpoint needs a relative name inside it", name)
    return str(parts)


def write_manifest(folder: Path, manifest: Manifest) -> None:
    """Raises OSError, or DataError for meta that is not JSON (tensors belong in a state)."""
    meta, tensors = codec.encode(manifest.meta)
    if tensors:
        raise DataError("meta of a checkpoint holds tensors or arrays", sorted(tensors), "put them in a state")
    body = {
        "format": _FORMAT,
        "verl": manifest.verl,
        "step": manifest.step,
        "meta": meta,
        "files": {
            name: {"size": record.size, "crc32": f"{record.crc32:08x}"} for name, record in manifest.files.items()
        },
    }
    with atomic_write(folder / MANIFEST) as file:
        file.write(codec.to_json_bytes({**body, "crc32": _crc(body)}, indent=1) + b"\n")


def read_manifest(folder: Path) -> Manifest:
    """Raises CheckpointError naming the manifest when it is missing, cut, damaged or foreign."""
    path = folder / MANIFEST
    try:
        body = codec.from_json_bytes(path.read_bytes())
        checksum = body.pop("crc32")
        if body["format"] != _FORMAT:
            raise ValueError(f"format {body['format']!r}, not {_FORMAT!r}")
        if checksum != _crc(body):
            raise ValueError("its checksum differs")
        files = {
            safe_name(name): FileRecord(int(entry["size"]), int(entry["crc32"], 16))
            for name, entry in body["files"].items()
        }
        return Manifest(int(body["step"]), codec.decode(body["meta"], {}), files, str(body["verl"]))
    except FileNotFoundError:
        raise CheckpointError(
            "not a complete checkpoint: it has no manifest", str(path), "choose another checkpoint"
        ) from None
    except (OSError, DataError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise CheckpointError(
            f"the manifest of a checkpoint cannot be read: {error}", str(path), "choose another checkpoint"
        ) from error


def check_sizes(folder: Path, manifest: Manifest) -> None:
    """Raises CheckpointError naming the first file that is missing or has another size."""
    for name, record in manifest.files.items():
        path = folder / name
        with checkpoint_errors("read a file of the checkpoint", path):
            size = path.stat().st_size
        if size != record.size:
            raise CheckpointError(
                "a file of the checkpoint has the wrong size",
                f"{path}: {size} bytes, not {record.size}",
                "choose another checkpoint",
            )


def check_checksum(folder: Path, manifest: Manifest, name: str) -> None:
    """Raises CheckpointError when the bytes of a file are not those that were saved."""
    path = folder / name
    with checkpoint_errors("read a file of the checkpoint", path):
        value = crc32_of(path)
    if value != manifest.files[name].crc32:
        raise CheckpointError(
            "a file of the checkpoint is damaged: its checksum differs", str(path), "choose another checkpoint"
        )


def _crc(body: dict[str, Any]) -> str:
    return f"{zlib.crc32(codec.to_json_bytes(body)):08x}"
