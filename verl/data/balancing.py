"""Which rows go to which rank, and into which of its micro-batches. Pure arithmetic, the same on all ranks."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Hashable, Sequence
from itertools import count, pairwise

from verl.data.packing import plan_micro_batches

Plan = list[list[int]]  # row indices of each micro-batch


def karmarkar_karp(weights: Sequence[float], bins: int, equal_sizes: bool = False) -> list[list[int]]:
    """Spread items over bins so that the sums come close (largest differencing method, Karmarkar and Karp 1982).

    The two partial solutions whose sums are furthest apart are joined, the heaviest bin of one with the lightest of
    the other, until one solution is left.

    Args:
        weights: of the items.
        bins: at least 1; with fewer items than bins some bins are empty.
        equal_sizes: bins hold the same number of items, or one more.

    Returns:
        Items of each bin, ascending.
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
