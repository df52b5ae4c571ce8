"""Who owns which block: random actions against a plain model, and what is given up first."""

from __future__ import annotations

import random
from collections import Counter

from hypothesis import given
from hypothesis import settings as examples
from hypothesis import strategies as st

from verl.rollout.blocks import BlockManager, blocks_for, prompt_keys


def test_a_key_is_that_of_the_whole_beginning() -> None:
    assert [blocks_for(tokens, 4) for tokens in (0, 1, 4, 5, 8)] == [0, 1, 1, 2, 2]
    prompt = list(range(10))
    keys = prompt_keys(prompt, 4)
    assert len(keys) == len(set(keys)) == 3
    assert prompt_keys(prompt[:8], 4) == keys[:2]
    assert prompt_keys(prompt[:9], 4)[:2] == keys[:2] and prompt_keys(prompt[:9], 4)[2] != keys[2]
    other = prompt_keys([*prompt[:3], 99, *prompt[4:]], 4)
    assert not set(other) & set(keys)  # later blocks hold the same tokens behind another beginning
    assert prompt_keys([256], 4) != prompt_keys([1], 4) != prompt_keys([0, 1], 4)


def test_lowest_first_and_all_or_nothing() -> None:
    blocks = BlockManager(5)
    assert blocks.take(6) is None and (blocks.used, blocks.available) == (0, 5)
    assert blocks.take(3) == [0, 1, 2] and blocks.take(0) == []
    blocks.release([1, 0], keep_known=True)  # nobody knows them: free
    assert blocks.take(5) is None and blocks.used == 1
    assert blocks.take(3) == [0, 1, 3]
    assert (blocks.used, blocks.available) == (4, 1)


def test_the_longest_unused_goes_first_and_the_end_of_a_sequence_before_its_beginning() -> None:
    blocks = BlockManager(6)
    for prompt in ("ab", "cd"):
        for block, key in zip(blocks.take(2) or [], prompt, strict=True):
            blocks.publish(block, key.encode())
    blocks.release([2, 3], keep_known=True)  # c d, first
    blocks.release([0, 1], keep_known=True)
    assert blocks.take(2) == [4, 5]  # free ones before known ones
    assert blocks.take(1) == [3] and blocks.find([b"c", b"d"]) == [2]
    blocks.share([2])  # used again, and by that the last to go
    blocks.release([2], keep_known=True)
    assert blocks.take(1) == [1] and blocks.find([b"a", b"b"]) == [0]
    assert blocks.take(1) == [0] and blocks.find([b"a"]) == []
    assert blocks.take(2) is None
    assert blocks.take(1) == [2] and not blocks._known


def test_what_nobody_keeps_is_forgotten() -> None:
    blocks = BlockManager(3)
    a, b = blocks.take(2) or []
    blocks.publish(a, b"a")
    blocks.publish(b, b"a")  # the first stays
    assert blocks.find([b"a", b"a"]) == [a, a] and blocks.find([b"x", b"a"]) == []
    blocks.release([b], keep_known=True)
    assert blocks.find([b"a"]) == [a]
    blocks.share([a])
    blocks.release([a], keep_known=False)
    assert blocks.find([b"a"]) == [a] and blocks.used == 1  # somebody still has it
    blocks.release([a], keep_known=False)
    assert blocks.find([b"a"]) == [] and blocks.used == 0


@examples(max_examples=200, deadline=None)
@given(st.randoms(use_true_random=False), st.integers(1, 9), st.lists(st.sampled_from("tttsssrrrrppc"), max_size=80))
def test_random_actions(rng: random.Random, count: int, actions: list[str]) -> None:
    """Users hold lists of blocks; what each block is known for, and the order of the unused, are kept here as well."""
    blocks = BlockManager(count)
    users: list[list[int]] = []
    known: dict[int, bytes] = {}
    unused: list[int] = []  # longest unused first
    for number, action in enumerate(actions):
        held = Counter(block for user in users for block in user)
        free = set(range(count)) - set(held) - set(unused)
        if action == "t":
            wanted = rng.randint(0, count)
            taken = blocks.take(wanted)
            assert (taken is None) == (wanted > len(free) + len(unused))
            if taken is not None:
                given_up, unused = unused[: max(wanted - len(free), 0)], unused[max(wanted - len(free), 0) :]
                for block in given_up:
                    del known[block]
                assert len(set(taken)) == wanted and not set(taken) & (set(held) | set(unused))
                assert set(taken) == set(sorted(free)[:wanted]) | set(given_up)
                users.append(taken)
        elif action == "s":
            shared = [block for block in known if rng.random() < 0.5]
            blocks.share(shared)
            unused = [block for block in unused if block not in shared]
            users.append(shared)
        elif action == "r" and users:
            gone, keep = users.pop(rng.randrange(len(users))), rng.random() < 0.7
            blocks.release(gone, keep)
            for block in reversed(gone):
                if held[block] == 1:
                    if keep and block in known:
                        unused.append(block)
                    else:
                        known.pop(block, None)
        elif action == "p" and held:
            block, key = rng.choice(sorted(held)), bytes([rng.randrange(4), number % 3])
            blocks.publish(block, key)
            if key not in known.values():
                known.setdefault(block, key)
        elif action == "c" and rng.random() < 0.2:
            blocks.clear()
            users, known, unused = [], {}, []
        in_use = {block for user in users for block in user}
        assert blocks.used == len(in_use) and blocks.available == count - len(in_use)
        for block, key in known.items():
            assert blocks.find([key]) == [block]
        every = {bytes([i, j]) for i in range(4) for j in range(3)}
        assert all(blocks.find([key]) == [] for key in every - set(known.values()))
    for user in users:
        blocks.release(user, keep_known=True)
    assert blocks.available == count
    assert sorted(blocks.take(count) or []) == list(range(count))
    assert not blocks._known and not blocks._key
