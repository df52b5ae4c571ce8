"""``DataProto``: the rows that travel between the stages and between processes."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, SupportsIndex

import numpy as np
import torch
from tensordict import TensorDict, TensorDictBase

from verl.errors import DataError
from verl.protocol import wire
from verl.protocol.columns import copy_column, merge_meta, same, union_meta
from verl.protocol.files import read_tree, write_tree
from verl.protocol.rows import Rows, resolve_rows


class DataProto(Rows):
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

    # --- putting together ---------------------------------------------------------------------------

    def union(self, other: DataProto) -> DataProto:
        """Take the columns and meta keys of ``other`` in place; returns self, unchanged on error.

        An operand without any columns fits any number of rows. Raises DataError: another number of rows, or a key that
        both hold with different values (NaN equals NaN), which is named.
        """
        left, right = self.batch, other.batch
        if not (self.non_tensor_batch or self.tensors):
            left = TensorDict({}, batch_size=right.batch_size)
        elif not (other.non_tensor_batch or other.tensors):
            right = TensorDict({}, batch_size=left.batch_size)
        batch = union_tensor_dict(left, right)
        theirs = {name: copy_column(column) for name, column in other.non_tensor_batch.items()}
        columns = union_numpy_dict(self.non_tensor_batch, theirs)
        return self._become(type(self)(batch, columns, union_meta(self.meta_info, other.meta_info)))

    @staticmethod
    def concat(data: Sequence[DataProto]) -> DataProto:
        """All rows of the pieces in order.

        Every piece needs the same columns with the same dtypes and trailing shapes. ``meta_info`` is merged;
        ``metrics`` is collected into lists, see ``columns.merge_meta``. Raises DataError: no pieces, or a column or
        meta key that does not fit, which is named.
        """
        pieces = list(data)
        if not pieces:
            raise DataError("there is nothing to concatenate", fix="pass at least one DataProto")
        first = pieces[0]
        for number, piece in enumerate(pieces[1:], start=1):
            _require_same_columns(first, piece, number)
        columns = {
            name: np.concatenate([piece.non_tensor_batch[name] for piece in pieces]) for name in first.non_tensor_batch
        }
        tensors = {name: torch.cat([piece.tensors[name] for piece in pieces]) for name in first.tensors}
        size = (sum(map(len, pieces)), *first.batch.batch_size[1:])
        return first._assemble(tensors, columns, merge_meta(piece.meta_info for piece in pieces), size)

    def padding(self, padding_size: int, padding_candidate: str = "first") -> DataProto:
        """Add ``padding_size`` copies of the "first" or "last" row at the end, in place."""
        if padding_candidate not in ("first", "last"):
            raise DataError("padding_candidate must be 'first' or 'last'", padding_candidate)
        if padding_size < 0 or (padding_size and not len(self)):
            raise DataError(f"cannot add {padding_size} padding rows to {len(self)} rows")
        row = 0 if padding_candidate == "first" else len(self) - 1
        more = torch.full((padding_size,), row, dtype=torch.int64)
        return self._become(self.select_idxs(torch.cat([torch.arange(len(self)), more])))

    # --- other orders and numbers of rows -------------------------------------------------------------

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
        numbers, rows = torch.as_tensor(counts), len(self)
        if numbers.shape != (rows,) or (rows and (numbers.is_floating_point() or bool((numbers < 0).any()))):
            raise DataError("sample_level_repeat needs one count of at least 0 for each row", f"{rows} rows, {counts}")
        return self.select_idxs(torch.arange(rows).repeat_interleave(numbers.to(torch.int64)))

    def unfold_column_chunks(self, n_split: int, split_keys: Sequence[str] | None = None) -> DataProto:
        """Rows whose second dimension holds ``n_split`` groups become ``n_split`` rows each.

        (B, n_split * W, ...) becomes (B * n_split, W, ...) in the columns of ``split_keys`` (None: all
        with a second dimension); every other column repeats its rows next to each other.
        """
        shapes = _shapes(self)
        keys = [name for name, shape in shapes.items() if len(shape) > 1] if split_keys is None else list(split_keys)
        for name in keys:
            if name not in shapes or n_split < 1 or len(shapes[name]) < 2 or shapes[name][1] % n_split:
                raise DataError(f"column '{name}' does not split into {n_split} along its second dimension", shapes)
        repeated = self.repeat(n_split, interleave=True)
        rows = len(repeated)

        def cut(value: Any) -> Any:
            return value.reshape(rows, value.shape[1] // n_split, *value.shape[2:])

        tensors = {name: cut(self.tensors[name]) if name in keys else value for name, value in repeated.tensors.items()}
        columns = {
            name: cut(self.non_tensor_batch[name]).copy() if name in keys else value
            for name, value in repeated.non_tensor_batch.items()
        }
        return self._assemble(tensors, columns, self.meta_info, (rows,))

    # --- taking apart -----------------------------------------------------------------------------------

    def chunk(self, chunks: int, allow_uneven: bool | None = None) -> list[DataProto]:
        """Exactly ``chunks`` pieces in row order, as views.

        Equal ones, or with ``allow_uneven`` (None: when automatic padding is enabled) the first pieces one row longer
        than the last: 9 rows in 4 are 3, 2, 2, 2; 2 rows in 4 are 1, 1, 0, 0. Raises DataError: the rows do not divide
        and uneven pieces are not allowed.
        """
        if chunks < 1:
            raise DataError("the number of chunks must be at least 1", chunks)
        base, longer = divmod(len(self), chunks)
        if longer and not (self.is_padding_enabled() if allow_uneven is None else allow_uneven):
            raise DataError(
                f"{len(self)} rows do not divide into {chunks} equal chunks",
                fix="pad with pad_dataproto_to_divisor, or pass allow_uneven=True",
            )
        bounds = [number * base + min(number, longer) for number in range(chunks + 1)]
        return [self.slice(start, end) for start, end in itertools.pairwise(bounds)]

    def split(self, split_size: int) -> list[DataProto]:
        """Pieces of ``split_size`` rows, the last may be shorter; no pieces for no rows."""
        if split_size < 1:
            raise DataError("split_size must be at least 1", split_size)
        return [self.slice(start, start + split_size) for start in range(0, len(self), split_size)]

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
        Bad arguments raise here, not at the first mini-batch.
        """
        options, rows = dict(dataloader_kwargs or {}), len(self)
        unknown = sorted(options.keys() - {"shuffle", "drop_last"})
        if unknown:
            raise DataError("make_iterator takes only shuffle and drop_last in dataloader_kwargs", unknown)
        if mini_batch_size < 1 or epochs < 0:
            raise DataError("mini_batch_size must be at least 1 and epochs at least 0", f"{mini_batch_size}, {epochs}")
        if rows % mini_batch_size and "drop_last" not in options:
            raise DataError(
                f"{rows} rows do not divide into mini-batches of {mini_batch_size}",
                fix="pad the rows, or say drop_last=True or False in dataloader_kwargs",
            )
        generator = None if seed is None else torch.Generator().manual_seed(seed)
        end = rows - rows % mini_batch_size if options.get("drop_last") else rows

        def mini_batches() -> Iterator[DataProto]:
            for _ in range(epochs):
                order = torch.randperm(rows, generator=generator) if options.get("shuffle") else None
                for start in range(0, end, mini_batch_size):
                    span = slice(start, min(start + mini_batch_size, end))
                    yield self.select_idxs(span if order is None else order[span])

        return mini_batches()

    # --- copies, files, processes ---------------------------------------------------------------------

    def writable(self) -> DataProto:
        """A private copy: tensors and object columns that may be written into."""
        return self.select(deepcopy=True)

    def save_to_disk(self, path: str | Path) -> None:
        """Write one file (safetensors with a JSON part, no pickle), complete or absent. Raises DataError: an object
        that cannot be encoded (named), or the file cannot be written."""
        if Path(path).is_dir():
            raise DataError("a DataProto is saved as one file, and this is a directory", str(path), "add a file name")
        write_tree(Path(path), self.to_tree())

    @classmethod
    def load_from_disk(cls, path: str | Path) -> DataProto:
        """Read a file of ``save_to_disk``. Raises DataError naming a missing, cut, damaged or foreign file."""
        return cls.from_tree(read_tree(Path(path)), str(path))

    def to_tree(self) -> dict[str, Any]:
        """Its parts as a tree that checkpoints hold among others."""
        parts = {"batch": self.tensors, "non_tensor_batch": self.non_tensor_batch, "meta_info": self.meta_info}
        return {"batch_size": list(self.batch.batch_size), **parts}

    @classmethod
    def from_tree(cls, tree: Any, where: str = "a checkpoint") -> DataProto:
        """Of :meth:`to_tree`. Raises DataError where it is something else."""
        if not isinstance(tree, dict) or tree.keys() != {"batch_size", "batch", "non_tensor_batch", "meta_info"}:
            raise DataError("something else than a DataProto was saved here", where)
        return cls._assemble(tree["batch"], tree["non_tensor_batch"], tree["meta_info"], tree["batch_size"])

    def __copy__(self) -> DataProto:
        return self.select()

    def __deepcopy__(self, memo: dict[int, Any]) -> DataProto:
        return self.select(deepcopy=True)

    def __reduce_ex__(self, protocol: SupportsIndex) -> Any:
        return wire.reduce_data(self)


