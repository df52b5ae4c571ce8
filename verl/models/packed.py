"""Rows laid end to end: no padding token reaches the model, and a prompt shared by several responses lies there once.

A pack is a sequence of segments. A segment is a whole row (prompt and response), or a prompt alone, or a response
whose prompt is another segment (``prefix_of``). The last token of a response is not part of the pack: nothing reads
the hidden state behind it.

Shape legend: T packed tokens, S segments, M response tokens, see also :mod:`verl.models.attention`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from verl.models.attention import AttentionContext, AttentionRule, block_attention, mask_bias

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
    key_valid: Tensor  # (N, L) bool


class PackedContext:
    """Causal attention within each segment and over its prefix."""

    def __init__(self, packed: PackedBatch) -> None:
        self._buckets, self._order = _bucket(packed)
        self._queries = _joined([bucket.query_index for bucket in self._buckets])
        self._keys = _joined([bucket.key_index for bucket in self._buckets])
        self._biases: dict[int | None, list[Tensor]] = {}

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, rule: AttentionRule) -> Tensor:
        heads, tokens, size = query.shape
        kv_heads = key.shape[0]
        group = heads // kv_heads
        # One gather for all buckets: the backward of each would fill and add up a gradient over all tokens.
        queries, keys, values = (
            x.transpose(0, 1).reshape(tokens, -1).index_select(0, index).split(sizes)
            for x, index, sizes in ((query, *self._queries), (key, *self._keys), (value, *self._keys))
        )
        outs = []
        for i, (bucket, bias) in enumerate(zip(self._buckets, self._masks(rule.window, query.dtype), strict=True)):
            n, t = bucket.query_index.shape
            length = bucket.key_index.shape[1]
            q = queries[i].view(n, t, kv_heads, group, size)
            k, v = keys[i].view(n, length, kv_heads, size), values[i].view(n, length, kv_heads, size)
            out = block_attention(
                q.permute(0, 2, 3, 1, 4).contiguous().view(n * kv_heads, group * t, size),
                k.permute(0, 2, 3, 1).contiguous().view(n * kv_heads, size, length),
                v.transpose(1, 2).contiguous().view(n * kv_heads, length, size),
                bias,
                rule,
            )
            outs.append(out.view(n, kv_heads, group, t, size).permute(0, 3, 1, 2, 4).reshape(n * t, heads * size))
        return torch.cat(outs).index_select(0, self._order).view(tokens, heads, size)

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


def _bucket(packed: PackedBatch) -> tuple[list[_Bucket], Tensor]:
    """Buckets, and for each packed token its place among the buckets' outputs laid end to end."""
    device = packed.input_ids.device
    starts, ends = packed.cu_seqlens[:-1].cpu(), packed.cu_seqlens[1:].cpu()
    prefix = packed.prefix_of.cpu()
    length = ends - starts
    has_prefix = prefix >= 0
    prefix_start = torch.where(has_prefix, starts[prefix.clamp(min=0)], 0)
    prefix_length = torch.where(has_prefix, length[prefix.clamp(min=0)], 0)
    sizes = torch.stack([_round_up(length, QUERY_BUCKET), _round_up(prefix_length + length, KEY_BUCKET)], 1)
    order = torch.zeros(packed.input_ids.shape[0], dtype=torch.int64)  # fill tokens read place 0; nobody reads them
    buckets, offset = [], 0
    for t, keys in torch.unique(sizes, dim=0).tolist():
        members = ((sizes[:, 0] == t) & (sizes[:, 1] == keys)).nonzero()[:, 0]
        start, own, before, before_len = (x[members][:, None] for x in (starts, length, prefix_start, prefix_length))
        queries = torch.minimum(torch.arange(t), own - 1)
        places = torch.minimum(torch.arange(keys), before_len + own - 1)
        key_index = torch.where(places < before_len, before + places, start + places - before_len)
        real = torch.arange(t) < own
        order[(start + queries)[real]] = (offset + torch.arange(members.numel() * t).view(-1, t))[real]
        bucket = _Bucket(start + queries, key_index, before_len + queries, torch.arange(keys) < before_len + own)
        buckets.append(_Bucket(*(x.to(device) for x in bucket.__dict__.values())))
        offset += members.numel() * t
    return buckets, order.to(device)


def _joined(indices: list[Tensor]) -> tuple[Tensor, list[int]]:
    return torch.cat([index.view(-1) for index in indices]), [index.numel() for index in indices]


def _round_up(counts: Tensor, multiple: int) -> Tensor:
    return (counts + multiple - 1) // multiple * multiple
