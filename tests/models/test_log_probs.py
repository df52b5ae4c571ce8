"""Log-probs and entropy of response tokens from hidden states."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor
from transformers import AutoConfig

from verl.models import log_probs
from verl.models.log_probs import PLAIN, LogitRule, logit_rule, project, response_log_probs
from verl.models.rows import ALL_ROWS, IN_BLOCKS, RowRule

RULES = (ALL_ROWS, IN_BLOCKS)
LOGIT_RULES = (PLAIN, LogitRule(0.25), LogitRule(softcap=1.5), LogitRule(2.0, 3.0))


def of_logits(logits: Tensor, targets: list[int], temperature: float) -> tuple[Tensor, Tensor]:
    """With the unit matrix as projection the hidden states are the logits."""
    size = logits.shape[1]
    return response_log_probs(
        logits, torch.eye(size, dtype=logits.dtype), None, torch.tensor(targets), temperature, ALL_ROWS
    )


@pytest.mark.parametrize(
    ("temperature", "expected"),
    [(0.5, -0.142932), (1.0, -0.407606), (0.0, -0.407606), (1e-6, 0.0)],
)
def test_temperature_divides_the_logits(temperature: float, expected: float) -> None:
    """B041, B043; greedy (0) is untempered."""
    found, entropy = of_logits(torch.tensor([[2.0, 1.0, 0.0]]), [0], temperature)
    assert found.item() == pytest.approx(expected, abs=1e-6)
    tempered = torch.tensor([2.0, 1.0, 0.0], dtype=torch.float64) / (temperature or 1.0)
    p = tempered.softmax(0)
    assert entropy.item() == pytest.approx(float(-(p * tempered.log_softmax(0)).sum()), abs=1e-6)


def test_tiny_temperature_stays_finite_backwards_too() -> None:
    """B043: also for the token that is all but impossible."""
    logits = torch.tensor([[2.0, 1.0, 0.0]] * 2, requires_grad=True)
    found, entropy = of_logits(logits, [0, 2], 1e-6)
    assert found.tolist() == pytest.approx([0.0, -2e6], rel=1e-6) and entropy.tolist() == [0.0, 0.0]
    (found.sum() + entropy.sum()).backward()
    assert logits.grad is not None and logits.grad.isfinite().all()


@pytest.mark.parametrize(
    ("logits", "expected"), [([0.0, -math.inf], 0.0), ([0.0, 0.0, -math.inf], 0.693147), ([3e38, -3e38], 0.0)]
)
def test_entropy_with_impossible_tokens(logits: list[float], expected: float) -> None:
    """B024. A projection cannot pass on infinities, so this one is given the logits as they are."""
    rows = torch.tensor([logits], requires_grad=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(log_probs, "project_rows", lambda hidden, *_: hidden.clone())
        found, entropy = of_logits(rows, [0], 1.0)
        assert entropy.item() == pytest.approx(expected, abs=1e-6)
        entropy.sum().backward()
    assert found.isfinite().all() and rows.grad is not None and rows.grad.isfinite().all()


def test_entropy_of_nothing_possible_is_not_zero() -> None:
    assert (
        log_probs._entropy(*(f(torch.full((1, 3), -math.inf), -1) for f in (torch.log_softmax, torch.softmax)))
        .isnan()
        .all()
    )


@pytest.mark.parametrize("temperature", [0.5, 1.0, 0.0])
@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize(
    ("rule", "logits_of"), [(r, x) for r in RULES for x in LOGIT_RULES if r == ALL_ROWS or x == PLAIN]
)
def test_gradcheck(temperature: float, with_bias: bool, rule: RowRule, logits_of: LogitRule) -> None:
    generator = torch.Generator().manual_seed(1)
    hidden, weight, bias = (
        torch.randn(*shape, generator=generator, dtype=torch.float64, requires_grad=True)
        for shape in ((5, 3), (7, 3), (7,))
    )
    targets = torch.tensor([0, 6, 3, 3, 1])
    inputs = (hidden, weight, bias if with_bias else None)
    assert torch.autograd.gradcheck(
        lambda h, w, b: response_log_probs(h, w, b, targets, temperature, rule, logits_of), inputs, atol=1e-7
    )


@pytest.mark.parametrize("logits_of", LOGIT_RULES)
def test_scale_and_cap_come_before_the_temperature(logits_of: LogitRule) -> None:
    """By hand: 5 becomes cap * tanh(scale * 5 / cap), then the temperature divides."""
    x, cap = torch.tensor([[5.0, -1.0]], dtype=torch.float64), logits_of.softcap
    found = project(x, torch.eye(2, dtype=torch.float64), None, 0.5, ALL_ROWS, logits_of)
    by_hand = [logits_of.scale * 5, logits_of.scale * -1]
    by_hand = by_hand if cap is None else [cap * math.tanh(value / cap) for value in by_hand]
    assert found[0].tolist() == pytest.approx([value / 0.5 for value in by_hand], rel=1e-12)


def test_rules_of_configurations() -> None:
    assert logit_rule(AutoConfig.for_model("llama")) == PLAIN
    assert logit_rule(AutoConfig.for_model("gemma2")) == LogitRule(softcap=30.0)
    assert logit_rule(AutoConfig.for_model("cohere")) == LogitRule(0.0625)
    assert logit_rule(AutoConfig.for_model("granite", logits_scaling=8.0)) == LogitRule(0.125)
    assert logit_rule(AutoConfig.for_model("gemma3")) == PLAIN  # text and image: of its text part


@pytest.mark.parametrize("chunk", [1, 3, 8, 512])
@pytest.mark.parametrize("what", ["log_probs", "entropy", "both"])
def test_chunks_give_what_one_matrix_gives(chunk: int, what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(log_probs, "CHUNK", chunk)
    monkeypatch.setattr(log_probs, "CACHED", 7 * -(-chunk // 2))
    monkeypatch.setattr(log_probs, "SLICED", 0)
    monkeypatch.setattr(log_probs, "NARROWEST", min(chunk, 4))  # 11 words in slices of 1, 3 or 4
    generator = torch.Generator().manual_seed(2)
    leaves = [torch.randn(*shape, generator=generator, requires_grad=True) for shape in ((20, 6), (11, 6), (11,))]
    hidden, weight, bias = leaves
    targets = torch.randint(0, 11, (20,), generator=generator)
    factors = torch.randn(2, 20, generator=generator)
    factors[0] *= what != "entropy"
    factors[1] *= what != "log_probs"

    def gradients(found: Tensor, entropy: Tensor) -> list[Tensor]:
        return list(torch.autograd.grad((found * factors[0] + entropy * factors[1]).sum(), leaves))

    found, entropy = response_log_probs(hidden, weight, bias, targets, 0.7, ALL_ROWS)
    log_p = torch.log_softmax((hidden @ weight.T + bias) / 0.7, -1)
    plain, plain_entropy = log_p.gather(1, targets[:, None])[:, 0], -(log_p.exp() * log_p).sum(-1)
    torch.testing.assert_close(found, plain, atol=1e-5, rtol=0)
    torch.testing.assert_close(entropy, plain_entropy, atol=1e-5, rtol=0)
    for ours, theirs in zip(gradients(found, entropy), gradients(plain, plain_entropy), strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-5)


def test_log_probs_of_a_bfloat16_model_are_float32() -> None:
    """B047: -5.3 in bfloat16 would be -5.3125."""
    hidden, weight = torch.randn(9, 8).bfloat16(), torch.randn(16, 8).bfloat16()
    leaf = weight.clone().requires_grad_()
    found, entropy = response_log_probs(hidden, leaf, None, torch.arange(9), 1.0, ALL_ROWS)
    assert found.dtype == entropy.dtype == torch.float32
    assert not torch.equal(found, found.bfloat16().float())
    found.sum().backward()
    assert leaf.grad is not None and leaf.grad.dtype == torch.bfloat16


def test_frozen_inputs_and_no_tokens() -> None:
    hidden = torch.randn(0, 4, requires_grad=True)
    found, entropy = response_log_probs(
        hidden, torch.randn(6, 4), None, torch.empty(0, dtype=torch.int64), 1.0, ALL_ROWS
    )
    assert found.shape == entropy.shape == (0,)
    found.sum().backward()
    assert hidden.grad is not None and hidden.grad.shape == (0, 4)


def test_project_leaves_its_inputs_alone() -> None:
    """B055: twice the same, and one temperature a row is the same division as one for all."""
    hidden, weight, bias = torch.randn(5, 4), torch.randn(6, 4), torch.randn(6)
    before = [tensor.clone() for tensor in (hidden, weight, bias)]
    for rule in RULES:
        first = project(hidden, weight, bias, 0.5, rule)
        assert first.shape == (5, 6)
        assert torch.equal(first, project(hidden, weight, bias, 0.5, rule))
        assert torch.equal(first, project(hidden, weight, bias, torch.full((5,), 0.5), rule))
        torch.testing.assert_close(first, (hidden @ weight.T + bias) / 0.5)
        mixed = project(hidden, weight, bias, torch.tensor([0.5, 0.0, 1.0, 2.0, 0.5]), rule)
        torch.testing.assert_close(mixed[1:4] * torch.tensor([[1.0], [1.0], [2.0]]), (hidden @ weight.T + bias)[1:4])
    assert all(map(torch.equal, before, (hidden, weight, bias)))
