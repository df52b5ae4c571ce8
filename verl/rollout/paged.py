"""Keys and values of running sequences in blocks of a pool, and attention over them.

The pool's blocks are those blocks of 128 keys by which :func:`verl.models.attention.block_attention` adds up values, so
that attention over scattered blocks has the bits of attention over a whole row. One new token of each of many sequences
is computed block by block: one batched matmul over a range of the pool, copying no keys; a block that several sequences
share meets all their queries at once. Chunks of prompts gather their blocks first.

Shape legend: N blocks of the pool, S = 128 places of a block, T rows that decode, E blocks that they read, m rows that
share a block, B most blocks of a row, A attention heads, K key-value heads, G = A / K, D head size.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from mmap import MAP_ANONYMOUS, MAP_PRIVATE, mmap
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from verl.models.attention import (
    KEY_BLOCK,
    ROW_MULTIPLE,
    AttentionRule,
    attention_probs,
    block_attention,
    mask_bias,
    round_up,
    wide_dtype,
)
from verl.rollout.scheduler import Work

LONGEST_PIECE = 128  # queries of a prompt that are computed at once: the scores of more leave a CPU's cache
PIECE_MULTIPLE = KEY_MULTIPLE = 32
MOST_SCORES = 2**21  # per head, of one batched matmul over pieces of prompts
# A range of the pool is read whole where at least this share of it is wanted; else the wanted blocks are copied out.
DENSE = 0.7


class KVPool:
    """Keys and values, each (N, K, S, D), of every layer; memory is held from :meth:`acquire` to :meth:`free`."""

    def __init__(
        self, layers: int, kv_heads: int, head_size: int, dtype: torch.dtype, device: torch.device, blocks: int = 0
    ) -> None:
        self.blocks = blocks
        self.joined: list[Tensor] = []  # (2, N, K, S, D): keys, then values
        self.keys: list[Tensor] = []
        self.values: list[Tensor] = []
        self.kv_heads = kv_heads
        self._layers, self._shape, self._dtype, self._device = layers, (kv_heads, head_size), dtype, device

    def acquire(self) -> None:
        """Zeros, which cost nothing on a CPU until they are written: a masked NaN is still a NaN behind a matmul."""
        if self.keys:
            return
        kv_heads, head_size = self._shape
        self.joined = [self._zeros(2, self.blocks, kv_heads, KEY_BLOCK, head_size) for _ in range(self._layers)]
        self.keys, self.values = ([tensor[half] for tensor in self.joined] for half in (0, 1))

    def _zeros(self, *shape: int) -> Tensor:
        if self._device.type != "cpu":
            return torch.zeros(shape, dtype=self._dtype, device=self._device)
        # The system has zeros to give, torch would write them, and so would the heap in what it has had back.
        pages = mmap(-1, math.prod(shape) * self._dtype.itemsize, MAP_PRIVATE | MAP_ANONYMOUS)
        return torch.from_numpy(np.frombuffer(pages, np.uint8)).view(self._dtype).view(shape)

    def free(self) -> None:
        self.joined, self.keys, self.values = [], [], []

    def copy(self, pairs: list[tuple[int, int]]) -> None:
        """Copy blocks, (source, target) each."""
        if not pairs:
            return
        sources, targets = (torch.tensor(ids, device=self._device) for ids in zip(*pairs, strict=True))
        for tensor in self.joined:
            tensor[:, targets] = tensor[:, sources]

    @property
    def block_bytes(self) -> int:
        """Memory of one block in all layers."""
        kv_heads, head_size = self._shape
        return 2 * self._layers * kv_heads * head_size * KEY_BLOCK * self._dtype.itemsize


@dataclass(frozen=True)
class _Read:
    """Blocks that one batched matmul reads, each for the same number of rows."""

    blocks: slice | Tensor
    rows: Tensor  # (E, m) rows that read the block; left-over places say 0
    places: Tensor  # (E, m) the block's number in the row


@dataclass(frozen=True)
class _Pieces:
    """Pieces of prompts of about the same size, n of them, t queries each over B blocks."""

    query_index: Tensor  # (n, t) tokens of this forward; left-over queries repeat the last one
    blocks: Tensor  # (n * B,)
    positions: Tensor  # (n, t)
    out_index: Tensor  # (n, t) bool: real queries
    targets: Tensor  # the tokens that the real queries are


class PagedContext:
    """Attention of one forward whose tokens are, in this order, one of each decoding row, then chunks.

    Args:
        pool: is written at the tokens' places before it is read.
        work: with all single tokens first.
    """

    def __init__(self, pool: KVPool, work: list[Work], device: torch.device) -> None:
        self._pool = pool
        tokens = sum(part.end - part.start for part in work)
        rows = [part for part in work if part.end - part.start == 1]
        positions = np.concatenate([np.arange(part.start, part.end) for part in work])
        blocks = np.concatenate([np.asarray(p.sequence.blocks)[np.arange(p.start, p.end) // KEY_BLOCK] for p in work])
        as_tensor = lambda values: torch.from_numpy(np.ascontiguousarray(values)).to(device)  # noqa: E731
        self.positions = as_tensor(positions)
        self._tokens, self._rows = tokens, len(rows)
        # Where the tokens' keys, then values, lie among (2 * N * K * S).
        heads = np.arange(pool.kv_heads)[:, None] + pool.blocks * pool.kv_heads * np.arange(2)[:, None, None]
        self._write = as_tensor(((blocks * pool.kv_heads + heads) * KEY_BLOCK + positions % KEY_BLOCK).reshape(-1))
        self._biases: dict[tuple[int, int | None], Tensor] = {}
        self._buffers: dict[tuple[int, int], Tensor] = {}
        if rows:
            self._reads, self._order = _plan_reads(rows, as_tensor)
            self._most = max(len(_blocks_of(part)) for part in rows)
            # Keys of a block that are looked at: of a single one those that the longest row has filled.
            longest = max(part.end for part in rows)
            self._keys = KEY_BLOCK if self._most > 1 else round_up(longest, KEY_MULTIPLE)
        self._pieces = _plan_pieces(work[len(rows) :], len(rows), as_tensor) if tokens > len(rows) else []

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, rule: AttentionRule) -> Tensor:
        """query (A, T, D), key and value (K, T, D) -> (T, A, D); tokens behind the work's are fill."""
        keys, values = self._pool.keys[layer], self._pool.values[layer]
        new = torch.cat([key[:, : self._tokens], value[:, : self._tokens]]).view(-1, key.shape[2])
        self._pool.joined[layer].view(-1, key.shape[2]).index_copy_(0, self._write, new)
        if self._rows == query.shape[1]:
            return self._attend_rows(keys, values, query, rule)
        out = query.new_zeros(query.shape[1], query.shape[0], query.shape[2])
        if self._rows:
            out[: self._rows] = self._attend_rows(keys, values, query[:, : self._rows], rule)
        for number, pieces in enumerate(self._pieces):
            out[pieces.targets] = self._attend_pieces(number, pieces, keys, values, query, rule)
        return out

    # one token of each row ----------------------------------------------------------------------------------------

    def _attend_rows(self, keys: Tensor, values: Tensor, query: Tensor, rule: AttentionRule) -> Tensor:
        heads, rows, size = query.shape
        kv_heads = keys.shape[1]
        group = heads // kv_heads
        queries = query.view(kv_heads, group, rows, size).permute(2, 0, 1, 3)  # (T, K, G, D)
        scores = _joined([self._scores(read, queries, keys) for read in self._reads])  # (sum of E * m, K, G, S)
        if self._order is not None:
            scores = scores.index_select(0, self._order.clamp(max=scores.shape[0] - 1))
        scores = scores.view(rows, self._most, kv_heads, group, self._keys).permute(0, 2, 3, 1, 4)
        scores = scores.reshape(rows, kv_heads, group, 1, self._most * self._keys)
        probs = attention_probs(scores, self._bias_of_rows(rule.window, query.dtype), rule, query.dtype)
        probs = probs.view(rows, kv_heads, group, self._most, self._keys).permute(0, 3, 1, 2, 4)
        parts = [self._values(read, probs, values) for read in self._reads]  # (E * m, K, G, D) each
        if self._order is None:
            return parts[0].reshape(rows, heads, size)
        parts.append(parts[0].new_zeros(1, *parts[0].shape[1:]))
        summed = torch.cat(parts).index_select(0, self._order)
        if self._most > 1:
            blocks = summed.view(rows, self._most, heads, size).to(wide_dtype(query.dtype)).unbind(1)
            summed = blocks[0]
            for block in blocks[1:]:  # in this order, as in a packed forward
                summed = summed + block
        return summed.to(query.dtype).view(rows, heads, size)

    def _scores(self, read: _Read, queries: Tensor, keys: Tensor) -> Tensor:
        """(T, K, G, D) queries of the rows against the blocks that they read: (E * m, K, G, S)."""
        _, kv_heads, group, _ = queries.shape
        q = self._stacked(read, queries, read.rows)
        # Keys first: a matmul lays out its second operand anew, which is better done to the small one.
        scores = torch.bmm(self._read(keys, read), q.transpose(1, 2)).transpose(1, 2).contiguous()
        return _unstacked(scores, read, kv_heads, group)

    def _values(self, read: _Read, probs: Tensor, values: Tensor) -> Tensor:
        """(T, B, K, G, S) probabilities with the values of the blocks that the rows read: (E * m, K, G, D)."""
        rows, most, kv_heads, group, _ = probs.shape
        p = probs if self._order is None else probs.reshape(rows * most, kv_heads, group, self._keys)
        out = torch.bmm(self._stacked(read, p, read.rows * most + read.places), self._read(values, read))
        return _unstacked(out, read, kv_heads, group)

    def _read(self, pool: Tensor, read: _Read) -> Tensor:
        """(E * K, S or fewer, D) keys or values."""
        part = pool[read.blocks] if isinstance(read.blocks, slice) else pool.index_select(0, read.blocks)
        return part.flatten(0, 1)[:, : self._keys]

    def _stacked(self, read: _Read, rows: Tensor, index: Tensor) -> Tensor:
        """(..., K, G, X) rows by index (E, m) -> (E * K, m * G and perhaps some zeros, X).

        Query rows come in multiples of 8 (see :mod:`verl.models.attention`), but two or more in bfloat16 have the same
        bits as they are; the buffer with the zeros is kept.
        """
        entries, m = read.rows.shape
        kv_heads, group, last = rows.shape[-3:]
        if self._order is not None:
            rows = rows.reshape(-1, kv_heads * group * last).index_select(0, index.view(-1))
        rows = rows.view(entries, m, kv_heads, group, last).transpose(1, 2)
        if m * group % ROW_MULTIPLE == 0 or (rows.dtype == torch.bfloat16 and m * group > 1):
            return rows.reshape(entries * kv_heads, m * group, last)
        shape = entries, kv_heads, round_up(m * group, ROW_MULTIPLE), last
        buffer = self._buffers.get((id(read), last))
        if buffer is None:
            buffer = self._buffers[id(read), last] = rows.new_zeros(shape)
        buffer[:, :, : m * group].view(entries, kv_heads, m, group, last).copy_(rows)
        return buffer.view(entries * kv_heads, *shape[2:])

    def _bias_of_rows(self, window: int | None, dtype: torch.dtype) -> Tensor:
        """(T, 1, 1, 1, B * S), the same in every layer."""
        if (-1, window) not in self._biases:
            places = torch.arange(self._most * self._keys, device=self.positions.device)
            keep = _visible(places, self.positions[: self._rows, None], window)
            self._biases[-1, window] = mask_bias(keep, dtype)[:, None, None, None]
        return self._biases[-1, window]

    # pieces of prompts --------------------------------------------------------------------------------------------

    def _attend_pieces(
        self, number: int, pieces: _Pieces, keys: Tensor, values: Tensor, query: Tensor, rule: AttentionRule
    ) -> Tensor:
        heads, _, size = query.shape
        kv_heads = keys.shape[1]
        n, t = pieces.query_index.shape
        length = pieces.blocks.shape[0] // n * KEY_BLOCK
        group = heads // kv_heads
        q = query.index_select(1, pieces.query_index.view(-1)).view(kv_heads, group, n, t, size)
        q = q.permute(2, 0, 1, 3, 4).reshape(n * kv_heads, group * t, size)
        k = keys.index_select(0, pieces.blocks).view(n, -1, kv_heads, KEY_BLOCK, size)
        k = k.permute(0, 2, 4, 1, 3).reshape(n * kv_heads, size, length)
        v = values.index_select(0, pieces.blocks).view(n, -1, kv_heads, KEY_BLOCK, size)
        v = v.transpose(1, 2).reshape(n * kv_heads, length, size)
        if (number, rule.window) not in self._biases:
            keep = _visible(torch.arange(length, device=query.device), pieces.positions[:, :, None], rule.window)
            self._biases[number, rule.window] = mask_bias(keep, query.dtype)
        out = block_attention(q, k, v, self._biases[number, rule.window], rule)
        out = out.view(n, kv_heads, group, t, size).permute(0, 3, 1, 2, 4).reshape(n, t, heads, size)
        return out[pieces.out_index]


