"""Random numbers by slot and position, so that who samples a response, when and beside what never matters.

Each slot has a 64-bit seed; draw k is a hash of seed and k (SplitMix64: Steele, Lea and Flood, 2014), turned into a
uniform number in [0, 1) with 24 bits, which float32 holds exactly.
"""

from __future__ import annotations

import hashlib

import numpy as np
from numpy.typing import NDArray

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)


def slot_seed(run_seed: int, uid: str, index: int) -> int:
    """64-bit seed of one sample slot."""
    digest = hashlib.blake2b(f"{run_seed}\0{uid}\0{index}".encode("utf-8", "surrogatepass"), digest_size=8).digest()
    return int.from_bytes(digest, "little")


def uniforms(seeds: NDArray[np.uint64], positions: NDArray[np.int64]) -> NDArray[np.float32]:
    """One uniform number in [0, 1) for each (seed, position) pair, shapes (N,)."""
    with np.errstate(over="ignore"):
        z = seeds.astype(np.uint64) + _GOLDEN * (positions.astype(np.uint64) + np.uint64(1))
        z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        z ^= z >> np.uint64(31)
    return ((z >> np.uint64(40)).astype(np.float64) / 2.0**24).astype(np.float32)
