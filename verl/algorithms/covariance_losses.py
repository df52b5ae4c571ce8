"""Policy losses that hold back the tokens which lower the entropy most (Cui et al. 2025, arXiv:2505.22617).

A token's covariance is ``(A - mean A)(log pi - mean log pi)``, the means being over all trained tokens of the
mini-batch. Which tokens are held back is decided over the whole mini-batch before the first backward, and ties and
random choices are decided by the draws of slot and position: no split, order or retry changes the choice.
"""

from __future__ import annotations

import torch
from torch import Tensor

from verl.algorithms.aggregation import Denominators
from verl.algorithms.loss_inputs import LossInputs, LossResult, clipped_surrogate, finished
from verl.algorithms.masking import masked_mean
from verl.config.schema_roles import ActorConfig

CHOSEN = "chosen"  # of the statistics: (B, R) bool


def clip_cov(inputs: LossInputs, config: ActorConfig, denominators: Denominators) -> LossResult:
    """Clip-Cov: PPO's clipped surrogate (no dual clip); chosen tokens have loss 0 and no gradient.

    Chosen at random: ``clip_cov_ratio`` of all trained tokens (rounded down), among those that are not clipped
    already and whose covariance is in (``clip_cov_lb``, ``clip_cov_ub``).

    Config: ``clip_low``, ``clip_high``, ``policy_loss.clip_cov_{ratio, lb, ub}``, ``loss_agg_mode``.
    Metrics: `finished`'s; ``actor/pg_clipfrac``; ``actor/cov_frac``, share of tokens that were chosen.
    """
    token_loss, clipped = clipped_surrogate(inputs, config)
    chosen = _chosen(inputs, "clip_cov")
    token_loss = torch.where(chosen, 0.0, token_loss)
    mode = config.loss_agg_mode
    return finished(token_loss, inputs, denominators, mode, pg_clipfrac=clipped, cov_frac=chosen)


def clip_cov_statistics(inputs: LossInputs, config: ActorConfig) -> dict[str, Tensor]:
    mask, settings = inputs.tokens.mask, config.policy_loss
    cov = covariance(inputs)
    _, clipped = clipped_surrogate(inputs, config)
    eligible = mask & ~clipped & (cov > settings.clip_cov_lb) & (cov < settings.clip_cov_ub)
    draws = inputs.require("draws", "clip_cov")
    return {CHOSEN: _first(eligible, _share(settings.clip_cov_ratio, mask), draws, cov)}


def kl_cov(inputs: LossInputs, config: ActorConfig, denominators: Denominators) -> LossResult:
    """KL-Cov: ``-A rho``, plus ``ppo_kl_coef |log rho|`` for the ``kl_cov_ratio`` of tokens (rounded down) with the
    largest covariance. Nothing is clipped.

    Config: ``policy_loss.kl_cov_ratio``, ``policy_loss.ppo_kl_coef``, ``loss_agg_mode``.
    Metrics: `finished`'s; ``actor/cov_frac``, share of tokens that were chosen.
    """
    t, chosen = inputs.tokens, _chosen(inputs, "kl_cov")
    penalty = torch.where(chosen, config.policy_loss.ppo_kl_coef * t.held.abs(), 0.0)
    return finished(-t.advantages * t.ratio + penalty, inputs, denominators, config.loss_agg_mode, cov_frac=chosen)


def kl_cov_statistics(inputs: LossInputs, config: ActorConfig) -> dict[str, Tensor]:
    mask = inputs.tokens.mask
    count = _share(config.policy_loss.kl_cov_ratio, mask)
    return {CHOSEN: _first(mask, count, -covariance(inputs), inputs.require("draws", "kl_cov"))}


def covariance(inputs: LossInputs) -> Tensor:
    """(B, R) float64, of the mini-batch that ``inputs`` holds whole."""
    t = inputs.tokens
    advantages, log_probs = t.advantages.double(), t.log_probs.detach().double()
    return (advantages - masked_mean(advantages, t.mask)) * (log_probs - masked_mean(log_probs, t.mask))


def _chosen(inputs: LossInputs, loss: str) -> Tensor:
    if inputs.statistics is None:
        raise ValueError(f"the policy loss {loss!r} needs the statistics of the whole mini-batch")
    return inputs.statistics[CHOSEN]


def _share(share: float, mask: Tensor) -> int:
    return int(share * int(mask.sum()) + 1e-9)  # 0.29 * 100 is 28.999999999999996


def _first(candidates: Tensor, count: int, key: Tensor, then: Tensor) -> Tensor:
    """The ``count`` candidates with the smallest ``key``, equals by ``then``: (B, R) bool."""
    places = candidates.flatten().nonzero()[:, 0]
    places = places[then.flatten()[places].argsort(stable=True)]
    places = places[key.flatten()[places].argsort(stable=True)][:count]
    chosen = torch.zeros_like(candidates)
    chosen.view(-1)[places] = True
    return chosen
