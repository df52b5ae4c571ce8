"""Object columns and meta values: how they are made, copied, compared and merged."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import torch

from verl.errors import DataError

METRICS_KEY = "metrics"


def to_column(name: str, values: Any) -> np.ndarray:
    """An object array with one entry a row.

    A list becomes a one-dimensional column whatever its entries are (lists of equal length too);
    an array keeps its shape, so that a two-dimensional one has a row vector of objects per row.

    Raises:
        DataError: ``values`` is neither a list nor an array with rows.
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
