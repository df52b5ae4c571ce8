"""Putting DataProtos together and taking them apart."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from tensordict import TensorDict, TensorDictBase

from verl.errors import DataError
from verl.protocol.columns import copy_column, merge_meta, same, union_meta

if TYPE_CHECKING:
    from verl.protocol.container import DataProto


def concat(pieces: Sequence[DataProto]) -> DataProto:
    """All rows of the pieces in order.

    Every piece needs the same columns with the same dtypes and trailing shapes. ``meta_info`` is
    merged; ``metrics`` is collected into lists, see ``columns.merge_meta``.

    Raises:
        DataError: no pieces, or a column or meta key that does not fit, which is named.
    """
    pieces = list(pieces)
    if not pieces:
        raise DataError("there is nothing to concatenate", fix="pass at least one DataProto")
    first = pieces[0]
    for number, piece in enumerate(pieces[1:], start=1):
        _require_same_columns(first, piece, number)
    tensors = {name: torch.cat([piece.tensors[name] for piece in pieces]) for name in first.tensors}
    columns = {
        name: np.concatenate([piece.non_tensor_batch[name] for piece in pieces]) for name in first.non_tensor_batch
    }
    size = (sum(map(len, pieces)), *first.batch.batch_size[1:])
    return first._assemble(tensors, columns, merge_meta(piece.meta_info for piece in pieces), size)


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
    """Columns of both, as a new TensorDict over the same memory.

    Raises:
        DataError: another batch size, or a key that both hold with different values.
    """
    if left.batch_size != right.batch_size:
        raise DataError(
            "the two sides of a union differ in their number of rows",
            f"{tuple(left.batch_size)} and {tuple(right.batch_size)}",
        )
    merged = dict(left.items())
    for name, tensor in right.items():
        if name in merged and not same(merged[name], tensor):
            raise _conflict(name)
        merged.setdefault(name, tensor)
    return TensorDict(merged, batch_size=left.batch_size)


def union_numpy_dict(left: Mapping[str, np.ndarray], right: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Columns of both; NaN equals NaN. Raises DataError naming a key with different values."""
    merged = dict(left)
    for name, column in right.items():
        if name in merged and not same(merged[name], column):
            raise _conflict(name)
        merged.setdefault(name, column)
    return merged


def _conflict(name: str) -> DataError:
    return DataError(
        f"both sides of a union have a column '{name}', with different values", fix="pop or rename one of them first"
    )


def union(data: DataProto, other: DataProto) -> DataProto:
    """See ``DataProto.union``; an operand without any columns fits any number of rows."""
    left, right = data.batch, other.batch
    if not _has_columns(data):
        left = TensorDict({}, batch_size=right.batch_size)
    elif not _has_columns(other):
        right = TensorDict({}, batch_size=left.batch_size)
    batch = union_tensor_dict(left, right)
    columns = union_numpy_dict(
        data.non_tensor_batch, {name: copy_column(column) for name, column in other.non_tensor_batch.items()}
    )
    return type(data)(batch, columns, union_meta(data.meta_info, other.meta_info))


def _has_columns(data: DataProto) -> bool:
    return bool(data.non_tensor_batch or data.tensors)


def sample_level_repeat(data: DataProto, counts: Any) -> DataProto:
    """See ``DataProto.sample_level_repeat``."""
    numbers = torch.as_tensor(counts)
    if numbers.shape != (len(data),) or (len(data) and (numbers.is_floating_point() or bool((numbers < 0).any()))):
        raise DataError("sample_level_repeat needs one count of at least 0 for each row", f"{len(data)} rows, {counts}")
    return data.select_idxs(torch.arange(len(data)).repeat_interleave(numbers.to(torch.int64)))


def chunk(data: DataProto, chunks: int, allow_uneven: bool) -> list[DataProto]:
    """See ``DataProto.chunk``."""
    if chunks < 1:
        raise DataError("the number of chunks must be at least 1", chunks)
    base, longer = divmod(len(data), chunks)
    if longer and not allow_uneven:
        raise DataError(
            f"{len(data)} rows do not divide into {chunks} equal chunks",
            fix="pad with pad_dataproto_to_divisor, or pass allow_uneven=True",
        )
    bounds = [number * base + min(number, longer) for number in range(chunks + 1)]
    return [data.slice(start, end) for start, end in itertools.pairwise(bounds)]


def split(data: DataProto, split_size: int) -> list[DataProto]:
    """See ``DataProto.split``."""
    if split_size < 1:
        raise DataError("split_size must be at least 1", split_size)
    return [data.slice(start, start + split_size) for start in range(0, len(data), split_size)]


def padded(data: DataProto, size: int, candidate: str) -> DataProto:
    """See ``DataProto.padding``."""
    if candidate not in ("first", "last"):
        raise DataError("padding_candidate must be 'first' or 'last'", candidate)
    if size < 0 or (size and not len(data)):
        raise DataError(f"cannot add {size} padding rows to {len(data)} rows")
    row = 0 if candidate == "first" else len(data) - 1
    return data.select_idxs(torch.cat([torch.arange(len(data)), torch.full((size,), row, dtype=torch.int64)]))


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


def unfold_column_chunks(data: DataProto, n_split: int, split_keys: Sequence[str] | None = None) -> DataProto:
    """Rows whose second dimension holds ``n_split`` groups become ``n_split`` rows each.

    (B, n_split * W, ...) becomes (B * n_split, W, ...) in the columns of ``split_keys`` (None: all
    with a second dimension); every other column repeats its rows next to each other.
    """
    shapes = _shapes(data)
    keys = [name for name, shape in shapes.items() if len(shape) > 1] if split_keys is None else list(split_keys)
    for name in keys:
        if name not in shapes or n_split < 1 or len(shapes[name]) < 2 or shapes[name][1] % n_split:
            raise DataError(f"column '{name}' does not split into {n_split} along its second dimension", shapes)
    repeated = data.repeat(n_split, interleave=True)
    rows = len(repeated)

    def cut(value: Any) -> Any:
        return value.reshape(rows, value.shape[1] // n_split, *value.shape[2:])

    tensors = {name: cut(data.tensors[name]) if name in keys else value for name, value in repeated.tensors.items()}
    columns = {
        name: cut(data.non_tensor_batch[name]).copy() if name in keys else value
        for name, value in repeated.non_tensor_batch.items()
    }
    return data._assemble(tensors, columns, data.meta_info, (rows,))


def make_iterator(
    data: DataProto, mini_batch_size: int, epochs: int, seed: int | None, options: dict[str, Any]
) -> Iterator[DataProto]:
    """See ``DataProto.make_iterator``; bad arguments raise here, not at the first mini-batch."""
    unknown = sorted(options.keys() - {"shuffle", "drop_last"})
    if unknown:
        raise DataError("make_iterator takes only shuffle and drop_last in dataloader_kwargs", unknown)
    if mini_batch_size < 1 or epochs < 0:
        raise DataError("mini_batch_size must be at least 1 and epochs at least 0", f"{mini_batch_size}, {epochs}")
    rows = len(data)
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
                yield data.select_idxs(span if order is None else order[span])

    return mini_batches()
