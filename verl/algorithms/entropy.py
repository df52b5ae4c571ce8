"""Entropy of a categorical distribution given by logits."""

from __future__ import annotations

import torch
from torch import Tensor

from verl.algorithms.masking import at_least_float32

# exp of anything this far below the maximum is exactly 0 in float32 and float64, and 0 times it is 0, where 0 times
# the -inf of a forbidden token is NaN.
_FLOOR = -1e4


def entropy_from_logits(logits: Tensor) -> Tensor:
    """``-sum p log p`` over the last dimension, in nats, never below 0.

    Args:
        logits: (..., V), any float dtype (computed in at least float32). -inf marks an impossible token: it adds
            nothing and its gradient is exactly 0. The caller divides by the temperature and chunks over rows.

    Returns:
        (...). A row of only -inf is no distribution: NaN, with zero gradient. A NaN or +inf logit gives NaN.
    """
    x = at_least_float32(logits)
    peak = x.detach().amax(dim=-1, keepdim=True)  # (..., 1)
    invalid = peak == -torch.inf
    z = (torch.where(invalid, 0.0, x) - torch.where(invalid, 0.0, peak)).clamp(min=_FLOOR)  # (..., V), at most 0
    weights = z.exp()
    total = weights.sum(dim=-1)  # at least 1
    entropy = total.log() - (weights * z).sum(dim=-1) / total
    return torch.where(invalid.squeeze(-1), torch.nan, entropy)
