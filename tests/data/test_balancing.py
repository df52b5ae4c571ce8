"""Rows of each rank: cases B110 to B118 that concern ranks, and properties of every plan."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from verl.data.packing import karmarkar_karp, plan_ranks, share_rows
from verl.errors import DataError


def plan(lengths: list[int], shares: int, limit: int, **settings: bool) -> list[list[list[int]]]:
    """Rows without a prompt, each a group of its own."""
    rows = len(lengths)
    return plan_ranks(
        lengths, range(rows), None, limit, prompt_lengths=[0] * rows, shared=False, ranks=shares, **settings
    )


def test_b112_ranks_make_the_same_number_of_micro_batches() -> None:
    """In order, rank 0 has 4 x 100 tokens and rank 1 has 2 x 900, limit 1000: both make 2, by cutting what is there."""
    lengths = [100, 100, 100, 100, 900, 900]
    shares = [[0, 1, 2, 3], [4, 5]]
    assert [len(part) for part in plan(lengths, 2, 1000, balance=False)] != [2, 2]  # three rows each
    plans = plan_ranks(
        lengths,
        [0, 0, 0, 0, 1, 1],
        None,
        1000,
        prompt_lengths=[0] * 6,
        shared=True,
        ranks=2,
        balance=False,
        lockstep=True,
    )
    assert plans == [[[0, 1], [2, 3]], [[4], [5]]]
    assert [sorted(row for part in rank for row in part) for rank in plans] == shares


def test_b113_a_light_rank_makes_idle_passes() -> None:
    lengths = [100, 900, 900, 900]
    plans = plan_ranks(
        lengths, [0, 1, 1, 1], None, 1000, prompt_lengths=[0] * 4, shared=True, ranks=2, balance=False, lockstep=True
    )
    assert plans == [[[0], [], []], [[1], [2], [3]]]
    loose = plan_ranks(lengths, [0, 1, 1, 1], None, 1000, prompt_lengths=[0] * 4, shared=True, ranks=2, balance=False)
    assert loose == [[[0]], [[1], [2], [3]]]  # nobody waits for a forward of another rank: none is made in vain


def test_b115_the_balance_switch() -> None:
    lengths = [9, 8, 7, 1, 1, 1]
    settings = {"prompt_lengths": [0] * 6, "shared": False}
    assert share_rows(lengths, range(6), ranks=2, balance=False, **settings) == [[0, 1, 2], [3, 4, 5]]
    sums = [sum(lengths[row] for row in share) for share in share_rows(lengths, range(6), ranks=2, **settings)]
    assert sorted(sums) == [12, 15]


def test_groups_stay_together_where_prompts_are_shared() -> None:
    """Four groups of four on two ranks; one group of eight is cut, as its prompt twice costs less than an idle rank."""
    groups = [row // 4 for row in range(16)]
    lengths = [30, 20, 10, 1] * 4
    for share in share_rows(lengths, groups, [50] * 16, 2, shared=True):
        assert len({groups[row] for row in share}) == 2 and len(share) == 8
    assert [len(share) for share in share_rows([30] * 8, [0] * 8, [50] * 8, 2, shared=True)] == [4, 4]


def test_b116_and_b117_bins() -> None:
    with pytest.raises(ValueError, match="0 bins"):
        karmarkar_karp([1.0], 0)
    assert sorted(map(len, karmarkar_karp([3, 2, 1], 4))) == [0, 1, 1, 1]
    assert sorted(map(len, karmarkar_karp([5, 4, 3, 2, 1], 2, equal_sizes=True))) == [2, 3]
    assert karmarkar_karp([], 3) == [[], [], []]
    # The example of the literature: differencing {8, 7, 6, 5, 4} leaves 2 (the best is 0, greedy leaves 4).
    sums = [sum([8, 7, 6, 5, 4][i] for i in part) for part in karmarkar_karp([8, 7, 6, 5, 4], 2)]
    assert abs(sums[0] - sums[1]) == 2


def test_b118_a_step_whose_rows_do_not_divide() -> None:
    plans = plan_ranks([3] * 5, range(5), 2, None, prompt_lengths=[1] * 5, shared=False, ranks=2, lockstep=True)
    assert [[len(part) for part in rank] for rank in plans] in ([[2, 1], [1, 1]], [[1, 1], [2, 1]])


def test_b111_a_row_over_the_limit_fails_on_every_rank() -> None:
    with pytest.raises(DataError, match="longer than a micro-batch may be"):
        plan([10, 1], 2, 9)


@given(
    lengths=st.lists(st.integers(0, 40), min_size=1, max_size=24),
    ranks=st.integers(1, 5),
    group=st.integers(1, 6),
    prompt=st.integers(1, 30),
    shared=st.booleans(),
    balance=st.booleans(),
    lockstep=st.booleans(),
    rows=st.none() | st.integers(1, 5),
)
def test_every_row_once_within_the_limits(
    lengths: list[int],
    ranks: int,
    group: int,
    prompt: int,
    shared: bool,
    balance: bool,
    lockstep: bool,
    rows: int | None,
) -> None:
    groups = [row // group for row in range(len(lengths))]
    limit = None if rows else 80
    plans = plan_ranks(
        lengths,
        groups,
        rows,
        limit,
        prompt_lengths=[prompt] * len(lengths),
        shared=shared,
        ranks=ranks,
        balance=balance,
        lockstep=lockstep,
    )
    assert len(plans) == ranks
    assert sorted(row for rank in plans for part in rank for row in part) == list(range(len(lengths)))
    if lockstep:
        assert len({len(rank) for rank in plans}) == 1
    elif ranks == 1 or len(lengths) < ranks:
        assert all(part for rank in plans for part in rank)
    for part in (part for rank in plans for part in rank):
        prompts = {groups[row] for row in part} if shared else part
        assert len(part) <= (rows or 24)
        assert limit is None or sum(lengths[row] for row in part) + prompt * len(prompts) <= limit
    counts = [sum(map(len, rank)) for rank in plans]
    if rows and balance:
        assert max(counts) - min(counts) <= group  # equal numbers of rows, or of whole groups
    if balance and not shared and not rows:
        sums = [sum(lengths[row] + prompt for part in rank for row in part) for rank in plans]
        assert max(sums) - min(sums) <= max(lengths) + prompt  # no better than moving one row
