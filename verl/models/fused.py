"""Norms and gated MLPs with the forward bits of transformers' modules, in fewer passes over less memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from verl.models.attention import wide_dtype
from verl.models.rows import RowRule, linear_rows

# Rows that are looked at together: what is computed of them stays in a core's cache. A multiple of 8, as all numbers of
# rows are (the mean over a single row is summed in another order).
ROWS = 128


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x (..., H) over the root of its mean square, times the weight (H,) (Zhang and Sennrich, 2019).

    Computed in float32 and rounded to the dtype of ``x`` before the weight, as transformers does it.
    """
    if torch.is_grad_enabled():
        return _RmsNorm.apply(x, weight, eps)  # type: ignore[no-any-return]
    return weight * _normalised(x, eps)[0]


def _normalised(x: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """(..., H) in the dtype of x, and what x was multiplied by (..., 1) in float32."""
    wide = x.to(wide_dtype(x.dtype))
    scale = torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    return (wide * scale).to(x.dtype), scale


class _RmsNorm(torch.autograd.Function):
    """Keeps x and a number a row; autograd would keep four tensors of the size of x, two of them in float32."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        rows = x.reshape(-1, x.shape[-1])
        out = torch.empty_like(rows)
        scales = []
        for part, into in _parts(rows, out):
            normalised, scale = _normalised(part, eps)
            torch.mul(weight, normalised, out=into)
            scales.append(scale)
        ctx.save_for_backward(rows, weight, torch.cat(scales))
        return out.view(x.shape)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        """With n = x s, s the scale of a row: dx = s (g w - n mean(g w n)), dw = sum of g n over rows."""
        rows, weight, scales = ctx.saved_tensors
        grad = grads[0].reshape(rows.shape)
        grad_x, wide = torch.empty_like(rows), scales.dtype
        grad_weight, wide_weight = torch.zeros_like(weight, dtype=wide), weight.to(wide)
        for x, g, scale, into in _parts(rows, grad, scales, grad_x):
            normalised, weighted = x * scale, g * wide_weight
            grad_weight += (g * normalised).sum(0)
            along = (normalised * weighted).mean(1, keepdim=True)
            torch.mul(weighted.addcmul_(normalised, along, value=-1), scale, out=into)
        return grad_x.view(grads[0].shape), grad_weight.to(weight.dtype), None


def _at_once(x: Tensor) -> int:
    return ROWS * torch.get_num_threads() if x.device.type == "cpu" else 2**31


def gated_linear(gate: Tensor, up: Tensor, weight: Tensor, bias: Tensor | None, rule: RowRule) -> Tensor:
    """silu(gate) * up, (..., I), through a linear layer (O, I) under a row rule (Shazeer, 2020: SwiGLU)."""
    if torch.is_grad_enabled():
        return _GatedLinear.apply(gate, up, weight, bias, rule)  # type: ignore[no-any-return]
    return linear_rows(F.silu(gate) * up, weight, bias, rule)


class _GatedLinear(torch.autograd.Function):
    """Keeps gate and up; silu(gate) and the product are computed again in the backward pass."""

    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor, weight: Tensor, bias: Tensor | None, rule: RowRule) -> Tensor:
        ctx.save_for_backward(gate, up, weight)
        return linear_rows(torch.cat([F.silu(g) * u for g, u in _parts(gate, up)], -2), weight, bias, rule)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        gate, up, weight = ctx.saved_tensors
        grad = grads[0].reshape(-1, weight.shape[0])
        by_product = (grad @ weight).view_as(gate)
        product, grad_gate, grad_up = (torch.empty_like(gate) for _ in range(3))
        for g, u, by, into, into_gate, into_up in _parts(gate, up, by_product, product, grad_gate, grad_up):
            active = F.silu(g)
            torch.mul(active, u, out=into)
            torch.mul(by, active, out=into_up)
            torch.ops.aten.silu_backward.grad_input(by.mul_(u), g, grad_input=into_gate)
        grad_weight = grad.T @ product.view(-1, weight.shape[1]) if ctx.needs_input_grad[2] else None
        return grad_gate, grad_up, grad_weight, grad.sum(0) if ctx.needs_input_grad[3] else None, None


def _parts(*tensors: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """Some rows of each, of the last but one dimension."""
    return zip(*(tensor.split(_at_once(tensor), -2) for tensor in tensors), strict=True)


@torch.no_grad()
def install(model: nn.Module, rule: RowRule) -> None:
    """Let norms and MLPs of the model that compute what is here, bit for bit, be computed by it."""
    generator = torch.Generator().manual_seed(0)
    for module in model.modules():
        for forward, width in (_norm_forward(module), _mlp_forward(module, rule)):
            if forward is None:
                continue
            x = torch.randn(rule.padded(8), width, generator=generator).to(next(module.parameters()))
            if torch.equal(type(module).forward(module, x), forward(x)):
                module.forward = forward


def _norm_forward(module: nn.Module) -> tuple[Callable[[Tensor], Tensor] | None, int]:
    weight, eps = getattr(module, "weight", None), getattr(module, "variance_epsilon", None)
    if not isinstance(weight, nn.Parameter) or weight.dim() != 1 or not isinstance(eps, float):
        return None, 0
    return (lambda hidden_states: rms_norm(hidden_states, module.weight, eps)), weight.shape[0]  # type: ignore[arg-type]


def _mlp_forward(module: nn.Module, rule: RowRule) -> tuple[Callable[[Tensor], Tensor] | None, int]:
    gate, up, down = (getattr(module, f"{name}_proj", None) for name in ("gate", "up", "down"))
    if not all(isinstance(layer, nn.Linear) for layer in (gate, up, down)):
        return None, 0
    return (lambda x: gated_linear(gate(x), up(x), down.weight, down.bias, rule)), gate.in_features  # type: ignore
