"""``DataProto``: the rows that travel between the stages and between processes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, SupportsIndex, TypeAlias, overload

import numpy as np
import torch
from tensordict import TensorDict, TensorDictBase

from verl.errors import DataError
from verl.protocol import assembly, disk, routing, wire
from verl.protocol.columns import copy_column, copy_meta, same, to_column, union_meta
from verl.protocol.files import read_tree
from verl.protocol.indexing import is_single, resolve_row, resolve_rows

AUTO_PADDING_KEY = "_verl_auto_padding"
"""meta_info flag: the receiver may get uneven pieces (see ``DataProto.chunk``)."""


RowIndex: TypeAlias = slice | range | list[int] | list[bool] | np.ndarray | torch.Tensor


@dataclass(eq=False)
class DataProtoItem:
    """One row: tensors without their row dimension, the row's objects, and a copy of the meta_info."""

    batch: TensorDict
    non_tensor_batch: dict[str, Any] = field(default_factory=dict)
    meta_info: dict[str, Any] = field(default_factory=dict)


class DataProto:
    """Rows with tensor columns, object columns and values that hold for all rows.

    - ``batch`` (alias ``tensor_batch``): a TensorDict, every tensor with the rows as first dimension;
      there even without tensors, because it holds the number of rows.
    - ``non_tensor_batch``: dict of object arrays, one entry a row.
    - ``meta_info``: dict. No two DataProtos share one.

    Nothing here writes into the memory of a tensor: methods that work in place put new tensors in
    place of the old. Results may be views of the same memory (slices, chunks, select), so a raw
    write into a tensor, e.g. ``data.batch["x"][0] = 1``, shows in every view and is forbidden on
    tensors that came from another process; ``writable()`` gives a private copy. Entries of object
    columns (dicts, lists) are shared between results, the columns themselves are not.
    """

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
            batch = TensorDict({}, batch_size=[routing.common_rows(self.non_tensor_batch)])
        self.batch = batch
        self.meta_info = copy_meta(dict(meta_info or {}))
        self._received: dict[str, tuple[torch.Tensor, int]] = {}
        self.check_consistency()

    # --- making -----------------------------------------------------------------------------------

    @classmethod
    def from_single_dict(cls, data: Mapping[str, Any], meta_info: Mapping[str, Any] | None = None) -> DataProto:
        """Route by kind: tensors to ``batch``, arrays and lists of row length to ``non_tensor_batch``,
        scalars, strings and None to ``meta_info``.

        Raises:
            DataError: a value of any other kind or length (named), or a meta key given twice.
        """
        tensors, non_tensors, scalars = routing.route(data)
        return cls.from_dict(tensors, non_tensors, union_meta(scalars, meta_info or {}))

    @classmethod
    def from_dict(
        cls,
        tensors: Mapping[str, torch.Tensor] | None = None,
        non_tensors: Mapping[str, Any] | None = None,
        meta_info: Mapping[str, Any] | None = None,
        num_batch_dims: int = 1,
    ) -> DataProto:
        """From columns by kind; the first ``num_batch_dims`` dimensions of all tensors must agree."""
        tensors = dict(tensors or {})
        columns = {name: to_column(name, values) for name, values in (non_tensors or {}).items()}
        size = routing.common_batch_size(tensors, columns, num_batch_dims)
        return cls(TensorDict(tensors, batch_size=size), columns, meta_info)

    @classmethod
    def from_tensordict(cls, data: TensorDictBase, meta_info: Mapping[str, Any] | None = None) -> DataProto:
        """Inverse of ``to_tensordict``: stacks of non-tensors become columns, single ones meta_info."""
        tensors, non_tensors, scalars = routing.split_tensordict(data)
        batch = TensorDict(tensors, batch_size=data.batch_size)
        return cls(batch, non_tensors, union_meta(scalars, meta_info or {}))

    def to_tensordict(self) -> TensorDict:
        """One TensorDict: object columns as NonTensorStack, every meta value as NonTensorData."""
        return routing.join_tensordict(self)

    @classmethod
    def _assemble(
        cls,
        tensors: Mapping[str, torch.Tensor],
        non_tensors: Mapping[str, np.ndarray],
        meta_info: Mapping[str, Any],
        batch_size: Sequence[int],
    ) -> DataProto:
        return cls(TensorDict(dict(tensors), batch_size=list(batch_size)), non_tensors, meta_info)

    def _map_rows(
        self,
        rows: int,
        on_tensor: Callable[[torch.Tensor], torch.Tensor],
        on_column: Callable[[np.ndarray], np.ndarray],
    ) -> DataProto:
        """A new DataProto of ``rows`` rows with every column changed by the same rule."""
        return self._assemble(
            {name: on_tensor(tensor) for name, tensor in self.tensors.items()},
            {name: on_column(column) for name, column in self.non_tensor_batch.items()},
            self.meta_info,
            (rows, *self.batch.batch_size[1:]),
        )

    def _become(self, other: DataProto) -> DataProto:
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
    def __getitem__(self, index: RowIndex) -> DataProto: ...
    def __getitem__(self, index: Any) -> DataProto | DataProtoItem:
        """An integer gives a ``DataProtoItem``; slices, lists and arrays (integers or a mask) a DataProto."""
        if not is_single(index):
            return self.select_idxs(index)
        row = resolve_row(index, len(self))
        tensors = {name: tensor[row] for name, tensor in self.tensors.items()}
        objects = {name: column[row] for name, column in self.non_tensor_batch.items()}
        return DataProtoItem(TensorDict(tensors, batch_size=self.batch.batch_size[1:]), objects, self._meta_copy())

    def __iter__(self) -> Iterator[DataProtoItem]:
        return (self[row] for row in range(len(self)))

    def __contains__(self, name: object) -> bool:
        """True for the name of a column of either kind."""
        return name in self.tensors or name in self.non_tensor_batch

    def equal(self, other: DataProto) -> bool:
        """Same columns, dtypes, values and meta_info; NaN equals NaN."""
        return (
            self.batch.batch_size == other.batch.batch_size
            and same(self.tensors, other.tensors)
            and same(self.non_tensor_batch, other.non_tensor_batch)
            and same(self.meta_info, other.meta_info)
        )

    def check_consistency(self) -> None:
        """Every column has one entry a row and is of the right kind.

        Raises:
            DataError: naming the column; also when ``VERL_CHECK_RECEIVED=1`` and someone wrote into
                the shared memory of a column that came from another process.
        """
        routing.check(self.batch, self.non_tensor_batch)
        wire.verify_received(self)

    def is_padding_enabled(self) -> bool:
        """True when the meta_info asks for automatic padding (uneven pieces are then allowed)."""
        return bool(self.meta_info.get(AUTO_PADDING_KEY, False))

    def size_in_bytes(self) -> int:
        """Bytes of the tensors; object columns are not counted."""
        return sum(tensor.numel() * tensor.element_size() for tensor in self.tensors.values())

    def get_data_info(self) -> str:
        """Columns with shape, dtype and device, one a line."""
        lines = [f"DataProto of {len(self)} rows"]
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

    def select_idxs(self, idxs: Any) -> DataProto:
        """The rows of an index (see ``verl.protocol.indexing``), in its order, repeats allowed."""
        rows = resolve_rows(idxs, len(self))
        if isinstance(rows, slice):
            count = len(range(*rows.indices(len(self))))
            return self._map_rows(count, lambda tensor: tensor[rows], lambda column: column[rows].copy())
        numbers = rows.numpy()
        return self._map_rows(
            len(numbers), lambda tensor: tensor.index_select(0, rows.to(tensor.device)), lambda column: column[numbers]
        )

    def slice(self, start: int | None = None, end: int | None = None, step: int | None = None) -> DataProto:
        """``data[start:end:step]``."""
        return self.select_idxs(slice(start, end, step))

    def select(
        self,
        batch_keys: Sequence[str] | None = None,
        non_tensor_batch_keys: Sequence[str] | None = None,
        meta_info_keys: Sequence[str] | None = None,
        deepcopy: bool = False,
    ) -> DataProto:
        """The named columns and meta keys; None means all of that kind. ``deepcopy`` copies memory too."""
        tensors = routing.pick("batch", self.tensors, batch_keys)
        columns = routing.pick("non_tensor_batch", self.non_tensor_batch, non_tensor_batch_keys)
        meta = routing.pick("meta_info", self.meta_info, meta_info_keys)
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
    ) -> DataProto:
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

    def rename(self, old_keys: str | Sequence[str], new_keys: str | Sequence[str]) -> DataProto:
        """Rename columns of either kind in place, all at once (so two may swap names)."""
        old = [old_keys] if isinstance(old_keys, str) else list(old_keys)
        new = [new_keys] if isinstance(new_keys, str) else list(new_keys)
        renames = routing.plan_renames(self, old, new)
        tensors = {renames.get(name, name): tensor for name, tensor in self.tensors.items()}
        columns = {renames.get(name, name): column for name, column in self.non_tensor_batch.items()}
        return self._become(self._assemble(tensors, columns, self.meta_info, self.batch.batch_size))

    # --- putting together and apart (the work is in verl.protocol.assembly) ---------------------------

    def union(self, other: DataProto) -> DataProto:
        """Take the columns and meta keys of ``other`` in place; returns self, unchanged on error.

        Raises:
            DataError: another number of rows, or a key that both hold with different values (NaN
                equals NaN), which is named.
        """
        return self._become(assembly.union(self, other))

    def reorder(self, indices: Any) -> DataProto:
        """Put the rows in the order of a permutation, in place. Raises DataError for anything else."""
        rows = resolve_rows(indices, len(self))
        order = list(range(len(self))[rows]) if isinstance(rows, slice) else rows.tolist()
        if sorted(order) != list(range(len(self))):
            raise DataError("reorder needs every row exactly once", f"{len(order)} indices for {len(self)} rows")
        return self._become(self.select_idxs(order))

    def to(self, device: str | torch.device) -> DataProto:
        """Move the tensors in place; "auto" is the accelerator of this process, or the CPU."""
        if device == "auto":
            device = torch.accelerator.current_accelerator() or "cpu" if torch.accelerator.is_available() else "cpu"
        target = torch.device(device)
        tensors = {name: tensor.to(target, non_blocking=True) for name, tensor in self.tensors.items()}
        if target.type == "cpu" and any(tensor.is_cuda for tensor in self.tensors.values()):
            torch.cuda.synchronize()  # a non-blocking copy to the host may not have ended
        return self._become(self._assemble(tensors, self.non_tensor_batch, self.meta_info, self.batch.batch_size))

    def repeat(self, repeat_times: int = 2, interleave: bool = True) -> DataProto:
        """Rows ``repeat_times`` times: a a b b with ``interleave``, else a b a b."""
        rows = torch.arange(len(self))
        return self.select_idxs(rows.repeat_interleave(repeat_times) if interleave else rows.repeat(repeat_times))

    def sample_level_repeat(self, counts: Any) -> DataProto:
        """Row i ``counts[i]`` times (zero drops it), copies next to each other."""
        return assembly.sample_level_repeat(self, counts)

    def chunk(self, chunks: int, allow_uneven: bool | None = None) -> list[DataProto]:
        """Exactly ``chunks`` pieces in row order, as views.

        Equal ones, or with ``allow_uneven`` (None: when automatic padding is enabled) the first pieces
        one row longer than the last: 9 rows in 4 are 3, 2, 2, 2; 2 rows in 4 are 1, 1, 0, 0.

        Raises:
            DataError: the rows do not divide and uneven pieces are not allowed.
        """
        return assembly.chunk(self, chunks, self.is_padding_enabled() if allow_uneven is None else allow_uneven)

    def split(self, split_size: int) -> list[DataProto]:
        """Pieces of ``split_size`` rows, the last may be shorter; no pieces for no rows."""
        return assembly.split(self, split_size)

    @staticmethod
    def concat(data: Sequence[DataProto]) -> DataProto:
        """All rows of the pieces in order; see ``verl.protocol.assembly.concat``."""
        return assembly.concat(data)

    def padding(self, padding_size: int, padding_candidate: str = "first") -> DataProto:
        """Add ``padding_size`` copies of the "first" or "last" row at the end, in place."""
        return self._become(assembly.padded(self, padding_size, padding_candidate))

    def unfold_column_chunks(self, n_split: int, split_keys: Sequence[str] | None = None) -> DataProto:
        """Cut the second dimension of some columns into rows; see ``verl.protocol.assembly``."""
        return assembly.unfold_column_chunks(self, n_split, split_keys)

    def make_iterator(
        self,
        mini_batch_size: int,
        epochs: int,
        seed: int | None = None,
        dataloader_kwargs: Mapping[str, Any] | None = None,
    ) -> Iterator[DataProto]:
        """Mini-batches of ``mini_batch_size`` rows, ``epochs`` times over.

        ``dataloader_kwargs``: ``shuffle`` (a new order each epoch, from one generator with ``seed``) and
        ``drop_last`` (given: a short last mini-batch is dropped or kept; not given: the rows must divide).
        """
        return assembly.make_iterator(self, mini_batch_size, epochs, seed, dict(dataloader_kwargs or {}))

    # --- copies, files, processes ---------------------------------------------------------------------

    def writable(self) -> DataProto:
        """A private copy: tensors and object columns that may be written into."""
        return self.select(deepcopy=True)

    def save_to_disk(self, path: str | Path) -> None:
        """Write one file (safetensors with a JSON part, no pickle), complete or absent.

        Raises:
            DataError: an object that cannot be encoded (named), or the file cannot be written.
        """
        disk.save(self, Path(path))

    @classmethod
    def load_from_disk(cls, path: str | Path) -> DataProto:
        """Read a file of ``save_to_disk``. Raises DataError naming a missing, cut, damaged or foreign file."""
        return cls.from_tree(read_tree(Path(path)), str(path))

    def to_tree(self) -> dict[str, Any]:
        """Its parts as a tree that checkpoints hold among others."""
        return disk.to_tree(self)

    @classmethod
    def from_tree(cls, tree: Any, where: str = "a checkpoint") -> DataProto:
        """Of :meth:`to_tree`. Raises DataError where it is something else."""
        return cls._assemble(*disk.parts_of(tree, where))

    def _meta_copy(self) -> dict[str, Any]:
        return copy_meta(self.meta_info)

    def __copy__(self) -> DataProto:
        return self.select()

    def __deepcopy__(self, memo: dict[int, Any]) -> DataProto:
        return self.select(deepcopy=True)

    def __reduce_ex__(self, protocol: SupportsIndex) -> Any:
        return wire.reduce_data(self)