def _require_same_columns(first: DataProto, piece: DataProto, number: int) -> None:
    for part, left, right in (
        ("batch", first.tensors, piece.tensors),
        ("non_tensor_batch", first.non_tensor_batch, piece.non_tensor_batch),
    ):
        differing = sorted(map(str, left.keys() ^ right.keys()))
        if differing:
            raise DataError(
                f"pieces 0 and {number} differ in the columns of {part}", differing, "every piece needs the same ones"
            )
        for name, value in left.items():
            other = right[name]
            if value.shape[1:] != other.shape[1:] or value.dtype != other.dtype:
                raise DataError(
                    f"column '{name}' differs between pieces 0 and {number}",
                    f"{tuple(value.shape[1:])} {value.dtype} and {tuple(other.shape[1:])} {other.dtype}",
                    "pad to one width and use one dtype before concatenating",
                )


def union_tensor_dict(left: TensorDictBase, right: TensorDictBase) -> TensorDict:
    """Columns of both, as a new TensorDict over the same memory. Raises DataError: another batch size, or a key that
    both hold with different values."""
    if left.batch_size != right.batch_size:
        raise DataError(
            "the two sides of a union differ in their number of rows",
            f"{tuple(left.batch_size)} and {tuple(right.batch_size)}",
        )
    merged = _merged(dict(left.items()), dict(right.items()))
    return TensorDict(merged, batch_size=left.batch_size)


