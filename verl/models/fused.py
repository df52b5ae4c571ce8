"""Norms and gated MLPs with the forward bits of transformers' modules, in fewer passes over less memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from verl.models.attention import wide_dtype
from verl.models.native.training import compiled
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
    if (kernels := compiled(x, weight)) is not None:
        return kernels.norm(x.view(-1, x.shape[-1]), weight, eps)[0].view(x.shape)
    return weight * _normalised(x, eps)[0]


def _normalised(x: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """(..., H) in the dtype of x, and what x was multiplied by (..., 1) in float32."""
    wide = x.to(wide_dtype(x.dtype))
    scale = torch.rsqrt((wide * wide).mean(-1, keepdim=True) + eps)
    return (wide * scale).to(x.dtype), scale


class _RmsNorm(torch.autograd.Function):
    """Keeps x and a number a row; autograd would keep four tensors of the size of x, two of them in float32."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        rows = x.reshape(-1, x.shape[-1])
        if (kernels := compiled(rows, weight)) is not None:
            out, scale = kernels.norm(rows, weight, eps)
            ctx.save_for_backward(rows, weight, scale)
            return out.view(x.shape)
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
        if (kernels := compiled(rows, weight, grad)) is not None:
            grad_x, grad_weight = kernels.norm_backward(rows, weight, scales, grad)
            return grad_x.view(grads[0].shape), grad_weight.to(weight.dtype), None
        grad_x, wide = torch.empty_like(rows), scales.dtype
        grad_weight, wide_weight = torch.zeros_like(weight, dtype=wide), weight.to(wide)
        for x, g, scale, into in _parts(rows, grad, scales, grad_x):
            normalised, weighted = x * scale, g * wide_weight
            for some in (g * normalised).split(ROWS):  # in this order with any number of threads
                grad_weight += some.sum(0)
            along = (normalised * weighted).mean(1, keepdim=True)
            torch.mul(weighted.addcmul_(normalised, along, value=-1), scale, out=into)
        return grad_x.view(grads[0].shape), grad_weight.to(weight.dtype), None


def _at_once(x: Tensor) -> int:
    return ROWS * torch.get_num_threads() if x.device.type == "cpu" else 2**31


Layer = tuple[Tensor, Tensor | None]  # weight (O, H) and bias (O,)


def gated_mlp(x: Tensor, gate: Layer, up: Layer, down: Layer, rule: RowRule) -> Tensor:
    """silu(gate(x)) * up(x) through ``down``, linear layers under a row rule (Shazeer, 2020: SwiGLU)."""
    if torch.is_grad_enabled():
        return _GatedMlp.apply(x, *gate, *up, *down, rule)  # type: ignore[no-any-return]
    return linear_rows(_gated(linear_rows(x, *gate, rule), linear_rows(x, *up, rule)), *down, rule)


def _gated(gate: Tensor, up: Tensor) -> Tensor:
    """silu(gate) * up, some rows at a time."""
    if (kernels := compiled(gate, up)) is not None:
        return kernels.gate(gate, up)
    product = torch.empty_like(gate)
    for g, u, into in _parts(gate, up, product):
        torch.mul(F.silu(g), u, out=into)
    return product


def _gated_backward(gate: Tensor, up: Tensor, by_product: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """silu(gate) * up once more, and the gradients by gate and by up; ``by_product`` is overwritten."""
    if (kernels := compiled(gate, up, by_product)) is not None:
        return kernels.gate_backward(gate, up, by_product)
    product, grad_gate, grad_up = (torch.empty_like(gate) for _ in range(3))
    for g, u, by, into, into_gate, into_up in _parts(gate, up, by_product, product, grad_gate, grad_up):
        active = F.silu(g)
        torch.mul(active, u, out=into)
        torch.mul(by, active, out=into_up)
        torch.ops.aten.silu_backward.grad_input(by.mul_(u), g, grad_input=into_gate)
    return product, grad_gate, grad_up


class _GatedMlp(torch.autograd.Function):
    """Keeps input, gate and up; silu(gate) and the product are computed again in the backward pass."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, *given: Any) -> Tensor:
        gate_weight, gate_bias, up_weight, up_bias, weight, bias, rule = given
        rows = x.reshape(-1, x.shape[-1])
        gate, up = linear_rows(rows, gate_weight, gate_bias, rule), linear_rows(rows, up_weight, up_bias, rule)
        ctx.save_for_backward(rows, gate, up, gate_weight, up_weight, weight)
        return linear_rows(_gated(gate, up), weight, bias, rule).view(*x.shape[:-1], weight.shape[0])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, gate, up, gate_weight, up_weight, weight = ctx.saved_tensors
        grad = grads[0].reshape(-1, weight.shape[0])
        product, grad_gate, grad_up = _gated_backward(gate, up, grad @ weight)
        grad_x = (grad_gate @ gate_weight).addmm_(grad_up, up_weight).view(*grads[0].shape[:-1], x.shape[1])
        if not any(ctx.needs_input_grad[i] for i in (1, 3, 5)):  # a model is trained or frozen as a whole
            grad_weights: list[Tensor | None] = [None] * 3
        elif x.dtype == torch.bfloat16 and x.device.type == "cpu":
            # oneDNN takes twice as long over a transposed operand as over one that is laid out, the narrower, before.
            x_t, grad_t = x.T.contiguous(), grad.T.contiguous()
            grad_weights = [(x_t @ grad_gate).T.contiguous(), (x_t @ grad_up).T.contiguous(), grad_t @ product]
        else:
            grad_weights = [grad_gate.T @ x, grad_up.T @ x, grad.T @ product]
        grad_biases = [
            outer.sum(0) if ctx.needs_input_grad[i] else None for i, outer in ((2, grad_gate), (4, grad_up), (6, grad))
        ]
        pairs = zip(grad_weights, grad_biases, strict=True)
        return grad_x, *(found for pair in pairs for found in pair), None


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

    def forward(x: Tensor) -> Tensor:
        layers = ((layer.weight, layer.bias) for layer in (gate, up, down))  # type: ignore[union-attr]
        return gated_mlp(x, *layers, rule)  # type: ignore[call-arg,arg-type]

    return forward, gate.in_features  # type: ignore[union-attr,return-value]
