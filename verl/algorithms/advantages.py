"""Advantage estimators: pure functions with one signature, and the plain dict that names them.

An estimator takes `AdvantageInputs` and the algorithm's configuration and returns `Advantages`, both (B, R). It runs
on the controller over the whole batch, so every statistic is global. What every estimator keeps:

- Nothing at a masked position is ever read, so the **terminal reward belongs on the last trained token**. A response
  that ends in masked tokens (a tool's output, say) has its reward before them; a reward left on the masked tail is
  not seen. `verl.algorithms.masking.place_at_last` puts it right.
- Masked gaps inside a response are closed: the next token is the next *trained* token.
- A row that was not scored, or that has no trained token, enters no statistic and has advantage 0.
- Advantages and returns at masked positions are 0.

Those of this module compare the responses of one prompt; one advantage a response, on each of its trained tokens, which
is the return as well. m, s: mean and std (n - 1) of the scores r of the group's counted rows; L: trained tokens of a
response. A group of one, and a group whose scores differ by rounding noise only, gives exactly 0 (before whitening in
the one that whitens over tokens, `reinforce_plus_plus_baseline`).
"""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

from verl.algorithms.advantage_inputs import (
    AdvantageInputs,
    Advantages,
    Estimator,
    group_statistics,
    spread_over_tokens,
)
from verl.algorithms.masking import select
from verl.algorithms.token_advantages import gae, reinforce_plus_plus, remax
from verl.config.schema_run import AlgorithmConfig
from verl.errors import ConfigError, VerlError
from verl.user_code import describe, load_user_function


def grpo(inputs: AdvantageInputs, config: AlgorithmConfig) -> Advantages:
    """``(r - m) / (s + 1e-6)`` (Shao et al. 2024, arXiv:2402.03300).

    ``norm_adv_by_std_in_grpo=False`` leaves the division out (Dr. GRPO, Liu et al. 2025, arXiv:2503.20783).
    """
    group = inputs.groups
    return spread_over_tokens(inputs, group.normalized if config.norm_adv_by_std_in_grpo else group.relative)


def grpo_passk(inputs: AdvantageInputs, config: AlgorithmConfig) -> Advantages:
    """The best response gets ``(best - second best) / s``, all others 0 (Tang et al. 2025, arXiv:2503.19595).

    Two that are equally good are best and second best: 0. ``norm_adv_by_std_in_grpo=False`` leaves the division out.
    """
    group = inputs.groups
    best = group.scores == group.largest(group.scores)
    alone = group.total(best) == 1
    lead = group.scores - group.largest(torch.where(best, -torch.inf, group.scores))
    scale = group.std if config.norm_adv_by_std_in_grpo else 1.0
    # A NaN score spoils its whole group, so that it shows.
    chosen = group.spread & ((best & alone) | group.mean.isnan())
    return spread_over_tokens(inputs, torch.where(chosen, lead / scale, 0.0))


def rloo(inputs: AdvantageInputs, config: AlgorithmConfig) -> Advantages:
    """r less the mean of the group's other scores, ``n / (n - 1) (r - m)`` (Ahmadian et al. 2024, arXiv:2402.14740)."""
    group = inputs.groups
    return spread_over_tokens(inputs, group.relative * group.count / (group.count - 1).clamp(min=1))


def opo(inputs: AdvantageInputs, config: AlgorithmConfig) -> Advantages:
    """r less the baseline of least variance, ``sum(L r) / sum(L)`` of the group (Hao et al. 2025, arXiv:2505.23585)."""
    group, lengths = inputs.groups, inputs.totals.lengths
    baseline = group.total(lengths * group.scores) / group.total(lengths)
    return spread_over_tokens(inputs, torch.where(group.spread, group.scores - baseline, 0.0))


def gpg(inputs: AdvantageInputs, config: AlgorithmConfig) -> Advantages:
    """``alpha (r - m)``, alpha = groups / groups with spread (Chu et al. 2025, arXiv:2504.02546).

    Both are counted over the whole batch, and count groups (not rows) that have at least one counted row.
    """
    group = inputs.groups
    alpha = group.number(group.counted) / max(group.number(group.spread), 1)
    return spread_over_tokens(inputs, alpha * group.relative)


def maxrl(inputs: AdvantageInputs, config: AlgorithmConfig) -> Advantages:
    """``(r - m) / m`` where m > 0, else 0 (maximum likelihood RL, Tajwar et al. 2026, arXiv:2602.02710)."""
    group = inputs.groups
    hopeless = group.mean.isfinite() & (group.mean <= 0)
    return spread_over_tokens(inputs, torch.where(group.spread & ~hopeless, group.relative / group.mean, 0.0))


