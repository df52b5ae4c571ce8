"""mean@N, best@k, maj@N and their intervals, against hand-computed values and brute force."""

from __future__ import annotations

import itertools
import math
from statistics import fmean

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from verl.protocol import DataProto
from verl.trainer.group_metrics import (
    Estimate,
    Graded,
    Group,
    estimate,
    graded_rows,
    score_estimates,
    student_t,
    validation_metrics,
)

VALUES = st.floats(-10, 10, allow_nan=False)


def group(*values: float, answers: str | None = None) -> Group:
    """``answers``: one letter a response, "-" for none."""
    return Group(list(values), [None if a == "-" else a for a in answers or "-" * len(values)])


# --- one group


@given(values=st.lists(VALUES, min_size=1, max_size=7), k=st.integers(1, 9))
def test_best_at_k_is_the_mean_over_all_subsets(values: list[float], k: int) -> None:
    subsets = list(itertools.combinations(values, min(k, len(values))))
    assert group(*values).best(k) == pytest.approx(fmean(map(max, subsets)), abs=1e-9)


@pytest.mark.parametrize(("right", "n", "k"), [(0, 8, 4), (1, 8, 4), (3, 8, 2), (8, 8, 1), (5, 8, 8), (100, 1000, 300)])
def test_best_at_k_of_right_and_wrong_is_pass_at_k(right: int, n: int, k: int) -> None:
    expected = 1 - math.comb(n - right, k) / math.comb(n, k)
    assert group(*[1.0] * right, *[0.0] * (n - right)).best(k) == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize(
    ("values", "answers", "expected"),
    [
        ((1, 0, 1, 0), "abac", 1.0),  # a wins, and it is right
        ((1, 0, 0, 0), "abbc", 0.0),  # b wins
        ((1, 0, 1, 0), "abab", 0.5),  # a and b share
        ((1, 0, 0), "abc", 1 / 3),  # each alone
        ((1, 0, 0, 0), "a---", 1.0),  # who has no answer has no vote
        ((0.25, 0.75), "--", 0.5),  # nobody has one: the mean of all
        ((1.0, 0.5, 0.0, 0.0), "aabb", 0.375),  # one answer, two scores (a format that costs): their mean
        ((1,), "a", 1.0),
    ],
)
def test_majority_by_hand(values: tuple[float, ...], answers: str, expected: float) -> None:
    assert group(*values, answers=answers).majority() == pytest.approx(expected)


@given(st.lists(st.tuples(VALUES, st.sampled_from("abc-")), min_size=1, max_size=8), st.randoms())
def test_the_order_of_responses_does_not_matter(pairs: list[tuple[float, str]], random) -> None:
    def both(pairs: list[tuple[float, str]]) -> list[float]:
        one = group(*(value for value, _ in pairs), answers="".join(answer for _, answer in pairs))
        return [one.majority(), one.best(2)]

    shuffled = random.sample(pairs, len(pairs))
    assert both(shuffled) == pytest.approx(both(pairs), abs=1e-9)
    assert min(v for v, _ in pairs) - 1e-9 <= both(pairs)[0] <= max(v for v, _ in pairs) + 1e-9


# --- intervals


@pytest.mark.parametrize(
    ("degrees", "quantile"), [(1, 12.7062), (2, 4.30265), (3, 3.18245), (5, 2.57058), (10, 2.22814), (99, 1.98422)]
)
def test_students_t(degrees: int, quantile: float) -> None:
    assert student_t(degrees) == pytest.approx(quantile, rel=2e-3)


def test_an_interval_by_hand() -> None:
    # Means 0, 1, 2, 1: mean 1, deviation sqrt(2/3), half width t(3) * sqrt(2/3) / 2 = 1.2992.
    found = estimate([0, 2, 4, 2], [2, 2, 2, 2])
    assert found.value == 1.0
    assert found.low == pytest.approx(1 - 1.2992, abs=2e-3) and found.high == pytest.approx(1 + 1.2992, abs=2e-3)
    shares = estimate([0, 1, 2, 1], [2, 2, 2, 2])  # shares stay between 0 and 1
    assert shares == Estimate(0.5, 0.0, 1.0)
    # Unequal counts: 30 / 5; residuals (8, -2, -6) / (5/3) = 4.8, -1.2, -3.6: deviation sqrt(37.44 / 2) = 4.3267, half
    # width t(2) * 4.3267 / sqrt(3) = 10.748.
    ratio = estimate([20, 10, 0], [2, 2, 1])
    assert ratio.value == 6.0 and ratio.high - 6.0 == pytest.approx(10.748, abs=1e-3)


