"""Rows laid end to end: no padding token reaches the model, and a prompt shared by several responses lies there once.

A pack is a sequence of segments. A segment is a whole row (prompt and response), or a prompt alone, or a response
whose prompt is another segment (``prefix_of``). The last token of a response is not part of the pack: nothing reads
the hidden state behind it.

Shape legend: T packed tokens, S segments, M response tokens, see also :mod:`verl.models.attention`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from verl.models.attention import (
    AttentionContext,
    AttentionRule,
    block_attention,
    block_probs,
    mask_bias,
    weighted_values,
)

QUERY_BUCKET = 8
KEY_BUCKET = 32


@dataclass(frozen=True)
class PackedBatch:
    """A micro-batch as the model sees it.

    ``response_index[j]`` is the packed position whose hidden state predicts response token ``targets[j]``, which
    stands at ``(rows[j], columns[j])`` of the padded (B, R) columns.
    """

    input_ids: Tensor  # (T,) int64
    position_ids: Tensor  # (T,) int64
    cu_seqlens: Tensor  # (S + 1,) int64; tokens behind the last entry only fill T up
    prefix_of: Tensor  # (S,) int64: the segment that comes before this one's tokens, -1 for none
    response_index: Tensor  # (M,) int64
    targets: Tensor  # (M,) int64
    rows: Tensor  # (M,) int64
    columns: Tensor  # (M,) int64
    shape: tuple[int, int]  # (B, R) of the padded columns

    def scatter(self, values: Tensor, fill: float = 0.0) -> Tensor:
        """(M,) per response token -> (B, R), padded places holding ``fill``; differentiable."""
        padded = values.new_full(self.shape, fill)
        return padded.index_put((self.rows, self.columns), values)

    def only(self, keep: Tensor) -> PackedBatch:
        """The same tokens with fewer results: of the response tokens where ``keep`` (M,) bool is true."""
        names = ("response_index", "targets", "rows", "columns")
        return replace(self, **{name: getattr(self, name)[keep] for name in names})

    def filled(self, padded: Callable[[int], int]) -> PackedBatch:
        """The same batch with ``padded(T)`` tokens; those filled in belong to no segment and nothing reads them."""
        tokens = self.input_ids.shape[0]
        fill = padded(tokens) - tokens
        if fill == 0:
            return self
        zeros = self.input_ids.new_zeros(fill)
        return replace(
            self, input_ids=torch.cat([self.input_ids, zeros]), position_ids=torch.cat([self.position_ids, zeros])
        )

    def to(self, device: torch.device | str) -> PackedBatch:
        tensors = {name: value.to(device) for name, value in self.__dict__.items() if isinstance(value, Tensor)}
        return PackedBatch(shape=self.shape, **tensors)


def pack_rows(
    prompts: Sequence[Sequence[int]],
    responses: Sequence[Sequence[int]],
    response_width: int,
    groups: Sequence[int] | None = None,
) -> PackedBatch:
    """Lay rows end to end.

    Args:
        prompts, responses: token ids of B rows; prompts are not empty.
        response_width: R of the padded columns that results go back to.
        groups: rows with the same number have the same prompt, which is then packed once; None packs every row whole.
    """
    tokens: list[int] = []
    positions: list[int] = []
    bounds, prefix_of = [0], []
    response_index: list[int] = []
    targets: list[int] = []
    rows: list[int] = []
    columns: list[int] = []
    prompt_segment: dict[int, tuple[int, int]] = {}  # group -> (segment, packed position of its last token)

    def add_segment(ids: Sequence[int], first_position: int, prefix: int) -> int:
        tokens.extend(ids)
        positions.extend(range(first_position, first_position + len(ids)))
        bounds.append(len(tokens))
        prefix_of.append(prefix)
        return len(tokens) - len(ids)

    for row, (prompt, response) in enumerate(zip(prompts, responses, strict=True)):
        if groups is None:
            start = add_segment([*prompt, *response[:-1]], 0, -1)
            predictors = range(start + len(prompt) - 1, start + len(prompt) - 1 + len(response))
        else:
            group = groups[row]
            if group not in prompt_segment:
                start = add_segment(prompt, 0, -1)
                prompt_segment[group] = (len(prefix_of) - 1, start + len(prompt) - 1)
            segment, last = prompt_segment[group]
            start = len(tokens)
            if len(response) > 1:
                start = add_segment(response[:-1], len(prompt), segment)
            predictors = [last, *range(start, start + len(response) - 1)] if response else []  # type: ignore[assignment]
        response_index.extend(predictors)
        targets.extend(response)
        rows.extend([row] * len(response))
        columns.extend(range(len(response)))

    as_tensor = lambda values: torch.tensor(values, dtype=torch.int64)  # noqa: E731
    return PackedBatch(
        input_ids=as_tensor(tokens),
        position_ids=as_tensor(positions),
        cu_seqlens=as_tensor(bounds),
        prefix_of=as_tensor(prefix_of),
        response_index=as_tensor(response_index),
        targets=as_tensor(targets),
        rows=as_tensor(rows),
        columns=as_tensor(columns),
        shape=(len(prompts), response_width),
    )


@dataclass(frozen=True)
class _Bucket:
    """Segments of about the same size, computed in one batched matmul."""

    query_index: Tensor  # (N, t) packed positions; padded queries repeat the last one
    key_index: Tensor  # (N, L) packed positions, the prefix first; padded keys repeat the last one
    query_place: Tensor  # (N, t) place of the query in its row, the prefix counted
    query_real: Tensor  # (N, t) bool: not padded
    key_valid: Tensor  # (N, L) bool


Shapes = list[tuple[int, int]]


@dataclass(frozen=True)
class _HeadRows:
    """Which rows of (T * A, D) queries and (T * K, D) keys the buckets' matmuls take, bucket after bucket."""

    queries: Tensor  # (N, K, G, t) of each bucket
    keys: Tensor  # (N, K, L) of each bucket
    query_shapes: Shapes  # (N * K, G * t)
    key_shapes: Shapes  # (N * K, L)
    padded: Tensor  # places in ``queries`` of rows that are there once more
    outs: Tensor  # (T * A,) each row's place in ``queries``; 0 for tokens that only fill T up
    real: int  # rows of other tokens, which come first

    @classmethod
    def of(cls, buckets: list[_Bucket], tokens: int, heads: int, kv_heads: int) -> _HeadRows:
        device = buckets[0].query_index.device
        head = torch.arange(heads, device=device).view(kv_heads, -1, 1)
        queries = [x.query_index[:, None, None] * heads + head for x in buckets]
        keys = [x.key_index[:, None] * kv_heads + torch.arange(kv_heads, device=device)[:, None] for x in buckets]
        real = [x.query_real[:, None, None].expand(rows.shape) for x, rows in zip(buckets, queries, strict=True)]
        flat, flat_keys, flat_real = (torch.cat([x.reshape(-1) for x in some]) for some in (queries, keys, real))
        outs, places = flat.new_zeros(tokens * heads), flat_real.nonzero()[:, 0]
        outs[flat[places]] = places
        return cls(
            flat,
            flat_keys,
            [(x.shape[0] * kv_heads, x.shape[2] * x.shape[3]) for x in queries],
            [(x.shape[0] * kv_heads, x.shape[2]) for x in keys],
            (~flat_real).nonzero()[:, 0],
            outs,
            places.numel(),
        )


