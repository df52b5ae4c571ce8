from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from verl.algorithms.aggregation import count_denominators
from verl.algorithms.metric import merge_all, reduce_metrics
from verl.algorithms.value_loss import ValueLossInputs, value_loss
from verl.config.schema_roles import CriticConfig

NAN = math.nan


def row(*values: float) -> torch.Tensor:
    return torch.tensor([values], dtype=torch.float64)


def evaluate(values: torch.Tensor, old: torch.Tensor, returns: torch.Tensor, config: Any, mask: Any = None):
    mask = torch.ones_like(values, dtype=torch.bool) if mask is None else mask
    inputs = ValueLossInputs(values, old, returns, mask)
    loss, metrics = value_loss(inputs, config, count_denominators(mask, values.shape[1]))
    return loss, reduce_metrics(metrics)


@pytest.mark.parametrize(
    ("new", "old", "target", "expected"), [(1, 5, 10, 40.5), (5, 1, 10, 38.72), (1.5, 1, 2, 0.32), (0.5, 1, 2, 1.125)]
)
def test_b028_clipping_takes_the_maximum(new, old, target, expected):
    loss, metrics = evaluate(row(new), row(old), row(target), CriticConfig(cliprange_value=0.2))
    assert loss.item() == pytest.approx(expected, abs=1e-12)
    assert metrics["critic/vf_loss"] == pytest.approx(expected, abs=1e-12)


def test_b029_clip_fraction_looks_at_the_unclipped_change():
    _, metrics = evaluate(row(1.0, 0.1, -0.5), row(0, 0, 0), row(0, 0, 0), CriticConfig(cliprange_value=0.2))
    assert metrics["critic/vf_clipfrac"] == pytest.approx(2 / 3)
    assert metrics["critic/vpred_mean"] == pytest.approx(0.2)


def test_plain_is_half_the_squared_error():
    config = SimpleNamespace(huber_delta=None, cliprange_value=None, loss_agg_mode="token-mean")
    loss, metrics = evaluate(row(1.0, 3.0), row(9, 9), row(2.0, 6.0), config)
    assert loss.item() == pytest.approx(0.5 * (1 + 9) / 2)
    assert metrics["critic/vf_clipfrac"] == 0


def test_explained_variance_of_the_old_values():
    old, returns = row(0.5, 1.0, 2.5), row(1.0, 2.0, 3.0)
    _, metrics = evaluate(row(7, 8, 9), old, returns, CriticConfig())
    expected = 1 - float((returns - old).var(unbiased=False) / returns.var(unbiased=False))
    assert metrics["critic/vf_explained_var"] == pytest.approx(expected)


def test_b020_padding_and_gradient():
    mask = torch.tensor([[True, True, False]])
    values = row(1.0, 2.0, NAN).requires_grad_()
    loss, metrics = evaluate(values, row(1.1, 2.0, math.inf), row(0.5, 3.0, NAN), CriticConfig(), mask)
    loss.backward()
    assert loss.item() == pytest.approx(0.5 * (0.25 + 1.0) / 2)
    assert values.grad.tolist() == [[0.25, -0.5, 0.0]]
    assert not [name for name in metrics if name.endswith("skipped")]


@pytest.mark.parametrize("cliprange", [0.5, None])
def test_gradcheck(cliprange):
    config = SimpleNamespace(huber_delta=None, cliprange_value=cliprange, loss_agg_mode="token-mean")
    values = row(0.1, 0.9, 2.0, -3.0).requires_grad_()
    old, returns = row(0.0, 0.0, 0.3, -1.0), row(1.0, 0.2, -1.0, 1.0)
    assert torch.autograd.gradcheck(lambda v: evaluate(v, old, returns, config)[0], values)


def test_metrics_merge_over_micro_batches():
    g = torch.Generator().manual_seed(0)
    values, old, returns = (torch.randn(6, 5, generator=g, dtype=torch.float64) for _ in range(3))
    mask = torch.rand(6, 5, generator=g) < 0.6
    whole = count_denominators(mask, 5)

    def part(rows: slice):
        columns = (values[rows], old[rows], returns[rows], mask[rows])
        return value_loss(ValueLossInputs(*columns), CriticConfig(), whole)

    expected_loss, expected = part(slice(0, 6))
    pieces = [part(slice(0, 1)), part(slice(1, 5)), part(slice(5, 6))]
    assert sum(loss for loss, _ in pieces).item() == pytest.approx(expected_loss.item(), abs=1e-12)
    merged = reduce_metrics(merge_all(metrics for _, metrics in pieces))
    assert merged == pytest.approx(reduce_metrics(expected), abs=1e-10)


@pytest.mark.parametrize(
    ("value", "plain", "clipped"),
    # huber of an error e with delta 2: e^2 / 2 up to 2, then 2 (|e| - 1)
    [(1.0, 0.5, 0.5), (2.0, 2.0, 2.0), (5.0, 8.0, 8.0), (-5.0, 8.0, 8.0), (0.5, 0.125, 0.5)],
)
def test_huber_by_hand(value, plain, clipped):
    """Target 0; old value 1.5 and range 0.5: the clipped value of 0.5 is 1."""
    loss, _ = evaluate(row(value), row(1.5), row(0.0), CriticConfig(cliprange_value=None, huber_delta=2.0))
    assert loss.item() == pytest.approx(plain)
    loss, _ = evaluate(row(value), row(1.5), row(0.0), CriticConfig(cliprange_value=0.5, huber_delta=2.0))
    assert loss.item() == pytest.approx(clipped)


def test_huber_gradient_is_bounded():
    values = row(0.5, 2.5, -900.0).requires_grad_()
    loss, _ = evaluate(values, values.detach() + 0, row(0, 0, 0), CriticConfig(cliprange_value=None, huber_delta=2.0))
    loss.backward()
    assert values.grad.tolist()[0] == pytest.approx([0.5 / 3, 2 / 3, -2 / 3])
