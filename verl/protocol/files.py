"""Files that are complete or absent: safetensors, and trees in one file.

The safetensors layout (https://github.com/huggingface/safetensors, format section) is a little-endian u64 header
length, a JSON header, and the tensors' bytes without gaps. It is written here rather than by the library so that a
checksum comes for free on the way out, shared and non-contiguous tensors need no second copy of everything, and a
failing disk is one plain OSError. Files are read by the library.
"""

from __future__ import annotations

import errno
import json
import math
import os
import zlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open

from verl.atomic import atomic_write
from verl.errors import DataError
from verl.protocol import codec
from verl.protocol.codec import DTYPE_CODES, Tree
from verl.protocol.wire import array_over, tensor_over

_BLOCK = 4 << 20
_TREE_KEY = "tree.json"
_TREE_FORMAT = "verl.tree/1"
_ITEMSIZE = {dtype: torch.empty(0, dtype=dtype).element_size() for dtype in DTYPE_CODES}


@dataclass(frozen=True)
class FileRecord:
    """Size in bytes and CRC-32 of a file."""

    size: int
    crc32: int


def crc32_of(path: Path, start: int = 0) -> int:
    """CRC-32 of a file's bytes from ``start`` on."""
    value = 0
    with open(path, "rb", buffering=0) as file:
        file.seek(start)
        while block := file.read(_BLOCK):
            value = zlib.crc32(block, value)
    return value


def advice(error: OSError) -> str:
    """What to do about an OSError while writing."""
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return "free space on that disk, or choose a folder on another one"
    if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
        return "make the folder writable, or choose another one"
    return "check the path and the disk"


