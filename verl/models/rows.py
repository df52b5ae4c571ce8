"""Linear layers whose rows keep their bits whatever they are computed beside.

A matmul library picks its kernel by the number of rows, and another kernel may add up in another order. Three rules
make a row's result independent of its neighbours:

* ``packed``: the weight is laid out for oneDNN once, and the layer is computed in calls of at most 128 rows and of at
  least as many as it takes for all calls to add up alike (40 on AMX, in bfloat16). No call lays out the weight again,
  which takes longer than the product itself while there are few rows. Larger calls that are seen to add up alike, too,
  take the bulk of many rows.
* ``multiple``: row counts are padded to a multiple of 8. Enough for float32 under MKL's strict reproducible mode
  (``MKL_CBWR=AUTO,STRICT``, which the workers set) and for bfloat16 on AVX512.
* ``block``: the layer is computed in calls of exactly 64 rows, one kernel for all. For bfloat16 on AMX where there is
  no packing: kernels differ between 8, 64 and 4,096 rows.

:func:`choose_row_rule` tries them on the model's own shapes. Where none holds, the start-up check of the engine
against the trainer says so and old log-probs are computed again.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from functools import lru_cache
from itertools import product
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers.pytorch_utils import Conv1D

BLOCK = 64
PACKED_BLOCK = 128
PROBE_ROWS = (*range(8, 136, 8), 136, 264, 520, 1032)
LARGE = (256, 512, 1024, 2048, 4096)
PROOF = 2**14  # results that are looked at: another order of sums shows in most of those of `telling_rows`
TOLD = 512  # outputs with weights of their own
LARGEST = 2**34  # multiply-adds of a call beyond which larger ones gain nothing
MANY = 64  # rows that a weight is laid out for; oneDNN knows two layouts, this one and the one for a single row
HEADS, KEYS = (32, 64, 128), 128  # sizes of heads and keys of a block for which batched matmuls are looked at
# Rows from which on kernels agree about a weight laid out for many: all of them, or those that fill tiles of AMX.
LEAST_ROWS = (8, 40)


@dataclass(frozen=True)
class RowRule:
    """How many rows a linear layer may see.

    Attributes:
        multiple: row counts are padded to a multiple of this, by whoever calls.
        least: rows of the smallest matmul call; fewer are filled up for it.
        block: rows of one matmul call (the most of one, where the weight is packed); None for all at once.
        packed: the weight is kept a second time in oneDNN's own layout.
        single: shapes of the weights that are laid out for a single row: their other layout has kernels that disagree.
        large: the most rows of one call by the shape of the weight, where that is more than ``block``: a power of two,
            which like all lesser ones down to the block has the bits of blocks.
        proven: whether the probe found every row's bits independent of the others.
        any_threads: whether it found them independent of the number of threads, too.
    """

    multiple: int = 8
    least: int = 8
    block: int | None = None
    packed: bool = False
    single: frozenset[torch.Size] = frozenset()
    large: dict[torch.Size, int] = field(default_factory=dict)
    proven: bool = False
    any_threads: bool = field(default=False, compare=False)

    def padded(self, rows: int) -> int:
        return max(1, -(-rows // self.multiple)) * self.multiple

    def calls(self, rows: int, shape: torch.Size) -> list[int]:
        """Rows of each call for so many of them, padded ones; the last two share what would leave one too few."""
        if self.block is None or rows <= self.block:
            return [rows]
        calls, size = [], self.large.get(shape, self.block)
        while size > self.block:
            while rows == size or rows >= size + self.least:
                calls.append(size)
                rows -= size
            size //= 2
        whole, rest = divmod(rows, self.block)
        if rest == 0 or rest >= self.least or not whole:
            return calls + [self.block] * whole + [rest] * (rest > 0)
        half = -(-(self.block + rest) // (2 * self.multiple)) * self.multiple
        return calls + [self.block] * (whole - 1) + [half, self.block + rest - half]


# The operator itself: looked up by name in every call it takes as long as the product of one row.
_linear_packed: Any = getattr(getattr(torch.ops.mkldnn, "_linear_pointwise", None), "default", None)

ALL_ROWS = RowRule()
IN_BLOCKS = RowRule(multiple=BLOCK, least=BLOCK, block=BLOCK)
PACKED = RowRule(block=PACKED_BLOCK, packed=True)


def linear_rows(x: Tensor, weight: Tensor, bias: Tensor | None, rule: RowRule) -> Tensor:
    """``F.linear`` under a row rule: x (..., T, H) with T a multiple of the rule's, weight (O, H) -> (..., T, O)."""
    if rule.block is None:
        return F.linear(x, weight, bias)
    packed = packed_weight(weight, rule) if rule.packed else None
    if packed is not None and x.numel() <= rule.block * x.shape[-1] and not torch.is_grad_enabled():
        return _product(x, packed, bias, rule.least)
    return _BlockedLinear.apply(x, weight, bias, rule, packed)  # type: ignore[no-any-return]


