"""Sampling one token for each row from tempered logits."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class SampledTokens:
    tokens: Tensor  # (N,) int64
    log_probs: Tensor  # (N,) float32, over the whole vocabulary
    kept_log_mass: Tensor  # (N,) float32, 0 where nothing is cut


def sample(logits: Tensor, uniform: Tensor, greedy: Tensor, top_p: Tensor, top_k: Tensor) -> SampledTokens:
    """Inverse-CDF sampling; a row's outcome depends on that row alone.

    Args:
        logits: (N, V) float32, tempered.
        uniform: (N,) float32 in [0, 1).
        greedy: (N,) bool; those rows take the most likely token.
        top_p: (N,) float32; 1 is off.
        top_k: (N,) int64; 0 or less is off, as is the whole vocabulary.
    """
    log_p = torch.log_softmax(logits, -1)
    cut = ~greedy & ((top_p < 1.0) | ((top_k > 0) & (top_k < logits.shape[1])))
    mass = torch.zeros_like(uniform)
    probs = log_p.exp()
    if bool(cut.any()):
        probs[cut], mass[cut] = truncate(probs[cut], top_p[cut], top_k[cut])
    cdf = probs.cumsum(-1)
    total = cdf[:, -1:].contiguous()
    picked = torch.searchsorted(cdf, uniform[:, None] * total, right=True)
    # u * total can round up to total: the last token that has any mass is then meant, not one beyond the vocabulary.
    # Logits that are not finite give an id of no meaning and a log-prob of NaN, for the caller to see.
    tokens = torch.minimum(picked, torch.searchsorted(cdf, total))[:, 0].clamp(max=logits.shape[1] - 1)
    if bool(greedy.any()):
        tokens = torch.where(greedy, logits.argmax(-1), tokens)
    return SampledTokens(tokens, log_p.gather(1, tokens[:, None])[:, 0], mass)


def truncate(probs: Tensor, top_p: Tensor, top_k: Tensor) -> tuple[Tensor, Tensor]:
    """Zero what top-k and then top-p drop: the smallest set of most likely tokens whose mass reaches top-p stays.

    Args:
        probs: (N, V) float32.
        top_p: (N,), top_k: (N,).

    Returns:
        probs with the dropped tokens at 0, and the log of the kept mass (N,).
    """
    ordered, index = probs.sort(dim=-1, descending=True, stable=True)
    rank = torch.arange(probs.shape[1], device=probs.device)
    limit = torch.where(top_k > 0, top_k, probs.shape[1])
    keep = rank < limit[:, None]
    ordered = torch.where(keep, ordered, 0.0)
    reached = ordered.cumsum(-1)  # not sum: with one row its bits depend on the threads
    before = (reached - ordered) / reached[:, -1:]  # mass of the more likely tokens, after top-k
    keep &= (before < top_p[:, None]) | (top_p[:, None] >= 1.0) | (rank == 0)
    kept = torch.where(keep, ordered, 0.0)
    return torch.zeros_like(probs).scatter_(1, index, kept), kept.cumsum(-1)[:, -1].log()