def _visible(places: Tensor, position: Tensor, window: int | None) -> Tensor:
    keep = places <= position
    return keep if window is None else keep & (position - places < window)


def _joined(parts: list[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def _unstacked(out: Tensor, read: _Read, kv_heads: int, group: int) -> Tensor:
    """(E * K, at least m * G, X) -> (E * m, K, G, X)."""
    entries, m = read.rows.shape
    out = out.view(entries, kv_heads, -1, out.shape[2])[:, :, : m * group]
    if m == 1:
        return out
    return out.unflatten(2, (m, group)).transpose(1, 2).flatten(0, 1)


# --- plans, the same for all layers --------------------------------------------------------------------------------

AsTensor = Callable[[NDArray[Any]], Tensor]


def _blocks_of(part: Work) -> list[int]:
    """The blocks that the part's tokens attend to."""
    return part.sequence.blocks[: (part.end - 1) // KEY_BLOCK + 1]


def _plan_reads(rows: list[Work], as_tensor: AsTensor) -> tuple[list[_Read], Tensor | None]:
    """What is read for the rows, and where each row's blocks are in all that is read: (T * B,).

    Blocks that a row lacks are looked for behind everything. None: each row has one block, and they lie in order.
    """
    readers: dict[int, list[tuple[int, int]]] = defaultdict(list)
    for row, part in enumerate(rows):
        for place, block in enumerate(_blocks_of(part)):
            readers[block].append((row, place))
    widths: dict[int, list[int]] = defaultdict(list)  # blocks by the number of their readers, a power of two
    for block, users in readers.items():
        widths[_width(users)].append(block)
    reads, offset = [], 0
    order = np.full((len(rows), max(len(_blocks_of(part)) for part in rows)), -1)
    for width, blocks in widths.items():
        low, high = min(blocks), max(blocks) + 1
        dense = len(blocks) >= DENSE * (high - low)
        listed = list(range(low, high)) if dense else sorted(blocks)
        users_of = np.zeros((2, len(listed), width), dtype=np.int64)
        for entry, block in enumerate(listed):
            users = readers.get(block, [])
            if users and _width(users) == width:
                for k, (row, place) in enumerate(users):
                    users_of[:, entry, k] = row, place
                    order[row, place] = offset + entry * width + k
        where = slice(low, high) if dense else as_tensor(np.asarray(listed))
        reads.append(_Read(where, as_tensor(users_of[0]), as_tensor(users_of[1])))
        offset += len(listed) * width
    if list(widths) == [1] and offset == len(rows) and (order == np.arange(len(rows))[:, None]).all():
        return reads, None
    return reads, as_tensor(np.where(order < 0, offset, order).reshape(-1))


def _width(users: list[tuple[int, int]]) -> int:
    return 1 << (len(users) - 1).bit_length()


def _plan_pieces(chunks: list[Work], first_token: int, as_tensor: AsTensor) -> list[_Pieces]:
    """Chunks cut into pieces, pieces of about the same size together."""
    alike: dict[tuple[int, int], list[tuple[int, Work]]] = defaultdict(list)
    token = first_token
    for chunk in chunks:
        for start in range(chunk.start, chunk.end, LONGEST_PIECE):
            piece = Work(chunk.sequence, start, min(start + LONGEST_PIECE, chunk.end))
            size = round_up(piece.end - piece.start, PIECE_MULTIPLE), len(_blocks_of(piece))
            alike[size].append((token, piece))
            token += piece.end - piece.start
    plans = []
    for (width, blocks), pieces in alike.items():
        most = max(1, MOST_SCORES // (width * blocks * KEY_BLOCK))
        for first in range(0, len(pieces), most):
            tokens, part = zip(*pieces[first : first + most], strict=True)
            lengths = np.array([piece.end - piece.start for piece in part])[:, None]
            places = np.minimum(np.arange(width), lengths - 1)
            query_index = np.array(tokens)[:, None] + places
            real = np.arange(width) < lengths
            plans.append(
                _Pieces(
                    as_tensor(query_index),
                    as_tensor(np.concatenate([_blocks_of(piece) for piece in part])),
                    as_tensor(np.array([piece.start for piece in part])[:, None] + places),
                    as_tensor(real),
                    as_tensor(query_index[real]),
                )
            )
    return plans