def gdpo(inputs: AdvantageInputs, config: AlgorithmConfig) -> Advantages:
    """Each reward normalised by group on its own as in `grpo`, weighted sum, whitened over the batch's counted rows.

    Liu et al. 2026, arXiv:2601.05242. ``reward_components`` decide alone; ``token_level_rewards`` are not read. A row
    without a component (NaN) is out of that component's statistics and has 0 for it. Since every normalised reward
    sums to 0 over its group, whitening only divides: a row whose components all lack spread keeps exactly 0.
    Raises ValueError: no components were given.
    """
    components = inputs.reward_components
    if components is None:
        raise ValueError("the estimator 'gdpo' needs reward_components")
    combined = torch.zeros(len(components), dtype=torch.float64, device=components.device)
    moved = torch.zeros_like(inputs.counted)
    weights = config.gdpo_reward_weights or [1.0] * components.shape[1]
    for component, weight in zip(components.T, weights, strict=True):
        group = group_statistics(component, inputs.counted & ~component.isnan(), inputs.group_ids)
        combined += weight * group.normalized
        moved |= group.spread
    whitened = _whiten(combined, inputs.counted.double())
    return spread_over_tokens(inputs, torch.where(moved, whitened, 0.0))


def reinforce_plus_plus_baseline(inputs: AdvantageInputs, config: AlgorithmConfig) -> Advantages:
    """``r - m``, undiscounted, whitened over all trained tokens of the batch (Hu et al. 2025, arXiv:2501.03262).

    The whitening shifts every token alike, those of groups without spread included.
    """
    lengths = torch.where(inputs.counted, inputs.totals.lengths, 0.0)
    whitened = _whiten(inputs.groups.relative, lengths)
    return spread_over_tokens(inputs, torch.where(inputs.counted, whitened, 0.0))


def _whiten(values: Tensor, weights: Tensor) -> Tensor:
    """``(x - mean) / sqrt(var + 1e-8)``, variance by n - 1, each value as often as its weight says. (B,) float64."""
    count = weights.sum()
    deviations = values - (weights * values).sum() / count.clamp(min=1)
    variance = (weights * deviations.square()).sum() / (count - 1).clamp(min=1)
    return deviations * torch.rsqrt(variance + 1e-8)


_ALL: tuple[Estimator, ...] = (
    gae, grpo, grpo_passk, rloo, reinforce_plus_plus, reinforce_plus_plus_baseline, remax, opo, gpg, gdpo, maxrl,
)  # fmt: skip
ESTIMATORS: dict[str, Estimator] = {estimator.__name__: estimator for estimator in _ALL}


def estimate(inputs: AdvantageInputs, config: AlgorithmConfig) -> Advantages:
    """Advantages by the configured estimator, the user's own (``algorithm.custom_estimator``) or one of `ESTIMATORS`.
    Raises ConfigError: the user's file or function cannot be loaded; VerlError: the user's function failed, or gave
    something else than `Advantages` of the inputs' shape."""
    estimator, own = find_estimator(config), config.custom_estimator
    if own.path is None:
        return estimator(inputs, config)
    name = f"{own.name} in {own.path}"
    try:
        result = estimator(inputs, config)
    except Exception as error:
        raise VerlError("the advantage estimator failed", name, describe(error)) from error
    mask = inputs.response_mask.bool()
    fits = isinstance(result, Advantages) and result.advantages.shape == result.returns.shape == mask.shape
    if not fits:
        fix = f"return verl.algorithms.advantages.Advantages(advantages, returns), both of shape {tuple(mask.shape)}"
        raise VerlError("the advantage estimator returned something else than advantages and returns", name, fix)
    return Advantages(select(result.advantages, mask), select(result.returns, mask))


def find_estimator(config: AlgorithmConfig, reread: bool = False) -> Estimator:
    """``algorithm.custom_estimator``, a function ``(inputs, config) -> Advantages`` of the user's, or the named one.
    ``reread``: read the user's file anew, as a new run must. Raises ConfigError: no such file, an exception while it is
    imported, or no such function."""
    own = config.custom_estimator
    if reread:
        _user_estimator.cache_clear()
    return ESTIMATORS[config.adv_estimator] if own.path is None else _user_estimator(own.path, own.name)


@cache  # the file is read once a run
def _user_estimator(path: str, name: str) -> Estimator:
    return load_user_function(path, name, "estimator", "algorithm.custom_estimator.path", ConfigError)[0]