def _product(x: Tensor, packed: Tensor, bias: Tensor | None, least: int) -> Tensor:
    """One call over (..., T, H); what fills it up to ``least`` rows is taken off again."""
    rows = x.shape[-2]
    if rows < least:
        fill = _zeros((*x.shape[:-2], least - rows, x.shape[-1]), x.dtype)
        return _linear_packed(torch.cat([x, fill], -2), packed, bias, "none", [], "")[..., :rows, :]
    return _linear_packed(x, packed, bias, "none", [], "")


@lru_cache(maxsize=32)
@torch.inference_mode(False)
def _zeros(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    return torch.zeros(shape, dtype=dtype)


def _holder(weight: Tensor) -> Tensor:
    return weight._base if weight._base is not None else weight  # of a transposed parameter: the parameter


def forget_packed(weight: Tensor) -> None:
    """Drop the weight in oneDNN's layout: of a weight that is whole only while it computes."""
    vars(_holder(weight)).pop("_verl_packed", None)


def packed_weight(weight: Tensor, rule: RowRule) -> Tensor:
    """The weight in oneDNN's layout, kept beside the parameter until its values or its memory change."""
    holder, rows = _holder(weight), 1 if weight.shape in rule.single else MANY
    stamp = (weight.data_ptr(), weight._version, weight.shape, rows)
    kept = getattr(holder, "_verl_packed", None)
    if kept is None or kept[0] != stamp:
        kept = stamp, torch.ops.mkldnn._reorder_linear_weight(weight.detach().contiguous(), rows)
        holder._verl_packed = kept  # type: ignore[attr-defined]
    return kept[1]


def transposed(x: Tensor) -> Tensor:
    """(T, H) -> (H, T), where a matmul whose first operand it is would lay it out anyway, and take longer over it."""
    return x.T.contiguous() if x.dtype == torch.bfloat16 and x.device.type == "cpu" else x.T


class _BlockedLinear(torch.autograd.Function):
    """Blocks in the forward, whole matmuls in the backward: gradients are sums over rows and need no such care."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, rule: RowRule, packed: Tensor | None
    ) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.has_bias = bias is not None
        rows = x.reshape(-1, x.shape[-1])
        parts = rows.split(rule.calls(rows.shape[0], weight.shape))
        if packed is None:
            outs = [F.linear(part, weight, bias) for part in parts]
        else:
            outs = [_product(part, packed, bias, rule.least) for part in parts]
        out = outs[0] if len(outs) == 1 else torch.cat(outs)
        return out.view(*x.shape[:-1], weight.shape[0])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        grad = grads[0].reshape(-1, weight.shape[0])
        grad_x = (grad @ weight).view_as(x) if ctx.needs_input_grad[0] else None
        grad_weight = grad.T @ x.reshape(-1, x.shape[-1]) if ctx.needs_input_grad[1] else None
        grad_bias = grad.sum(0) if ctx.has_bias and ctx.needs_input_grad[2] else None
        return grad_x, grad_weight, grad_bias, None, None


class RowLinear(nn.Linear):
    """A linear layer that follows a row rule."""

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
        if type(module) in (nn.Linear, RowLinear):
            module.__class__, module.row_rule = RowLinear, rule  # type: ignore[assignment]
        elif type(module) in (Conv1D, _RowConv1D):
            module.__class__, module.row_rule = _RowConv1D, rule  # type: ignore[assignment]


@torch.inference_mode(False)
@torch.no_grad()
def choose_row_rule(model: nn.Module, dtype: torch.dtype | None = None) -> RowRule:
    """The cheapest rule under which the rows of every linear shape of this model keep their bits on this machine.

    On devices other than the CPU nothing is probed: parity is then claimed within a tolerance only.

    Args:
        dtype: that the layers will compute in; None: that of their weights.
    """
    layers = [layer for layer in model.modules() if isinstance(layer, nn.Linear | Conv1D)]
    if any(layer.weight.device.type != "cpu" for layer in layers):
        return ALL_ROWS
    weights: Weights = {}
    for layer in layers:
        shape = torch.Size(layer.weight.shape if isinstance(layer, nn.Linear) else layer.weight.shape[::-1])
        if shape not in weights:
            weight = telling_weight(shape, dtype or layer.weight.dtype)
            weights[shape] = weight if isinstance(layer, nn.Linear) else weight.T.contiguous().T  # as it lies
    found = _probe(weights)
    # Experts keep their matrices stacked and see as many rows as tokens chose them: no rule reaches them.
    plain = all(parameter.dim() < 3 for parameter in model.parameters())
    # MKL's; oneDNN, which computes in bfloat16, sums so few numbers pair after pair.
    batches = torch.float32 not in {weight.dtype for weight in weights.values()} or _batches_keep_bits()
    return replace(found, proven=found.proven and plain and batches)


Weights = dict[torch.Size, Tensor]  # one of each shape


def _probe(weights: Weights) -> RowRule:
    here = torch.get_num_threads()
    try:
        for threads in (sorted({1, 2, here}), [here]):  # whoever samples may have other threads than who trains
            found = {"proven": True, "any_threads": len(threads) > 1}
            if _can_pack(weights.values()) and (packed := _packed_rule(weights, threads)):
                large = {shape: _largest_call(weight, packed, threads) for shape, weight in weights.items()}
                return replace(packed, large=large, **found)  # type: ignore[arg-type]
            for rule in (ALL_ROWS, IN_BLOCKS):
                if all(_keeps_bits(weight, rule, threads) for weight in weights.values()):
                    return replace(rule, **found)  # type: ignore[arg-type]
    finally:
        torch.set_num_threads(here)
    return ALL_ROWS


def _packed_rule(weights: Weights, threads: list[int]) -> RowRule | None:
    """With as many weights as possible laid out for many rows."""
    for least in LEAST_ROWS:
        rule = replace(PACKED, least=least)
        single = frozenset(shape for shape, weight in weights.items() if not _keeps_bits(weight, rule, threads))
        if not single:
            return rule
    for mixed in (replace(rule, single=single), replace(PACKED, single=frozenset(weights))):
        if all(_keeps_bits(weights[shape], mixed, threads) for shape in mixed.single):
            return mixed
    return None


def _largest_call(weight: Tensor, rule: RowRule, threads: list[int]) -> int:
    """The largest power of two up to which calls of so many rows have the bits of blocks."""
    assert rule.block is not None
    largest = rule.block
    for rows in LARGE:
        if rows * weight.numel() > LARGEST:
            break
        x = telling_rows(weight, max(rows, -(-PROOF // weight.shape[0] // rows) * rows))
        blocks = linear_rows(x, weight, None, rule)
        for count in threads:
            torch.set_num_threads(count)
            if not torch.equal(linear_rows(x, weight, None, replace(rule, large={weight.shape: rows})), blocks):
                return largest
        largest = rows
    return largest


@torch.inference_mode(False)
def telling_weight(shape: torch.Size, dtype: torch.dtype) -> Tensor:
    """A weight (O, H) that makes nothing but rounding errors of :func:`telling_rows`.

    Each input is there twice, with weights of opposite sign: what is left shows any other order of the sums, which in a
    sum of its own size would be rounded off mostly.
    """
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(min(shape[0], TOLD), shape[1] // 2, generator=generator)
    weight = _twice(weight, -weight, shape[1]).to(dtype)
    return weight.repeat(-(-shape[0] // TOLD), 1)[: shape[0]]


def telling_rows(weight: Tensor, rows: int) -> Tensor:
    generator = torch.Generator().manual_seed(1)
    shape = rows, weight.shape[1] // 2
    x = torch.randn(shape, generator=generator) * 2.0 ** torch.randint(-3, 4, shape, generator=generator)
    return _twice(x, x, weight.shape[1]).to(weight.dtype)


def _twice(one: Tensor, other: Tensor, width: int) -> Tensor:
    """Columns of both in a random order, filled up with zeros."""
    order = torch.randperm(width, generator=torch.Generator().manual_seed(2))
    return F.pad(torch.cat([one, other], 1), (0, width % 2))[:, order]


def _can_pack(weights: Iterable[Tensor]) -> bool:
    """Whether oneDNN computes in bfloat16 here; float32 is MKL's, whose kernels keep their bits without packing."""
    return (
        all(weight.dtype == torch.bfloat16 for weight in weights)
        and hasattr(torch.ops.mkldnn, "_reorder_linear_weight")
        and _linear_packed is not None
        and torch.ops.mkldnn._is_mkldnn_bf16_supported()
    )


def _product_of_each(x: Tensor, y: Tensor, batch: int = 3) -> Tensor:
    return torch.bmm(*(part.expand(batch, -1, -1).contiguous() for part in (x, y)))[0]


@lru_cache
@torch.inference_mode(False)
@torch.no_grad()
def _batches_keep_bits() -> bool:
    """Whether attention's batched matmuls in float32 give a row the same bits beside any others, and beside keys that
    count 0.

    MKL promises it on Intel's CPUs alone; see :mod:`verl.models.attention` for what is asked of it.
    """
    for size in HEADS:
        keys, values = (
            telling_weight(torch.Size([KEYS, size]), torch.float32),
            telling_weight(torch.Size([size, KEYS]), torch.float32).T,
        )
        queries, probs, values = telling_rows(keys, MANY), telling_rows(values.T, MANY), values.contiguous()
        scores, outs = _product_of_each(queries, keys.T), _product_of_each(probs, values)
        for rows, count in product((8, 24), (32, KEYS)):
            part = probs[:rows].clone()
            part[:, count:] = 0
            pairs = (
                (_product_of_each(queries[:rows], keys[:count].T, 1), scores[:rows, :count]),
                (_product_of_each(keys[:count], queries[:rows].T, 1).T, scores[:rows, :count]),
                (_product_of_each(part, values, 1), _product_of_each(part[:, :count], values[:count], 1)),
                (_product_of_each(probs[:rows], values, 1), outs[:rows]),
            )
            if not all(torch.equal(one, other) for one, other in pairs):
                return False
    return True


def _keeps_bits(weight: Tensor, rule: RowRule, threads: list[int]) -> bool:
    most = max(PROBE_ROWS) if weight.shape[0] * max(PROBE_ROWS) < 2**24 else 136  # a vocabulary projection: fewer rows
    x = telling_rows(weight, rule.padded(most))
    whole = linear_rows(x, weight, None, rule)
    for number, rows in enumerate(sorted({rule.padded(rows) for rows in PROBE_ROWS if rule.padded(rows) <= len(x)})):
        first = min((0, 8, 24)[number % 3], len(x) - rows)
        pieces = min((len(x) - first) // rows, max(1, PROOF // 4 // (rows * weight.shape[0])))
        for start, count in product(range(first, first + pieces * rows, rows), threads):
            torch.set_num_threads(count)
            if not torch.equal(linear_rows(x[start : start + rows], weight, None, rule), whole[start : start + rows]):
                return False
    return True
