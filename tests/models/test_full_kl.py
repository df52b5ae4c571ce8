"""KL over the whole vocabulary: values, gradients, chunks, and logits that forbid tokens."""

from __future__ import annotations

import math

import pytest
import torch
from toy_models import random_policy

from verl.models import full_kl as module
from verl.models.full_kl import full_kl
from verl.models.packed import pack_rows


def whole(p: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
    log_p, log_q = p.log_softmax(-1), q.log_softmax(-1)
    return (log_p.exp() * (log_p - log_q)).sum(-1)


def test_a_hand_computed_divergence():
    """B016"""
    p, q = torch.tensor([[0.5, 0.3, 0.2]]).double().log(), torch.tensor([[0.4, 0.4, 0.2]]).double().log()
    assert full_kl(p, lambda x: x, q, lambda x: x).item() == pytest.approx(0.0252672, abs=1e-7)
    assert full_kl(p, lambda x: x, p, lambda x: x).item() == 0.0


@pytest.mark.parametrize("chunk", [1, 3, 512])
def test_value_and_gradient_do_not_depend_on_the_chunks(monkeypatch, chunk):
    monkeypatch.setattr(module, "CHUNK", chunk)
    g = torch.Generator().manual_seed(0)
    shapes = ((7, 4), (7, 5), (9, 4), (9, 5))
    hidden, other, weight, other_weight = (
        torch.randn(*shape, generator=g, dtype=torch.float64).requires_grad_() for shape in shapes
    )
    found = full_kl(hidden, lambda x: x @ weight.T, other, lambda x: x @ other_weight.T)
    expected = whole(hidden @ weight.T, other @ other_weight.T)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-14)
    scale = torch.arange(7.0, dtype=torch.float64)
    gradients = torch.autograd.grad((found * scale).sum(), (hidden, weight))
    for a, b in zip(gradients, torch.autograd.grad((expected * scale).sum(), (hidden, weight)), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-12)
    assert other.grad is None and other_weight.grad is None


def test_forbidden_tokens():
    """A token that the policy never takes adds nothing and has no gradient; one that only the other excludes: inf."""
    p = torch.tensor([[0.0, 0.0, -math.inf]], dtype=torch.float64, requires_grad=True)
    q = torch.tensor([[1.0, 0.0, 2.0]], dtype=torch.float64)
    kl = full_kl(p, lambda x: x, q, lambda x: x)
    kl.sum().backward()
    log_q = q.log_softmax(-1)[0]
    assert kl.item() == pytest.approx(0.5 * (math.log(0.5) - log_q[0].item() + math.log(0.5) - log_q[1].item()))
    assert p.grad.isfinite().all() and p.grad[0, 2] == 0
    assert full_kl(q, lambda x: x, p.detach(), lambda x: x).item() == math.inf


@pytest.mark.parametrize(("family", "share"), [("llama", False), ("llama", True), ("gemma2", True)])
def test_two_policies(family, share):
    """Tempered like the log-probs, packed and capped like them, and exactly 0 between equal models."""
    policy, reference = (random_policy(family, torch.float64, seed=seed) for seed in (0, 1))
    packed = pack_rows([[3, 4], [3, 4], [5]], [[6, 7, 8], [9], [1, 2]], 4, [0, 0, 1] if share else None)
    log_probs, entropy, kl = policy(packed, 0.7, reference)
    plain = policy(packed, 0.7)
    assert torch.equal(log_probs, plain[0]) and torch.equal(entropy, plain[1])
    expected = whole(policy.logits(policy.predictors(packed), 0.7), reference.logits(reference.predictors(packed), 0.7))
    torch.testing.assert_close(kl, expected, rtol=1e-10, atol=1e-12)
    assert (kl > 0).all() and kl.requires_grad
    assert (policy(packed, 0.7, random_policy(family, torch.float64))[2] == 0).all()
    kl.sum().backward()
    assert all(p.grad is None for p in reference.parameters())
