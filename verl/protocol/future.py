"""Pieces of a batch that are still being made elsewhere."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from verl.errors import DataError
from verl.protocol.container import DataProto


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
