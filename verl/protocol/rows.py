"""Rows of columns: how they are made, looked at, and chosen from. What ``DataProto`` is built on."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Self, TypeAlias, overload

import numpy as np
import torch
from tensordict import NonTensorData, NonTensorStack, TensorDict, TensorDictBase

from verl.errors import DataError
from verl.protocol import wire
from verl.protocol.columns import (
    check_parts,
    common_batch_size,
    common_rows,
    copy_column,
    copy_meta,
    object_array,
    pick,
    route,
    same,
    to_column,
    union_meta,
)

AUTO_PADDING_KEY = "_verl_auto_padding"
"""meta_info flag: the receiver may get uneven pieces (see ``DataProto.chunk``)."""


RowIndex: TypeAlias = slice | range | list[int] | list[bool] | np.ndarray | torch.Tensor


@dataclass(eq=False)
class DataProtoItem:
    """One row: tensors without their row dimension, the row's objects, and a copy of the meta_info."""

    batch: TensorDict
    non_tensor_batch: dict[str, Any] = field(default_factory=dict)
    meta_info: dict[str, Any] = field(default_factory=dict)


class Rows:
    """See :class:`verl.protocol.container.DataProto`."""

    batch: TensorDictBase
    non_tensor_batch: dict[str, np.ndarray]
    meta_info: dict[str, Any]

    def __init__(
        self,
        batch: TensorDictBase | None = None,
        non_tensor_batch: Mapping[str, Any] | None = None,
        meta_info: Mapping[str, Any] | None = None,
    ) -> None:
        self.non_tensor_batch = {name: to_column(name, values) for name, values in (non_tensor_batch or {}).items()}
        if batch is None:
            batch = TensorDict({}, batch_size=[common_rows(self.non_tensor_batch)])
        self.batch = batch
        self.meta_info = copy_meta(dict(meta_info or {}))
        self._received: dict[str, tuple[torch.Tensor, int]] = {}
        self.check_consistency()

    # --- making -----------------------------------------------------------------------------------

    @classmethod
    def from_single_dict(cls, data: Mapping[str, Any], meta_info: Mapping[str, Any] | None = None) -> Self:
        """Route by kind: tensors to ``batch``, arrays and lists of row length to ``non_tensor_batch``, scalars, strings
        and None to ``meta_info``. Raises DataError: a value of any other kind or length (named), or a meta key given
        twice."""
        tensors, non_tensors, scalars = route(data)
        return cls.from_dict(tensors, non_tensors, union_meta(scalars, meta_info or {}))

    @classmethod
    def from_dict(
        cls,
        tensors: Mapping[str, torch.Tensor] | None = None,
        non_tensors: Mapping[str, Any] | None = None,
        meta_info: Mapping[str, Any] | None = None,
        num_batch_dims: int = 1,
    ) -> Self:
        """From columns by kind; the first ``num_batch_dims`` dimensions of all tensors must agree."""
        tensors = dict(tensors or {})
        columns = {name: to_column(name, values) for name, values in (non_tensors or {}).items()}
        size = common_batch_size(tensors, columns, num_batch_dims)
        return cls(TensorDict(tensors, batch_size=size), columns, meta_info)

    @classmethod
    def from_tensordict(cls, data: TensorDictBase, meta_info: Mapping[str, Any] | None = None) -> Self:
        """Inverse of ``to_tensordict``: stacks of non-tensors become columns, single ones meta_info."""
        tensors, columns, meta = dict[str, torch.Tensor](), dict[str, Any](), dict[str, Any]()
        for name, value in data.items():
            if isinstance(value, NonTensorStack):
                columns[name] = object_array([entry.data for entry in value.tensordicts])
            elif isinstance(value, NonTensorData):
                is_column = data.batch_size[:1] == (0,) and isinstance(value.data, list) and not value.data
                (columns if is_column else meta)[name] = value.data
            elif isinstance(value, torch.Tensor):
                tensors[name] = value
            else:
                what = f"'{name}' is neither a tensor nor a non-tensor"
                raise DataError(what, type(value).__name__, "flatten it first")
        return cls(TensorDict(tensors, batch_size=data.batch_size), columns, union_meta(meta, meta_info or {}))

    def to_tensordict(self) -> TensorDict:
        """One TensorDict: object columns as NonTensorStack, every meta value as NonTensorData. A column without rows
        is a NonTensorData of an empty list."""
        clash = self.meta_info.keys() & {*self.tensors, *self.non_tensor_batch}
        if clash:
            raise DataError("a meta_info key is also the name of a column", sorted(clash), "rename one of them")
        joined = TensorDict(self.tensors, batch_size=self.batch.batch_size)
        for name, column in self.non_tensor_batch.items():
            entries = [NonTensorData(entry, batch_size=self.batch.batch_size[1:]) for entry in column]
            stack: Any = NonTensorStack(*entries) if entries else NonTensorData([], batch_size=joined.batch_size)
            joined.set(name, stack)
        for name, value in self.meta_info.items():
            constant: Any = NonTensorData(value, batch_size=joined.batch_size)
            joined.set(name, constant)
        return joined

    @classmethod
    def _assemble(
        cls,
        tensors: Mapping[str, torch.Tensor],
        non_tensors: Mapping[str, np.ndarray],
        meta_info: Mapping[str, Any],
        batch_size: Sequence[int],
    ) -> Self:
        return cls(TensorDict(dict(tensors), batch_size=list(batch_size)), non_tensors, meta_info)

    def _map_rows(
        self,
        rows: int,
        on_tensor: Callable[[torch.Tensor], torch.Tensor],
        on_column: Callable[[np.ndarray], np.ndarray],
    ) -> Self:
        """A new DataProto of ``rows`` rows with every column changed by the same rule."""
        return self._assemble(
            {name: on_tensor(tensor) for name, tensor in self.tensors.items()},
            {name: on_column(column) for name, column in self.non_tensor_batch.items()},
            self.meta_info,
            (rows, *self.batch.batch_size[1:]),
        )

    def _become(self, other: Rows) -> Self:
        """Take over the columns of a freshly made DataProto (how in-place methods end)."""
        self.batch, self.non_tensor_batch, self.meta_info = other.batch, other.non_tensor_batch, other.meta_info
        return self

    # --- looking ----------------------------------------------------------------------------------

    @property
    def tensor_batch(self) -> TensorDictBase:
        return self.batch

    @tensor_batch.setter
    def tensor_batch(self, batch: TensorDictBase) -> None:
        self.batch = batch

    @property
    def tensors(self) -> dict[str, torch.Tensor]:
        """The columns of ``batch`` by name. (Iterating a TensorDict gives rows, not names.)"""
        return dict(self.batch.items())  # check_consistency refuses anything else

    def __len__(self) -> int:
        return int(self.batch.batch_size[0])

    @overload
    def __getitem__(self, index: int) -> DataProtoItem: ...
    @overload
    def __getitem__(self, index: RowIndex) -> Self: ...
    def __getitem__(self, index: Any) -> Self | DataProtoItem:
        """An integer gives a ``DataProtoItem``; slices, lists and arrays (integers or a mask) a DataProto."""
        if not is_single(index):
            return self.select_idxs(index)
        row = resolve_row(index, len(self))
        tensors = {name: tensor[row] for name, tensor in self.tensors.items()}
        objects = {name: column[row] for name, column in self.non_tensor_batch.items()}
        return DataProtoItem(
            TensorDict(tensors, batch_size=self.batch.batch_size[1:]), objects, copy_meta(self.meta_info)
        )

    def __iter__(self) -> Iterator[DataProtoItem]:
        return (self[row] for row in range(len(self)))

    def __contains__(self, name: object) -> bool:
        """True for the name of a column of either kind."""
        return name in self.tensors or name in self.non_tensor_batch

    def equal(self, other: Rows) -> bool:
        """Same columns, dtypes, values and meta_info; NaN equals NaN."""
        return (
            self.batch.batch_size == other.batch.batch_size
            and same(self.tensors, other.tensors)
            and same(self.non_tensor_batch, other.non_tensor_batch)
            and same(self.meta_info, other.meta_info)
        )

    def check_consistency(self) -> None:
        """Every column has one entry a row and is of the right kind. Raises DataError: naming the column; also when
        ``VERL_CHECK_RECEIVED=1`` and someone wrote into the shared memory of a column that came from another process.
        """
        check_parts(self.batch, self.non_tensor_batch)
        wire.verify_received(self)

    def is_padding_enabled(self) -> bool:
        """True when the meta_info asks for automatic padding (uneven pieces are then allowed)."""
        return bool(self.meta_info.get(AUTO_PADDING_KEY, False))

    def size_in_bytes(self) -> int:
        """Bytes of the tensors; object columns are not counted."""
        return sum(tensor.numel() * tensor.element_size() for tensor in self.tensors.values())

    def get_data_info(self) -> str:
        """Columns with shape, dtype and device, one a line."""
        lines = [f"{type(self).__name__} of {len(self)} rows"]
        lines += [
            f"  batch['{name}']: {tuple(tensor.shape)} {tensor.dtype} {tensor.device}"
            for name, tensor in self.tensors.items()
        ]
        lines += [
            f"  non_tensor_batch['{name}']: {column.shape} of "
            + ("/".join(sorted({type(item).__name__ for item in column.flat})) or "nothing")
            for name, column in self.non_tensor_batch.items()
        ]
        lines += [f"  meta_info['{key}']: {type(value).__name__}" for key, value in self.meta_info.items()]
        return "\n".join(lines)

    def print_size(self, prefix: str = "") -> None:
        """Print rows and size of the tensors."""
        print(f"{prefix + ': ' if prefix else ''}{len(self)} rows, {self.size_in_bytes() / 2**30:.6f} GiB of tensors")

    def __repr__(self) -> str:
        return self.get_data_info()

    # --- choosing rows and columns ------------------------------------------------------------------

    def select_idxs(self, idxs: Any) -> Self:
        """The rows of an index (see ``verl.protocol.rows``), in its order, repeats allowed."""
        rows = resolve_rows(idxs, len(self))
        if isinstance(rows, slice):
            count = len(range(*rows.indices(len(self))))
            return self._map_rows(count, lambda tensor: tensor[rows], lambda column: column[rows].copy())
        numbers = rows.numpy()
        return self._map_rows(
            len(numbers), lambda tensor: tensor.index_select(0, rows.to(tensor.device)), lambda column: column[numbers]
        )

    def slice(self, start: int | None = None, end: int | None = None, step: int | None = None) -> Self:
        """``data[start:end:step]``."""
        return self.select_idxs(slice(start, end, step))

    def select(
        self,
        batch_keys: Sequence[str] | None = None,
        non_tensor_batch_keys: Sequence[str] | None = None,
        meta_info_keys: Sequence[str] | None = None,
        deepcopy: bool = False,
    ) -> Self:
        """The named columns and meta keys; None means all of that kind. ``deepcopy`` copies memory too."""
        tensors = pick("batch", self.tensors, batch_keys)
        columns = pick("non_tensor_batch", self.non_tensor_batch, non_tensor_batch_keys)
        meta = pick("meta_info", self.meta_info, meta_info_keys)
        return self._assemble(
            {name: tensor.clone() if deepcopy else tensor for name, tensor in tensors.items()},
            {name: copy_column(column, deep=deepcopy) for name, column in columns.items()},
            meta,
            self.batch.batch_size,
        )

    def pop(
        self,
        batch_keys: Sequence[str] | None = None,
        non_tensor_batch_keys: Sequence[str] | None = None,
        meta_info_keys: Sequence[str] | None = None,
    ) -> Self:
        """Remove the named columns and meta keys (None: nothing of that kind) and return them."""
        popped = self.select(batch_keys or (), non_tensor_batch_keys or (), meta_info_keys or ())
        for kind, names in (
            (self.batch, batch_keys),
            (self.non_tensor_batch, non_tensor_batch_keys),
            (self.meta_info, meta_info_keys),
        ):
            for name in dict.fromkeys(names or ()):
                del kind[name]
        return popped

    def rename(self, old_keys: str | Sequence[str], new_keys: str | Sequence[str]) -> Self:
        """Rename columns of either kind in place, all at once (so two may swap names)."""
        old = [old_keys] if isinstance(old_keys, str) else list(old_keys)
        new = [new_keys] if isinstance(new_keys, str) else list(new_keys)
        if len(old) != len(new) or len(set(old)) != len(old) or len(set(new)) != len(new):
            raise DataError("rename needs one new name for each old one, without repeats", f"{old} to {new}")
        present = {*self.tensors, *self.non_tensor_batch}
        missing, taken = [name for name in old if name not in present], [n for n in new if n in present - set(old)]
        if missing or taken:
            problem = f"no column {missing[0]!r} to rename" if missing else f"a column {taken[0]!r} is already there"
            raise DataError(problem, sorted(present))
        renames = dict(zip(old, new, strict=True))
        tensors = {renames.get(name, name): tensor for name, tensor in self.tensors.items()}
        columns = {renames.get(name, name): column for name, column in self.non_tensor_batch.items()}
        return self._become(self._assemble(tensors, columns, self.meta_info, self.batch.batch_size))


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

    Lists, ranges, numpy and torch arrays of integers (repeats allowed, order kept, negatives count from the end) or of
    booleans (one a row). Raises DataError: the index is of another kind, or a mask has another length than the rows;
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
