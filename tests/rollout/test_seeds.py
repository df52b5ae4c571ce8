"""Random numbers by slot and position (B088)."""

from __future__ import annotations

import hashlib

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from verl.rollout.seeds import slot_seed, uniforms

ONES = 2**64 - 1


def splitmix(seed: int, draw: int) -> float:
    """SplitMix64 in plain integers: the state moves on by the golden ratio, then it is mixed."""
    z = (seed + (draw + 1) * 0x9E3779B97F4A7C15) & ONES
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & ONES
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & ONES
    z ^= z >> 31
    return (z >> 40) / 2**24


def test_the_published_generator() -> None:
    """First outputs for seed 1234567 (Rosetta Code): 6457827717110365317, 3203168211198807973, 9817491932198370423."""
    published = [6457827717110365317, 3203168211198807973, 9817491932198370423]
    found = uniforms(np.full(3, 1234567, dtype=np.uint64), np.arange(3))
    assert found.tolist() == [(number >> 40) / 2**24 for number in published]


@given(st.lists(st.tuples(st.integers(0, ONES), st.integers(0, 2**40)), min_size=1, max_size=20))
def test_any_pair(pairs: list[tuple[int, int]]) -> None:
    seeds, positions = zip(*pairs, strict=True)
    found = uniforms(np.array(seeds, dtype=np.uint64), np.array(positions, dtype=np.int64))
    assert found.dtype == np.float32
    assert found.tolist() == [splitmix(*pair) for pair in pairs]
    assert (found >= 0).all() and (found < 1).all()


def test_they_are_uniform_and_neighbours_have_nothing_in_common() -> None:
    seeds = np.array([slot_seed(1, f"train:{i}", 0) for i in range(400)], dtype=np.uint64)
    grid = np.stack([uniforms(seeds, np.full(400, k)) for k in range(250)])  # (draws, slots)
    counts = np.bincount((grid.ravel() * 64).astype(int), minlength=64)
    expected = grid.size / 64
    assert ((counts - expected) ** 2 / expected).sum() < 63 + 5 * (2 * 63) ** 0.5  # chi-square, 5 sigma
    assert abs(grid.mean() - 0.5) < 5 * (1 / 12 / grid.size) ** 0.5
    for a, b in ((grid[1:], grid[:-1]), (grid[:, 1:], grid[:, :-1])):
        assert abs(np.corrcoef(a.ravel(), b.ravel())[0, 1]) < 5 / a.size**0.5


def test_seed_of_a_slot() -> None:
    digest = hashlib.blake2b(b"7\x00train:3:gsm8k:12\x00-1", digest_size=8).digest()
    assert slot_seed(7, "train:3:gsm8k:12", -1) == int.from_bytes(digest, "little")
    seeds = {
        slot_seed(run, uid, index)
        for run in (1, 2, 11)
        for uid in ("a:1", "a:11", "a\0001", "")
        for index in range(-1, 12)
    }
    assert len(seeds) == 3 * 4 * 13
    assert all(0 <= seed <= ONES for seed in seeds)
    assert 0 <= slot_seed(1, "\udc80", 0) <= ONES  # a lone surrogate, as file names bring them
