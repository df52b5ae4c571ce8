"""What advantage estimators are given and what they give back, and the statistics of groups that most of them share."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from verl.algorithms.masking import at_least_float32, require_same_shape, row_blocks, select, zero_outside
from verl.algorithms.metric import Metric
from verl.config.schema_run import AlgorithmConfig

# Scores of a group that differ by less than this share of their size differ by rounding only: float32 sums of token
# rewards carry about 1e-7 of noise, which a division by the std would blow up to advantages of size 1.
_ROUNDING = 1e-6


class RowTotals(NamedTuple):
    """Sums over each row's trained tokens, all (B,) float64: rewards, sizes of rewards, and the tokens themselves."""

    scores: Tensor
    magnitudes: Tensor
    lengths: Tensor


@dataclass(frozen=True)
class AdvantageInputs:
    """What an estimator may look at. Raises ValueError: shapes that do not fit together.

    Attributes:
        token_level_rewards: (B, R), after shaping and the KL penalty where there are any.
        response_mask: (B, R) bool, the trained tokens.
        group_ids: (B,) int, equal for the responses of one prompt (`group_index` makes them from uids).
        scored: (B,) bool. False: no reward function could score the row.
        values: (B, R), critic; ``values[t]`` is read before token t.
        bootstrap_values: (B,), the value after the last token of a response cut by the length limit, 0 for a
            finished one. None: every response counts as finished.
        reward_components: (B, K), for estimators that normalise several rewards apart; NaN where a row has none.
        baselines: (B,), for estimators with a baseline rollout: the return of the greedy response.
    """

    token_level_rewards: Tensor
    response_mask: Tensor
    group_ids: Tensor
    scored: Tensor
    values: Tensor | None = None
    bootstrap_values: Tensor | None = None
    reward_components: Tensor | None = None
    baselines: Tensor | None = None

    def __post_init__(self) -> None:
        shape = self.token_level_rewards.shape
        require_same_shape(shape, response_mask=self.response_mask, values=self.values)
        require_same_shape(
            shape[:1],
            group_ids=self.group_ids,
            scored=self.scored,
            bootstrap_values=self.bootstrap_values,
            baselines=self.baselines,
            reward_components=None if self.reward_components is None else self.reward_components[:, 0],
        )

    @cached_property
    def totals(self) -> RowTotals:
        """Outcome score, sum of absolute rewards and number of trained tokens of every row."""
        parts = []
        for block in row_blocks(self.token_level_rewards.shape):
            mask = self.response_mask[block].bool()
            chosen = zero_outside(at_least_float32(self.token_level_rewards[block]), mask)  # (b, R)
            sizes = torch.linalg.vector_norm(chosen, ord=1, dim=-1)
            parts.append(torch.stack([chosen.sum(dim=-1), sizes, mask.to(chosen.dtype).sum(dim=-1)]).double())
        return RowTotals(*(torch.cat(parts, dim=1) if parts else self.scored.new_zeros(3, 0, dtype=torch.float64)))

    @cached_property
    def counted(self) -> Tensor:
        """(B,) bool: rows that enter statistics, scored and with a trained token."""
        return self.scored.bool() & (self.totals.lengths > 0)

    @cached_property
    def groups(self) -> GroupStatistics:
        """Statistics of the outcome scores by group."""
        return group_statistics(self.totals.scores, self.counted, self.group_ids, self.totals.magnitudes)


@dataclass(frozen=True)
class Advantages:
    """Attributes: advantages, returns: (B, R) in the rewards' dtype (at least float32), 0 at masked positions."""

    advantages: Tensor
    returns: Tensor


Estimator = Callable[[AdvantageInputs, "AlgorithmConfig"], Advantages]


def spread_over_tokens(inputs: AdvantageInputs, row_advantages: Tensor) -> Advantages:
    """One advantage a row (B,) on each of its trained tokens; the returns are the advantages (there is no critic)."""
    rows = row_advantages.to(at_least_float32(inputs.token_level_rewards).dtype).unsqueeze(1)  # (B, 1)
    advantages = zero_outside(rows, inputs.response_mask.bool())
    return Advantages(advantages, advantages)


