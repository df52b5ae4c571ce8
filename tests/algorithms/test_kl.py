from __future__ import annotations

import math

import pytest
import torch

from verl.algorithms.kl import (
    KL_ESTIMATORS,
    ZERO_GRADIENT_KINDS,
    apply_kl_penalty,
    check_kl_loss,
    kl_estimate,
)
from verl.errors import ConfigError

NAN, INF = math.nan, math.inf
ALL_KINDS = [kind + plus for kind in KL_ESTIMATORS for plus in ("", "+")]


def row(*values: float) -> torch.Tensor:
    return torch.tensor([values], dtype=torch.float64)


def estimate(log_probs: torch.Tensor, ref: torch.Tensor, kind: str) -> torch.Tensor:
    return kl_estimate(log_probs, ref, torch.ones_like(log_probs, dtype=torch.bool), kind)


@pytest.mark.parametrize("plus", ["", "+"])
@pytest.mark.parametrize(
    ("kinds", "expected"),
    [
        (("k1", "kl"), (1.0, -1.0)),
        (("abs",), (1.0, 1.0)),
        (("k2", "mse"), (0.5, 0.5)),
        (("k3", "low_var_kl"), (0.367879, 0.718282)),
    ],
)
def test_b016_values_and_signs(kinds, expected, plus):
    for kind in kinds:
        got = estimate(row(-1.0, -2.0), row(-2.0, -1.0), kind + plus)
        assert got.tolist()[0] == pytest.approx(expected, abs=1e-6)


def test_b016_expectations_over_a_small_vocabulary():
    p, q = (torch.tensor(x, dtype=torch.float64) for x in ([0.5, 0.3, 0.2], [0.4, 0.4, 0.2]))
    mean = {kind: float((p * estimate(p.log()[None], q.log()[None], kind)[0]).sum()) for kind in ("k1", "k2", "k3")}
    assert mean["k1"] == pytest.approx(0.0252672, abs=1e-7)
    assert mean["k3"] == pytest.approx(0.0252672, abs=1e-7)
    assert mean["k2"] == pytest.approx(0.0248624, abs=1e-7)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_b016_k3_is_never_negative(dtype):
    exponents = torch.logspace(-12, 3, 2000, dtype=dtype)
    log_probs = torch.cat([exponents, -exponents, torch.tensor([0.0, 1e9, -1e9], dtype=dtype)])[None]
    k3 = estimate(log_probs, torch.zeros_like(log_probs), "k3")
    assert (k3 >= 0).all()
    assert k3.isfinite().all()


def expected_gradient(kind: str) -> torch.Tensor:
    """Gradient in the logits of E_p[loss], the samples' distribution held fixed: what training on samples follows."""
    logits = torch.tensor([0.3, -0.2, 0.9, 0.1], dtype=torch.float64, requires_grad=True)
    log_p = logits.log_softmax(0)
    log_q = torch.tensor([0.1, 0.5, -0.3, 0.0], dtype=torch.float64).log_softmax(0)
    loss = (log_p.detach().exp() * estimate(log_p[None], log_q[None], kind)[0]).sum()
    return torch.autograd.grad(loss, logits)[0]


def divergence_gradient(divergence) -> torch.Tensor:
    logits = torch.tensor([0.3, -0.2, 0.9, 0.1], dtype=torch.float64, requires_grad=True)
    log_q = torch.tensor([0.1, 0.5, -0.3, 0.0], dtype=torch.float64).log_softmax(0)
    return torch.autograd.grad(divergence(logits.log_softmax(0), log_q), logits)[0]


@pytest.mark.parametrize("kind", ALL_KINDS)
def test_the_gradient_that_the_docstring_promises(kind):
    reverse = divergence_gradient(lambda p, q: (p.exp() * (p - q)).sum())
    forward = divergence_gradient(lambda p, q: (q.exp() * (q - p)).sum())
    variation = divergence_gradient(lambda p, q: (p.exp() - q.exp()).abs().sum())  # 2 TV
    base = {
        "k1": torch.zeros(4, dtype=torch.float64),
        "abs": variation,
        "k2": reverse,
        "k3": forward,
    }
    names = {"kl": "k1", "mse": "k2", "low_var_kl": "k3"}
    expected = reverse if kind.endswith("+") else base[names.get(kind, kind)]
    torch.testing.assert_close(expected_gradient(kind), expected, atol=1e-12, rtol=0)


def test_k1_is_refused_as_a_loss_and_its_straight_through_form_is_not():
    for kind in ("k1", "kl"):
        with pytest.raises(ConfigError, match="zero in expectation"):
            check_kl_loss(kind)
    for kind in ("k1+", "kl+", "k2", "k3", "abs", "low_var_kl+"):
        check_kl_loss(kind)


