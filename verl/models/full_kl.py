"""KL divergence between two models over the whole vocabulary, without the (tokens, vocabulary) matrix at once."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

Logits = Callable[[Tensor], Tensor]  # (N, H) hidden states -> (N, V) tempered logits
CHUNK = 512  # tokens whose logits of both models exist at once


def full_kl(hidden: Tensor, logits: Logits, other_hidden: Tensor, other_logits: Logits) -> Tensor:
    """``sum over tokens v of p(v) (log p(v) - log q(v))``, p of the first model and q of the other one: (M,).

    Chunk by chunk; the backward projects each chunk again. The gradient is that of the divergence itself. A token that
    p never takes (a logit of -inf) adds nothing; one that only q never takes makes the divergence infinite.

    Args:
        hidden: (M, H) hidden states of the first model, of the tokens' predictors.
        other_hidden: (M, H') of the other model; no gradient flows into it.
    """
    parts = [
        checkpoint(_divergence, part, logits, other, other_logits, use_reentrant=False, preserve_rng_state=False)
        for part, other in zip(hidden.split(CHUNK), other_hidden.split(CHUNK), strict=True)
    ]
    return torch.cat(parts)


def _divergence(hidden: Tensor, logits: Logits, other_hidden: Tensor, other_logits: Logits) -> Tensor:
    log_p = logits(hidden).log_softmax(-1)
    with torch.no_grad():
        log_q = other_logits(other_hidden).log_softmax(-1)
    p = log_p.exp()
    return (p * torch.where(p > 0, log_p - log_q, 0.0)).sum(-1)  # 0 * -inf would be NaN
