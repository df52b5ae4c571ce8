"""Rows made ready in chunks: token ids, the length limit, bad rows. The same work here and in worker processes."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from verl.config import DataConfig
from verl.data.rendering import cut, render
from verl.data.rows import BadRow, PromptRow
from verl.data.sources import RowSource

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

CHUNK = 1024  # rows


@dataclass
class Prepared:
    """What became of consecutive rows of a source.

    Attributes:
        rows: (K,) int64 numbers of the rows that can be used, ascending.
        lengths: (K,) int32 tokens of each, after the limit.
        ids: (sum of lengths,) int32 their token ids, end to end.
        digests: (K,) uint64, each a hash of what its row means and of its ids.
        weights: (K,) float64 of ``data.sampler.weight_column``; (0,) where none is named.
        sources: (K,) int32 places in ``names``.
        names: data sources.
        over: (X,) int64 numbers of the rows over the limit, kept or not.
        over_lengths: (X,) int32 tokens of each before the limit.
        bad: rows that cannot be used.
        kinds: for each data source and each further column its first row.
    """

    rows: np.ndarray
    lengths: np.ndarray
    ids: np.ndarray
    digests: np.ndarray
    weights: np.ndarray
    sources: np.ndarray
    over: np.ndarray
    over_lengths: np.ndarray
    names: list[str] = field(default_factory=list)
    bad: list[BadRow] = field(default_factory=list)
    kinds: dict[str, int] = field(default_factory=dict)

    def first(self, count: int) -> Prepared:
        """This, as if the source ended with the ``count``-th usable row."""
        if count > len(self.rows):
            return self
        last = int(self.rows[count - 1])
        over = self.over <= last
        return Prepared(
            self.rows[:count],
            self.lengths[:count],
            self.ids[: int(self.lengths[:count].sum())],
            self.digests[:count],
            self.weights[:count],
            self.sources[:count],
            self.over[over],
            self.over_lengths[over],
            self.names,
            [row for row in self.bad if row.index <= last],
            {kind: row for kind, row in self.kinds.items() if row <= last},
        )


def prepare(
    source: RowSource, start: int, stop: int, config: DataConfig, tokenizer: PreTrainedTokenizerBase
) -> Prepared:
    """Rows ``start`` to ``stop`` (excluded) of ``source``: rendered, cut to ``data.max_prompt_length`` or left out.

    Raises:
        DataError: message lists on a tokenizer without a chat template.
    """
    read = source.read(start, stop)
    good = [row for row in read if isinstance(row, PromptRow)]
    bad = [row for row in read if isinstance(row, BadRow)]
    ids, refused = render(good, tokenizer, config.chat_template_kwargs)
    weights = [row_weight(row, config.sampler.weight_column) for row in good]
    limit = config.max_prompt_length
    kept: list[int] = []
    over: list[int] = []
    for place, row in enumerate(good):
        weight = weights[place]
        reason = refused.get(place) or (weight if isinstance(weight, str) else None)
        if reason:
            bad.append(row.refused(reason))
            continue
        if len(ids[place]) > limit:
            over.append(place)
            if config.filter_overlong_prompts:
                continue
        kept.append(place)
    over_lengths = [len(ids[place]) for place in over]
    if not config.filter_overlong_prompts and config.truncation != "error":
        for place in over:
            ids[place] = cut(ids[place], limit, config.truncation)
    rows = [good[place] for place in kept]
    names = {name: i for i, name in enumerate(dict.fromkeys(row.data_source for row in rows))}
    return Prepared(
        rows=np.array([row.row_index for row in rows], np.int64),
        lengths=np.array([len(ids[place]) for place in kept], np.int32),
        ids=np.array([token for place in kept for token in ids[place]], np.int32),
        digests=np.array([digest(good[place], ids[place]) for place in kept], np.uint64),
        weights=np.array([weights[place] for place in kept] if config.sampler.weight_column else [], np.float64),
        sources=np.array([names[row.data_source] for row in rows], np.int32),
        over=np.array([good[place].row_index for place in over], np.int64),
        over_lengths=np.array(over_lengths, np.int32),
        names=list(names),
        bad=sorted(bad, key=lambda row: row.index),
        kinds=kinds_of(rows),
    )


def digest(row: PromptRow, ids: Sequence[int]) -> int:
    """64 bits that stand for a row's number, source, prompt, truth and token ids."""
    record = [row.row_index, row.data_source, row.prompt, row.ground_truth, list(ids)]
    # ASCII escapes keep lone surrogates encodable; repr serves types that only Arrow has (dates, decimals).
    text = json.dumps(record, sort_keys=True, default=repr).encode("ascii")
    return int.from_bytes(hashlib.sha256(text).digest()[:8], "little")


def row_weight(row: PromptRow, column: str | None) -> float | str:
    """The row's own weight, or what is wrong with it."""
    if column is None:
        return 1.0
    value: Any = {**row.extra_info, **row.columns}.get(column)
    try:
        weight = float(value)
    except (TypeError, ValueError):
        return f"the weight in column {column!r} is {value!r}, not a number"
    return weight if 0 <= weight < math.inf else f"the weight in column {column!r} is {value!r}, not 0 or more"


def kinds_of(rows: Sequence[PromptRow]) -> dict[str, int]:
    """For each data source and each further column among ``rows`` the number of the first row that has it."""
    kinds: dict[str, int] = {}
    for row in rows:
        kinds.setdefault(f"source {row.data_source}", row.row_index)
        for name in (*row.extra_info, *row.columns):
            kinds.setdefault(f"column {name}", row.row_index)
    return kinds
