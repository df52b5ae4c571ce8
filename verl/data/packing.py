"""Which rows go to which rank, and which go through the model together: the plan of micro-batches.

Pure arithmetic on lengths. The plan never changes a result (law 2); it only decides memory and speed.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left, insort
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from itertools import count, pairwise

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
    fewer micro-batches. Row indices ascend within a micro-batch, micro-batches by their first row; none is empty.
    Raises DataError: no limit or a limit below 1, or a single row over ``max_tokens``, with its length.

    Args:
        lengths, groups: (B,) response tokens and prompt group of each row.
        max_rows, max_tokens: most rows, and most tokens (prompts included), of a micro-batch.
        prompt_lengths: (B,) prompt tokens of each row; None: ``lengths`` are whole rows already.
        shared: a prompt is computed once for all rows of its group in the same micro-batch, and counted once.
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


Plan = list[list[int]]  # row indices of each micro-batch


def karmarkar_karp(weights: Sequence[float], bins: int, equal_sizes: bool = False) -> list[list[int]]:
    """Spread items over bins so that the sums come close (largest differencing method, Karmarkar and Karp 1982).

    The two partial solutions whose sums are furthest apart are joined, the heaviest bin of one with the lightest of the
    other, until one solution is left. ``equal_sizes``: bins hold the same number of items, or one more. Returns the
    items of each bin, ascending.
    """
    if bins < 1:
        raise ValueError(f"{bins} bins")
    order = sorted(range(len(weights)), key=lambda item: (-weights[item], item))
    step = bins if equal_sizes else 1
    number = count()  # breaks ties in the order of the items
    heap: list[tuple[float, int, list[tuple[float, list[int]]]]] = []

    def push(solution: list[tuple[float, list[int]]]) -> None:
        solution = sorted(solution, key=lambda bin_: (-bin_[0], bin_[1]))
        heapq.heappush(heap, (solution[-1][0] - solution[0][0], next(number), solution))

    for start in range(0, len(order), step):
        chosen = order[start : start + step]
        push([(weights[item], [item]) for item in chosen] + [(0.0, []) for _ in range(bins - len(chosen))])
    while len(heap) > 1:
        one, other = heapq.heappop(heap)[2], heapq.heappop(heap)[2]
        push([(a[0] + b[0], a[1] + b[1]) for a, b in zip(one, reversed(other), strict=True)])
    solution = heap[0][2] if heap else [(0.0, [])] * bins
    return sorted(sorted(items) for _, items in solution)


def share_rows(
    lengths: Sequence[int],
    groups: Sequence[Hashable],
    prompt_lengths: Sequence[int],
    ranks: int,
    *,
    shared: bool,
    balance: bool = True,
    equal_rows: bool = False,
) -> list[list[int]]:
    """The rows of each rank.

    Args:
        lengths, groups, prompt_lengths: response tokens, prompt group and prompt tokens of each row.
        shared: a prompt is computed once for the rows of its group on one rank. Groups then stay together, unless
            cutting them leaves less work to the busiest rank although their prompts are computed more than once.
        balance: by tokens; False: in order, whole groups where there are enough of them.
        equal_rows: every rank gets the same number of rows, or one more (micro-batches of a fixed number of rows).
    """
    rows = range(len(lengths))
    members: dict[Hashable, list[int]] = {}
    for row in rows:
        members.setdefault(groups[row], []).append(row)
    whole, single = list(members.values()), [[row] for row in rows]
    equal_groups = len(whole) % ranks == 0 and len({len(group) for group in whole}) == 1

    def cost(chosen: Sequence[int]) -> int:
        prompts = {groups[row]: prompt_lengths[row] for row in chosen}.values() if shared else ()
        return sum(lengths[row] + (0 if shared else prompt_lengths[row]) for row in chosen) + sum(prompts)

    if not balance:
        units = whole if equal_groups or (shared and len(whole) >= ranks) else single
        bounds = [len(units) * rank // ranks for rank in range(ranks + 1)]
        return [[row for unit in units[start:end] for row in unit] for start, end in pairwise(bounds)]
    if equal_rows:
        return _spread(whole if shared and equal_groups else single, cost, ranks, True)
    if not shared:
        return _spread(single, cost, ranks)
    pieces = [
        [group[i] for i in piece]
        for group in whole
        for piece in karmarkar_karp([lengths[row] for row in group], min(ranks, len(group)))
    ]
    candidates = [_spread(units, cost, ranks) for units in (whole, pieces)]
    return min(candidates, key=lambda shares: max(map(cost, shares)))


def plan_ranks(
    lengths: Sequence[int],
    groups: Sequence[Hashable],
    max_rows: int | None,
    max_tokens: int | None,
    *,
    prompt_lengths: Sequence[int],
    shared: bool,
    ranks: int = 1,
    balance: bool = True,
    lockstep: bool = False,
) -> list[Plan]:
    """The micro-batches of every rank; arguments and errors as :func:`verl.data.packing.plan_micro_batches`.
    ``lockstep``: every rank makes as many micro-batches as the one that needs the most: its own rows in smaller
    portions, then empty ones."""
    every = list(range(len(lengths)))
    shares = [every]
    if ranks > 1:
        shares = share_rows(
            lengths, groups, prompt_lengths, ranks, shared=shared, balance=balance, equal_rows=max_tokens is None
        )
    plans = []
    for share in shares:
        own = plan_micro_batches(
            [lengths[row] for row in share],
            [groups[row] for row in share],
            max_rows,
            max_tokens,
            prompt_lengths=[prompt_lengths[row] for row in share],
            shared=shared,
        )
        plans.append([[share[place] for place in part] for part in own])
    most = max(map(len, plans))
    return [_as_many(plan, most) for plan in plans] if lockstep else plans


def _as_many(plan: Plan, number: int) -> Plan:
    while len(plan) < number and max(map(len, plan), default=0) > 1:
        at = max(range(len(plan)), key=lambda i: len(plan[i]))
        half = (len(plan[at]) + 1) // 2
        plan = [*plan[:at], plan[at][:half], plan[at][half:], *plan[at + 1 :]]
    return plan + [[] for _ in range(number - len(plan))]


def _spread(
    units: list[list[int]], cost: Callable[[Sequence[int]], int], ranks: int, equal_sizes: bool = False
) -> list[list[int]]:
    bins = karmarkar_karp([cost(unit) for unit in units], ranks, equal_sizes)
    return [sorted(row for unit in bin_ for row in units[unit]) for bin_ in bins]
