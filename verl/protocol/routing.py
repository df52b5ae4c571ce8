"""Which value belongs in which part of a DataProto, and whether the parts agree."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from tensordict import NonTensorData, NonTensorStack, TensorDict, TensorDictBase

from verl.errors import DataError
from verl.protocol.columns import object_array, to_column

if TYPE_CHECKING:
    from verl.protocol.rows import Rows

SCALARS = (bool, int, float, complex, str, np.generic, type(None))


def common_rows(columns: Mapping[str, Any]) -> int:
    """The length that all columns share (0 without columns). Raises DataError naming two that differ."""
    lengths = {name: len(values) for name, values in columns.items()}
    if len(set(lengths.values())) > 1:
        raise DataError("columns differ in their number of rows", lengths, "every column needs one entry a row")
    return next(iter(lengths.values()), 0)


def common_batch_size(
    tensors: Mapping[str, torch.Tensor], columns: Mapping[str, np.ndarray], num_batch_dims: int
) -> tuple[int, ...]:
    """The leading dimensions that all columns share. Raises DataError naming a column without them."""
    if num_batch_dims < 1:
        raise DataError("num_batch_dims must be at least 1", num_batch_dims)
    for name, tensor in tensors.items():
        if not isinstance(tensor, torch.Tensor):
            raise DataError(f"'{name}' of tensors is not a tensor", type(tensor).__name__, "pass it in non_tensors")
    everything: dict[str, Any] = {**tensors, **columns}
    sizes = {name: tuple(values.shape[:num_batch_dims]) for name, values in everything.items()}
    for name, size in sizes.items():
        if len(size) < num_batch_dims:
            raise DataError(f"column '{name}' has fewer than {num_batch_dims} dimensions", tuple(size))
    if len(set(sizes.values())) > 1:
        raise DataError("columns differ in their number of rows", sizes, "every column needs one entry a row")
    return next(iter(sizes.values()), (0,) * num_batch_dims)


def route(data: Mapping[str, Any]) -> tuple[dict[str, torch.Tensor], dict[str, Any], dict[str, Any]]:
    """Tensors, object columns and meta values of a mixed dict. Raises DataError naming a misfit."""
    tensors: dict[str, torch.Tensor] = {}
    columns: dict[str, Any] = {}
    meta: dict[str, Any] = {}
    for name, value in data.items():
        if isinstance(value, torch.Tensor) and value.ndim > 0:
            tensors[name] = value
        elif isinstance(value, list) or (isinstance(value, np.ndarray) and value.ndim > 0):
            columns[name] = value
        elif isinstance(value, SCALARS):
            meta[name] = value
        else:
            kind = f"{type(value).__name__} without rows" if hasattr(value, "ndim") else type(value).__name__
            raise DataError(
                f"'{name}' has no place in a DataProto",
                kind,
                "pass tensors, arrays or lists of row length, scalars or strings; other values in meta_info",
            )
    common_rows({**tensors, **columns})
    return tensors, columns, meta


def check(batch: Any, columns: Any) -> None:
    """Raises DataError naming the first column of the wrong kind or length."""
    if not isinstance(batch, TensorDictBase):
        raise DataError("batch must be a TensorDict", type(batch).__name__, "use DataProto.from_dict for plain dicts")
    if not batch.batch_size:
        raise DataError("batch has no row dimension", tuple(batch.batch_size), "give the TensorDict a batch_size")
    if not isinstance(columns, dict):
        raise DataError("non_tensor_batch must be a dict", type(columns).__name__)
    rows = int(batch.batch_size[0])
    tensors = dict(batch.items())
    for name, tensor in tensors.items():
        if not isinstance(tensor, torch.Tensor):
            raise DataError(f"'{name}' of batch is not a tensor", type(tensor).__name__, "nested values have no place")
    for name, column in columns.items():
        if not isinstance(column, np.ndarray) or column.ndim == 0:
            raise DataError(f"'{name}' of non_tensor_batch is not an array of rows", type(column).__name__)
        if len(column) != rows:
            raise DataError(f"column '{name}' has {len(column)} rows, the batch has {rows}", tuple(column.shape))
        if name in tensors:
            raise DataError(f"column '{name}' is in batch and in non_tensor_batch", fix="give one of them another name")


def pick(part: str, values: Mapping[str, Any], names: Sequence[str] | None) -> dict[str, Any]:
    """The named entries, all when ``names`` is None. Raises DataError naming one that is missing."""
    if isinstance(names, str):
        raise DataError(f"{part} keys must be a list of names", names, f"write [{names!r}]")
    missing = [name for name in names or () if name not in values]
    if missing:
        raise DataError(f"no {', '.join(map(repr, missing))} in {part}", sorted(map(str, values)))
    return {name: values[name] for name in (values if names is None else names)}


def plan_renames(data: Rows, old: Sequence[str], new: Sequence[str]) -> dict[str, str]:
    """Old names to new ones. Raises DataError for unknown, repeated or taken names."""
    if len(old) != len(new) or len(set(old)) != len(old) or len(set(new)) != len(new):
        raise DataError("rename needs one new name for each old one, without repeats", f"{old} to {new}")
    present = {*data.tensors, *data.non_tensor_batch}
    missing = [name for name in old if name not in present]
    taken = [name for name in new if name in present - set(old)]
    if missing or taken:
        problem = f"no column {missing[0]!r} to rename" if missing else f"a column {taken[0]!r} is already there"
        raise DataError(problem, sorted(present))
    return dict(zip(old, new, strict=True))


def join_tensordict(data: Rows) -> TensorDict:
    """See ``DataProto.to_tensordict``. A column without rows is a NonTensorData of an empty list."""
    clash = data.meta_info.keys() & {*data.tensors, *data.non_tensor_batch}
    if clash:
        raise DataError("a meta_info key is also the name of a column", sorted(clash), "rename one of them")
    joined = TensorDict(data.tensors, batch_size=data.batch.batch_size)
    for name, column in data.non_tensor_batch.items():
        entries = [NonTensorData(entry, batch_size=data.batch.batch_size[1:]) for entry in column]
        stack: Any = NonTensorStack(*entries) if entries else NonTensorData([], batch_size=joined.batch_size)
        joined.set(name, stack)
    for name, value in data.meta_info.items():
        constant: Any = NonTensorData(value, batch_size=joined.batch_size)
        joined.set(name, constant)
    return joined


def split_tensordict(data: TensorDictBase) -> tuple[dict[str, torch.Tensor], dict[str, Any], dict[str, Any]]:
    """See ``DataProto.from_tensordict``."""
    tensors: dict[str, torch.Tensor] = {}
    columns: dict[str, Any] = {}
    meta: dict[str, Any] = {}
    for name, value in data.items():
        if isinstance(value, NonTensorStack):
            columns[name] = object_array([entry.data for entry in value.tensordicts])
        elif isinstance(value, NonTensorData):
            is_column = data.batch_size[:1] == (0,) and isinstance(value.data, list) and not value.data
            (columns if is_column else meta)[name] = to_column(name, []) if is_column else value.data
        elif isinstance(value, torch.Tensor):
            tensors[name] = value
        else:
            raise DataError(f"'{name}' is neither a tensor nor a non-tensor", type(value).__name__, "flatten it first")
    return tensors, columns, meta
