"""Attention as batched matmuls, with the same bits in decoding and in a packed forward on CPU.

Three rules make every token's output independent of what it is computed beside (batch, padding, packing):

* query rows (the heads that share a key-value head, times the tokens) come in multiples of 8, since fewer rows
  take other matmul kernels;
* scores are normalised over the row alone, masked keys being -inf;
* values are summed in float32 over fixed blocks of 128 keys counted from the row's start, in order.

transformers models call :func:`attention_forward` through the attention interface under the name
:data:`ATTENTION_NAME`; who attends to what is decided by the ``attention_context`` passed to the model's forward.

Shape legend: T packed tokens, N rows of a bucket, t padded queries of a row, L padded keys of a row, A attention
heads, K key-value heads, G = A / K, D head size.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface

from verl.errors import ModelError

ATTENTION_NAME = "verl_packed"
KEY_BLOCK = 128
ROW_MULTIPLE = 8


def round_up(count: int, multiple: int) -> int:
    return -(-count // multiple) * multiple


def wide_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype that reductions run in: float32, or float64 for float64 models (tests)."""
    return torch.promote_types(dtype, torch.float32)


class AttentionContext(Protocol):
    """Knows which tokens of this forward attend to which keys."""

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float, window: int | None) -> Tensor:
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
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """The attention of every model that this package runs; tokens lie packed in one row: query (1, A, T, D)."""
    if attention_context is None:
        raise ModelError(
            f"{type(module).__name__} was called without an attention context",
            fix="call the model through verl.models.policy, or load it with another attention implementation",
        )
    for feature in ("softcap", "s_aux"):
        if kwargs.get(feature) is not None:
            raise ModelError(f"{type(module).__name__} uses {feature}, which VeRL's attention does not support")
    if dropout:
        raise ModelError(f"{type(module).__name__} asks for attention dropout", dropout, "set it to 0 in config.json")
    scale = scaling if scaling is not None else query.shape[-1] ** -0.5
    layer: int = module.layer_idx  # type: ignore[assignment]
    out = attention_context.attend(layer, query[0], key[0], value[0], scale, sliding_window)
    return out.unsqueeze(0), None


def _no_mask(*args: Any, **kwargs: Any) -> None:
    """Masks come from the attention context; a (T, T) mask over a pack is never built."""
    return None


AttentionInterface.register(ATTENTION_NAME, attention_forward)
AttentionMaskInterface.register(ATTENTION_NAME, _no_mask)


def block_attention(query: Tensor, key: Tensor, value: Tensor, keep: Tensor, scale: float) -> Tensor:
    """Softmax attention whose bits per query row do not depend on the other rows or on key padding.

    Args:
        query: (B, R, D), R a multiple of 8.
        key, value: (B, L, D).
        keep: broadcastable to (B, R, L) bool; every row keeps at least one key.
        scale: factor on the scores.

    Returns:
        (B, R, D) in the query's dtype.
    """
    wide = wide_dtype(query.dtype)
    scores = torch.bmm(query, key.transpose(1, 2)).to(wide).mul_(scale)  # (B, R, L)
    probs = scores.masked_fill_(~keep, float("-inf")).softmax(-1).to(query.dtype)
    length = key.shape[1]
    if length <= KEY_BLOCK:
        return torch.bmm(probs, value)
    out = torch.bmm(probs[:, :, :KEY_BLOCK].contiguous(), value[:, :KEY_BLOCK].contiguous()).to(wide)
    for start in range(KEY_BLOCK, length, KEY_BLOCK):
        block = slice(start, start + KEY_BLOCK)
        out = out + torch.bmm(probs[:, :, block].contiguous(), value[:, block].contiguous()).to(wide)
    return out.to(query.dtype)
