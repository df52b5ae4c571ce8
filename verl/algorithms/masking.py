"""Masked reductions that obey the padding law: select, then reduce; never multiply by a mask.

``NaN * 0`` is NaN, in the value and in the gradient. `select` replaces what stands at masked positions before any
arithmetic sees it, so garbage there (NaN and inf included) changes nothing and its gradient is exactly 0.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

_ELEMENTS_AT_ONCE = 2**19  # temporaries stay in the cache


def row_blocks(shape: Sequence[int]) -> Iterator[slice]:
    """Slices of rows of a (B, ...) tensor, each small enough for the cache; together all rows in order."""
    rows = max(1, _ELEMENTS_AT_ONCE // max(math.prod(shape[1:]), 1))
    return (slice(start, start + rows) for start in range(0, shape[0], rows))


def select(x: Tensor, mask: Tensor, fill: float = 0.0) -> Tensor:
    """``x`` where ``mask`` (bool or 0/1) is true, ``fill`` elsewhere; half-precision input comes back as float32.
    Raises ValueError: the shapes differ (broadcasting a mask hides mistakes)."""
    if x.shape != mask.shape:
        raise ValueError(f"mask of shape {tuple(mask.shape)} for values of shape {tuple(x.shape)}")
    return torch.where(mask.bool(), at_least_float32(x), fill)


def mask_bits(mask: Tensor, dtype: torch.dtype) -> Tensor:
    """All ones where ``mask`` is true and all zeros elsewhere, as integers as wide as ``dtype`` (`zero_outside`)."""
    return mask.to(torch.int32 if dtype == torch.float32 else torch.int64).neg_()


def zero_outside(x: Tensor, mask: Tensor, out: Tensor | None = None) -> Tensor:
    """`select` for columns of the controller: no gradient, and in a third of the time, by masking bits. ``x``: float32
    or float64, of a shape that broadcasts to the mask's (B, R), which is bool or its `mask_bits`; ``out`` may be it."""
    bits = mask_bits(mask, x.dtype) if mask.dtype == torch.bool else mask
    place = None if out is None else out.view(bits.dtype)
    return torch.bitwise_and(x.view(bits.dtype), bits, out=place).view(x.dtype)


def require_same_shape(expected: torch.Size, **tensors: Tensor | None) -> None:
    """Refuse columns that would be silently broadcast against each other. Raises ValueError: a given tensor's shape is
    not ``expected``."""
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


@dataclass
class Moments:
    """Count, mean and sum of squared deviations of a stream of numbers, in float64 (Chan et al. 1983)."""

    count: float = 0.0
    mean: float = 0.0
    squares: float = 0.0

    @classmethod
    def of(cls, values: Tensor) -> Moments:
        """Of all values of a tensor."""
        if not values.numel():
            return cls()
        mean = values.double().mean()
        return cls(values.numel(), float(mean), float((values.double() - mean).square().sum()))

    def add(self, other: Moments) -> None:
        """Take in the numbers of another."""
        total = self.count + other.count
        if other.count:
            delta = other.mean - self.mean
            self.squares += other.squares + delta * delta * self.count * other.count / total
            self.mean += delta * other.count / total
            self.count = total

    @property
    def variance(self) -> float:
        """Divided by n - 1; fewer than two numbers: 0."""
        return self.squares / max(self.count - 1, 1)


@torch.no_grad()
def masked_whiten(x: Tensor, mask: Tensor, eps: float = 1e-8, out: Tensor | None = None) -> Tensor:
    """``(x - mean) / sqrt(var + eps)`` over the true positions, 0 elsewhere; no gradient flows.

    The variance divides by n - 1. Values without spread (one value, or all equal whatever their rounding noise)
    give exactly 0. Statistics are merged from blocks of rows (B, ...), so that no temporary is as large as ``x``, into
    which ``out`` may go.
    """
    chosen = mask.bool()
    if out is None:
        out = torch.empty_like(at_least_float32(x))
    moments, low, high = Moments(), math.inf, -math.inf
    for block in row_blocks(x.shape):
        trained = mask_bits(chosen[block], out.dtype)
        clean = zero_outside(at_least_float32(x[block]), trained)
        count = int(chosen[block].count_nonzero())
        if count:
            mean = float(clean.sum(dim=-1).double().sum()) / count
            deviations = zero_outside(clean - mean, trained)
            squares = float(torch.linalg.vector_norm(deviations, dim=-1).double().square().sum())
            moments.add(Moments(count, mean, squares))
            lowest, highest = (mean + float(extreme) for extreme in torch.aminmax(deviations))
            low, high = min(low, lowest), max(high, highest)
    # Not "size > noise": a NaN must show, not pass for a value without spread.
    noise = 8 * torch.finfo(out.dtype).eps * max(abs(low), abs(high))
    flat = max(high - moments.mean, moments.mean - low) <= noise
    scale = 0.0 if flat else (moments.variance + eps) ** -0.5
    for block in row_blocks(x.shape):
        centered = torch.sub(x[block].to(out.dtype), moments.mean, out=out[block]).mul_(scale)
        zero_outside(centered, chosen[block], out=centered)
    return out


def place_at_last(values: Tensor, mask: Tensor) -> Tensor:
    """Put one number a row, (B,), on the row's last true position of (B, R): where a response's scalar score lands. A
    row without one stays all 0: its value goes nowhere, least of all to the padded slot that index -1 would name."""
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
