"""Estimators of KL(policy || reference) per token, and the KL penalty in the reward.

With ``d = log_probs - ref_log_probs`` at the sampled token:

| kind                   | value           | in expectation | gradient as a loss, in expectation                   |
|------------------------|-----------------|----------------|------------------------------------------------------|
| ``k1``, ``kl``         | d               | KL             | **0** (the score function): refused as a loss        |
| ``abs``                | abs(d)          | above KL       | of 2 TV(policy, reference)                           |
| ``k2``, ``mse``        | d^2 / 2         | KL + O(d^3)    | of KL(policy, reference): the true one               |
| ``k3``, ``low_var_kl`` | exp(-d) - 1 + d | KL, never < 0  | of KL(reference, policy): near the true one at d = 0 |
| ``full``               | KL itself       | KL             | of KL(policy, reference): the true one, without noise |

Expectations are over tokens sampled from the policy. ``full`` sums over the whole vocabulary, from both models'
logits (`verl.models.full_kl`), whatever token was sampled.
Schulman 2020, "Approximating KL divergence" (joschu.net/blog/kl-approx.html). A trailing ``+`` keeps the value and
takes k2's gradient (straight through), so every ``+`` form, ``k1+`` included, follows the true KL's gradient.
``full+`` is ``full``: its gradient is the true one already.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from verl.algorithms.masking import masked_mean, require_same_shape, select
from verl.algorithms.metric import Metric, mean_metric
from verl.errors import ConfigError

_EXP_LIMIT = 20.0


def _k3(d: Tensor) -> Tensor:
    # Below -20, exp(-d) heads for overflow: the value stays at its (huge) bound there and gives no gradient. expm1 and
    # the bound keep it from going below 0 by cancellation where d is tiny. Not by clamp, whose gradient at NaN is 0:
    # the optimizer would take the step.
    bounded = torch.where(d < -_EXP_LIMIT, -_EXP_LIMIT, d)
    estimate = torch.expm1(-bounded) + bounded
    return torch.where(estimate < 0, 0.0, estimate)


KL_ESTIMATORS: dict[str, Callable[[Tensor], Tensor]] = {
    **dict.fromkeys(("k1", "kl"), lambda d: d),
    "abs": torch.abs,
    **dict.fromkeys(("k2", "mse"), lambda d: 0.5 * d.square()),
    **dict.fromkeys(("k3", "low_var_kl"), _k3),
}
FULL = "full"
ZERO_GRADIENT_KINDS = frozenset({"k1", "kl"})  # refused as losses


def is_full(kind: str) -> bool:
    """Whether an estimator needs both models' logits instead of log-probs."""
    return kind.removesuffix("+") == FULL


def kl_estimate(
    log_probs: Tensor, ref_log_probs: Tensor | None, mask: Tensor, kind: str, full_kl: Tensor | None = None
) -> Tensor:
    """Token estimates of the KL divergence, 0 at masked positions. Raises ConfigError: an unknown kind; ValueError: the
    column that the kind needs is missing.

    Args:
        log_probs, ref_log_probs: (B, R); no gradient flows into the latter, which ``full`` does without.
        kind: a key of `KL_ESTIMATORS`, or ``full``, with an optional trailing ``+``.
        full_kl: (B, R), the divergence itself, for ``full``.
    """
    base = kind.removesuffix("+")
    if base not in KL_ESTIMATORS and base != FULL:
        known = ", ".join([*KL_ESTIMATORS, FULL])
        raise ConfigError("unknown KL estimator", kind, f"use one of {known}, each also with a trailing +")
    if base == FULL:
        if full_kl is None:
            raise ValueError("the KL over the whole vocabulary is asked for, but no full_kl was computed")
        return select(full_kl, mask)
    if ref_log_probs is None:
        raise ValueError(f"the KL estimator {kind!r} is asked for, but no ref_log_probs were computed")
    d = select(log_probs, mask) - select(ref_log_probs, mask).detach()  # (B, R)
    estimate = KL_ESTIMATORS[base](d)
    if kind.endswith("+"):
        gradient = KL_ESTIMATORS["k2"](d)
        # (gradient - gradient) is 0 and carries the gradient; it would be NaN where the square overflows.
        estimate = estimate.detach() + torch.where(gradient.isinf(), 0.0, gradient - gradient.detach())
    return estimate


def check_kl_loss(kind: str) -> None:
    """Refuse an estimator whose gradient, as a loss, is zero in expectation. Raises ConfigError: the kind is k1 without
    the straight-through form."""
    if kind in ZERO_GRADIENT_KINDS:
        raise ConfigError(
            "this KL estimator gives a loss whose gradient is zero in expectation: it would only add noise",
            kind,
            f"use {kind}+ (same value, the true KL's gradient), k2 or low_var_kl",
        )


class KLPenalty(NamedTuple):
    """``mean_kl``: of ``sequence_kl`` over the rows that have a trained token; the controller is told it."""

    token_level_rewards: Tensor  # (B, R), 0 at masked positions
    sequence_kl: Tensor  # (B,), mean over each row's trained tokens; 0 for a row without any
    mean_kl: Metric


def apply_kl_penalty(
    scores: Tensor,
    log_probs: Tensor,
    ref_log_probs: Tensor | None,
    mask: Tensor,
    coef: float,
    kind: str,
    full_kl: Tensor | None = None,
) -> KLPenalty:
    """``token_level_rewards = scores - coef * KL`` per token (Ouyang et al. 2022, arXiv:2203.02155), all (B, R).
    ``log_probs``: of the policy that generated. A ``+`` of the kind changes nothing here, since no gradient flows."""
    require_same_shape(mask.shape, scores=scores, log_probs=log_probs, ref_log_probs=ref_log_probs, full_kl=full_kl)
    with torch.no_grad():
        kl = kl_estimate(log_probs, ref_log_probs, mask, kind, full_kl)
        rewards = select(scores, mask) - coef * kl
        sequence_kl = masked_mean(kl, mask, dim=-1)
    return KLPenalty(rewards, sequence_kl, mean_metric(sequence_kl, mask.bool().any(dim=-1)))