def test_wilsons_interval_where_a_prompt_is_right_or_wrong() -> None:
    # Newcombe 1998, table I: 81 of 263, 0 of 20, 1 of 29.
    for right, n, low, high in [(81, 263, 0.2553, 0.3662), (0, 20, 0.0, 0.1611), (1, 29, 0.0061, 0.1718)]:
        found = estimate([1.0] * right + [0.0] * (n - right))
        assert (found.low, found.high) == (pytest.approx(low, abs=1e-4), pytest.approx(high, abs=1e-4))
    groups = estimate([8, 8, 0], [8, 8, 8])  # eight equal responses to each prompt are three trials, not 24
    assert groups == Estimate(2 / 3, *(estimate([1, 1, 0]).low, estimate([1, 1, 0]).high))


def test_one_prompt_has_no_interval() -> None:
    assert estimate([1, 0][:1], [4]) == Estimate(0.25)


def test_intervals_cover_what_they_should() -> None:
    """Prompts of unlike difficulty, some responses unscored: 95% of the intervals hold the truth, by prompt and not by
    response."""
    random = np.random.default_rng(0)
    covered = 0
    for _ in range(600):
        difficulty = random.beta(0.6, 0.9, size=40)
        counts = random.integers(5, 9, size=40)
        sums = random.binomial(counts, difficulty)
        found = estimate(sums.tolist(), counts.tolist())
        covered += found.low < 0.4 < found.high
    assert 0.92 < covered / 600 < 0.98


# --- rows


def rows_by_hand() -> list[Graded]:
    return [
        Graded("math", "a", 1.0, 1.0, "7"),
        Graded("math", "a", 0.0, 0.0, "8"),
        Graded("math", "b", 0.5, 0.0, "9"),
        Graded("math", "b", None, None, "9"),  # could not be scored: nowhere counted, no vote either
        Graded("code", "c", -1.0),
        Graded("code", "c", -2.0),
    ]


def test_validation_metrics_by_hand() -> None:
    assert validation_metrics(rows_by_hand(), 2) == {
        "val-core/math/reward/mean@2": 0.5,
        "val-core/math/reward/best@2": 0.75,
        "val-core/math/reward/maj@2": 0.5,
        "val-core/math/acc/mean@2": pytest.approx(1 / 3),
        "val-core/math/acc/best@2": 0.5,
        "val-core/math/acc/maj@2": 0.25,
        "val-core/code/reward/mean@2": -1.5,
        "val-core/code/reward/best@2": -1.0,  # no answers: no majority
        "val-aux/math/unscored": 1,
    }
    assert validation_metrics([Graded("math", "a", None)], 1) == {"val-aux/math/unscored": 1}
    assert validation_metrics([Graded("math", "a", 1.0, answer="7")], 1) == {"val-core/math/reward/mean@1": 1.0}


def test_best_at_several_ks() -> None:
    rows = [Graded("s", "p", value) for value in (0.0, 0.0, 1.0, 0.0)]
    found = score_estimates(rows, 4, "reward", [2, 4])
    assert {name: e.value for name, e in found.items()} == {"mean@4": 0.25, "best@2": pytest.approx(0.5), "best@4": 1.0}


@pytest.mark.parametrize(
    ("acc", "found"), [(True, 1.0), (1, 1.0), (0.5, 0.5), (None, None), ("1", None), (math.nan, None), ([1], None)]
)
def test_an_accuracy_is_a_number_or_it_is_none(acc: object, found: float | None) -> None:
    batch = DataProto.from_dict(
        {"responses": torch.zeros(1, 1), "attention_mask": torch.ones(1, 2)},
        {"data_source": ["s"], "uid": ["a"], "score": [1.0], "finish_reason": ["stop"], "reward_extra/acc": [acc]},
    )
    assert [row.acc for row in graded_rows(batch)] == [found]


def test_rows_of_a_batch() -> None:
    batch = DataProto.from_dict(
        {
            "responses": torch.zeros(3, 4, dtype=torch.int64),
            "attention_mask": torch.tensor([[1, 1, 1, 1, 1, 1], [1, 1, 1, 0, 0, 0], [1, 1, 0, 0, 0, 0]]),
        },
        {
            "data_source": ["s"] * 3,
            "uid": ["a", "a", "b"],
            "score": [1.0, None, 0.0],
            "finish_reason": ["length", "stop", "stop"],
            "reward_extra/acc": [True, None, 0],
            "reward_extra/pred": [" 4 ", None, ""],
            "reward_extra/answer": ["5", 6, "7"],
        },
    )
    assert graded_rows(batch) == [
        Graded("s", "a", 1.0, 1.0, "4", 4, True),
        Graded("s", "a", None, None, "6", 1, False),
        Graded("s", "b", 0.0, 0.0, None, 0, False),
    ]
