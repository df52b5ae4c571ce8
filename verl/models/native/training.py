"""What an update computes around its matrix products in compiled code: :mod:`verl.models.fused` and ``plain`` call it.

Forth and back it gives the bits of torch's operators, in one pass over memory where these take several.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from functools import lru_cache
from itertools import starmap
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from verl.models.native.build import Unavailable, address, library

MULTIPLE = 32  # of the last dimension
LEAST_ROWS = 8  # torch adds up fewer in another order
PART = 128  # tokens whose part of a weight's gradient is summed apart, as in fused.py


def compiled(*tensors: Tensor) -> Kernels | None:
    """The kernels, if they are for these tensors (..., H): bfloat16 on a CPU, laid out row by row."""
    for x in tensors:
        if x.dtype != torch.bfloat16 or x.device.type != "cpu" or x.shape[-1] % MULTIPLE or not x.is_contiguous():
            return None
    return _kernels() if tensors[0].numel() >= LEAST_ROWS * tensors[0].shape[-1] else None


@lru_cache(maxsize=1)
@torch.inference_mode(False)
@torch.no_grad()
def _kernels() -> Kernels | None:
    try:
        kernels = Kernels(library())
    except Unavailable:
        return None
    return kernels if all(starmap(torch.equal, _both(kernels))) else None


def _both(kernels: Kernels) -> Iterator[tuple[Tensor, Tensor]]:
    """What the kernels and what torch's operators make of the same numbers."""
    generator = torch.Generator().manual_seed(0)
    x, up, grad, cos, sin = (torch.randn(300, 96, generator=generator).bfloat16() for _ in range(5))
    wide, weight = x.float(), up[0]
    scale = torch.rsqrt((wide * wide).mean(-1, keepdim=True) + 1e-5)
    yield from zip(kernels.norm(x, weight, 1e-5), (weight * (wide * scale).bfloat16(), scale), strict=True)
    normal, weighted = x * scale, grad * weight.float()
    along = (normal * weighted).mean(1, keepdim=True)
    grad_x = ((weighted.addcmul(normal, along, value=-1)) * scale).bfloat16()
    grad_weight = sum((part.sum(0) for part in (grad * normal).split(PART)), torch.zeros(96))
    yield from zip(kernels.norm_backward(x, weight, scale, grad), (grad_x, grad_weight), strict=True)
    active = F.silu(x)
    yield kernels.gate(x, up), active * up
    by_gate = torch.ops.aten.silu_backward(grad * up, x)
    yield from zip(kernels.gate_backward(x, up, grad), (active * up, by_gate, grad * active), strict=True)
    targets, logits = torch.arange(300) % 96, x.float() / 0.7
    log_p = torch.log_softmax(logits, -1)
    own, its_logit = (values.gather(1, targets[:, None])[:, 0] for values in (log_p, logits))
    entropy = -(logits.softmax(-1) * log_p).sum(-1)
    yield from zip(kernels.log_probs(x, targets, 0.7), (own, its_logit - own, entropy), strict=True)
    expected = (logits - (its_logit - own)[:, None]).exp_().mul_(-scale)
    expected = expected.scatter_add_(1, targets[:, None], scale).mul_(1 / 0.7).bfloat16()
    found = x.clone()
    kernels.logit_gradients(found, its_logit - own, scale[:, 0], targets, 0.7, 1 / 0.7)
    yield found, expected
    x, grad, cos, sin = (part.view(-1, 3, 32) for part in (x, grad, cos, sin))
    cos, sin = cos[:, :1].contiguous(), sin[:, :1].contiguous()
    swapped = lambda x: torch.cat([x[..., 16:], x[..., :16]], -1)  # noqa: E731
    yield kernels.turn(x, cos, sin), x * cos + swapped(x) * sin
    yield kernels.turn(grad, cos, sin, back=True), grad * cos + swapped(grad * sin)


class Kernels:
    """The functions of ``train.c``; arguments and results as there."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self._library = library

    def norm(self, x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        """x (T, H) over its root mean square, times weight (H,); and the inverse of the root (T, 1) in float32."""
        out, scales = torch.empty_like(x), torch.empty(len(x), 1)
        wide = torch.empty(torch.get_num_threads() * x.shape[1])
        self._call("norm_forward", x, weight, out, scales, *x.shape, ctypes.c_double(eps), wide)
        return out, scales

    def norm_backward(self, x: Tensor, weight: Tensor, scales: Tensor, grad: Tensor) -> tuple[Tensor, Tensor]:
        """Gradients by x, and by the weight in float32."""
        grad_x, sums = torch.empty_like(x), torch.empty(-(-len(x) // PART), x.shape[1])
        wide = torch.empty(torch.get_num_threads() * 2 * x.shape[1])
        self._call("norm_backward", x, weight, scales, grad, grad_x, sums, *x.shape, wide)
        grad_weight = torch.zeros(x.shape[1])
        for part in sums:  # in this order with any number of threads
            grad_weight += part
        return grad_x, grad_weight

    def gate(self, gate: Tensor, up: Tensor) -> Tensor:
        """silu(gate) * up."""
        out = torch.empty_like(gate)
        self._call("gate_forward", gate, up, out, gate.numel())
        return out

    def gate_backward(self, gate: Tensor, up: Tensor, by_out: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """silu(gate) * up once more, and the gradients by gate and by up."""
        outs = torch.empty_like(gate), torch.empty_like(gate), torch.empty_like(gate)
        self._call("gate_backward", gate, up, by_out, *outs, gate.numel())
        return outs

    def turn(self, x: Tensor, cos: Tensor, sin: Tensor, back: bool = False) -> Tensor:
        """x (T, heads, D) turned by cos, sin (T, 1, D), or a gradient turned back."""
        out = torch.empty_like(x)
        self._call("turn_backward" if back else "turn_forward", x, cos, sin, out, *x.shape)
        return out

    def log_probs(self, logits: Tensor, targets: Tensor, temperature: float) -> tuple[Tensor, Tensor, Tensor]:
        """Log-probs (T,) of targets (T,), what was taken from their logits for it, and entropies in nats."""
        out = torch.empty(len(logits), 3)
        scratch = torch.empty(torch.get_num_threads() * 2 * logits.shape[1])
        self._call("log_probs", logits, targets, out, *logits.shape, ctypes.c_double(temperature), scratch)
        log_probs, normalisers, entropies = out.unbind(1)
        return log_probs, normalisers, entropies

    def logit_gradients(
        self, logits: Tensor, normalisers: Tensor, grads: Tensor, places: Tensor, temperature: float, slope: float
    ) -> None:
        """Logits (T, V) are overwritten by the gradient: (onehot(places) - p) by the target's (T,), times the slope."""
        p = torch.empty(logits.shape)
        self._call("shifted", logits, normalisers, p, *logits.shape, ctypes.c_double(temperature))
        self._call("logit_gradients", p.exp_(), grads, places, logits, *logits.shape, ctypes.c_double(slope))

    def _call(self, name: str, *arguments: Any) -> None:
        given = (
            address(x) if isinstance(x, Tensor) else ctypes.c_int64(x) if isinstance(x, int) else x for x in arguments
        )
        getattr(self._library, name)(*given, ctypes.c_int(torch.get_num_threads()))