def union_numpy_dict(left: Mapping[str, np.ndarray], right: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Columns of both; NaN equals NaN. Raises DataError naming a key with different values."""
    return _merged(left, right)


def _merged(left: Mapping[str, Any], right: Mapping[str, Any]) -> dict[str, Any]:
    merged = dict(left)
    for name, column in right.items():
        if name in merged and not same(merged[name], column):
            what = f"both sides of a union have a column '{name}', with different values"
            raise DataError(what, fix="pop or rename one of them first")
        merged.setdefault(name, column)
    return merged


def pad_dataproto_to_divisor(data: DataProto, size_divisor: int) -> tuple[DataProto, int]:
    """Add rows until their number divides, repeating the rows from the first as often as needed.

    Returns:
        the padded data (a new DataProto) and how many rows were added; no rows stay no rows.
    """
    if size_divisor < 1:
        raise DataError("the size divisor must be at least 1", size_divisor)
    pad = -len(data) % size_divisor
    if not pad:
        return data.select(), 0
    return data.select_idxs(torch.arange(len(data) + pad) % len(data)), pad


def unpad_dataproto(data: DataProto, pad_size: int) -> DataProto:
    """Drop the last ``pad_size`` rows."""
    if not 0 <= pad_size <= len(data):
        raise DataError(f"cannot drop {pad_size} padding rows from {len(data)} rows")
    return data.slice(0, len(data) - pad_size)


def fold_batch_dim(data: DataProto, new_batch_size: int) -> DataProto:
    """(B, ...) to (new_batch_size, B / new_batch_size, ...) in every column; rows then count groups."""
    if new_batch_size < 1 or len(data) % new_batch_size:
        raise DataError(f"{len(data)} rows do not fold into {new_batch_size} equal groups")
    width = len(data) // new_batch_size
    return data._map_rows(
        new_batch_size,
        lambda tensor: tensor.reshape(new_batch_size, width, *tensor.shape[1:]),
        lambda column: column.reshape(new_batch_size, width, *column.shape[1:]).copy(),
    )


def unfold_batch_dim(data: DataProto, batch_dims: int = 2) -> DataProto:
    """Join the first ``batch_dims`` dimensions of every column into rows (inverse of ``fold_batch_dim``)."""
    shapes = _shapes(data)
    short = [name for name, shape in shapes.items() if len(shape) < batch_dims]
    if batch_dims < 1 or short or len({shape[:batch_dims] for shape in shapes.values()}) > 1:
        raise DataError(f"the columns do not share {batch_dims} leading dimensions", shapes)
    leading = next((shape[:batch_dims] for shape in shapes.values()), (len(data),))
    rows = int(np.prod(leading))
    return data._assemble(
        {name: tensor.reshape(rows, *tensor.shape[batch_dims:]) for name, tensor in data.tensors.items()},
        {
            name: column.reshape(rows, *column.shape[batch_dims:]).copy()
            for name, column in data.non_tensor_batch.items()
        },
        data.meta_info,
        (rows,),
    )


def _shapes(data: DataProto) -> dict[str, tuple[int, ...]]:
    columns: dict[str, Any] = {**data.tensors, **data.non_tensor_batch}
    return {name: tuple(column.shape) for name, column in columns.items()}


@dataclass(frozen=True)
class DataProtoFuture:
    """A DataProto that is the concatenation of remote pieces, or a chunk of it; nothing moves before ``get``.

    Args:
        pieces: handles, in row order.
        resolve: waits for handles and returns their DataProtos (with Ray: a picklable wrapper of ``ray.get``).
        chunks: for each cut, how many chunks, which of them, and whether uneven ones are allowed.
    """

    pieces: tuple[Any, ...]
    resolve: Callable[[list[Any]], Sequence[DataProto]]
    chunks: tuple[tuple[int, int, bool | None], ...] = ()

    @staticmethod
    def concat(pieces: Sequence[Any], resolve: Callable[[list[Any]], Sequence[DataProto]]) -> DataProtoFuture:
        """The concatenation of the DataProtos behind some handles."""
        if not pieces:
            raise DataError("there is nothing to concatenate", fix="pass at least one handle")
        return DataProtoFuture(tuple(pieces), resolve)

    def chunk(self, chunks: int, allow_uneven: bool | None = None) -> list[DataProtoFuture]:
        """Futures of ``DataProto.chunk``'s pieces; whether the rows divide shows at ``get``."""
        if chunks < 1:
            raise DataError("the number of chunks must be at least 1", chunks)
        return [replace(self, chunks=(*self.chunks, (chunks, number, allow_uneven))) for number in range(chunks)]

    def get(self) -> DataProto:
        """Wait for the pieces. Raises what ``resolve``, ``DataProto.concat`` and ``DataProto.chunk`` raise."""
        data = DataProto.concat(list(self.resolve(list(self.pieces))))
        for chunks, number, allow_uneven in self.chunks:
            data = data.chunk(chunks, allow_uneven)[number]
        return data