def _cut(rows: Tensor, shapes: Shapes) -> list[Tensor]:
    """Each bucket's part of rows (..., D), as its matmuls see it."""
    return [part.view(*shape, -1) for part, shape in zip(rows.split([n * m for n, m in shapes]), shapes, strict=True)]


def _attend(
    query: Tensor, key: Tensor, value: Tensor, rows: _HeadRows, biases: list[Tensor], rule: AttentionRule
) -> Tensor:
    """Queries (T * A, D), keys and values (T * K, D) -> (T * A, D)."""
    gathered = key.index_select(0, rows.keys), value.index_select(0, rows.keys)
    parts = _buckets_of(rows, [query.index_select(0, rows.queries)], gathered)
    outs = [
        block_attention(q, k.transpose(1, 2).contiguous(), v, bias, rule)
        for (q, k, v), bias in zip(parts, biases, strict=True)
    ]
    return torch.cat([out.view(-1, out.shape[2]) for out in outs]).index_select(0, rows.outs)


class _Attend(torch.autograd.Function):
    """:func:`_attend` without soft cap and sinks, whose backward pass goes back by gathers and keeps less.

    Weights are kept in the model's dtype alone; autograd would keep them in float32, too.
    """

    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        rows: _HeadRows,
        biases: list[Tensor],
        rule: AttentionRule,
    ) -> Tensor:
        query_rows = query.index_select(0, rows.queries)
        key_rows, value_rows = (x.index_select(0, rows.keys) for x in (key, value))
        out = torch.empty_like(query_rows)
        probs = []
        parts = _buckets_of(rows, (query_rows, out), (key_rows, value_rows))
        for (q, into, k, v), bias in zip(parts, biases, strict=True):
            probs.append(block_probs(q, k.transpose(1, 2).contiguous(), bias, rule))
            into.copy_(weighted_values(probs[-1], v))
        ctx.save_for_backward(query_rows, key_rows, value_rows, *probs)
        ctx.rows, ctx.scale, ctx.keys = rows, rule.scale, key.shape
        return out.index_select(0, rows.outs)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        """With P the weights and dP = dO V': dV = P' dO, dS = scale P (dP - sum of P dP), dQ = dS K, dK = dS' Q."""
        (query, key, value, *probs), rows = ctx.saved_tensors, ctx.rows
        grad = grads[0].index_select(0, rows.queries).index_fill_(0, rows.padded, 0.0)
        grad_query, grad_key, grad_value = (torch.empty_like(x) for x in (query, key, value))
        parts = _buckets_of(rows, (query, grad, grad_query), (key, value, grad_key, grad_value))
        for (q, g, into_q, k, v, into_k, into_v), p in zip(parts, probs, strict=True):
            torch.bmm(p.transpose(1, 2), g, out=into_v)
            by_probs = torch.bmm(g * ctx.scale, v.transpose(1, 2))
            by_scores = torch._softmax_backward_data(by_probs, p, -1, p.dtype)
            torch.bmm(by_scores, k, out=into_q)
            torch.bmm(by_scores.transpose(1, 2), q, out=into_k)
        by_query = grad_query.index_select(0, rows.outs)
        by_query[rows.real :] = 0.0
        by_key, by_value = (x.new_zeros(ctx.keys).index_add_(0, rows.keys, x) for x in (grad_key, grad_value))
        return by_query, by_key, by_value, None, None, None


