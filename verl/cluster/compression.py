"""Results of rollout workers, compressed for a slow network between machines. To the bit what they were."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from verl.rollout.protocol import Result

CODEC = "zstd"
COLUMNS = {
    "response_ids": np.dtype(np.int32),
    "log_probs": np.dtype(np.float32),
    "loss_mask": np.dtype(np.bool_),
    "versions": np.dtype(np.int32),
    "kept_log_mass": np.dtype(np.float32),
}


@dataclass(frozen=True)
class Compressed:
    """Several results.

    Attributes:
        rest: the results without the tokens' columns, and how many tokens each has; None for a column that is None.
        columns: by name those of all results together.
    """

    rest: list[tuple[Result, dict[str, int | None]]]
    columns: dict[str, bytes]


def compressed(results: Sequence[Result]) -> Compressed:
    rest: list[tuple[Result, dict[str, int | None]]] = []
    bare: dict[str, Any] = dict.fromkeys(COLUMNS)
    for result in results:
        sizes = {name: None if (column := getattr(result, name)) is None else len(column) for name in COLUMNS}
        rest.append((replace(result, **bare), sizes))
    columns = {}
    for name, dtype in COLUMNS.items():
        parts = [column for result in results if (column := getattr(result, name)) is not None]
        whole = np.concatenate([np.zeros(0, dtype), *parts])
        # First the lowest byte of every number, then the next: the higher ones are much alike.
        columns[name] = pa.compress(whole.view(np.uint8).reshape(-1, dtype.itemsize).T.tobytes(), CODEC, asbytes=True)
    return Compressed(rest, columns)


def decompressed(packed: Compressed) -> list[Result]:
    found: list[dict[str, Any]] = [{} for _ in packed.rest]
    for name, dtype in COLUMNS.items():
        sizes = [sizes[name] for _, sizes in packed.rest]
        total = sum(size or 0 for size in sizes)
        data = pa.decompress(packed.columns[name], total * dtype.itemsize, CODEC, asbytes=True)
        planes: NDArray[np.uint8] = np.frombuffer(data, np.uint8).reshape(dtype.itemsize, total)
        whole, start = np.ascontiguousarray(planes.T).reshape(-1).view(dtype), 0
        for columns, size in zip(found, sizes, strict=True):
            columns[name] = None if size is None else whole[start : start + size]
            start += size or 0
    return [replace(result, **columns) for (result, _), columns in zip(packed.rest, found, strict=True)]
