"""Plans of micro-batches: never over the limit, every row once, nothing depends on chance (B110, B111)."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from verl.data.packing import plan_micro_batches
from verl.errors import DataError


def loads(plan, lengths):
    return [sum(lengths[i] for i in rows) for rows in plan]


def test_six_of_five_never_fit_together():
    assert plan_micro_batches([5] * 6, range(6), max_tokens=9) == [[i] for i in range(6)]


def test_the_best_plan_of_a_small_case():
    lengths = [9, 1, 1, 1, 6]
    plan = plan_micro_batches(lengths, range(5), max_tokens=9)
    assert plan == [[0], [1, 2, 3, 4]] and loads(plan, lengths) == [9, 9]


def test_rows_alone_are_consecutive_chunks():
    assert plan_micro_batches([1] * 5, [0] * 5, max_rows=2) == [[0, 1], [2, 3], [4]]


def test_both_limits_hold():
    plan = plan_micro_batches([1] * 5, range(5), max_rows=2, max_tokens=100)
    assert sorted(map(len, plan)) == [1, 2, 2]


def test_no_rows_no_micro_batches():
    assert plan_micro_batches([], [], max_tokens=5) == [] == plan_micro_batches([], [], max_rows=5)


def test_a_shared_prompt_is_counted_once():
    # Two groups of 3: prompt 10, responses 2. Shared: a group costs 16; apart: a row costs 12.
    lengths, groups, prompts = [2] * 6, [0, 0, 0, 1, 1, 1], [10] * 6
    shared = plan_micro_batches(lengths, groups, max_tokens=16, prompt_lengths=prompts, shared=True)
    assert shared == [[0, 1, 2], [3, 4, 5]]
    apart = plan_micro_batches(lengths, groups, max_tokens=16, prompt_lengths=prompts)
    assert apart == [[i] for i in range(6)]


def test_groups_stay_together_where_that_costs_nothing():
    # Interleaved groups: by length alone rows 0-2 and 1-3 would be as good.
    plan = plan_micro_batches([3, 3, 3, 3], ["a", "b", "a", "b"], max_tokens=6)
    assert plan == [[0, 2], [1, 3]]


def test_groups_are_split_where_that_needs_fewer():
    # Three groups of 2 x 3 in 9: together one micro-batch a group, apart two full ones.
    plan = plan_micro_batches([3] * 6, [0, 0, 1, 1, 2, 2], max_tokens=9)
    assert len(plan) == 2


def test_a_group_over_the_limit_is_split():
    plan = plan_micro_batches([4] * 5, [0] * 5, max_tokens=10, prompt_lengths=[2] * 5, shared=True)
    assert sorted(map(len, plan)) == [1, 2, 2]  # 2 + 4 + 4 = 10


@pytest.mark.parametrize("shared", [True, False])
def test_one_row_over_the_limit_is_refused_with_its_length(shared):
    with pytest.raises(DataError, match=r"(?s)9 tokens.*row 1: 10 tokens \(4 of the prompt, 6 of the response\)"):
        plan_micro_batches([1, 6], [0, 0], max_tokens=9, prompt_lengths=[4, 4], shared=shared)


@pytest.mark.parametrize("limits", [{}, {"max_rows": 0}, {"max_tokens": 0}, {"max_tokens": -1}, {"max_rows": -3}])
def test_limits_that_are_none(limits):
    with pytest.raises(DataError):
        plan_micro_batches([1], [0], **limits)


def test_misuse_is_refused():
    with pytest.raises(ValueError, match="not one a row"):
        plan_micro_batches([1, 2], [0], max_rows=1)
    with pytest.raises(ValueError, match="differ in length"):
        plan_micro_batches([1, 2], [0, 0], max_tokens=9, prompt_lengths=[1, 2], shared=True)


@st.composite
def batches(draw):
    group_prompts = draw(st.lists(st.integers(0, 20), min_size=1, max_size=6))
    groups = draw(st.lists(st.integers(0, len(group_prompts) - 1), max_size=30))
    lengths = draw(st.lists(st.integers(0, 20), min_size=len(groups), max_size=len(groups)))
    return lengths, groups, [group_prompts[g] for g in groups]


@settings(max_examples=300, deadline=None)
@given(batch=batches(), limit=st.integers(40, 90), rows=st.none() | st.integers(1, 8), shared=st.booleans())
def test_every_plan_keeps_the_rules(batch, limit, rows, shared):
    lengths, groups, prompts = batch
    options = {"max_rows": rows, "max_tokens": limit, "prompt_lengths": prompts, "shared": shared}
    plan = plan_micro_batches(lengths, groups, **options)
    assert sorted(i for piece in plan for i in piece) == list(range(len(lengths)))
    assert all(piece and piece == sorted(piece) for piece in plan)
    assert all(a[0] < b[0] for a, b in pairwise(plan))
    for piece in plan:
        if shared:
            prompt_tokens = sum({groups[i]: prompts[i] for i in piece}.values())
        else:
            prompt_tokens = sum(prompts[i] for i in piece)
        assert prompt_tokens + sum(lengths[i] for i in piece) <= limit
        assert rows is None or len(piece) <= rows
    assert plan == plan_micro_batches(lengths, groups, **options)


@settings(max_examples=200, deadline=None)
@given(lengths=st.lists(st.integers(1, 30), min_size=1, max_size=40), limit=st.integers(30, 80))
def test_waste_is_bounded(lengths, limit):
    # Of any two micro-batches at most one is half empty, so their number is below 2 * total / limit + 1.
    plan = plan_micro_batches(lengths, range(len(lengths)), max_tokens=limit)
    assert sum(load * 2 <= limit for load in loads(plan, lengths)) <= 1
    assert len(plan) < 2 * sum(lengths) / limit + 1
