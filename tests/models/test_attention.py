"""Attention as batched matmuls: the right numbers, the same bits, and no feature dropped in silence."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import settings as examples
from hypothesis import strategies as st
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface

from verl.errors import ModelError
from verl.models.attention import (
    ATTENTION_NAME,
    KEY_BLOCK,
    AttentionRule,
    attention_forward,
    attention_probs,
    block_attention,
    mask_bias,
    round_up,
    wide_dtype,
)
from verl.models.rows import choose_row_rule

DTYPES = (torch.float32, torch.bfloat16)


class Recorder:
    """An attention context that says what it was asked."""

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, rule: AttentionRule) -> Tensor:
        self.asked = layer, tuple(query.shape), tuple(key.shape), rule
        return query.transpose(0, 1)


class Layer(nn.Module):
    layer_idx = 3


def heads(tokens: int = 5) -> tuple[Tensor, Tensor, Tensor]:
    return torch.randn(1, 4, tokens, 16), torch.randn(1, 2, tokens, 16), torch.randn(1, 2, tokens, 16)


def test_round_up_and_wide_dtype() -> None:
    assert [round_up(n, 8) for n in (0, 1, 8, 9)] == [0, 8, 8, 16]
    assert wide_dtype(torch.bfloat16) == torch.float32 == wide_dtype(torch.float32)
    assert wide_dtype(torch.float64) == torch.float64


@pytest.mark.parametrize(("scaling", "scale"), [(None, 0.25), (0.5, 0.5), (1.0, 1.0)])
def test_the_context_is_asked(scaling: float | None, scale: float) -> None:
    context, (query, key, value), sinks = Recorder(), heads(), torch.zeros(4)
    asked = {"sliding_window": 7, "softcap": 30.0, "s_aux": sinks}
    out, weights = attention_forward(Layer(), query, key, value, None, scaling, 0.0, context, **asked)
    assert context.asked == (3, (4, 5, 16), (2, 5, 16), AttentionRule(scale, 7, 30.0, sinks))
    assert weights is None and torch.equal(out, query.transpose(1, 2))


def test_dropout_and_a_missing_context_are_refused() -> None:
    with pytest.raises(ModelError, match="attention dropout") as caught:
        attention_forward(Layer(), *heads(), None, dropout=0.1, attention_context=Recorder())
    assert caught.value.value == 0.1
    with pytest.raises(ModelError, match="Layer was called without an attention context"):
        attention_forward(Layer(), *heads(), None)


def test_transformers_finds_it_and_builds_no_mask() -> None:
    assert AttentionInterface()[ATTENTION_NAME] is attention_forward
    assert AttentionMaskInterface()[ATTENTION_NAME](1, 10, 10, device="cpu") is None


def plain_attention(query: Tensor, key: Tensor, value: Tensor, keep: Tensor, rule: AttentionRule) -> Tensor:
    """Written out head by head: query (N, K, G, t, D), key and value (N, K, L, D), keep (N, t, L)."""
    scores = torch.einsum("nkgtd,nkld->nkgtl", query.double(), key.double()) * rule.scale
    if rule.softcap is not None:
        scores = rule.softcap * (scores / rule.softcap).tanh()
    weights = scores.exp() * keep[:, None, None]
    total = weights.sum(-1, keepdim=True)
    if rule.sinks is not None:
        total = total + rule.sinks.double().view(1, *query.shape[1:3], 1, 1).exp()
    return torch.einsum("nkgtl,nkld->nkgtd", weights / total, value.double())


def attention(query: Tensor, key: Tensor, value: Tensor, keep: Tensor, rule: AttentionRule) -> Tensor:
    """Ours on the same shapes."""
    flat = query.flatten(0, 1).flatten(1, 2), key.flatten(0, 1).transpose(1, 2).contiguous(), value.flatten(0, 1)
    return block_attention(*flat, mask_bias(keep, query.dtype), rule).view(query.shape)


RULES = [
    AttentionRule(0.3),
    AttentionRule(0.3, softcap=0.5),
    AttentionRule(0.3, sinks=torch.tensor([0.5, -2.0, 4.0, 0.0])),
    AttentionRule(0.3, softcap=2.0, sinks=torch.tensor([0.5, -2.0, 4.0, 0.0])),
]


def random_heads(length: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """3 rows of 2 key-value heads with 2 query heads each, 8 tokens, heads of 8 numbers, and what may be seen."""
    generator = torch.Generator().manual_seed(length)
    query = torch.randn(3, 2, 2, 8, 8, generator=generator).to(dtype)
    key, value = (torch.randn(3, 2, length, 8, generator=generator).to(dtype) for _ in "kv")
    keep = torch.rand(3, 8, length, generator=generator) < 0.7
    keep[:, :, length // 2] = True
    return query, key, value, keep


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("length", [1, 5, 128, 129, 300])
@pytest.mark.parametrize(("dtype", "within"), [(torch.float64, 1e-12), (torch.float32, 1e-5), (torch.bfloat16, 3e-2)])
def test_it_is_softmax_attention(length: int, dtype: torch.dtype, within: float, rule: AttentionRule) -> None:
    inputs = random_heads(length, dtype)
    out = attention(*inputs, rule)
    assert out.dtype == dtype
    torch.testing.assert_close(out.double(), plain_attention(*inputs, rule), atol=within, rtol=0)


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("length", [9, 150])
def test_gradients_are_those_of_the_plain_form(length: int, rule: AttentionRule) -> None:
    *inputs, keep = random_heads(length, torch.float64)
    weights = torch.linspace(-1, 2, inputs[0].numel(), dtype=torch.float64).view(inputs[0].shape)
    found = []
    for form in (attention, plain_attention):
        leaves = [x.clone().requires_grad_() for x in inputs]
        own = rule
        if rule.sinks is not None:
            leaves.append(rule.sinks.double().requires_grad_())
            own = replace(rule, sinks=leaves[-1])
        found.append(torch.autograd.grad((form(*leaves[:3], keep, own) * weights).sum(), leaves))
    for ours, theirs in zip(*found, strict=True):
        assert theirs.any()
        torch.testing.assert_close(ours, theirs, atol=1e-12, rtol=1e-10)


def test_sinks_of_heads_filled_up_with_rows_that_nobody_reads() -> None:
    """As the engine asks: one token, 3 query heads for each of 2 key-value heads, filled up to 8 rows."""
    scores, bias = torch.randn(4, 2, 8, 1, 20), torch.zeros(4, 1, 1, 1, 20)
    rule = AttentionRule(1.0, sinks=torch.randn(6))
    filled = attention_probs(scores, bias, rule, torch.float32)
    exact = attention_probs(scores[:, :, :3].contiguous(), bias, rule, torch.float32)
    assert torch.equal(filled[:, :, :3], exact) and filled.isfinite().all()


@examples(max_examples=40)
@given(
    length=st.integers(1, 420),
    padding=st.integers(0, 200),
    rows=st.sampled_from([8, 24, 96]),
    size=st.sampled_from([8, 64, 80]),
    dtype=st.sampled_from(DTYPES),
    softcap=st.sampled_from([None, 20.0]),
    sunk=st.booleans(),
)
def test_bits_do_not_depend_on_key_padding_or_on_other_rows(
    length: int, padding: int, rows: int, size: int, dtype: torch.dtype, softcap: float | None, sunk: bool
) -> None:
    # key buckets of both sides are multiples of 32
    bucket, padded = round_up(length, 32), round_up(length + padding, 32)
    generator = torch.Generator().manual_seed(1000 * length + padding)
    query = torch.randn(2, rows, size, generator=generator).to(dtype)
    key, value = (torch.randn(2, padded, size, generator=generator).to(dtype) for _ in "kv")
    key_t, sinks = key.transpose(1, 2).contiguous(), torch.randn(1, generator=generator) if sunk else None
    rule = AttentionRule(0.125, None, softcap, sinks)
    keep = (torch.arange(padded) < length)[None, None].expand(2, 1, padded)
    shorter = key_t[1:, :, :bucket].contiguous()
    few = query[1:, None, :8], shorter[:, None], value[1:, None, :bucket], keep[1:, :, :bucket]
    many = query[:, None], key_t[:, None], value[:, None], keep
    alone, beside = (
        block_attention(q.flatten(0, 1), k.flatten(0, 1), v.flatten(0, 1), mask_bias(seen, dtype), rule)
        for q, k, v, seen in (few, many)
    )
    beside = beside[1:, :8]
    torch.testing.assert_close(alone, beside, atol=1e-4 if dtype == torch.float32 else 2e-2, rtol=0)
    if choose_row_rule(nn.Linear(64, 64).to(dtype)).proven:
        assert torch.equal(alone, beside)


@examples(max_examples=40)
@given(
    keys=st.integers(1, 12).map(lambda n: 32 * n),
    rows=st.sampled_from([8, 24, 200]),
    batch=st.sampled_from([1, 3, 24]),
    size=st.sampled_from([8, 16, 64, 80, 128]),
    dtype=st.sampled_from(DTYPES),
)
def test_keys_may_be_kept_in_blocks(keys: int, rows: int, batch: int, size: int, dtype: torch.dtype) -> None:
    """The engine keeps them so: scores of 128 keys at a time are those of all keys at once, as are the outputs."""
    generator = torch.Generator().manual_seed(keys + rows)
    query = torch.randn(batch, rows, size, generator=generator).to(dtype)
    stored = torch.randn(round_up(keys, KEY_BLOCK) // KEY_BLOCK, batch, size, KEY_BLOCK, generator=generator).to(dtype)
    value = torch.randn(batch, keys, size, generator=generator).to(dtype)
    at_once = torch.bmm(query, torch.cat(list(stored), -1)[..., :keys].contiguous())
    by_block = torch.cat([torch.bmm(query[:, :8].contiguous(), block) for block in stored], -1)[..., :keys]
    if not choose_row_rule(nn.Linear(64, 64).to(dtype)).proven:
        torch.testing.assert_close(by_block, at_once[:, :8], atol=1e-4 if dtype == torch.float32 else 0.5, rtol=0)
        return
    assert torch.equal(by_block, at_once[:, :8])
    bias, rule = torch.zeros(batch, 1, keys), AttentionRule(size**-0.5)
    expected = block_attention(query, torch.cat(list(stored), -1)[..., :keys].contiguous(), value, bias, rule)[:, :8]
    probs, out = attention_probs(by_block, bias, rule, dtype), torch.zeros(())
    for start in range(0, keys, KEY_BLOCK):
        part = slice(start, start + KEY_BLOCK)
        out = out + torch.bmm(probs[..., part].contiguous(), value[:, part].contiguous()).to(wide_dtype(dtype))
    assert torch.equal(out.to(dtype), expected)


@pytest.mark.parametrize("length", [64, 200])
@pytest.mark.parametrize("rule", RULES[:3:2])
def test_masked_keys_get_no_gradient_and_no_weight(length: int, rule: AttentionRule) -> None:
    query = torch.randn(1, 2, 2, 4, 8)
    key, value = (torch.randn(1, 2, length, 8, requires_grad=True) for _ in "kv")
    keep = (torch.arange(length) < 40)[None, None]
    attention(query, key, value, keep, rule).sum().backward()
    assert key.grad is not None and value.grad is not None
    assert not key.grad[:, :, 40:].any() and not value.grad[:, :, 40:].any()
    assert value.grad[:, :, :40].all()
