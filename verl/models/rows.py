"""Linear layers whose rows keep their bits whatever they are computed beside.

A matmul library picks its kernel by the number of rows, and another kernel may add up in another order. Three rules
make a row's result independent of its neighbours:

* ``packed``: the weight is laid out for oneDNN once, by the layout that it wants for a single row, and the layer is
  computed in calls of at most 128 rows. In bfloat16 every such call then adds up alike, on AVX512 and on AMX, and no
  call lays out the weight again, which takes longer than the product itself while there are few rows. Many rows are
  computed in one call where that is seen to give the same bits.
* ``multiple``: row counts are padded to a multiple of 8. Enough for float32 under MKL's strict reproducible mode
  (``MKL_CBWR=AUTO,STRICT``, which the workers set) and for bfloat16 on AVX512.
* ``block``: the layer is computed in calls of exactly 64 rows, one kernel for all. For bfloat16 on AMX where there is
  no packing: kernels differ between 8, 64 and 4,096 rows.

:func:`choose_row_rule` tries them on the model's own shapes. Where none holds, the start-up check of the engine
against the trainer says so and old log-probs are computed again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers.pytorch_utils import Conv1D

BLOCK = 64
PACKED_BLOCK = 128
PROOF = 2**17  # results, of which at least ten would differ if they were added up in another order
PROBE_ROWS = (*range(8, 136, 8), 136, 264, 520, 1032)


@dataclass(frozen=True)
class RowRule:
    """How many rows a linear layer may see.

    Attributes:
        multiple: row counts are padded to a multiple of this.
        block: rows of one matmul call (the most of one, where the weight is packed); None for all at once.
        packed: the weight is kept a second time in oneDNN's own layout.
        proven: whether the probe found every row's bits independent of the others.
    """

    multiple: int = 8
    block: int | None = None
    packed: bool = False
    proven: bool = False

    def padded(self, rows: int) -> int:
        return -(-max(rows, 1) // self.multiple) * self.multiple


# The operator itself: looked up by name in every call it takes as long as the product of one row.
_linear_packed: Any = getattr(getattr(torch.ops.mkldnn, "_linear_pointwise", None), "default", None)

ALL_ROWS = RowRule()
IN_BLOCKS = RowRule(multiple=BLOCK, block=BLOCK)
PACKED = RowRule(block=PACKED_BLOCK, packed=True)

# How products of these shapes are computed, once known.
_compute: dict[tuple[Any, ...], Callable[[Tensor, Tensor, Tensor | None, RowRule], Tensor]] = {}


def linear_rows(x: Tensor, weight: Tensor, bias: Tensor | None, rule: RowRule) -> Tensor:
    """``F.linear`` under a row rule: x (..., T, H) with T a multiple of the rule's, weight (O, H) -> (..., T, O)."""
    if rule.block is None:
        return F.linear(x, weight, bias)
    if torch.is_grad_enabled():
        return _BlockedLinear.apply(x, weight, bias, rule)  # type: ignore[no-any-return]
    if rule.packed and x.numel() <= rule.block * x.shape[-1]:
        return _linear_packed(x, _packed_weight(weight), bias, "none", [], "")
    return _many_rows(x.reshape(-1, x.shape[-1]), weight, bias, rule).view(*x.shape[:-1], weight.shape[0])


def _many_rows(x: Tensor, weight: Tensor, bias: Tensor | None, rule: RowRule) -> Tensor:
    """(T, H) -> (T, O) in calls of at most ``rule.block`` rows, or in one that was seen to give the same bits.

    One call takes half the time. In which order it adds up depends on shapes and threads alone, so the first product of
    a shape is computed in both ways and compared. Another order shows in about one of 10,000 results: a small product
    proves nothing.
    """
    if x.shape[0] * weight.shape[0] < PROOF or not rule.packed:
        return _in_blocks(x, weight, bias, rule)
    key = (x.shape, x.stride(), weight.shape, weight.stride(), bias is None, torch.get_num_threads(), rule.block)
    if key in _compute:
        return _compute[key](x, weight, bias, rule)
    out = _in_blocks(x, weight, bias, rule)
    if int(out.count_nonzero()) * 2 > out.numel():
        ways = (way for way in (_at_once, _at_once_packed) if torch.equal(way(x, weight, bias, rule), out))
        _compute[key] = next(ways, _in_blocks)
    return out


