"""Advantage estimators: pure functions with one signature, and the plain dict that names them.

An estimator takes `AdvantageInputs` and the algorithm's configuration and returns `Advantages`, both (B, R). It runs
on the controller over the whole batch, so every statistic is global. What every estimator keeps:

- Nothing at a masked position is ever read, so the **terminal reward belongs on the last trained token**. A response
  that ends in masked tokens (a tool's output, say) has its reward before them; a reward left on the masked tail is
  not seen. `verl.algorithms.masking.place_at_last` puts it right.
- Masked gaps inside a response are closed: the next token is the next *trained* token.
- A row that was not scored, or that has no trained token, enters no statistic and has advantage 0.
- Advantages and returns at masked positions are 0.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from verl.algorithms.masking import at_least_float32, masked_whiten, place_at_last, require_same_shape, select
from verl.algorithms.metric import Metric

if TYPE_CHECKING:
    from verl.config.schema_run import AlgorithmConfig

GRPO_EPS = 1e-6  # added to a group's std, as the field does

# Scores of a group that differ by less than this share of their size differ by rounding only: float32 sums of token
# rewards carry about 1e-7 of noise, which a division by the std would blow up to advantages of size 1.
_ROUNDING = 1e-6

_ROWS_AT_ONCE = 1024  # GAE's temporaries: small enough for the cache, wide enough to hide the column loop


@dataclass(frozen=True)
class AdvantageInputs:
    """What an estimator may look at.

    Attributes:
        token_level_rewards: (B, R), after the KL penalty where there is one.
        response_mask: (B, R) bool, the trained tokens.
        group_ids: (B,) int, equal for the responses of one prompt (`group_index` makes them from uids).
        scored: (B,) bool. False: no reward function could score the row.
        values: (B, R), critic; ``values[t]`` is read before token t.
        bootstrap_values: (B,), the value after the last token of a response cut by the length limit, 0 for a
            finished one. None: every response counts as finished.
        reward_components: (B, K), for estimators that normalise several rewards apart.
        baselines: (B,), for estimators with a baseline rollout.

    Raises:
        ValueError: shapes that do not fit together.
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
        )

    @property
    def counted(self) -> Tensor:
        """(B,) bool: rows that enter statistics, scored and with a trained token."""
        return self.scored.bool() & self.response_mask.bool().any(dim=-1)


@dataclass(frozen=True)
class Advantages:
    """Attributes: advantages, returns: (B, R) in the rewards' dtype (at least float32), 0 at masked positions."""

    advantages: Tensor
    returns: Tensor


Estimator = Callable[[AdvantageInputs, "AlgorithmConfig"], Advantages]


def gae(inputs: AdvantageInputs, config: AlgorithmConfig) -> Advantages:
    """Generalised advantage estimation (Schulman et al. 2015, arXiv:1506.02438, eq. 16).

    ``delta_t = r_t + gamma V_{t+1} - V_t``, ``A_t = delta_t + gamma lam A_{t+1}``, return ``A_t + V_t``; t counts
    trained tokens. After the last one the value is 0, or ``bootstrap_values`` for a response cut by the length limit.
    With ``config.whiten_advantages`` the advantages are then whitened over the trained tokens of all scored rows
    (n - 1; one token alone: 0); the returns are not. An unscored row has advantage 0 and returns equal to its values.

    Config: ``gamma``, ``lam``, ``whiten_advantages``.

    Raises:
        ValueError: no values were given.
    """
    if inputs.values is None:
        raise ValueError("the estimator 'gae' needs values: it runs with a critic")
    mask = inputs.response_mask.bool()
    counted = mask & inputs.counted.unsqueeze(1)
    dtype = at_least_float32(inputs.token_level_rewards).dtype
    raw, returns = (torch.empty(mask.shape, dtype=dtype, device=mask.device) for _ in range(2))
    for start in range(0, len(mask), _ROWS_AT_ONCE):
        block = slice(start, start + _ROWS_AT_ONCE)
        rewards = select(inputs.token_level_rewards[block], counted[block]).to(dtype)  # (b, R)
        values = select(inputs.values[block], mask[block]).to(dtype)
        if inputs.bootstrap_values is not None:
            # The value after the end enters only the last delta: there it is a reward of gamma times its size.
            rewards += place_at_last(config.gamma * inputs.bootstrap_values[block], mask[block])
        scan = _scan_with_gaps if _has_gaps(mask[block]) else _scan
        raw[block] = scan(rewards, values, mask[block], config.gamma, config.lam)
        raw[block].masked_fill_(~counted[block], 0.0)
        torch.add(raw[block], values, out=returns[block])
    return Advantages(masked_whiten(raw, counted) if config.whiten_advantages else raw, returns)


def grpo(inputs: AdvantageInputs, config: AlgorithmConfig) -> Advantages:
    """Group-relative advantages (Shao et al. 2024, arXiv:2402.03300): ``(r - mean) / (std + 1e-6)`` of the group.

    The std divides by n - 1. ``config.norm_adv_by_std_in_grpo=False`` leaves the division out (Dr. GRPO, Liu et al.
    2025, arXiv:2503.20783). r is the sum of a response's token rewards; every trained token gets the response's
    advantage, and returns are the advantages (no critic). A group of one, and a group whose scores differ by rounding
    noise only, gets exactly 0.

    Config: ``norm_adv_by_std_in_grpo``.
    """
    group = group_statistics(inputs)
    relative = group.scores - group.mean
    if config.norm_adv_by_std_in_grpo:
        relative = relative / (group.std + GRPO_EPS)
    return _spread_over_tokens(inputs, torch.where(group.spread, relative, 0.0))


