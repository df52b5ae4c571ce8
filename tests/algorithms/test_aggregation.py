from __future__ import annotations

import math

import pytest
import torch

from verl.algorithms.aggregation import (
    LOSS_AGGREGATIONS,
    Denominators,
    aggregate_loss,
    count_denominators,
    loss_metric,
)
from verl.algorithms.metric import merge_all, reduce_metrics

NAN = math.nan
# B033: sequence 1 has 2 tokens of loss 1, sequence 2 has 6 of loss 3.
LOSS = torch.tensor([[1, 1, NAN, NAN, NAN, NAN], [3, 3, 3, 3, 3, 3]], dtype=torch.float64)
MASK = torch.tensor([[1, 1, 0, 0, 0, 0], [1] * 6], dtype=torch.bool)
EXPECTED = {
    "token-mean": 20 / 8,
    "seq-mean-token-sum": 20 / 2,
    "seq-mean-token-mean": (1 + 3) / 2,
    "seq-mean-token-sum-norm": 20 / (2 * 10),
    "token-sum": 20,
}


def test_every_mode_has_a_hand_computed_value():
    assert EXPECTED.keys() == LOSS_AGGREGATIONS.keys()
    whole = count_denominators(MASK, 10)
    assert whole == Denominators(8, 2, 10)
    for mode, value in EXPECTED.items():
        assert aggregate_loss(LOSS, MASK, mode, whole).item() == pytest.approx(value, abs=1e-12)


@pytest.mark.parametrize("mode", LOSS_AGGREGATIONS)
def test_b033_micro_batches_add_up(mode):
    whole = count_denominators(MASK, 10)
    loss = LOSS.clone().requires_grad_()
    aggregate_loss(loss, MASK, mode, whole).backward()
    pieces = LOSS.clone().requires_grad_()
    total, parts = 0.0, []
    for row, width in ((0, 3), (1, 6)):  # each micro-batch padded to its own width
        part, mask = pieces[row : row + 1, :width], MASK[row : row + 1, :width]
        micro = aggregate_loss(part, mask, mode, whole)
        micro.backward()
        total += micro.item()
        parts.append({"loss": loss_metric(micro, mask, whole)})
    assert total == pytest.approx(EXPECTED[mode], abs=1e-12)
    torch.testing.assert_close(pieces.grad, loss.grad, rtol=0, atol=1e-15)
    assert (loss.grad[~MASK] == 0).all()
    assert reduce_metrics(merge_all(parts)) == {"loss": pytest.approx(EXPECTED[mode], abs=1e-12)}


def test_b034_ranks_with_averaged_gradients():
    ranks = [count_denominators(MASK[i : i + 1], 10) for i in (0, 1)]
    whole = Denominators(sum(rank.tokens for rank in ranks), sum(rank.rows for rank in ranks), 10)
    assert whole == Denominators(8, 2, 10)
    losses = [aggregate_loss(LOSS[i : i + 1], MASK[i : i + 1], "token-mean", whole).item() * 2 for i in (0, 1)]
    assert losses == [0.5, 4.5]
    assert sum(losses) / 2 == 2.5


@pytest.mark.parametrize("mode", ["token-mean", "seq-mean-token-mean"])
def test_b036_masked_truncated_rows_are_in_no_denominator(mode):
    loss = torch.ones(2, 8, dtype=torch.float64, requires_grad=True)
    mask = torch.zeros(2, 8, dtype=torch.bool)
    mask[0, :4] = True  # the second response, 8 tokens, was cut: masked
    assert aggregate_loss(loss, mask, mode, count_denominators(mask, 8)).item() == 1.0


@pytest.mark.parametrize("mode", LOSS_AGGREGATIONS)
def test_b036_all_masked_gives_zero_with_zero_gradient(mode):
    loss = torch.full((2, 8), NAN, dtype=torch.float64, requires_grad=True)
    mask = torch.zeros(2, 8, dtype=torch.bool)
    nothing = count_denominators(mask, 8)
    value = aggregate_loss(loss, mask, mode, nothing)
    value.backward()
    assert value.item() == 0.0
    assert torch.equal(loss.grad, torch.zeros(2, 8, dtype=torch.float64))
    assert reduce_metrics({"loss": loss_metric(value, mask, nothing)}) == {}


@pytest.mark.parametrize("mode", ["token-mean", "seq-mean-token-mean"])
def test_b037_filler_rows_are_in_no_denominator(mode):
    loss = torch.ones(2, 8, dtype=torch.float64)
    loss[1] = 0.0
    mask = torch.ones(2, 8, dtype=torch.bool)
    mask[1] = False
    assert aggregate_loss(loss, mask, mode, count_denominators(mask, 8)).item() == 1.0


def test_loss_metric_is_the_mean_over_optimizer_steps():
    parts = []
    for factor, rows in ((1.0, 2), (3.0, 1)):
        mask = MASK[:rows]
        whole = count_denominators(mask, 10)
        loss = aggregate_loss(LOSS[:rows] * factor, mask, "token-mean", whole)
        parts.append({"loss": loss_metric(loss, mask, whole)})
    assert reduce_metrics(merge_all(parts)) == {"loss": pytest.approx((2.5 + 3.0) / 2)}


def test_a_nan_loss_is_not_hidden():
    loss = torch.tensor([[1.0, NAN]])
    whole = count_denominators(torch.ones(1, 2), 2)
    value = aggregate_loss(loss, torch.ones(1, 2), "token-mean", whole)
    assert math.isnan(reduce_metrics({"loss": loss_metric(value, torch.ones(1, 2), whole)})["loss"])


def test_refusals():
    with pytest.raises(ValueError, match="token-median"):
        aggregate_loss(LOSS, MASK, "token-median", count_denominators(MASK, 10))
    with pytest.raises(ValueError, match="above 0"):
        count_denominators(MASK, 0)