def outcome_scores(token_level_rewards: Tensor, response_mask: Tensor) -> Tensor:
    """One score a row: the sum of its trained tokens' rewards, (B,) float64.

    A row without a trained token sums to 0, whatever was left in its padded slots; estimators do not count such a row
    at all, since no token could carry its score.
    """
    return select(token_level_rewards, response_mask).sum(dim=-1).double()


def group_index(uids: Sequence[Hashable]) -> Tensor:
    """Number the groups in order of first appearance: (B,) int64."""
    numbers: dict[Hashable, int] = {}
    return torch.tensor([numbers.setdefault(uid, len(numbers)) for uid in uids], dtype=torch.int64)


@dataclass(frozen=True)
class GroupStatistics:
    """Statistics of each row's group over its counted rows, given back to every row: all (B,). ``count``: counted rows
    of the group; ``std`` divides by n - 1, 0 for a group of one; ``spread``: the row is counted and its group's scores
    differ by more than rounding."""

    group: Tensor  # int64, the groups numbered from 0
    scores: Tensor  # float64, 0 for a row that is not counted
    counted: Tensor  # bool
    count: Tensor
    mean: Tensor
    std: Tensor
    spread: Tensor  # bool

    @property
    def relative(self) -> Tensor:
        """Score less the group's mean; exactly 0 for rows not counted and in groups of one or without spread."""
        return torch.where(self.spread, self.scores - self.mean, 0.0)

    @property
    def normalized(self) -> Tensor:
        """`relative` divided by ``std + 1e-6``, as the field does."""
        return torch.where(self.spread, self.relative / (self.std + 1e-6), 0.0)

    def total(self, values: Tensor) -> Tensor:
        """Sum over the counted rows of each row's group, (B,) float64."""
        return _total(torch.where(self.counted, values.double(), 0.0), self.group)

    def largest(self, values: Tensor) -> Tensor:
        """Largest over the counted rows of each row's group, (B,) float64; -inf where there is none."""
        return _extreme(torch.where(self.counted, values, -torch.inf), self.group, "amax")

    def number(self, rows: Tensor) -> int:
        """How many groups have one of these rows, (B,) bool."""
        return int(torch.unique(self.group[rows]).numel())


def group_statistics(
    scores: Tensor, counted: Tensor, group_ids: Tensor, magnitudes: Tensor | None = None
) -> GroupStatistics:
    """Two-pass statistics in float64, by scatter: no loop over rows or groups. Groups need not be contiguous; scores of
    rows not ``counted`` are never read. ``magnitudes``: size of the numbers that a score was summed from, which bounds
    its rounding; None: the size of the scores themselves."""
    scores = torch.where(counted, scores.double(), 0.0)
    sizes = scores.abs() if magnitudes is None else torch.where(counted, magnitudes, 0.0)
    group = torch.unique(group_ids, return_inverse=True)[1]
    count = _total(counted.double(), group)
    mean = _total(scores, group) / count.clamp(min=1)
    deviations = torch.where(counted, scores - mean, 0.0)
    std = (_total(deviations.square(), group) / (count - 1).clamp(min=1)).sqrt()
    highest = _extreme(torch.where(counted, scores, -torch.inf), group, "amax")
    lowest = _extreme(torch.where(counted, scores, torch.inf), group, "amin")
    span = highest - lowest
    # A score of NaN or inf must show in its group, not pass for a group without spread.
    flat = span.isfinite() & (span <= _ROUNDING * _extreme(sizes, group, "amax"))
    return GroupStatistics(group, scores, counted, count, mean, std, spread=counted & ~flat)


def zero_spread_metric(inputs: AdvantageInputs) -> Metric:
    """Share of groups (with at least one counted row) whose scores are all equal: they teach nothing by comparison."""
    groups = inputs.groups.number(inputs.counted)
    return Metric(groups - inputs.groups.number(inputs.groups.spread), groups)


def _total(x: Tensor, group: Tensor) -> Tensor:  # (B,) -> its group's sum, (B,)
    return torch.zeros(len(x), dtype=torch.float64, device=x.device).index_add_(0, group, x)[group]


def _extreme(x: Tensor, group: Tensor, reduce: str) -> Tensor:  # (B,) -> its group's extreme, (B,)
    empty = torch.zeros(len(x), dtype=torch.float64, device=x.device)
    return empty.scatter_reduce_(0, group, x.double(), reduce, include_self=False)[group]
