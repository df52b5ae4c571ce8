"""Who owns which block of the key-value pool. Knows nothing of models or tensors.

A block holds the keys and values of ``size`` consecutive tokens of a sequence. A block of a prompt is known by a digest
of all tokens up to its end, so that whoever has the same beginning can use it. Nobody writes anything new into a shared
block: one that a prompt ends in the middle of is copied first, and the last token of a prompt that fills its blocks is
written again as it was.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from heapq import heappop, heappush

import numpy as np


def prompt_keys(prompt: Sequence[int], size: int) -> list[bytes]:
    """A key for each block of the prompt, the last one possibly of a block that is not full."""
    ids = np.asarray(prompt, dtype=np.int64)
    digest, keys = hashlib.blake2b(digest_size=16), []
    for start in range(0, len(ids), size):
        digest.update(ids[start : start + size].tobytes())
        keys.append(digest.digest())
    return keys


class BlockManager:
    """Blocks ``0 .. count - 1``: free, in use by one or several, or unused but still known by their key.

    Free blocks go out lowest first, so that those in use lie together. Unused known ones are given up, the longest
    unused first, when nothing else is left.
    """

    def __init__(self, count: int) -> None:
        self.count = count
        self.clear()

    def clear(self) -> None:
        """Everything is free and nothing is known."""
        self._free = list(range(self.count))
        self._users = [0] * self.count
        self._key: dict[int, bytes] = {}
        self._known: dict[bytes, int] = {}
        self._unused: OrderedDict[int, None] = OrderedDict()

    @property
    def available(self) -> int:
        return len(self._free) + len(self._unused)

    @property
    def used(self) -> int:
        return self.count - self.available

    def take(self, count: int) -> list[int] | None:
        """This many blocks for one user, or None where there are not as many."""
        if count > self.available:
            return None
        taken = []
        for _ in range(count):
            if not self._free:
                self._release_one(self._unused.popitem(last=False)[0])
            block = heappop(self._free)
            self._users[block] = 1
            taken.append(block)
        return taken

    def share(self, blocks: Iterable[int]) -> None:
        """One more user of each."""
        for block in blocks:
            self._users[block] += 1
            self._unused.pop(block, None)

    def release(self, blocks: Iterable[int], keep_known: bool) -> None:
        """One user less of each; what nobody uses is free, or stays known where ``keep_known`` says so.

        The end of a sequence is given up before its beginning, without which it is of no use.
        """
        for block in reversed(list(blocks)):
            self._users[block] -= 1
            if self._users[block]:
                continue
            if keep_known and block in self._key:
                self._unused[block] = None
            else:
                self._release_one(block)

    def publish(self, block: int, key: bytes) -> None:
        """From now on the block is found under the key, unless another one is."""
        if key not in self._known and block not in self._key:
            self._known[key], self._key[block] = block, key

    def find(self, keys: Sequence[bytes]) -> list[int]:
        """The known blocks of the longest beginning."""
        found = []
        for key in keys:
            block = self._known.get(key)
            if block is None:
                break
            found.append(block)
        return found

    def _release_one(self, block: int) -> None:
        key = self._key.pop(block, None)
        if key is not None:
            del self._known[key]
        heappush(self._free, block)


def blocks_for(tokens: int, size: int) -> int:
    return -(-tokens // size)
