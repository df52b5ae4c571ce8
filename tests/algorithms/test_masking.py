from __future__ import annotations

import math

import pytest
import torch

from verl.algorithms.masking import (
    count_nonfinite,
    masked_mean,
    masked_sum,
    masked_whiten,
    place_at_last,
    select,
)

NAN, INF = math.nan, math.inf


def f64(*values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


def test_b020_garbage_under_the_mask_changes_nothing_and_gets_no_gradient():
    x = f64(1.0, NAN, INF).requires_grad_()
    mask = torch.tensor([1, 0, 0])
    assert masked_sum(x, mask).item() == 1.0
    assert masked_mean(x, mask).item() == 1.0
    assert masked_whiten(x, mask).tolist() == [0.0, 0.0, 0.0]
    for reduction in (masked_sum, masked_mean):
        (gradient,) = torch.autograd.grad(reduction(x, mask), x)
        assert torch.equal(gradient[1:], f64(0.0, 0.0))
        assert gradient.isfinite().all()


def test_along_a_dimension():
    x = torch.tensor([[1.0, 3.0, NAN], [NAN, NAN, NAN]])
    mask = torch.tensor([[1, 1, 0], [0, 0, 0]])
    assert masked_mean(x, mask, dim=1).tolist() == [2.0, 0.0]
    assert masked_sum(x, mask, dim=1).tolist() == [4.0, 0.0]


def test_b030_whitening_with_a_mask_divides_by_n_minus_one():
    whitened = masked_whiten(f64(1, 2, 3, 100), torch.tensor([1, 1, 1, 0]))
    assert whitened.tolist() == pytest.approx([-1, 0, 1, 0], abs=1e-7)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_b031_whitening_one_none_or_equal_tokens(dtype):
    x = torch.tensor([0.1, 0.1, 0.1, NAN], dtype=dtype)
    for mask in ([1, 0, 0, 0], [0, 0, 0, 0], [1, 1, 0, 0], [1, 1, 1, 0]):
        assert masked_whiten(x, torch.tensor(mask)).tolist() == [0.0] * 4
    large = torch.full((7, 1000), 1234.5678, dtype=dtype)
    assert masked_whiten(large, torch.ones(7, 1000)).abs().max() == 0
    assert masked_whiten(torch.zeros(0, 3), torch.zeros(0, 3)).shape == (0, 3)


def test_whitening_has_mean_0_and_deviation_1():
    x = torch.randn(40, 30, generator=torch.Generator().manual_seed(0)) * 5 + 3
    mask = torch.rand(40, 30, generator=torch.Generator().manual_seed(1)) < 0.5
    kept = masked_whiten(x, mask)[mask]
    assert kept.mean().item() == pytest.approx(0, abs=1e-6)
    assert kept.std().item() == pytest.approx(1, abs=1e-5)


def test_whitening_shows_a_nan():
    assert masked_whiten(torch.tensor([1.0, NAN, 2.0]), torch.tensor([1, 1, 1])).isnan().all()


def test_whitening_into_a_given_place():
    """Also into its own input; blocks of rows do not show."""
    x = torch.randn(5, 3, generator=torch.Generator().manual_seed(2))
    mask = torch.rand(5, 3, generator=torch.Generator().manual_seed(3)) < 0.7
    x[~mask] = NAN
    whole = masked_whiten(x, mask)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("verl.algorithms.masking._ELEMENTS_AT_ONCE", 6)
        torch.testing.assert_close(masked_whiten(x, mask), whole)
        assert masked_whiten(x, mask, out=x) is x
    torch.testing.assert_close(x, whole)


def test_half_precision_is_widened_and_shapes_must_agree():
    assert select(torch.ones(2, dtype=torch.bfloat16), torch.ones(2)).dtype == torch.float32
    assert masked_sum(torch.full((1000,), 100.0, dtype=torch.float16), torch.ones(1000)).item() == 100000
    with pytest.raises(ValueError, match=r"\(2, 1\)"):
        select(torch.ones(2, 3), torch.ones(2, 1))


def test_b007_b008_a_score_lands_on_the_last_trained_token():
    scores = torch.tensor([10.0, 2.0, 3.0, 4.0, NAN])
    mask = torch.tensor([[0, 0, 0], [1, 1, 0], [1, 1, 1], [1, 0, 0], [0, 0, 0]])
    placed = place_at_last(scores, mask)
    assert placed.tolist() == [[0, 0, 0], [0, 2, 0], [0, 0, 3], [4, 0, 0], [0, 0, 0]]
    assert masked_sum(placed, mask, dim=1).tolist() == [0, 2, 3, 4, 0]
    assert place_at_last(torch.ones(1), torch.tensor([[1, 0, 1, 0]])).tolist() == [[0, 0, 1, 0]]
    assert place_at_last(torch.ones(2), torch.ones(2, 0)).shape == (2, 0)


def test_count_nonfinite():
    assert count_nonfinite(torch.tensor([1.0, NAN, INF, NAN]), torch.tensor([1, 1, 1, 0])) == 2
