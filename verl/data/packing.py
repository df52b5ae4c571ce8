"""Which rows go through the model together: the plan of micro-batches.

Pure arithmetic on lengths. The plan never changes a result (law 2); it only decides memory and speed.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field

from verl.errors import DataError


@dataclass
class _Bin:
    tokens: int = 0
    rows: list[int] = field(default_factory=list)


def plan_micro_batches(
    lengths: Sequence[int],
    groups: Sequence[Hashable],
    max_rows: int | None = None,
    max_tokens: int | None = None,
    *,
    prompt_lengths: Sequence[int] | None = None,
    shared: bool = False,
) -> list[list[int]]:
    """Split B rows into micro-batches.

    With ``max_rows`` alone: consecutive chunks of ``max_rows`` rows. With ``max_tokens``: best-fit-decreasing packing;
    the rows of a group stay in one micro-batch where the limit allows, unless (``shared`` off) splitting groups needs
    fewer micro-batches. ``ceil(total / max_tokens)`` is only a lower bound of their number.

    Args:
        lengths: (B,) response tokens of each row.
        groups: (B,) prompt group of each row.
        max_rows: most rows of a micro-batch.
        max_tokens: most tokens of a micro-batch, prompts included.
        prompt_lengths: (B,) prompt tokens of each row; None: ``lengths`` are whole rows already.
        shared: a prompt is computed once for all rows of its group in the same micro-batch, and counted once.

    Returns:
        Row indices: ascending within a micro-batch, micro-batches ordered by their first row; every row exactly once,
        no empty micro-batch. The same input gives the same plan.

    Raises:
        DataError: no limit or a limit below 1, or a single row over ``max_tokens``, with its length.
    """
    prompts = list(prompt_lengths) if prompt_lengths is not None else [0] * len(lengths)
    if not len(lengths) == len(groups) == len(prompts):
        raise ValueError(f"{len(lengths)} lengths, {len(groups)} groups, {len(prompts)} prompt lengths: not one a row")
    for name, limit in (("rows", max_rows), ("tokens", max_tokens)):
        if limit is not None and limit < 1:
            raise DataError(f"A micro-batch must hold at least one of its {name}.", limit, "use a limit of at least 1")
    if max_tokens is None:
        if max_rows is None:
            raise DataError("No limit is given for a micro-batch.", fix="give a number of rows or of tokens")
        return [list(range(i, min(i + max_rows, len(lengths)))) for i in range(0, len(lengths), max_rows)]
    _check_rows(lengths, prompts, max_tokens)
    rows_limit = max_rows or max(len(lengths), 1)
    together = _pack(_pieces(lengths, groups, prompts, rows_limit, max_tokens, shared), rows_limit, max_tokens)
    if not shared:
        single = [_Bin(lengths[i] + prompts[i], [i]) for i in range(len(lengths))]
        apart = _pack(single, rows_limit, max_tokens)
        if len(apart) < len(together):
            return apart
    return together


def _check_rows(lengths: Sequence[int], prompts: Sequence[int], max_tokens: int) -> None:
    longest = max(range(len(lengths)), key=lambda i: lengths[i] + prompts[i], default=None)
    if longest is not None and lengths[longest] + prompts[longest] > max_tokens:
        raise DataError(
            f"A sequence is longer than a micro-batch may be ({max_tokens} tokens).",
            f"row {longest}: {lengths[longest] + prompts[longest]} tokens "
            f"({prompts[longest]} of the prompt, {lengths[longest]} of the response)",
            "raise actor.ppo_max_token_len_per_gpu (or the ref/critic one) to at least "
            "data.max_prompt_length + data.max_response_length",
        )


def _pieces(
    lengths: Sequence[int],
    groups: Sequence[Hashable],
    prompts: Sequence[int],
    max_rows: int,
    max_tokens: int,
    shared: bool,
) -> list[_Bin]:
    """Whole groups where they fit, else parts of a group that do."""
    members: dict[Hashable, list[int]] = {}
    for i, group in enumerate(groups):
        members.setdefault(group, []).append(i)
    pieces: list[_Bin] = []
    for rows in members.values():
        if not shared:
            items = [_Bin(lengths[i] + prompts[i], [i]) for i in rows]
            pieces.extend(_fill(items, max_rows, max_tokens))
            continue
        # One prompt for all: what is left for the responses is the limit less the prompt.
        prompt = prompts[rows[0]]
        if any(prompts[i] != prompt for i in rows):
            raise ValueError(f"rows {rows} are one group but their prompts differ in length; they cannot be shared")
        parts = _fill([_Bin(lengths[i], [i]) for i in rows], max_rows, max_tokens - prompt)
        pieces.extend(_Bin(part.tokens + prompt, part.rows) for part in parts)
    return pieces


def _fill(items: list[_Bin], max_rows: int, max_tokens: int) -> list[_Bin]:
    """Best fit, longest first: each item into the fullest bin that still has room for it."""
    bins: list[_Bin] = []
    # (tokens left, bin) in ascending order; bins without room for one more row leave the list.
    room: list[tuple[int, int]] = []
    for item in sorted(items, key=lambda item: (-item.tokens, item.rows[0])):
        at = bisect_left(room, (item.tokens, -1))
        while at < len(room) and len(bins[room[at][1]].rows) + len(item.rows) > max_rows:
            at += 1
        if at == len(room):
            bins.append(_Bin())
            index = len(bins) - 1
        else:
            index = room.pop(at)[1]
        bins[index].tokens += item.tokens
        bins[index].rows += item.rows
        if len(bins[index].rows) < max_rows:
            insort(room, (max_tokens - bins[index].tokens, index))
    return bins


def _pack(pieces: list[_Bin], max_rows: int, max_tokens: int) -> list[list[int]]:
    return sorted(sorted(piece.rows) for piece in _fill(pieces, max_rows, max_tokens))