def _in_blocks(x: Tensor, weight: Tensor, bias: Tensor | None, rule: RowRule) -> Tensor:
    assert rule.block is not None
    call = _at_once_packed if rule.packed else _at_once
    parts = [call(part, weight, bias, rule) for part in x.split(rule.block)]
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def _at_once(x: Tensor, weight: Tensor, bias: Tensor | None, rule: RowRule) -> Tensor:
    return F.linear(x, weight, bias)


def _at_once_packed(x: Tensor, weight: Tensor, bias: Tensor | None, rule: RowRule) -> Tensor:
    return _linear_packed(x, _packed_weight(weight), bias, "none", [], "")  # type: ignore[no-any-return]


def _holder(weight: Tensor) -> Tensor:
    return weight._base if weight._base is not None else weight  # of a transposed parameter: the parameter


def forget_packed(weight: Tensor) -> None:
    """Drop the weight in oneDNN's layout: of a weight that is whole only while it computes."""
    vars(_holder(weight)).pop("_verl_packed", None)


def _packed_weight(weight: Tensor) -> Tensor:
    """The weight in oneDNN's layout, kept beside the parameter until its values or its memory change."""
    holder = _holder(weight)
    stamp = (weight.data_ptr(), weight._version, weight.shape)
    kept = getattr(holder, "_verl_packed", None)
    if kept is None or kept[0] != stamp:
        # Laid out for one row: the only layout whose kernels agree for all numbers of rows.
        kept = stamp, torch.ops.mkldnn._reorder_linear_weight(weight.detach().contiguous(), 1)
        holder._verl_packed = kept  # type: ignore[attr-defined]
    return kept[1]


class _BlockedLinear(torch.autograd.Function):
    """The rule in the forward, whole matmuls in the backward: gradients are sums over rows and need no such care."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, rule: RowRule) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.has_bias = bias is not None
        return _many_rows(x.reshape(-1, x.shape[-1]), weight, bias, rule).view(*x.shape[:-1], weight.shape[0])

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
def choose_row_rule(model: nn.Module, dtype: torch.dtype | None = None) -> RowRule:
    """The cheapest rule under which the rows of every linear shape of this model keep their bits on this machine.

    On devices other than the CPU nothing is probed: parity is then claimed within a tolerance only.

    Args:
        dtype: that the layers will compute in; None: that of their weights.
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
    weights = {shape: weight.to(dtype or weight.dtype) for shape, weight in weights.items()}
    generator = torch.Generator().manual_seed(0)
    for rule in (PACKED, ALL_ROWS, IN_BLOCKS):
        if rule.packed and not _can_pack(weights.values()):
            continue
        if all(_keeps_bits(weight, rule, generator) for weight in weights.values()):
            # Experts keep their matrices stacked and see as many rows as tokens chose them: no rule reaches them.
            return replace(rule, proven=all(parameter.dim() < 3 for parameter in model.parameters()))
    return ALL_ROWS


def _can_pack(weights: Iterable[Tensor]) -> bool:
    """Whether oneDNN computes in bfloat16 here; float32 is MKL's, whose kernels keep their bits without packing."""
    return (
        all(weight.dtype == torch.bfloat16 for weight in weights)
        and hasattr(torch.ops.mkldnn, "_reorder_linear_weight")
        and _linear_packed is not None
        and torch.ops.mkldnn._is_mkldnn_bf16_supported()
    )


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
