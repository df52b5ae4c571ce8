"""How a DataProto crosses between processes: pickle protocol 5 with tensors as numpy buffers.

A numpy array reduces itself to an out-of-band buffer, which Ray's object store keeps in shared memory and hands to
every reader without a copy; a torch tensor would be copied on both sides. Received tensors are therefore views of
memory that others read too: read-only in truth, though torch cannot enforce it. ``DataProto`` never writes into tensors
(its in-place methods put new ones in place of the old), and ``DataProto.writable()`` gives a private copy.

With ``VERL_CHECK_RECEIVED=1`` the sender adds a checksum of every tensor; each reader checks it on
arrival, and again in ``DataProto.check_consistency()``, so that a raw write shows by column name.
"""

from __future__ import annotations

import os
import zlib
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from verl.errors import DataError

if TYPE_CHECKING:
    from verl.protocol.rows import Rows

CHECK_VARIABLE = "VERL_CHECK_RECEIVED"

# dtypes that numpy does not know travel under an integer type of the same width
_CARRIER = {torch.bfloat16: torch.int16, torch.float8_e4m3fn: torch.uint8, torch.float8_e5m2: torch.uint8}


class _WritableView:
    """Claims that a read-only array may be written.

    ``torch.from_numpy`` warns about read-only arrays once per process, and ``warnings.catch_warnings``
    is not safe with threads. Only tensors made here are covered; any other still warns.
    """

    def __init__(self, array: np.ndarray) -> None:
        interface = dict(array.__array_interface__)
        interface["data"] = (interface["data"][0], False)
        self.__array_interface__ = interface
        self.owner = array  # keeps the memory alive as long as any view of it


def tensor_over(array: np.ndarray) -> torch.Tensor:
    """A tensor over the memory of a C-contiguous array, which may be read-only."""
    return torch.from_numpy(array if array.flags.writeable else np.asarray(_WritableView(array)))


def own_storage(tensor: torch.Tensor) -> torch.Tensor:
    """A CPU's memory under a storage object of its own. A storage that numpy once looked into never changes its size
    again, which those of idle roles' weights do."""
    return torch.from_dlpack(tensor.detach()) if tensor.device.type == "cpu" else tensor.detach()


def array_over(name: str, tensor: torch.Tensor) -> np.ndarray:
    """A C-contiguous numpy array over the memory of a CPU tensor (a copy of any other tensor).

    bfloat16 and 8-bit floats come as integers of the same width. Raises DataError: the tensor has no plain memory
    (sparse, quantised, nested).
    """
    if tensor.layout is not torch.strided or tensor.is_quantized or tensor.is_nested:
        raise DataError(f"'{name}' is not a plain dense tensor", f"{tensor.layout}, {tensor.dtype}", "make it dense")
    plain = tensor.detach().cpu().resolve_conj().resolve_neg().contiguous()
    carrier = _CARRIER.get(plain.dtype)
    try:
        return (plain.view(carrier) if carrier is not None else plain).numpy()
    except TypeError as error:
        raise DataError(f"'{name}' has a dtype that cannot be sent", str(tensor.dtype)) from error


def checksum(name: str, tensor: torch.Tensor) -> int:
    """CRC-32 of a tensor's bytes in row order."""
    return zlib.crc32(array_over(name, tensor).reshape(-1).view(np.uint8).data)


def reduce_data(data: Rows) -> tuple[Any, tuple[Any, ...]]:
    """What ``DataProto.__reduce_ex__`` returns."""
    tensors = {
        name: (str(tensor.dtype).removeprefix("torch."), array_over(name, tensor))
        for name, tensor in data.tensors.items()
    }
    sums = None
    if os.environ.get(CHECK_VARIABLE, "0") not in ("", "0"):
        sums = {name: checksum(name, tensor) for name, tensor in data.tensors.items()}
    return _rebuild, (
        type(data),
        tuple(data.batch.batch_size),
        tensors,
        dict(data.non_tensor_batch),
        data.meta_info,
        sums,
    )


def _rebuild(
    kind: type[Rows],
    batch_size: tuple[int, ...],
    tensors: Mapping[str, tuple[str, np.ndarray]],
    non_tensors: dict[str, np.ndarray],
    meta_info: dict[str, Any],
    sums: dict[str, int] | None,
) -> Rows:
    columns: dict[str, torch.Tensor] = {}
    for name, (dtype_name, array) in tensors.items():
        dtype, tensor = getattr(torch, dtype_name), tensor_over(array)
        columns[name] = tensor if tensor.dtype == dtype else tensor.view(dtype)
    data = kind._assemble(columns, non_tensors, meta_info, batch_size)
    if sums is not None:
        data._received = {name: (columns[name], value) for name, value in sums.items()}
        verify_received(data)
    return data


def verify_received(data: Rows) -> None:
    """Check the tensors that arrived with a checksum and are still in place. Raises DataError: someone wrote into the
    shared memory of a column, which is named."""
    for name, (tensor, expected) in data._received.items():
        if data.tensors.get(name) is tensor and checksum(name, tensor) != expected:
            raise DataError(
                f"column '{name}' was written to after it was sent",
                fix="tensors from another process are shared and read-only; call writable() for a private copy",
            )
