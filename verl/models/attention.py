"""Attention as batched matmuls, with the same bits in decoding and in a packed forward on CPU.

Three rules make every token's output independent of what it is computed beside (batch, padding, packing):

* query rows (the heads that share a key-value head, times the tokens) come in multiples of 8, since fewer rows
  take other matmul kernels;
* scores are normalised in float32 over the row alone, masked keys being -inf;
* values are summed in float32 over fixed blocks of 128 keys counted from the row's start, in order.

transformers models call :func:`attention_forward` through the attention interface under the name
:data:`ATTENTION_NAME`; who attends to what is decided by the ``attention_context`` passed to the model's forward.

Shape legend: T packed tokens, N rows of a bucket, t padded queries of a row, L padded keys of a row, A attention
heads, K key-value heads, G = A / K, D head size.
"""

from __future__ import annotations

from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import AttentionInterface, AttentionMaskInterface

from verl.errors import ModelError

ATTENTION_NAME = "verl_packed"
KEY_BLOCK = 128
ROW_MULTIPLE = 8
# What else models of transformers hand to an attention function.
UNSUPPORTED = ("position_bias", "sinks", "indices", "block_indices")
# (batch, head, query place, key place) -> whether the query sees the key, for each kind of layer of a model
MASKS_ASKED: ContextVar[list[Callable[..., Tensor]] | None] = ContextVar("masks_asked", default=None)


def round_up(count: int, multiple: int) -> int:
    return -(-count // multiple) * multiple


def wide_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype that reductions run in: float32, or float64 for float64 models (tests)."""
    return torch.promote_types(dtype, torch.float32)


@dataclass(frozen=True)
class AttentionRule:
    """What a layer asks of its attention, who may attend to whom within a row apart."""

    scale: float  # factor on the scores
    window: int | None = None  # a token attends to itself and the window - 1 tokens before it
    softcap: float | None = None  # scores become softcap * tanh(scores / softcap)
    sinks: Tensor | None = None  # (A,) one more logit of each head, whose probability goes nowhere


class AttentionContext(Protocol):
    """Knows which tokens of this forward attend to which keys."""

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, rule: AttentionRule) -> Tensor:
        """query (A, T, D), key and value (K, T, D) -> (T, A, D)."""
        ...


def attention_forward(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    attention_context: AttentionContext | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """The attention of every model that this package runs; tokens lie packed in one row: query (1, A, T, D)."""
    if attention_context is None:
        raise ModelError(
            f"{type(module).__name__} was called without an attention context",
            fix="call the model through verl.models.policy, or load it with another attention implementation",
        )
    for feature in UNSUPPORTED:
        if kwargs.get(feature) is not None:
            raise ModelError(f"{type(module).__name__} uses {feature}, which VeRL's attention does not support")
    if attention_mask is not None:
        raise ModelError(f"{type(module).__name__} adds something of its own to its attention scores")
    if dropout:
        raise ModelError(f"{type(module).__name__} asks for attention dropout", dropout, "set it to 0 in config.json")
    scale = scaling if scaling is not None else query.shape[-1] ** -0.5
    layer: int = module.layer_idx  # type: ignore[assignment]
    rule = AttentionRule(scale, sliding_window, softcap, s_aux)
    out = attention_context.attend(layer, query[0], key[0], value[0], rule)
    return out.unsqueeze(0), None


def _no_mask(*args: Any, **kwargs: Any) -> None:
    """Masks come from the attention context; a (T, T) mask over a pack is never built.

    What a model would have masked is noted while :mod:`verl.models.support` listens.
    """
    if (heard := MASKS_ASKED.get()) is not None:
        heard.append(kwargs["mask_function"])


AttentionInterface.register(ATTENTION_NAME, attention_forward)
AttentionMaskInterface.register(ATTENTION_NAME, _no_mask)


def mask_bias(keep: Tensor, dtype: torch.dtype) -> Tensor:
    """What is added to scores: 0 where ``keep``, else -inf, in the dtype that scores of ``dtype`` are summed in."""
    return torch.zeros(keep.shape, dtype=wide_dtype(dtype), device=keep.device).masked_fill_(~keep, float("-inf"))


def attention_probs(scores: Tensor, bias: Tensor, rule: AttentionRule, dtype: torch.dtype) -> Tensor:
    """Scores to attention weights, computed at least in float32.

    The sink stands before the keys, so that places of keys in the sum do not depend on how many there are.

    Args:
        scores: (..., L) products of queries and keys, not yet scaled; with sinks (N, K, G, t, L), where G may be the
            heads of a key-value head filled up with rows that nobody reads.
        bias: of :func:`mask_bias`, broadcastable to ``scores``; every row keeps at least one key.
        rule: of the layer; its window is taken to be in ``bias``.
        dtype: of the result.
    """
    if rule.softcap is None:
        scores = torch.add(bias, scores, alpha=rule.scale)  # one pass: scale, widen and mask
    else:
        wide = scores.to(bias.dtype) * rule.scale
        scores = bias + torch.tanh(wide / rule.softcap) * rule.softcap
    if rule.sinks is None:
        return scores.softmax(-1).to(dtype)
    kv_heads, group = scores.shape[1:3]
    sinks = rule.sinks.to(scores.dtype).view(kv_heads, -1)
    sinks = F.pad(sinks, (0, group - sinks.shape[1]))[:, :, None, None].expand(*scores.shape[:-1], 1)
    return torch.cat([sinks, scores], -1).softmax(-1)[..., 1:].to(dtype).contiguous()


def block_attention(query: Tensor, key_t: Tensor, value: Tensor, bias: Tensor, rule: AttentionRule) -> Tensor:
    """Softmax attention whose bits per query row do not depend on the other rows or on key padding.

    Nor do they depend on how keys are stored: the scores of each block of 128 keys may as well be computed apart.

    Args:
        query: (B, R, D), B = N * K rows and key-value heads, R = G * t query heads and tokens, a multiple of 8.
        key_t: (B, D, L), contiguous: a matmul with a transposed view takes several times as long.
        value: (B, L, D).
        bias: (N, t, L) of :func:`mask_bias`, the same for all heads of a row; every query keeps at least one key.
        rule: of the layer; its window is taken to be in ``bias``.

    Returns:
        (B, R, D) in the query's dtype.
    """
    return weighted_values(block_probs(query, key_t, bias, rule), value)


def block_probs(query: Tensor, key_t: Tensor, bias: Tensor, rule: AttentionRule) -> Tensor:
    """Attention weights (B, R, L) of :func:`block_attention`, in the query's dtype."""
    batch, rows, length = query.shape[0], query.shape[1], key_t.shape[2]
    n, t = bias.shape[:2]
    scores = torch.bmm(query, key_t).view(n, batch // n, rows // t, t, length)
    return attention_probs(scores, bias[:, None, None], rule, query.dtype).view(batch, rows, length)


def weighted_values(probs: Tensor, value: Tensor) -> Tensor:
    """(B, R, L) weights and (B, L, D) values to (B, R, D), summed by blocks of keys."""
    length = probs.shape[2]
    if length <= KEY_BLOCK:
        return torch.bmm(probs, value)
    wide = wide_dtype(probs.dtype)
    out = torch.bmm(probs[:, :, :KEY_BLOCK].contiguous(), value[:, :KEY_BLOCK].contiguous()).to(wide)
    for start in range(KEY_BLOCK, length, KEY_BLOCK):
        block = slice(start, start + KEY_BLOCK)
        out = out + torch.bmm(probs[:, :, block].contiguous(), value[:, block].contiguous()).to(wide)
    return out.to(probs.dtype)
