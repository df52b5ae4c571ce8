from __future__ import annotations

import math

import pytest
import torch

from verl.algorithms.entropy import entropy_from_logits

INF = math.inf


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize(
    ("logits", "expected"),
    [
        ([0, -INF], 0.0),
        ([0, 0, -INF], math.log(2)),
        ([0, 0, 0, 0], math.log(4)),
        ([65504, -65504], 0.0),
        ([65504, 65504], math.log(2)),
    ],
)
def test_b024_entropy(logits, expected, dtype):
    got = entropy_from_logits(torch.tensor(logits, dtype=dtype))
    assert got.item() == pytest.approx(expected, abs=1e-6)
    assert got.dtype == (dtype if dtype.itemsize >= 4 else torch.float32)


def test_b024_gradient_is_finite_and_zero_at_forbidden_tokens():
    logits = torch.tensor([[0.5, -INF, 1.0], [-INF, 2.0, -INF], [3e38, -3e38, 0.0]], requires_grad=True)
    entropy_from_logits(logits).sum().backward()
    assert logits.grad.isfinite().all()
    assert (logits.grad[logits == -INF] == 0).all()
    assert logits.grad[0, 0] != 0


def test_b024_no_token_left_is_invalid_not_certain():
    logits = torch.tensor([[-INF, -INF], [0.0, 0.0]], requires_grad=True)
    entropy = entropy_from_logits(logits)
    assert entropy[0].isnan()
    assert entropy[1].item() == pytest.approx(math.log(2))
    entropy[1].backward()
    assert (logits.grad == 0).all()


def test_a_broken_logit_surfaces():
    assert entropy_from_logits(torch.tensor([0.0, math.nan])).isnan()
    assert entropy_from_logits(torch.tensor([0.0, INF])).isnan()


def test_against_the_definition_and_b025_never_negative():
    logits = torch.randn(50, 40, generator=torch.Generator().manual_seed(0), dtype=torch.float64) * 20
    log_p = logits.log_softmax(-1)
    torch.testing.assert_close(entropy_from_logits(logits), -(log_p.exp() * log_p).sum(-1), atol=1e-12, rtol=1e-12)
    assert (entropy_from_logits(logits.float() * 5) >= 0).all()


def test_gradcheck():
    logits = torch.randn(3, 5, generator=torch.Generator().manual_seed(1), dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(entropy_from_logits, logits)
