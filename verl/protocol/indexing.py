"""Which rows an index means."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from verl.errors import DataError


def is_single(index: Any) -> bool:
    """True for an integer of any library (not for a bool)."""
    if isinstance(index, (bool, np.bool_)):
        return False
    if isinstance(index, (int, np.integer)):
        return True
    if isinstance(index, (torch.Tensor, np.ndarray)) and index.ndim == 0:
        kind = index.dtype.kind if isinstance(index, np.ndarray) else str(index.dtype)
        return kind in "iu" or str(kind).startswith(("torch.int", "torch.uint"))
    return False


def resolve_row(index: Any, rows: int) -> int:
    """The row number of a single index; negative ones count from the end. Raises IndexError."""
    row = int(index)
    if not -rows <= row < rows:
        raise IndexError(f"row {row} is out of range for {rows} rows")
    return row % rows


def resolve_rows(index: Any, rows: int) -> slice | torch.Tensor:
    """A slice with positive step, or an int64 tensor of row numbers in [0, rows).

    Lists, ranges, numpy and torch arrays of integers (repeats allowed, order kept, negatives count
    from the end) or of booleans (one a row).

    Raises:
        DataError: the index is of another kind, or a mask has another length than the rows.
        IndexError: a row number is out of range.
    """
    if isinstance(index, slice):
        start, stop, step = index.indices(rows)
        if step > 0:
            return slice(start, max(start, stop), step)
        return torch.tensor(list(range(start, stop, step)), dtype=torch.int64)
    numbers = _as_numbers(index)
    if numbers.dtype == bool:
        if len(numbers) != rows:
            raise DataError(f"a row mask has {len(numbers)} entries for {rows} rows", fix="pass one entry a row")
        numbers = np.flatnonzero(numbers)
    numbers = numbers.astype(np.int64)
    out_of_range = (numbers < -rows) | (numbers >= rows)
    if out_of_range.any():
        raise IndexError(f"row {numbers[out_of_range][0]} is out of range for {rows} rows")
    return torch.from_numpy(np.where(numbers < 0, numbers + rows, numbers))


def _as_numbers(index: Any) -> np.ndarray:
    if isinstance(index, torch.Tensor):
        numbers = index.detach().cpu().numpy()
    elif isinstance(index, np.ndarray):
        numbers = index
    elif isinstance(index, (list, range)):
        plain = [item.item() if isinstance(item, (torch.Tensor, np.generic)) else item for item in index]
        if not plain:
            return np.empty(0, dtype=np.int64)
        kinds = {type(item) for item in plain}
        if len(kinds) > 1:
            raise DataError("a row index mixes kinds", sorted(kind.__name__ for kind in kinds), "integers or booleans")
        numbers = np.array(plain)
    else:
        raise DataError(
            "rows are chosen by an integer, a slice, or a list or array of integers or booleans", type(index).__name__
        )
    if numbers.shape == (0,) and numbers.dtype.kind == "f":
        return np.empty(0, dtype=np.int64)  # what torch.tensor([]) and np.array([]) are
    if numbers.ndim != 1 or numbers.dtype.kind not in "iub":
        raise DataError(
            "a row index must be one-dimensional and hold integers or booleans",
            f"shape {numbers.shape}, {numbers.dtype}",
        )
    return numbers
