from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from verl.algorithms.metric import (
    Metric,
    explained_variance_metrics,
    max_metric,
    mean_metric,
    merge,
    merge_all,
    min_metric,
    reduce_metrics,
    spread_metrics,
    std_metrics,
    sum_metric,
)

NAN = math.nan


def test_b051_mean_over_micro_batches_is_weighted():
    merged = merge(Metric(0.5 * 10, 10, "mean"), Metric(1.0 * 2, 2, "mean"))
    assert merged.value() == pytest.approx(7 / 12, abs=1e-12)


@pytest.mark.parametrize("size", [1, 2, 4, 8])
def test_b051_extremes_do_not_depend_on_the_number_of_micro_batches(size):
    ratio = torch.tensor([0.8, 1.2, 1.0, 0.9, 0.8, 1.1, 1.0, 1.05], dtype=torch.float64)
    parts = [{"max": max_metric(piece), "min": min_metric(piece)} for piece in ratio.split(size)]
    assert reduce_metrics(merge_all(parts)) == {"max": 1.2, "min": 0.8}


def test_b052_nan_is_skipped_and_counted():
    values = torch.tensor([0.5, NAN, NAN, 0.8, 0.6, 0.7], dtype=torch.float64)
    metric = mean_metric(values)
    assert float(metric.denominator) == 4
    assert reduce_metrics({"m": metric}) == {"m": pytest.approx(0.65, abs=1e-12), "m/skipped": 2.0}
    # The count survives a merge with a clean part.
    clean = mean_metric(torch.tensor([0.65], dtype=torch.float64))
    assert reduce_metrics({"m": merge(metric, clean)}) == {"m": pytest.approx(0.65, abs=1e-12), "m/skipped": 2.0}


@pytest.mark.parametrize("build", [mean_metric, sum_metric, max_metric, min_metric])
def test_masked_positions_are_neither_read_nor_counted_as_skipped(build):
    values = torch.tensor([[2.0, NAN], [math.inf, 4.0]])
    mask = torch.tensor([[True, False], [False, True]])
    expected = {mean_metric: 3.0, sum_metric: 6.0, max_metric: 4.0, min_metric: 2.0}[build]
    metric = build(values, mask)
    assert metric.value() == expected
    assert float(metric.skipped) == 0


def test_empty_metrics_are_nan_and_left_out_except_a_sum():
    nothing = torch.zeros(3, dtype=torch.bool)
    built = {b.__name__: b(torch.ones(3), nothing) for b in (mean_metric, sum_metric, max_metric, min_metric)}
    assert math.isnan(built["mean_metric"].value())
    assert math.isnan(built["max_metric"].value())
    assert reduce_metrics(built) == {"sum_metric": 0.0}
    for build in (max_metric, min_metric, mean_metric):
        seven = build(torch.tensor([7.0]))
        assert merge(build(torch.ones(3), nothing), seven).value() == 7.0
        assert merge(seven, build(torch.ones(3), nothing)).value() == 7.0


def test_sums_are_float64():
    values = torch.cat([torch.tensor([2.0**24]), torch.ones(8)])  # float32 loses each 1
    assert sum_metric(values).value() == 2**24 + 8


def test_floats_and_tensors_merge():
    assert merge(max_metric(torch.tensor([3.0])), Metric(5.0, 1, "max")).value() == 5.0
    assert merge(Metric(5.0, 1, "min"), min_metric(torch.tensor([3.0]))).value() == 3.0
    assert math.isnan(merge(Metric(NAN, 1, "max"), Metric(5.0, 1, "max")).value())
    assert math.isnan(merge(Metric(5.0, 1, "max"), Metric(NAN, 1, "max")).value())


def test_different_reductions_do_not_merge():
    with pytest.raises(ValueError, match="cannot merge"):
        merge(Metric(1, 1, "mean"), Metric(1, 1, "max"))
    with pytest.raises(ValueError, match="median"):
        Metric(1, 1, "median")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="shape"):
        mean_metric(torch.ones(2, 2), torch.ones(2))


def test_merge_all_takes_the_union_of_names():
    parts = [{"a": Metric(1, 1)}, {"a": Metric(3, 1), "b": Metric(4, 2)}]
    assert reduce_metrics(merge_all(parts)) == {"a": 2.0, "b": 2.0}


finite = st.floats(-1e3, 1e3, allow_nan=False)


@settings(max_examples=60, deadline=None)
@given(st.lists(finite | st.just(NAN), min_size=1, max_size=12), st.integers(1, 5))
def test_any_split_gives_the_numbers_of_the_whole(values, size):
    tensor = torch.tensor(values, dtype=torch.float64)

    def measure(x: torch.Tensor) -> dict[str, Metric]:
        return spread_metrics("v", x) | {"v/sum": sum_metric(x)} | std_metrics("v/std", x)

    whole = reduce_metrics(measure(tensor))
    pieces = [measure(piece) for piece in tensor.split(size)]
    assert reduce_metrics(merge_all(pieces)) == pytest.approx(whole, rel=1e-10, abs=1e-7)
    assert reduce_metrics(merge_all(reversed(pieces))) == pytest.approx(whole, rel=1e-10, abs=1e-7)
    clean = tensor[~tensor.isnan()]
    if len(clean):
        assert whole["v/std"] == pytest.approx(float(clean.std(unbiased=False)), rel=1e-6, abs=1e-5)
        assert whole["v/max"] == float(clean.max())


def test_explained_variance_is_formed_from_sums():
    returns = torch.tensor([[1.0, 2.0, 9.0], [4.0, NAN, NAN]], dtype=torch.float64)
    values = torch.tensor([[1.5, 1.0, NAN], [4.5, 3.0, 3.0]], dtype=torch.float64)
    mask = torch.tensor([[1, 1, 0], [1, 0, 0]], dtype=torch.bool)
    r, v = torch.tensor([1.0, 2.0, 4.0]), torch.tensor([1.5, 1.0, 4.5])
    expected = float(1 - (r - v).var() / r.var())
    rows = [explained_variance_metrics("ev", values[i : i + 1], returns[i : i + 1], mask[i : i + 1]) for i in (0, 1)]
    assert reduce_metrics(merge_all(rows)) == {"ev": pytest.approx(expected, rel=1e-6)}


def test_explained_variance_without_spread_is_left_out():
    same = torch.full((2, 3), 0.1)
    assert reduce_metrics(explained_variance_metrics("ev", same * 2, same, torch.ones(2, 3))) == {}
    assert reduce_metrics(explained_variance_metrics("ev", same, same, torch.zeros(2, 3))) == {}
