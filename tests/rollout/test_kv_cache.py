"""The cache: rows keep what they hold, left-overs never matter, and memory goes back."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from verl.models.attention import AttentionRule
from verl.rollout.kv_cache import LENGTH_MULTIPLE, DecodeContext, KVCache


def make_cache(rows: int = 8) -> KVCache:
    return KVCache(2, 2, 4, rows, torch.float64, torch.device("cpu"))


def test_reserve_keeps_what_is_there_and_free_gives_it_back() -> None:
    cache = make_cache()
    assert cache.length == 0
    cache.reserve(5)
    assert cache.length == LENGTH_MULTIPLE and cache.keys[1].shape == (8, 2, 32, 4)
    key, value = torch.randn(2, 3, 4, dtype=torch.float64), torch.randn(2, 3, 4, dtype=torch.float64)
    cache.write_prompt(1, torch.tensor([2, 5]), key, value)
    cache.reserve(33)
    cache.reserve(10)  # never less than before
    assert cache.length == 64
    for row in (2, 5):
        assert torch.equal(cache.keys[1][row, :, :3], key) and torch.equal(cache.values[1][row, :, :3], value)
        assert not cache.keys[1][row, :, 3:].any()
    cache.free()
    assert cache.length == 0 and cache.keys[0].numel() == 0


def test_a_new_prompt_wipes_the_row() -> None:
    cache = make_cache()
    cache.reserve(32)
    for tensors in (cache.keys, cache.values):
        for tensor in tensors:
            tensor.fill_(math.nan)
    ones = torch.ones(2, 3, 4, dtype=torch.float64)
    cache.write_prompt(0, torch.tensor([4]), ones, ones)
    for tensor in (cache.keys[0], cache.values[0]):
        assert torch.equal(tensor[4, :, :3], ones) and not tensor[4, :, 3:].any()
        assert tensor[3].isnan().all() and tensor[5].isnan().all()


def test_move() -> None:
    cache = make_cache()
    cache.reserve(1)
    for layer in (0, 1):
        cache.keys[layer][:] = torch.arange(8.0, dtype=torch.float64)[:, None, None, None]
        cache.values[layer][:] = cache.keys[layer] + 100
    cache.move([5, 7], [0, 2])
    cache.move([], [])
    for layer in (0, 1):
        assert cache.keys[layer][:, 0, 0, 0].tolist() == [5, 1, 7, 3, 4, 5, 6, 7]
        assert cache.values[layer][:, 1, 9, 2].tolist() == [105, 101, 107, 103, 104, 105, 106, 107]


@pytest.mark.parametrize("window", [None, 1, 4, 40])
@pytest.mark.parametrize("heads", [2, 4, 6])
def test_one_token_of_each_row(window: int | None, heads: int) -> None:
    """Against the sum written out, with NaN in every place that no one may read the weight of."""
    generator = torch.Generator().manual_seed(heads)

    def noise(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    cache = make_cache()
    cache.reserve(70)
    lengths = [1, 3, 33, 64]
    for row, length in enumerate(lengths):
        for layer in (0, 1):
            cache.write_prompt(layer, torch.tensor([row]), noise(2, length, 4), noise(2, length, 4))
    before = [tensor.clone() for tensor in cache.keys]
    positions = torch.tensor(lengths)
    query, key, value = noise(heads, 4, 4), noise(2, 4, 4), noise(2, 4, 4)
    out = DecodeContext(cache, positions).attend(1, query, key, value, AttentionRule(0.6, window))
    assert out.shape == (4, heads, 4)
    assert torch.equal(cache.keys[0], before[0])  # the other layer is not touched
    for row, position in enumerate(lengths):
        assert torch.equal(cache.keys[1][row, :, position], key[:, row])
        assert torch.equal(cache.values[1][row, :, position], value[:, row])
        assert torch.equal(cache.keys[1][row, :, :position], before[1][row, :, :position])
        first = 0 if window is None else max(position + 1 - window, 0)
        for head in range(heads):
            kv = head // (heads // 2)
            keys, values = (t[1][row, kv, first : position + 1] for t in (cache.keys, cache.values))
            weights = (keys @ query[head, row] * 0.6).softmax(0)
            torch.testing.assert_close(out[row, head], weights @ values, atol=1e-12, rtol=0)
