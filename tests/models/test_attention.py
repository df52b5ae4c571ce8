"""Attention as batched matmuls: the right numbers, the same bits, and no feature dropped in silence."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import settings as examples
from hypothesis import strategies as st
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface

from verl.errors import ModelError
from verl.models.attention import ATTENTION_NAME, attention_forward, block_attention, round_up, wide_dtype
from verl.models.rows import choose_row_rule

DTYPES = (torch.float32, torch.bfloat16)


class Recorder:
    """An attention context that says what it was asked."""

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float, window: int | None) -> Tensor:
        self.asked = layer, tuple(query.shape), tuple(key.shape), scale, window
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
    context, (query, key, value) = Recorder(), heads()
    out, weights = attention_forward(Layer(), query, key, value, None, scaling, 0.0, context, sliding_window=7)
    assert context.asked == (3, (4, 5, 16), (2, 5, 16), scale, 7)
    assert weights is None and torch.equal(out, query.transpose(1, 2))


@pytest.mark.parametrize("feature", ["softcap", "s_aux"])
def test_unknown_features_are_refused_by_name(feature: str) -> None:
    with pytest.raises(ModelError, match=f"Layer uses {feature}"):
        attention_forward(Layer(), *heads(), None, attention_context=Recorder(), **{feature: 30.0})
    attention_forward(Layer(), *heads(), None, attention_context=Recorder(), **{feature: None})


def test_dropout_and_a_missing_context_are_refused() -> None:
    with pytest.raises(ModelError, match="attention dropout") as caught:
        attention_forward(Layer(), *heads(), None, dropout=0.1, attention_context=Recorder())
    assert caught.value.value == 0.1
    with pytest.raises(ModelError, match="Layer was called without an attention context"):
        attention_forward(Layer(), *heads(), None)


def test_transformers_finds_it_and_builds_no_mask() -> None:
    assert AttentionInterface()[ATTENTION_NAME] is attention_forward
    assert AttentionMaskInterface()[ATTENTION_NAME](1, 10, 10, device="cpu") is None


def plain_attention(query: Tensor, key: Tensor, value: Tensor, keep: Tensor, scale: float) -> Tensor:
    scores = torch.einsum("brd,bld->brl", query.double(), key.double()) * scale
    weights = scores.masked_fill(~keep, -math.inf).softmax(-1)
    return torch.einsum("brl,bld->brd", weights, value.double())


@pytest.mark.parametrize("length", [1, 5, 128, 129, 300])
@pytest.mark.parametrize(("dtype", "within"), [(torch.float64, 1e-12), (torch.float32, 1e-5), (torch.bfloat16, 3e-2)])
def test_it_is_softmax_attention(length: int, dtype: torch.dtype, within: float) -> None:
    generator = torch.Generator().manual_seed(length)
    query = torch.randn(3, 16, 8, generator=generator).to(dtype)
    key, value = (torch.randn(3, length, 8, generator=generator).to(dtype) for _ in "kv")
    keep = torch.rand(3, 16, length, generator=generator) < 0.7
    keep[:, :, length // 2] = True
    out = block_attention(query, key, value, keep, 0.3)
    assert out.dtype == dtype
    torch.testing.assert_close(out.double(), plain_attention(query, key, value, keep, 0.3), atol=within, rtol=0)


@examples(max_examples=25)
@given(
    length=st.integers(1, 420),
    padding=st.integers(0, 200),
    rows=st.sampled_from([8, 24, 96]),
    dtype=st.sampled_from(DTYPES),
)
def test_bits_do_not_depend_on_key_padding_or_on_other_rows(
    length: int, padding: int, rows: int, dtype: torch.dtype
) -> None:
    # key buckets of both sides are multiples of 32
    bucket, padded = round_up(length, 32), round_up(length + padding, 32)
    generator = torch.Generator().manual_seed(1000 * length + padding)
    query = torch.randn(2, rows, 64, generator=generator).to(dtype)
    key, value = (torch.randn(2, padded, 64, generator=generator).to(dtype) for _ in "kv")
    keep = (torch.arange(padded) < length)[None, None]
    alone = block_attention(query[1:, :8], key[1:, :bucket], value[1:, :bucket], keep[..., :bucket], 0.125)
    beside = block_attention(query, key, value, keep, 0.125)[1:, :8]
    torch.testing.assert_close(alone, beside, atol=1e-4 if dtype == torch.float32 else 2e-2, rtol=0)
    if choose_row_rule(nn.Linear(64, 64).to(dtype)).proven:
        assert torch.equal(alone, beside)


@pytest.mark.parametrize("length", [64, 200])
def test_masked_keys_get_no_gradient_and_no_weight(length: int) -> None:
    query, key, value = (torch.randn(1, n, 8, requires_grad=True) for n in (8, length, length))
    keep = (torch.arange(length) < 40)[None, None]
    block_attention(query, key, value, keep, 1.0).sum().backward()
    assert key.grad is not None and value.grad is not None
    assert not key.grad[:, 40:].any() and not value.grad[:, 40:].any()
    assert value.grad[:, :40].all()
