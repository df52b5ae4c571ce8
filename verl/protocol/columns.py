"""Object columns and meta values: how they are made, copied, compared and merged."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from tensordict import TensorDictBase

from verl.errors import DataError

METRICS_KEY = "metrics"


def to_column(name: str, values: Any) -> np.ndarray:
    """An object array with one entry a row.

    A list becomes a one-dimensional column whatever its entries are (lists of equal length too); an array keeps its
    shape, so that a two-dimensional one has a row vector of objects per row. Raises DataError: ``values`` is neither a
    list nor an array with rows.
    """
    if isinstance(values, np.ndarray):
        if values.ndim == 0:
            raise DataError(f"column '{name}' has no rows (a zero-dimensional array)", values, "pass one entry a row")
        return values if values.dtype == object else values.astype(object)
    if isinstance(values, (list, tuple)):
        return object_array(list(values))
    raise DataError(
        f"column '{name}' of non_tensor_batch must be a numpy array or a list with one entry a row",
        type(values).__name__,
        "tensors belong in batch, single values in meta_info",
    )


def object_array(values: list[Any]) -> np.ndarray:
    """A one-dimensional object array; ``np.array(values, dtype=object)`` would nest equal-length lists."""
    column = np.empty(len(values), dtype=object)
    for row, value in enumerate(values):
        column[row] = value
    return column


def padded(
    rows: Sequence[Sequence[Any]],
    fill: Any = 0,
    *,
    left: bool = False,
    dtype: torch.dtype = torch.int64,
    multiple: int = 1,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows in one (B, W) tensor, W the longest rounded up to a ``multiple``; the (B, W) int64 mask of what is real."""
    width = max(-(-max(map(len, rows), default=0) // multiple) * multiple, multiple)
    values, mask = torch.full((len(rows), width), fill, dtype=dtype), torch.zeros(len(rows), width, dtype=torch.int64)
    for i, row in enumerate(rows):
        if len(row):
            place = slice(width - len(row), width) if left else slice(0, len(row))
            values[i, place] = torch.as_tensor(row, dtype=dtype)
            mask[i, place] = 1
    return values, mask


def copy_meta(value: Any) -> Any:
    """Copy containers, arrays and tensors, so that pieces can change theirs apart; share opaque objects."""
    if isinstance(value, torch.Tensor):
        return value.clone()
    if isinstance(value, np.ndarray):
        return copy_column(value, deep=True) if value.dtype == object else value.copy()
    if type(value) in (list, tuple, set):
        return type(value)(copy_meta(item) for item in value)
    if isinstance(value, dict):
        copied = copy.copy(value)  # keeps OrderedDict and defaultdict what they are
        copied.update((key, copy_meta(item)) for key, item in value.items())
        return copied
    return copy.copy(value) if isinstance(value, (list, set, bytearray)) else value


def copy_column(column: np.ndarray, deep: bool = False) -> np.ndarray:
    """A column with its own entries; ``deep`` also copies the containers that the entries are."""
    result = column.copy()
    if deep:
        for index in np.ndindex(result.shape):
            result[index] = copy_meta(result[index])
    return result


def same(left: Any, right: Any) -> bool:
    """Deep equality in which NaN equals NaN; arrays and tensors must agree in shape and dtype."""
    if left is right:
        return True
    if isinstance(left, torch.Tensor) or isinstance(right, torch.Tensor):
        return isinstance(left, torch.Tensor) and isinstance(right, torch.Tensor) and same_tensor(left, right)
    if isinstance(left, np.ndarray) or isinstance(right, np.ndarray):
        return isinstance(left, np.ndarray) and isinstance(right, np.ndarray) and _same_array(left, right)
    if isinstance(left, Mapping):
        return (
            isinstance(right, Mapping)
            and left.keys() == right.keys()
            and all(same(value, right[key]) for key, value in left.items())
        )
    if isinstance(left, (list, tuple)):
        return (
            isinstance(right, (list, tuple))
            and isinstance(left, list) == isinstance(right, list)
            and len(left) == len(right)
            and all(map(same, left, right))
        )
    if _is_nan(left) and _is_nan(right):
        return True
    try:
        return bool(left == right)
    except (TypeError, ValueError, RuntimeError):
        return False


def _is_nan(value: Any) -> bool:
    return isinstance(value, (float, np.floating)) and math.isnan(value)


def _same_array(left: np.ndarray, right: np.ndarray) -> bool:
    if left.shape != right.shape or left.dtype != right.dtype:
        return False
    if left.dtype == object:
        return all(map(same, left.ravel(), right.ravel()))
    return bool(np.array_equal(left, right, equal_nan=left.dtype.kind in "fc"))


def same_tensor(left: torch.Tensor, right: torch.Tensor) -> bool:
    """Equal shape, dtype and values (NaN equals NaN); tensors over the same memory are not read."""
    if left.shape != right.shape or left.dtype != right.dtype:
        return False
    if left.device == right.device and left.data_ptr() == right.data_ptr() and left.stride() == right.stride():
        return True
    right = right.to(left.device)
    if torch.equal(left, right):
        return True
    if not (left.is_floating_point() or left.is_complex()):
        return False
    return bool(((left == right) | (left.isnan() & right.isnan())).all())


def union_meta(left: Mapping[str, Any], right: Mapping[str, Any]) -> dict[str, Any]:
    """Keys of both; raises DataError naming a key that both hold with different values."""
    merged = dict(left)
    for key, value in right.items():
        if key in merged and not same(merged[key], value):
            raise DataError(
                f"meta_info['{key}'] differs between the pieces",
                f"{_short(merged[key])} and {_short(value)}",
                "drop the key from one of them, or make them agree",
            )
        merged[key] = value
    return merged


def merge_meta(metas: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """The meta_info of a concatenation.

    Every key of every piece is kept, conflicts are named, and ``metrics`` (a dict, a list of dicts or
    None per piece) becomes one dict of lists over the pieces.
    """
    merged: dict[str, Any] = {}
    collected: dict[str, list[Any]] = {}
    for meta in metas:
        merged = union_meta(merged, {key: value for key, value in meta.items() if key != METRICS_KEY})
        metrics = meta.get(METRICS_KEY)
        for entry in metrics if isinstance(metrics, list) else [metrics or {}]:
            if not isinstance(entry, Mapping):
                raise DataError("meta_info['metrics'] must be a dict, a list of dicts or None", _short(entry))
            for name, value in entry.items():
                collected.setdefault(name, []).extend(value if isinstance(value, list) else [value])
    if collected:
        merged[METRICS_KEY] = collected
    return merged


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 120 else text[:117] + "..."


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


def check_parts(batch: Any, columns: Any) -> None:
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
