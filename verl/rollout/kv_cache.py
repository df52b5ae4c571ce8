"""Keys and values of the responses being generated, and attention of one new token of each over them.

Shape legend: C rows of the cache, T rows decoded now (the first T), L cached positions, K key-value heads, G query
heads of each, D head size.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from verl.models.attention import ROW_MULTIPLE, AttentionRule, block_attention, round_up

LENGTH_MULTIPLE = 32


class KVCache:
    """One row for each running response; rows in use are kept at the front.

    Args:
        layers, kv_heads, head_size: of the model.
        rows: C.
        dtype, device: of the keys and values.
    """

    def __init__(
        self, layers: int, kv_heads: int, head_size: int, rows: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.rows = rows
        self.length = 0
        self._shape = (kv_heads, head_size)
        self._dtype, self._device = dtype, device
        self.keys: list[Tensor] = [self._empty(0) for _ in range(layers)]
        self.values: list[Tensor] = [self._empty(0) for _ in range(layers)]

    def _empty(self, length: int) -> Tensor:
        kv_heads, head_size = self._shape
        return torch.zeros(
            self.rows, kv_heads, length, head_size, dtype=self._dtype, device=self._device
        )  # (C, K, L, D)

    def reserve(self, length: int) -> None:
        """Make room for ``length`` positions in every row; what the rows hold is kept."""
        length = round_up(length, LENGTH_MULTIPLE)
        if length <= self.length:
            return
        for tensors in (self.keys, self.values):
            for layer, old in enumerate(tensors):
                tensors[layer] = self._empty(length)
                tensors[layer][:, :, : self.length] = old
        self.length = length

    def write_prompt(self, layer: int, rows: Tensor, key: Tensor, value: Tensor) -> None:
        """Start these rows with a prompt's key and value, each (K, P, D); the rest of the rows becomes zero.

        Left-overs of an earlier response would be masked, but a masked NaN is still a NaN behind a matmul.
        """
        end = key.shape[1]
        for cache, new in ((self.keys[layer], key), (self.values[layer], value)):
            cache[rows, :, :end] = new
            cache[rows, :, end:] = 0

    def move(self, sources: list[int], targets: list[int]) -> None:
        for tensors in (self.keys, self.values):
            for cache in tensors:
                cache[targets] = cache[sources]

    def free(self) -> None:
        """Give the memory back."""
        self.length = 0
        for tensors in (self.keys, self.values):
            for layer in range(len(tensors)):
                tensors[layer] = self._empty(0)


class DecodeContext:
    """Attention of one new token in each of the first T rows over what its row holds.

    Args:
        cache: is written at ``positions`` before it is read.
        positions: (T,) int64 place of the new token in its row; T a multiple of the model's row rule.
    """

    def __init__(self, cache: KVCache, positions: Tensor) -> None:
        self._cache, self._positions = cache, positions
        self._rows = torch.arange(positions.shape[0], device=positions.device)
        self._length = round_up(int(positions.max()) + 1, LENGTH_MULTIPLE)
        self._places = torch.arange(self._length, device=positions.device)
        self._keep: dict[int | None, Tensor] = {}

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, rule: AttentionRule) -> Tensor:
        heads, tokens, size = query.shape
        kv_heads = key.shape[0]
        group = heads // kv_heads
        keys, values = self._cache.keys[layer], self._cache.values[layer]
        keys[self._rows, :, self._positions] = key.transpose(0, 1)
        values[self._rows, :, self._positions] = value.transpose(0, 1)
        queries = (
            query.view(kv_heads, group, tokens, size).permute(2, 0, 1, 3).reshape(-1, group, size)
        )  # (T * K, G, D)
        fill = round_up(group, ROW_MULTIPLE) - group
        if fill:
            queries = F.pad(queries, (0, 0, 0, fill))
        flat = (tokens * kv_heads, self._length, size)
        past_keys = keys[:tokens, :, : self._length].reshape(flat).transpose(1, 2).contiguous()
        past_values = values[:tokens, :, : self._length].reshape(flat)
        keep = self._mask(rule.window)[:, None]
        out = block_attention(queries, past_keys, past_values, keep, rule)[:, :group]
        return out.reshape(tokens, heads, size)

    def _mask(self, window: int | None) -> Tensor:
        """(T, L) bool, the same in every layer of one forward."""
        if window not in self._keep:
            keep = self._places <= self._positions[:, None]
            if window is not None:
                keep &= self._positions[:, None] - self._places < window
            self._keep[window] = keep
        return self._keep[window]
