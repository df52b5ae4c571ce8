"""Masked reductions that obey the padding law: select, then reduce; never multiply by a mask.

``NaN * 0`` is NaN, in the value and in the gradient. `select` replaces what stands at masked positions before any
arithmetic sees it, so garbage there (NaN and inf included) changes nothing and its gradient is exactly 0.
"""

from __future__ import annotations

import torch
from torch import Tensor


def select(x: Tensor, mask: Tensor, fill: float = 0.0) -> Tensor:
    """``x`` where ``mask`` is true, ``fill`` elsewhere; half-precision input comes back as float32.

    Args:
        x: any shape, floating point.
        mask: bool (or 0/1), the same shape.

    Raises:
        ValueError: the shapes differ (broadcasting a mask hides mistakes).
    """
    if x.shape != mask.shape:
        raise ValueError(f"mask of shape {tuple(mask.shape)} for values of shape {tuple(x.shape)}")
    return torch.where(mask.bool(), at_least_float32(x), fill)


def require_same_shape(expected: torch.Size, **tensors: Tensor | None) -> None:
    """Refuse columns that would be silently broadcast against each other.

    Raises:
        ValueError: a given tensor's shape is not ``expected``.
    """
    for name, tensor in tensors.items():
        if tensor is not None and tensor.shape != expected:
            raise ValueError(f"{name} has shape {tuple(tensor.shape)}, expected {tuple(expected)}")


def at_least_float32(x: Tensor) -> Tensor:
    """``x`` itself in float32 or float64, anything narrower (or not floating point) as float32."""
    return x if x.dtype in (torch.float32, torch.float64) else x.float()


def masked_sum(x: Tensor, mask: Tensor, dim: int | None = None) -> Tensor:
    """Sum over the true positions, over everything or along ``dim``. Nothing selected: 0."""
    chosen = select(x, mask)
    return chosen.sum() if dim is None else chosen.sum(dim)


def masked_mean(x: Tensor, mask: Tensor, dim: int | None = None) -> Tensor:
    """Mean over the true positions, over everything or along ``dim``. Nothing selected: 0, with zero gradient."""
    count = mask.bool().sum() if dim is None else mask.bool().sum(dim)
    return masked_sum(x, mask, dim) / count.clamp(min=1)


def masked_var(x: Tensor, mask: Tensor, unbiased: bool = True) -> Tensor:
    """Variance over the true positions, divided by n - 1 (``unbiased``) or by n. Fewer than two selected: 0."""
    count = mask.bool().sum()
    deviations = select(x, mask) - masked_mean(x, mask)
    divisor = (count - 1 if unbiased else count).clamp(min=1)
    return masked_sum(deviations.square(), mask) / divisor


def masked_whiten(x: Tensor, mask: Tensor, shift_mean: bool = True, eps: float = 1e-8) -> Tensor:
    """``(x - mean) / sqrt(var + eps)`` over the true positions, 0 elsewhere.

    The variance divides by n - 1. Values without spread (one value, or all equal whatever their rounding noise)
    give exactly 0 where the mean is shifted away. ``shift_mean=False`` keeps the mean: ``(x - mean)/std + mean``.
    """
    chosen = mask.bool()
    clean = select(x, chosen)
    count = chosen.sum()
    mean = clean.sum(dim=-1).double().sum() / count.clamp(min=1)
    deviations = select(clean - mean, chosen)
    variance = torch.linalg.vector_norm(deviations, dim=-1).double().square().sum() / (count - 1).clamp(min=1)
    # Not "size > noise": a NaN must show, not pass for a value without spread.
    flat = _largest(deviations) <= 8 * torch.finfo(clean.dtype).eps * _largest(clean)
    whitened = deviations * torch.where(flat, 0.0, torch.rsqrt(variance + eps))
    return whitened if shift_mean else select(whitened + mean, chosen)


def place_at_last(values: Tensor, mask: Tensor) -> Tensor:
    """Put one number a row on the row's last true position: where a response's scalar score lands.

    Args:
        values: (B,) floating point.
        mask: (B, R).

    Returns:
        (B, R), 0 everywhere else. A row without a true position stays all 0: its value goes nowhere, least of all
        to the padded slot that index -1 would name.
    """
    trained = mask.bool()  # (B, R)
    placed = torch.zeros(trained.shape, dtype=at_least_float32(values).dtype, device=values.device)
    if trained.shape[1] == 0:
        return placed
    positions = torch.arange(trained.shape[1], device=trained.device)
    last = torch.where(trained, positions, -1).amax(dim=1, keepdim=True)  # (B, 1), -1: none
    chosen = torch.where(last.squeeze(1) >= 0, at_least_float32(values), 0.0)
    return placed.scatter_(1, last.clamp(min=0), chosen.unsqueeze(1))


def count_nonfinite(x: Tensor, mask: Tensor) -> int:
    """How many true positions hold NaN or inf: what a step must be stopped for."""
    return int((~torch.isfinite(select(x, mask))).sum())


def _largest(x: Tensor) -> Tensor:
    """Largest absolute value, 0 for an empty tensor."""
    if not x.numel():
        return torch.zeros((), dtype=x.dtype, device=x.device)
    low, high = torch.aminmax(x.detach())
    return torch.maximum(high, -low)