def write_safetensors(
    path: Path, tensors: Mapping[str, torch.Tensor], metadata: Mapping[str, str] | None = None
) -> FileRecord:
    """Write tensors (any device, layout in memory or sharing) to a safetensors file, atomically. Raises OSError: the
    file cannot be written; DataError: a tensor has a dtype or layout without a place in safetensors."""
    specs = {name: (tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors.items()}
    return write_safetensors_lazily(path, specs, tensors.__getitem__, metadata)


def write_safetensors_lazily(
    path: Path,
    specs: Mapping[str, tuple[torch.dtype, tuple[int, ...]]],
    produce: Callable[[str], torch.Tensor],
    metadata: Mapping[str, str] | None = None,
) -> FileRecord:
    """Like ``write_safetensors``, but one tensor in memory at a time: ``produce(name)`` makes it."""
    header, order = _header(specs, metadata)
    written, value = 0, 0
    with atomic_write(path) as file:
        for block in _blocks(header, order, produce):
            file.write(block)
            written, value = written + len(block), zlib.crc32(block, value)
    return FileRecord(written, value)


def write_safetensors_share(
    path: Path, shapes: Mapping[str, tuple[int, ...]], rows: Mapping[str, tuple[int, torch.Tensor]]
) -> None:
    """One process's part of a safetensors file that several write at once, each its own rows of every tensor.

    The file is complete when all have returned; that is for the caller to know, and to sync. Raises OSError, DataError:
    as ``write_safetensors``.

    Args:
        shapes: of the whole tensors, the same in every process.
        rows: the first row and the rows, by name, of the same names and dtypes in every process.
    """
    header, order = _header({name: (rows[name][1].dtype, shapes[name]) for name in shapes}, {"format": "pt"})
    with open(os.open(path, os.O_WRONLY | os.O_CREAT, 0o666), "wb") as file:
        file.write(header)
        offset = len(header)
        for name in order:
            first, tensor = rows[name]
            file.seek(offset + first * math.prod(shapes[name][1:]) * tensor.element_size())
            file.write(array_over(name, tensor).reshape(-1).view(np.uint8).data)
            offset += math.prod(shapes[name]) * tensor.element_size()


def _blocks(header: bytes, order: list[str], produce: Callable[[str], torch.Tensor]) -> Iterator[memoryview]:
    yield memoryview(header)
    for name in order:
        data = array_over(name, produce(name)).reshape(-1).view(np.uint8).data
        for start in range(0, len(data), _BLOCK):
            yield data[start : start + _BLOCK]


def _header(
    specs: Mapping[str, tuple[torch.dtype, tuple[int, ...]]], metadata: Mapping[str, str] | None
) -> tuple[bytes, list[str]]:
    """Header bytes, and the order of the tensors: wide dtypes first, so that every one is aligned."""
    for name, (dtype, _) in specs.items():
        if dtype not in DTYPE_CODES:
            raise DataError(f"tensor '{name}' has a dtype that safetensors does not know", str(dtype))
    order = sorted(specs, key=lambda name: (-_ITEMSIZE[specs[name][0]], name))
    entries: dict[str, object] = {"__metadata__": dict(metadata)} if metadata else {}
    offset = 0
    for name in order:
        dtype, shape = specs[name]
        end = offset + int(np.prod(shape, dtype=np.int64)) * _ITEMSIZE[dtype]
        entries[name] = {"dtype": DTYPE_CODES[dtype], "shape": list(shape), "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(entries).encode("ascii")
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text, order


def read_safetensors(
    path: Path, rows: Callable[[str, list[int]], slice] | None = None
) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    """All tensors and the metadata of a safetensors file. ``rows``: of a tensor of this name and shape (of one
    dimension and more), which to read; None: all. Raises DataError: the file is missing, cut or no safetensors file; it
    is named."""
    try:
        with safe_open(str(path), framework="pt") as file:
            return {name: _read(file, name, rows) for name in file.keys()}, dict(file.metadata() or {})  # noqa: SIM118
    except FileNotFoundError:
        raise DataError("there is no such file", str(path)) from None
    except (SafetensorError, OSError, ValueError, RuntimeError, KeyError, TypeError) as error:
        raise DataError(
            f"not a safetensors file, or a damaged one: {error}", str(path), "write it again from its source"
        ) from error


def _read(file: Any, name: str, rows: Callable[[str, list[int]], slice] | None) -> torch.Tensor:
    part = file.get_slice(name)
    shape = part.get_shape()
    return file.get_tensor(name) if rows is None or not shape else part[rows(name, shape)]


def write_tree(path: Path, tree: Tree) -> None:
    """Write a tree to one safetensors file whose tensor ``tree.json`` holds the JSON part.

    The metadata has a CRC-32 of all the data, so that ``read_tree`` notices every changed byte. Raises DataError:
    something in the tree cannot be encoded, or the file cannot be written.
    """
    value, tensors = codec.encode(tree)
    if _TREE_KEY in tensors:
        raise DataError(f"the name '{_TREE_KEY}' is taken by the file format", fix="rename the value")
    tensors[_TREE_KEY] = tensor_over(np.frombuffer(codec.to_json_bytes(value), dtype=np.uint8))
    specs = {name: (tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors.items()}
    _, order = _header(specs, None)
    checksum = 0
    for block in _blocks(b"", order, tensors.__getitem__):
        checksum = zlib.crc32(block, checksum)
    try:
        write_safetensors(path, tensors, {"format": _TREE_FORMAT, "crc32": f"{checksum:08x}"})
    except OSError as error:
        raise DataError(f"cannot write the file: {error.strerror}", str(path), advice(error)) from error


def read_tree(path: Path) -> Tree:
    """Read a file of ``write_tree``, checked byte for byte. Raises DataError: the file is missing, cut, damaged, or of
    another format; it is named."""
    tensors, metadata = read_safetensors(path)
    text = tensors.pop(_TREE_KEY, None)
    if metadata.get("format") != _TREE_FORMAT or text is None or text.dtype != torch.uint8:
        raise DataError(f"not a file of VeRL's ({_TREE_FORMAT})", str(path), "give the path of a file that VeRL saved")
    with open(path, "rb") as file:
        start = 8 + int.from_bytes(file.read(8), "little")
    if metadata.get("crc32") != f"{crc32_of(path, start):08x}":
        raise DataError("the file is damaged: its checksum differs", str(path), "restore it from a copy")
    try:
        return codec.decode(codec.from_json_bytes(text.numpy().tobytes()), tensors)
    except (DataError, ValueError, RecursionError) as error:
        raise DataError(f"the file is damaged: {error}", str(path), "restore it from a copy") from error