def _buckets_of(rows: _HeadRows, queries: Sequence[Tensor], keys: Sequence[Tensor]) -> Iterator[tuple[Tensor, ...]]:
    """Each bucket's parts of what lies as queries do, then of what lies as keys do."""
    cut = [_cut(x, rows.query_shapes) for x in queries] + [_cut(x, rows.key_shapes) for x in keys]
    return zip(*cut, strict=True)


class PackedContext:
    """Causal attention within each segment and over its prefix."""

    def __init__(self, packed: PackedBatch) -> None:
        self._buckets = _bucket(packed)
        self._rows: dict[tuple[int, int], _HeadRows] = {}
        self._biases: dict[int | None, list[Tensor]] = {}

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, rule: AttentionRule) -> Tensor:
        heads, tokens, size = query.shape
        kinds = heads, key.shape[0]
        if kinds not in self._rows:
            self._rows[kinds] = _HeadRows.of(self._buckets, tokens, *kinds)
        # Mostly views: layers leave the heads of a token beside each other.
        q, k, v = (x.transpose(0, 1).reshape(-1, size) for x in (query, key, value))
        plain = rule.softcap is None and rule.sinks is None
        attend: Callable[..., Tensor] = _Attend.apply if plain else _attend  # type: ignore[assignment]
        out = attend(q, k, v, self._rows[kinds], self._masks(rule.window, query.dtype), rule)
        return out.view(tokens, heads, size)

    def _masks(self, window: int | None, dtype: torch.dtype) -> list[Tensor]:
        """Biases (N, t, L) of every bucket, built once a forward for each window size."""
        if window not in self._biases:
            biases = []
            for bucket in self._buckets:
                place = bucket.query_place[:, :, None]
                keys = torch.arange(bucket.key_index.shape[1], device=place.device)
                keep = bucket.key_valid[:, None] & (keys <= place)
                if window is not None:
                    keep &= place - keys < window
                biases.append(mask_bias(keep, dtype))
            self._biases[window] = biases
        return self._biases[window]


def decoder_states(decoder: nn.Module, input_ids: Tensor, position_ids: Tensor, context: AttentionContext) -> Tensor:
    """Last hidden states (T, H) of packed tokens (T,)."""
    out = decoder(
        input_ids=input_ids[None], position_ids=position_ids[None], use_cache=False, attention_context=context
    )
    return out.last_hidden_state[0]


def _bucket(packed: PackedBatch) -> list[_Bucket]:
    device = packed.input_ids.device
    starts, ends = packed.cu_seqlens[:-1].cpu(), packed.cu_seqlens[1:].cpu()
    prefix = packed.prefix_of.cpu()
    length = ends - starts
    has_prefix = prefix >= 0
    prefix_start = torch.where(has_prefix, starts[prefix.clamp(min=0)], 0)
    prefix_length = torch.where(has_prefix, length[prefix.clamp(min=0)], 0)
    sizes = torch.stack([_round_up(length, QUERY_BUCKET), _round_up(prefix_length + length, KEY_BUCKET)], 1)
    buckets = []
    for t, keys in torch.unique(sizes, dim=0).tolist():
        members = ((sizes[:, 0] == t) & (sizes[:, 1] == keys)).nonzero()[:, 0]
        start, own, before, before_len = (x[members][:, None] for x in (starts, length, prefix_start, prefix_length))
        queries = torch.minimum(torch.arange(t), own - 1)
        places = torch.minimum(torch.arange(keys), before_len + own - 1)
        key_index = torch.where(places < before_len, before + places, start + places - before_len)
        bucket = _Bucket(
            start + queries,
            key_index,
            before_len + queries,
            torch.arange(t) < own,
            torch.arange(keys) < before_len + own,
        )
        buckets.append(_Bucket(*(x.to(device) for x in bucket.__dict__.values())))
    return buckets


def _round_up(counts: Tensor, multiple: int) -> Tensor:
    return (counts + multiple - 1) // multiple * multiple
