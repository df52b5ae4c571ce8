"""Reward shaping by hand, and what its statistics keep."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from verl.algorithms.masking import Moments
from verl.algorithms.metric import reduce_metrics
from verl.algorithms.reward_shaping import RewardShaper, length_factors, length_penalties, overlong_penalties
from verl.config.schema_reward import RewardConfig


def f64(*values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


def shaper(max_length: int = 10, **fields: Any) -> RewardShaper:
    return RewardShaper(RewardConfig(**fields), max_length)


def shape(shaping: RewardShaper, scores: list[float], lengths: list[int], scored: list[bool] | None = None):
    known = torch.tensor(scored or [True] * len(scores))
    shaped = shaping(torch.tensor(scores), torch.tensor(lengths), known)
    return shaped.scores.tolist(), reduce_metrics(shaped.metrics)


def test_b053_overlong_penalty_boundaries():
    """B053: max 10, buffer 4, factor 1."""
    lengths = torch.tensor([0, 5, 6, 7, 8, 10, 11])
    assert overlong_penalties(lengths, 10, 4, 1.0).tolist() == [0, 0, 0, -0.25, -0.5, -1, -1]
    assert overlong_penalties(lengths, 10, 4, 0.5).tolist() == [0, 0, 0, -0.125, -0.25, -0.5, -0.5]
    assert overlong_penalties(torch.tensor([0, 5, 10]), 10, 10, 1.0).tolist() == [0, -0.5, -1]


def test_length_factors():
    scores, lengths = f64(2, -2, 2, 2), torch.tensor([4, 4, 0, 1])
    assert length_factors(scores, lengths, 0.5, False).tolist() == [0.5, 0.5, 1, 1]
    assert length_factors(scores, lengths, 0.5, True).tolist() == [0.5, 1, 1, 1]
    assert length_factors(scores, lengths, 0.0, False).tolist() == [1, 1, 1, 1]


def test_length_penalties():
    assert length_penalties(torch.tensor([0, 5, 10]), 10, 0.4).tolist() == pytest.approx([0, -0.2, -0.4])


def test_length_normalization():
    normalization = {"alpha": 1.0}
    scores, metrics = shape(shaper(length_normalization=normalization), [1.0, -1.0, 3.0], [4, 2, 0])
    assert scores == [0.25, -0.5, 3.0]
    assert metrics == {"reward/length_factor": pytest.approx((0.25 + 0.5 + 1) / 3)}
    positive = {"alpha": 1.0, "positive_only": True}
    assert shape(shaper(length_normalization=positive), [1.0, -1.0], [4, 2])[0] == [0.25, -1.0]


def test_penalties_add_up_and_are_logged():
    both = shaper(length_penalty=1.0, overlong_buffer={"enable": True, "len": 4, "penalty_factor": 2.0})
    scores, metrics = shape(both, [1.0, 1.0, 1.0], [5, 8, 10], [True, True, False])
    assert scores == pytest.approx([0.5, 1 - 0.8 - 1.0, 0.0])
    assert metrics == {
        "reward/length_penalty": pytest.approx(-0.65),
        "reward/overlong_penalty": pytest.approx(-0.5),
        "reward/overlong_ratio": 0.5,
    }


def test_max_resp_len_is_where_the_overlong_penalty_is_full():
    buffer = {"enable": True, "len": 2, "max_resp_len": 6}
    assert shape(shaper(max_length=99, overlong_buffer=buffer), [0.0] * 3, [4, 5, 6])[0] == [0, -0.5, -1]


def test_scaling_by_the_batch():
    """Deviation of 1, 3: sqrt 2; the mean stays."""
    scores, metrics = shape(shaper(scaling="batch"), [1.0, 3.0, 50.0], [1, 1, 1], [True, True, False])
    assert scores == pytest.approx([1 / math.sqrt(2), 3 / math.sqrt(2), 0])
    assert metrics == {"reward/scale": pytest.approx(math.sqrt(2))}


@pytest.mark.parametrize("scaling", ["batch", "running"])
def test_scores_without_spread_are_not_scaled(scaling):
    for scores in ([0.1, 0.1 + 1e-8, 0.1 - 1e-8], [5.0], [0.0, 0.0]):  # in float32 some of them differ by rounding
        shaped, metrics = shape(shaper(scaling=scaling), scores, [1] * len(scores))
        assert shaped == pytest.approx(scores) and metrics["reward/scale"] == 1.0
    assert shape(shaper(scaling=scaling), [math.nan], [1], [False])[0] == [0.0]


def test_running_scale_is_that_of_all_scores_so_far():
    shaping = shaper(scaling="running")
    shape(shaping, [1.0, 2.0, 9.0], [1, 1, 1], [True, True, False])
    _, metrics = shape(shaping, [6.0], [1])
    assert metrics["reward/scale"] == pytest.approx(math.sqrt(7))  # of 1, 2, 6
    batchwise = shaper(scaling="batch")
    shape(batchwise, [1.0, 2.0], [1, 1])
    assert shape(batchwise, [6.0], [1])[1]["reward/scale"] == 1.0


def test_running_statistics_are_resumed():
    """Law 4: a restored shaper goes on with the same bits."""
    whole, first, second = (shaper(scaling="running") for _ in range(3))
    shape(whole, [1.0, 2.0], [1, 1])
    shape(first, [1.0, 2.0], [1, 1])
    second.load_state_dict(first.state_dict())
    assert shape(whole, [0.3, 0.7], [1, 1]) == shape(second, [0.3, 0.7], [1, 1])


def test_clipping_comes_last():
    shaping = shaper(scaling="batch", clip=1.0, length_normalization={"alpha": 1.0})
    scores, metrics = shape(shaping, [4.0, -2.0, 0.0], [2, 1, 1])  # 2, -2, 0 by length, deviation 2
    assert scores == [1.0, -1.0, 0.0] and metrics["reward/clip_ratio"] == 0.0
    scores, metrics = shape(shaper(clip=0.5), [4.0, -2.0, 0.25, -9.0], [1] * 4, [True, True, True, False])
    assert scores == [0.5, -0.5, 0.25, 0.0] and metrics == {"reward/clip_ratio": pytest.approx(2 / 3)}


def test_baselines_are_shaped_alike_and_move_nothing():
    shaping = shaper(scaling="running", length_penalty=1.0, clip=3.0)
    scores, lengths, known = torch.tensor([1.0, 2.0]), torch.tensor([0, 0]), torch.tensor([True, True])
    shaped = shaping(scores, lengths, known, torch.tensor([1.5, 100.0]), torch.tensor([5, 0]))
    assert shaped.baselines.tolist() == pytest.approx([1.0 / math.sqrt(0.5), 3.0])
    assert shaping.seen.count == 2 and reduce_metrics(shaped.metrics)["reward/clip_ratio"] == 0.0


def test_nothing_is_on_by_default():
    assert not RewardConfig().shapes
    assert shape(shaper(), [0.3, -7.0], [5, 99]) == (pytest.approx([0.3, -7.0]), {})
    for field in (
        {"clip": 1.0},
        {"scaling": "batch"},
        {"length_penalty": 0.1},
        {"length_normalization": {"alpha": 0.5}},
        {"overlong_buffer": {"enable": True, "len": 1}},
    ):
        assert RewardConfig(**field).shapes


@settings(max_examples=50, deadline=None)
@given(st.lists(st.lists(st.floats(-1e3, 1e3), max_size=5), max_size=5))
def test_moments_of_parts_are_those_of_the_whole(parts):
    merged = Moments()
    for part in parts:
        merged.add(Moments.of(torch.tensor(part)))
    values = torch.tensor([x for part in parts for x in part], dtype=torch.float32).double()
    assert merged.count == len(values)
    if len(values) > 1:
        assert merged.mean == pytest.approx(float(values.mean()), abs=1e-9)
        assert merged.variance == pytest.approx(float(values.var()), rel=1e-9, abs=1e-9)