@pytest.mark.parametrize("kind", ALL_KINDS)
def test_b020_padding_has_no_value_and_no_gradient(kind):
    log_probs = row(-1.0, NAN, INF, -INF).requires_grad_()
    ref = row(-2.0, 1.0, NAN, -INF).requires_grad_()
    mask = torch.tensor([[1, 0, 0, 0]])
    kl = kl_estimate(log_probs, ref, mask, kind)
    assert kl[0, 1:].tolist() == [0, 0, 0]
    kl.sum().backward()
    assert log_probs.grad[0, 1:].tolist() == [0, 0, 0]
    assert log_probs.grad.isfinite().all()
    assert ref.grad is None


@pytest.mark.parametrize("kind", ALL_KINDS)
def test_far_apart_log_probs_stay_finite_and_nan_surfaces(kind):
    for dtype in (torch.float32, torch.float64):
        log_probs = torch.tensor([[-1000.0, -0.1, -500.0]], dtype=dtype, requires_grad=True)
        kl = estimate(log_probs, torch.tensor([[-0.1, -1000.0, -0.1]], dtype=dtype), kind)
        kl.sum().backward()
        assert kl.isfinite().all()
        assert log_probs.grad.isfinite().all()
    assert estimate(row(NAN), row(-1.0), kind).isnan().all()
    assert estimate(row(-1.0), row(NAN), kind).isnan().all()
    if kind not in {*ZERO_GRADIENT_KINDS, "abs"}:  # whose slope knows no size; else the optimizer leaves the step out
        log_probs = row(-1.0).requires_grad_()
        estimate(log_probs, row(NAN), kind).sum().backward()
        assert log_probs.grad.isnan().all()


@pytest.mark.parametrize("kind", ["k2", "k3"])
def test_gradcheck(kind):
    log_probs = row(-0.5, -2.0, -1.0).requires_grad_()
    assert torch.autograd.gradcheck(lambda x: estimate(x, row(-1.0, -1.0, -0.2), kind), log_probs)


def test_unknown_kind():
    with pytest.raises(ConfigError, match="k4"):
        estimate(row(0.0), row(0.0), "k4")


def test_b019_kl_in_the_reward():
    mask = torch.tensor([[1, 1, 0], [0, 0, 0]])
    scores = torch.tensor([[0.0, 1.0, NAN], [INF, NAN, 0.0]], dtype=torch.float64)
    log_probs = torch.tensor([[-1.0, -2.0, NAN], [NAN, 0.0, 1.0]], dtype=torch.float64)
    ref = torch.tensor([[-1.5, -1.0, INF], [0.0, NAN, 1.0]], dtype=torch.float64)
    penalty = apply_kl_penalty(scores, log_probs, ref, mask, 0.1, "kl")
    assert penalty.token_level_rewards.flatten().tolist() == pytest.approx([-0.05, 1.1, 0, 0, 0, 0], abs=1e-12)
    assert penalty.sequence_kl.tolist() == [-0.25, 0.0]
    assert penalty.mean_kl.value() == -0.25  # the empty row is no row


def test_b025_the_kl_does_not_change_with_more_padding():
    narrow, ref = row(-1.0, -2.0), row(-1.5, -1.0)
    wide, wide_ref = row(-1.0, -2.0, 1.0, 1.0, 1.0), row(-1.5, -1.0, 0.0, 0.0, 0.0)
    a = apply_kl_penalty(narrow * 0, narrow, ref, torch.ones(1, 2), 0.1, "k3").mean_kl
    b = apply_kl_penalty(wide * 0, wide, wide_ref, torch.tensor([[1, 1, 0, 0, 0]]), 0.1, "k3").mean_kl
    assert a.value() == b.value()


@pytest.mark.parametrize("kind", ["full", "full+"])
def test_the_full_kl_is_its_column_and_keeps_the_true_gradient(kind):
    logits = torch.tensor([0.3, -0.2, 0.9, 0.1], dtype=torch.float64, requires_grad=True)
    log_p = logits.log_softmax(0)
    log_q = torch.tensor([0.1, 0.5, -0.3, 0.0], dtype=torch.float64).log_softmax(0)
    divergence = (log_p.exp() * (log_p - log_q)).sum()
    column = torch.stack([divergence, torch.tensor(NAN, dtype=torch.float64)])[
        None
    ]  # (1, 2), the second token is not trained
    mask = torch.tensor([[1, 0]])
    kl = kl_estimate(column.detach(), None, mask, kind, column)
    assert kl.tolist() == [[divergence.item(), 0.0]]
    expected = divergence_gradient(lambda p, q: (p.exp() * (p - q)).sum())
    torch.testing.assert_close(torch.autograd.grad(kl[0, 0], logits)[0], expected)
    check_kl_loss(kind)
    penalty = apply_kl_penalty(column.detach() * 0 + 1, column.detach(), None, mask, 0.5, kind, column.detach())
    assert penalty.token_level_rewards[0, 0].item() == 1 - 0.5 * divergence.item()


def test_a_missing_column_is_an_error():
    with pytest.raises(ValueError, match="no full_kl"):
        kl_estimate(row(0.0), row(0.0), row(1.0).bool(), "full")
    with pytest.raises(ValueError, match="no ref_log_probs"):
        kl_estimate(row(0.0), None, row(1.0).bool(), "k3")
