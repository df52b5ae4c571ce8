"""Estimators of KL(policy || reference) per token, the KL penalty in the reward, and its coefficient's controllers.

With ``d = log_probs - ref_log_probs`` at the sampled token:

| kind                   | value           | in expectation | gradient as a loss, in expectation                   |
|------------------------|-----------------|----------------|------------------------------------------------------|
| ``k1``, ``kl``         | d               | KL             | **0** (the score function): refused as a loss        |
| ``abs``                | abs(d)          | above KL       | of 2 TV(policy, reference)                           |
| ``k2``, ``mse``        | d^2 / 2         | KL + O(d^3)    | of KL(policy, reference): the true one               |
| ``k3``, ``low_var_kl`` | exp(-d) - 1 + d | KL, never < 0  | of KL(reference, policy): near the true one at d = 0 |

Expectations are over tokens sampled from the policy.
Schulman 2020, "Approximating KL divergence" (joschu.net/blog/kl-approx.html). A trailing ``+`` keeps the value and
takes k2's gradient (straight through), so every ``+`` form, ``k1+`` included, follows the true KL's gradient.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple, Protocol

import torch
from torch import Tensor

from verl.algorithms.masking import masked_mean, require_same_shape, select
from verl.algorithms.metric import Metric, mean_metric
from verl.errors import ConfigError

if TYPE_CHECKING:
    from verl.config.schema_run import KlControlConfig

_EXP_LIMIT = 20.0


def _k1(d: Tensor) -> Tensor:
    return d


def _k2(d: Tensor) -> Tensor:
    return 0.5 * d.square()


def _k3(d: Tensor) -> Tensor:
    # Below -20, exp(-d) heads for overflow: the value stays at its (huge) bound there and gives no gradient. expm1 and
    # the clamp keep it from going below 0 by cancellation where d is tiny.
    bounded = d.clamp(min=-_EXP_LIMIT)
    return (torch.expm1(-bounded) + bounded).clamp(min=0.0)


KL_ESTIMATORS: dict[str, Callable[[Tensor], Tensor]] = {
    "k1": _k1,
    "kl": _k1,
    "abs": torch.abs,
    "k2": _k2,
    "mse": _k2,
    "k3": _k3,
    "low_var_kl": _k3,
}
ZERO_GRADIENT_KINDS = frozenset({"k1", "kl"})  # refused as losses


def kl_estimate(log_probs: Tensor, ref_log_probs: Tensor, mask: Tensor, kind: str) -> Tensor:
    """Token estimates of the KL divergence, 0 at masked positions.

    Args:
        log_probs: (B, R), of the policy.
        ref_log_probs: (B, R), of the reference; no gradient flows into it.
        mask: (B, R).
        kind: a key of `KL_ESTIMATORS`, with an optional trailing ``+``.

    Raises:
        ConfigError: an unknown kind.
    """
    base = kind.removesuffix("+")
    if base not in KL_ESTIMATORS:
        known = ", ".join(KL_ESTIMATORS)
        raise ConfigError("unknown KL estimator", kind, f"use one of {known}, each also with a trailing +")
    d = select(log_probs, mask) - select(ref_log_probs, mask).detach()  # (B, R)
    estimate = KL_ESTIMATORS[base](d)
    if kind.endswith("+"):
        gradient = _k2(d)
        # (gradient - gradient) is 0 and carries the gradient; it would be NaN where the square overflows.
        estimate = estimate.detach() + torch.where(gradient.isinf(), 0.0, gradient - gradient.detach())
    return estimate


def check_kl_loss(kind: str) -> None:
    """Refuse an estimator whose gradient, as a loss, is zero in expectation.

    Raises:
        ConfigError: the kind is k1 without the straight-through form.
    """
    if kind in ZERO_GRADIENT_KINDS:
        raise ConfigError(
            "this KL estimator gives a loss whose gradient is zero in expectation: it would only add noise",
            kind,
            f"use {kind}+ (same value, the true KL's gradient), k2 or low_var_kl",
        )


class KLPenalty(NamedTuple):
    """Outcome of `apply_kl_penalty`.

    Attributes:
        token_level_rewards: (B, R), 0 at masked positions.
        sequence_kl: (B,), mean over each row's trained tokens; 0 for a row without any.
        mean_kl: mean of ``sequence_kl`` over the rows that have a trained token: ``actor/reward_kl_penalty``, and
            what the controller is told.
    """

    token_level_rewards: Tensor
    sequence_kl: Tensor
    mean_kl: Metric


def apply_kl_penalty(
    scores: Tensor, log_probs: Tensor, ref_log_probs: Tensor, mask: Tensor, coef: float, kind: str
) -> KLPenalty:
    """``token_level_rewards = scores - coef * KL`` per token (Ouyang et al. 2022, arXiv:2203.02155).

    Args:
        scores: (B, R), token_level_scores.
        log_probs: (B, R), of the policy that generated (old_log_probs).
        ref_log_probs: (B, R).
        mask: (B, R).
        coef: this step's coefficient.
        kind: see `kl_estimate`; the ``+`` changes nothing here, since no gradient flows.
    """
    require_same_shape(mask.shape, scores=scores, log_probs=log_probs, ref_log_probs=ref_log_probs)
    with torch.no_grad():
        kl = kl_estimate(log_probs, ref_log_probs, mask, kind)
        rewards = select(scores, mask) - coef * kl
        sequence_kl = masked_mean(kl, mask, dim=-1)
    return KLPenalty(rewards, sequence_kl, mean_metric(sequence_kl, mask.bool().any(dim=-1)))


class KLController(Protocol):
    """Holds the coefficient of the KL penalty; stateful, checkpointed."""

    coef: float

    def update(self, kl: float, samples: int) -> None: ...
    def state_dict(self) -> dict[str, float]: ...
    def load_state_dict(self, state: dict[str, float]) -> None: ...


@dataclass
class FixedKLController:
    """The coefficient never moves."""

    coef: float

    def update(self, kl: float, samples: int) -> None:
        """Nothing to do: the coefficient is fixed."""

    def state_dict(self) -> dict[str, float]:
        return {"coef": self.coef}

    def load_state_dict(self, state: dict[str, float]) -> None:
        # The configured coefficient wins: a user who changed it and resumed meant it.
        return None


class AdaptiveKLController:
    """Moves the coefficient towards a target KL (Ziegler et al. 2019, arXiv:1909.08593, section 2.2).

    ``coef *= 1 + clip(kl / target - 1, -0.2, 0.2) * samples / horizon`` after each step.

    Args:
        coef: start, above 0 (0 would stay 0).
        target: the KL to hold, nats per token, above 0.
        horizon: samples over which the coefficient can move by a fifth, above 0.

    Raises:
        ConfigError: one of them is not above 0.
    """

    def __init__(self, coef: float, target: float, horizon: float) -> None:
        for name, value in (("kl_coef", coef), ("target_kl", target), ("horizon", horizon)):
            if not value > 0:
                raise ConfigError(f"algorithm.kl_ctrl.{name} must be above 0 for the adaptive controller", value)
        self.coef, self.target, self.horizon = coef, target, horizon

    def update(self, kl: float, samples: int) -> None:
        """Tell the step's mean KL and its number of responses. A KL that is not finite moves nothing."""
        if math.isfinite(kl):
            error = min(max(kl / self.target - 1.0, -0.2), 0.2)
            # The floor matters above 4.5 horizons a step only, where the factor would go to 0 and below.
            self.coef *= max(1.0 + error * samples / self.horizon, 0.1)

    def state_dict(self) -> dict[str, float]:
        return {"coef": self.coef}

    def load_state_dict(self, state: dict[str, float]) -> None:
        self.coef = float(state["coef"])


def _fixed(config: KlControlConfig) -> KLController:
    return FixedKLController(config.kl_coef)


def _adaptive(config: KlControlConfig) -> KLController:
    return AdaptiveKLController(config.kl_coef, config.target_kl, config.horizon)


KL_CONTROLLERS: dict[str, Callable[[KlControlConfig], KLController]] = {"fixed": _fixed, "adaptive": _adaptive}
