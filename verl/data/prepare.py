"""Rows made ready in chunks: token ids, the length limit, bad rows. The same work here and in worker processes."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from verl.config import DataConfig
from verl.data.rendering import cut, render
from verl.data.rows import BadRow, PromptRow
from verl.data.sources import RowSource

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

CHUNK = 1024  # rows


# Of a row that can be used: its number, tokens after the limit, a hash of what it means and of its ids, its weight of
# data.sampler.weight_column, and the place of its data source in ``names``. Of one over the limit: tokens before it.
KEPT = np.dtype([("number", "i8"), ("length", "i4"), ("digest", "u8"), ("weight", "f8"), ("source", "i4")])
OVER = np.dtype([("number", "i8"), ("length", "i4")])


@dataclass
class Prepared:
    """What became of consecutive rows of a source.

    Attributes:
        rows: (K,) of type ``KEPT``: the rows that can be used, in order.
        ids: (sum of their lengths,) int32 token ids, end to end.
        over: (X,) of type ``OVER``: rows over the limit, kept or not.
        names: data sources.
        bad: rows that cannot be used.
        kinds: for each data source and each further column its first row.
    """

    rows: np.ndarray
    ids: np.ndarray
    over: np.ndarray
    names: list[str]
    bad: list[BadRow]
    kinds: dict[str, int]

    def first(self, count: int) -> Prepared:
        """This, as if the source ended with the ``count``-th usable row."""
        if count > len(self.rows):
            return self
        rows, last = self.rows[:count], int(self.rows["number"][count - 1])
        return Prepared(
            rows,
            self.ids[: rows["length"].sum()],
            self.over[self.over["number"] <= last],
            self.names,
            [row for row in self.bad if row.index <= last],
            {kind: row for kind, row in self.kinds.items() if row <= last},
        )


def prepare(
    source: RowSource, start: int, stop: int, config: DataConfig, tokenizer: PreTrainedTokenizerBase
) -> Prepared:
    """Rows ``start`` to ``stop`` (excluded) of ``source``: rendered, cut to ``data.max_prompt_length`` or left out.
    Raises DataError: message lists on a tokenizer without a chat template."""
    read = source.read(start, stop)
    good = [row for row in read if isinstance(row, PromptRow)]
    bad = [row for row in read if isinstance(row, BadRow)]
    ids, refused = render(good, tokenizer, config.chat_template_kwargs)
    rows, used = list[tuple[Any, ...]](), list[PromptRow]()
    tokens, over, names = list[int](), list[tuple[int, int]](), dict[str, int]()
    for place, row in enumerate(good):
        own, weight = ids[place], row_weight(row, config.sampler.weight_column)
        reason = refused.get(place) or (weight if isinstance(weight, str) else None)
        if reason:
            bad.append(row.refused(reason))
            continue
        if len(own) > config.max_prompt_length:
            over.append((row.row_index, len(own)))
            if config.filter_overlong_prompts:
                continue
            if config.truncation != "error":
                own = cut(own, config.max_prompt_length, config.truncation)
        source_place = names.setdefault(row.data_source, len(names))
        rows.append((row.row_index, len(own), digest(row, own), weight, source_place))
        used.append(row)
        tokens += own
    arrays = np.array(rows, KEPT), np.array(tokens, np.int32), np.array(over, OVER)
    return Prepared(*arrays, list(names), sorted(bad, key=lambda row: row.index), kinds_of(used))


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