def rloo(inputs: AdvantageInputs, config: AlgorithmConfig) -> Advantages:
    """Leave-one-out baseline (Ahmadian et al. 2024, arXiv:2402.14740): r minus the mean of the group's other scores.

    Equal to ``n / (n - 1) (r - mean)``. A group of one has no others: 0. Equal scores: exactly 0. Returns are the
    advantages.
    """
    group = group_statistics(inputs)
    relative = (group.scores - group.mean) * group.count / (group.count - 1).clamp(min=1)
    return _spread_over_tokens(inputs, torch.where(group.spread, relative, 0.0))


ESTIMATORS: dict[str, Estimator] = {"gae": gae, "grpo": grpo, "rloo": rloo}


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
    """Statistics of each row's group over its counted rows, given back to every row: all (B,).

    Attributes:
        scores: outcome scores, float64.
        count: counted rows of the group.
        mean: float64.
        std: divides by n - 1; 0 for a group of one.
        spread: bool, the row is counted and its group's scores differ by more than rounding.
    """

    scores: Tensor
    count: Tensor
    mean: Tensor
    std: Tensor
    spread: Tensor


def group_statistics(inputs: AdvantageInputs) -> GroupStatistics:
    """Two-pass statistics in float64, by scatter: no loop over rows or groups. Groups need not be contiguous."""
    counted = inputs.counted
    chosen = select(inputs.token_level_rewards, inputs.response_mask.bool())
    scores = torch.where(counted, chosen.sum(dim=-1).double(), 0.0)
    magnitudes = torch.where(counted, torch.linalg.vector_norm(chosen, ord=1, dim=-1).double(), 0.0)
    ids, group = torch.unique(inputs.group_ids, return_inverse=True)

    def total(x: Tensor) -> Tensor:  # (B,) -> its group's sum, (B,)
        return torch.zeros(len(ids), dtype=torch.float64, device=x.device).index_add_(0, group, x)[group]

    def extreme(x: Tensor, reduce: str, start: float) -> Tensor:  # (B,) -> its group's extreme, (B,)
        empty = torch.full((len(ids),), start, dtype=torch.float64, device=x.device)
        return empty.scatter_reduce_(0, group, torch.where(counted, x, start), reduce)[group]

    count = total(counted.double())
    mean = total(scores) / count.clamp(min=1)
    deviations = torch.where(counted, scores - mean, 0.0)
    std = (total(deviations.square()) / (count - 1).clamp(min=1)).sqrt()
    span = extreme(scores, "amax", -torch.inf) - extreme(scores, "amin", torch.inf)
    # A NaN score must show in its group, not pass for a group without spread.
    spread = counted & ~(span <= _ROUNDING * extreme(magnitudes, "amax", 0.0)) & (count > 1)
    return GroupStatistics(scores, count, mean, std, spread)


def zero_spread_metric(inputs: AdvantageInputs) -> Metric:
    """Share of groups (with at least one counted row) whose advantages are all 0: they teach nothing."""
    group = group_statistics(inputs)
    counted = inputs.counted
    weight = torch.where(counted, 1.0 / group.count.clamp(min=1), 0.0)  # sums to 1 over a group
    flat = torch.where(group.spread, 0.0, weight)
    return Metric(float(flat.sum()), float(weight.sum()))


def _spread_over_tokens(inputs: AdvantageInputs, row_advantages: Tensor) -> Advantages:
    rows = row_advantages.to(at_least_float32(inputs.token_level_rewards).dtype).unsqueeze(1)  # (B, 1)
    advantages = torch.where(inputs.response_mask.bool(), rows, 0.0)
    return Advantages(advantages, advantages)


def _has_gaps(mask: Tensor) -> bool:
    """Whether some row is not a run of trained tokens from column 0 followed by padding."""
    return bool((mask[:, 1:] & ~mask[:, :-1]).any())


def _scan(rewards: Tensor, values: Tensor, mask: Tensor, gamma: float, lam: float) -> Tensor:
    """GAE of (b, R) rows that hold a run of tokens and then zeros: one multiply-add a column, columns contiguous."""
    deltas = rewards - values
    deltas[:, :-1].add_(values[:, 1:], alpha=gamma)
    columns = deltas.t().contiguous()  # (R, b)
    advantages = columns.unbind(0)
    for t in range(len(advantages) - 2, -1, -1):
        advantages[t].add_(advantages[t + 1], alpha=gamma * lam)
    return columns.t()


def _scan_with_gaps(rewards: Tensor, values: Tensor, mask: Tensor, gamma: float, lam: float) -> Tensor:
    """The same for any mask: a masked column hands on what comes after it."""
    reward, value, trained = (x.t().contiguous() for x in (rewards, values, mask))  # (R, b)
    following = torch.zeros(len(value) + 1, value.shape[1], dtype=value.dtype, device=value.device)
    for t in range(len(value) - 1, -1, -1):  # following[t]: the first trained value at or after t
        torch.where(trained[t], value[t], following[t + 1], out=following[t])
    advantages = torch.where(trained, reward + gamma * following[1:] - value, 0.0)
    decay = torch.ones_like(value).masked_fill_(trained, gamma * lam)
    for t in range(len(value) - 2, -1, -1):
        advantages[t].addcmul_(decay[t], advantages[t + 1])
    return advantages.t()
