"""Policy losses: pure functions with one signature, the plain dict that names them, and the actor's whole loss.

A policy loss takes `LossInputs`, the actor's configuration (this step's scheduled values) and the denominators of the
whole optimizer step. It returns one micro-batch's addend to the loss, and metrics still to be merged.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from verl.algorithms.aggregation import Denominators, aggregate_loss, loss_metric
from verl.algorithms.kl import check_kl_loss, kl_estimate
from verl.algorithms.masking import require_same_shape, select
from verl.algorithms.metric import Metric, mean_metric

if TYPE_CHECKING:
    from verl.config.schema_roles import ActorConfig

LOG_RATIO_LIMIT = 20.0


@dataclass(frozen=True)
class LossInputs:
    """One micro-batch as a policy loss sees it: (B, R) unless said otherwise, R free to differ between micro-batches.

    Attributes:
        log_probs: current ones, with gradient.
        old_log_probs: of the trainer's weights at the start of this update.
        advantages: finished column.
        response_mask: bool, the trained tokens.
        rollout_log_probs: of the engine that sampled.
        ref_log_probs: of the reference.
        entropy: per token, with gradient where it enters the loss.
        group_ids: (B,) int.
        importance_weights: detached; multiply the token losses. A weight of 0 rejects the token, which stays in the
            denominators (clear its mask to take it out of them).
        full_kl: per-token KL over the whole vocabulary.
        draws: uniforms by slot and position.
        statistics: what an entry's ``statistics`` computed over the whole mini-batch.

    Raises:
        ValueError: shapes that do not fit together.
    """

    log_probs: Tensor
    old_log_probs: Tensor
    advantages: Tensor
    response_mask: Tensor
    rollout_log_probs: Tensor | None = None
    ref_log_probs: Tensor | None = None
    entropy: Tensor | None = None
    group_ids: Tensor | None = None
    importance_weights: Tensor | None = None
    full_kl: Tensor | None = None
    draws: Tensor | None = None
    statistics: dict[str, Tensor] | None = None

    def __post_init__(self) -> None:
        require_same_shape(
            self.log_probs.shape,
            old_log_probs=self.old_log_probs,
            advantages=self.advantages,
            response_mask=self.response_mask,
            rollout_log_probs=self.rollout_log_probs,
            ref_log_probs=self.ref_log_probs,
            entropy=self.entropy,
            importance_weights=self.importance_weights,
            full_kl=self.full_kl,
            draws=self.draws,
        )
        require_same_shape(self.log_probs.shape[:1], group_ids=self.group_ids)


LossResult = tuple[Tensor, dict[str, Metric]]
PolicyLoss = Callable[[LossInputs, "ActorConfig", Denominators], LossResult]


def guarded_ratio(log_ratio: Tensor) -> Tensor:
    """``exp(log_ratio)``, held at exp(-20) or exp(20) outside [-20, 20], with zero gradient there.

    Inside, bit for bit the plain exp. NaN stays NaN: a broken log-prob must surface, not be clamped away.
    """
    return log_ratio.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp()


def vanilla(inputs: LossInputs, config: ActorConfig, denominators: Denominators) -> LossResult:
    """PPO's clipped surrogate (Schulman et al. 2017, arXiv:1707.06347, eq. 7) with the dual clip (Ye et al. 2019,
    arXiv:1912.09729, eq. 5).

    Per token, with ratio rho and advantage A: ``max(-A rho, -A clip(rho, 1 - clip_low, 1 + clip_high))``, and for
    A < 0 never above ``-A c`` (``clip_ratio_c``, above 1). For A >= 0 c plays no part.

    Config: ``clip_low``, ``clip_high``, ``clip_ratio_c``, ``loss_agg_mode``.

    Metrics: ``actor/pg_loss``; ``actor/pg_clipfrac``, share of tokens where the clipped term won (they have no
    gradient); ``actor/pg_clipfrac_lower``, share where the dual clip won; ``actor/ppo_kl``, mean of
    old_log_probs - log_probs, the k1 estimate of KL(old || current).
    """
    mask = inputs.response_mask.bool()
    advantages = select(inputs.advantages, mask)
    log_ratio = select(inputs.log_probs, mask) - select(inputs.old_log_probs, mask)  # (B, R)
    ratio = guarded_ratio(log_ratio)
    plain = -advantages * ratio
    clipped = -advantages * ratio.clamp(1.0 - config.clip_low, 1.0 + config.clip_high)
    pessimistic = torch.maximum(plain, clipped)
    bound = -advantages * config.clip_ratio_c
    negative = advantages < 0
    token_loss = torch.where(negative, torch.minimum(pessimistic, bound), pessimistic)
    if inputs.importance_weights is not None:
        token_loss = token_loss * select(inputs.importance_weights, mask).detach()
    mode = config.loss_agg_mode
    loss = aggregate_loss(token_loss, mask, mode, denominators)
    return loss, {
        "actor/pg_loss": loss_metric(loss, mask, denominators),
        "actor/pg_clipfrac": mean_metric((clipped > plain).double(), mask),
        "actor/pg_clipfrac_lower": mean_metric((negative & (pessimistic > bound)).double(), mask),
        "actor/ppo_kl": mean_metric(-log_ratio, mask),
    }


POLICY_LOSSES: dict[str, PolicyLoss] = {"vanilla": vanilla}


def actor_loss(inputs: LossInputs, config: ActorConfig, denominators: Denominators) -> LossResult:
    """The actor's whole loss: policy loss - entropy_coeff * entropy + kl_loss_coef * KL, all aggregated alike.

    Config: ``policy_loss.loss_mode`` (a key of `POLICY_LOSSES`) and what it reads, ``entropy_coeff``, ``use_kl_loss``,
    ``kl_loss_coef``, ``kl_loss_type``.

    Metrics: the policy loss's; ``actor/entropy``, mean per trained token, whenever entropy is given;
    ``actor/kl_loss``, the aggregated KL before its coefficient.

    Raises:
        ValueError: a term is switched on and its column is missing, or an unknown policy loss.
        ConfigError: a KL estimator that cannot serve as a loss.
    """
    name = config.policy_loss.loss_mode
    if name not in POLICY_LOSSES:
        raise ValueError(f"policy loss {name!r}, expected one of {', '.join(POLICY_LOSSES)}")
    mask, mode = inputs.response_mask.bool(), config.loss_agg_mode
    loss, metrics = POLICY_LOSSES[name](inputs, config, denominators)
    if inputs.entropy is not None:
        metrics["actor/entropy"] = mean_metric(inputs.entropy, mask)
    if config.entropy_coeff != 0:
        if inputs.entropy is None:
            raise ValueError("actor.entropy_coeff is set, but no entropy was computed")
        loss = loss - config.entropy_coeff * aggregate_loss(inputs.entropy, mask, mode, denominators)
    if config.use_kl_loss:
        if inputs.ref_log_probs is None:
            raise ValueError("actor.use_kl_loss is set, but no ref_log_probs were computed")
        check_kl_loss(config.kl_loss_type)
        kl = kl_estimate(inputs.log_probs, inputs.ref_log_probs, mask, config.kl_loss_type)
        kl_loss = aggregate_loss(kl, mask, mode, denominators)
        metrics["actor/kl_loss"] = loss_metric(kl_loss, mask, denominators)
        loss = loss + config.kl_loss_coef * kl_loss
    return loss, metrics
