"""Linear layers whose rows keep their bits whatever they are computed beside.

A matmul library picks its kernel by the number of rows, and another kernel may add up in another order. Two rules make
a row's result independent of its neighbours:

* ``multiple``: row counts are padded to a multiple of 8. Enough for float32 under MKL's strict reproducible mode
  (``MKL_CBWR=AUTO,STRICT``, which the workers set) and for bfloat16 on AVX512.
* ``block``: the layer is computed in calls of exactly 64 rows, one kernel for all. Needed for bfloat16 on AMX, where
  kernels differ between 8, 64 and 4,096 rows.

:func:`choose_row_rule` tries them on the model's own shapes. Where neither holds, the start-up check of the engine
against the trainer says so and old log-probs are computed again.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers.pytorch_utils import Conv1D

BLOCK = 64
PROBE_ROWS = (8, 24, 40, 64, 136, 264, 520, 1032)


@dataclass(frozen=True)
class RowRule:
    """How many rows a linear layer may see.

    Attributes:
        multiple: row counts are padded to a multiple of this.
        block: rows of one matmul call; None for all at once.
        proven: whether the probe found every row's bits independent of the others.
    """

    multiple: int = 8
    block: int | None = None
    proven: bool = False

    def padded(self, rows: int) -> int:
        return -(-max(rows, 1) // self.multiple) * self.multiple


ALL_ROWS = RowRule()
IN_BLOCKS = RowRule(multiple=BLOCK, block=BLOCK)


def linear_rows(x: Tensor, weight: Tensor, bias: Tensor | None, rule: RowRule) -> Tensor:
    """``F.linear`` under a row rule: x (..., T, H) with T a multiple of the rule's, weight (O, H) -> (..., T, O)."""
    if rule.block is None:
        return F.linear(x, weight, bias)
    return _BlockedLinear.apply(x, weight, bias, rule.block)  # type: ignore[no-any-return]


class _BlockedLinear(torch.autograd.Function):
    """Blocks in the forward, whole matmuls in the backward: gradients are sums over rows and need no such care."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, block: int) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.has_bias = bias is not None
        flat = x.reshape(-1, x.shape[-1])
        out = torch.cat([F.linear(part, weight, bias) for part in flat.split(block)])
        return out.view(*x.shape[:-1], weight.shape[0])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        grad = grads[0].reshape(-1, weight.shape[0])
        grad_x = (grad @ weight).view_as(x) if ctx.needs_input_grad[0] else None
        grad_weight = grad.T @ x.reshape(-1, x.shape[-1]) if ctx.needs_input_grad[1] else None
        grad_bias = grad.sum(0) if ctx.has_bias and ctx.needs_input_grad[2] else None
        return grad_x, grad_weight, grad_bias, None


class _RowLinear(nn.Linear):
    row_rule: RowRule

    def forward(self, input: Tensor) -> Tensor:
        return linear_rows(input, self.weight, self.bias, self.row_rule)


class _RowConv1D(Conv1D):
    """GPT-2's linear layer, whose weight lies transposed."""

    row_rule: RowRule

    def forward(self, x: Tensor) -> Tensor:
        return linear_rows(x, self.weight.T, self.bias, self.row_rule)


def apply_row_rule(model: nn.Module, rule: RowRule) -> None:
    """Make every linear layer of the model follow the rule; parameters and their names stay as they are."""
    for module in model.modules():
        if type(module) in (nn.Linear, _RowLinear):
            module.__class__, module.row_rule = _RowLinear, rule  # type: ignore[assignment]
        elif type(module) in (Conv1D, _RowConv1D):
            module.__class__, module.row_rule = _RowConv1D, rule  # type: ignore[assignment]


@torch.no_grad()
def choose_row_rule(model: nn.Module) -> RowRule:
    """The cheapest rule under which the rows of every linear shape of this model keep their bits on this machine.

    On devices other than the CPU nothing is probed: parity is then claimed within a tolerance only.
    """
    weights = {
        tuple(m.weight.shape if isinstance(m, nn.Linear) else m.weight.shape[::-1]): (
            m.weight if isinstance(m, nn.Linear) else m.weight.T
        )
        for m in model.modules()
        if isinstance(m, nn.Linear | Conv1D)
    }
    if any(weight.device.type != "cpu" for weight in weights.values()):
        return ALL_ROWS
    generator = torch.Generator().manual_seed(0)
    for rule in (ALL_ROWS, IN_BLOCKS):
        if all(_keeps_bits(weight, rule, generator) for weight in weights.values()):
            return RowRule(rule.multiple, rule.block, proven=True)
    return ALL_ROWS


def _keeps_bits(weight: Tensor, rule: RowRule, generator: torch.Generator) -> bool:
    out_features, in_features = weight.shape
    most = max(PROBE_ROWS) if out_features * max(PROBE_ROWS) < 2**24 else 136  # a vocabulary projection: fewer rows
    x = torch.randn(rule.padded(most), in_features, generator=generator).to(weight.dtype)
    whole = linear_rows(x, weight, None, rule)
    for rows in PROBE_ROWS:
        rows = rule.padded(rows)
        for start in (0, 8, 24):
            if start + rows <= x.shape[0] and not torch.equal(
                linear_rows(x[start : start + rows], weight, None, rule), whole[start : start + rows]
            ):
                return False
    return True
