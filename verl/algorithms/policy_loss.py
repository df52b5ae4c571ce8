"""Policy losses: pure functions with one signature, and the plain dict that names them.

A policy loss takes `LossInputs`, the actor's configuration (this step's scheduled values) and the denominators of the
whole optimizer step. It returns one micro-batch's addend to the loss, and metrics still to be merged: those of
`finished`, and the ones that it names. docs/algorithms.md has the settings of each.

In every formula A is the advantage and ``rho = pi / pi_old`` a token's ratio, its log held within [-20, 20]
(`guarded`). Importance weights (`verl.algorithms.rollout_correction`) multiply the token losses. A user's own loss is
a function like these in a Python file, named by ``actor.policy_loss.path`` and ``actor.policy_loss.name``.
"""

from __future__ import annotations

import inspect

import torch
from torch import Tensor

from verl.algorithms.aggregation import Denominators, aggregate_loss, loss_metric
from verl.algorithms.kl import check_kl_loss, kl_estimate
from verl.algorithms.loss_inputs import (
    LOG_RATIO_LIMIT,
    LossFunction,
    LossInputs,
    LossResult,
    PolicyLoss,
    clipped_surrogate,
    finished,
    guarded,
)
from verl.algorithms.masking import masked_mean, select
from verl.algorithms.metric import mean_metric
from verl.config.schema_roles import ActorConfig, PolicyLossConfig
from verl.errors import ConfigError
from verl.user_code import load_user_function


def vanilla(inputs: LossInputs, config: ActorConfig, denominators: Denominators) -> LossResult:
    """PPO's clipped surrogate (Schulman et al. 2017, arXiv:1707.06347, eq. 7) with the dual clip (Ye et al. 2019,
    arXiv:1912.09729, eq. 5).

    Per token ``max(-A rho, -A clip(rho, 1 - clip_low, 1 + clip_high))``, and for A < 0 never above ``-A c``
    (``clip_ratio_c``, above 1). For A >= 0 c plays no part.

    Metrics: ``actor/pg_clipfrac``, share of tokens where the clipped term won (they have no gradient);
    ``actor/pg_clipfrac_lower``, share where the dual clip won.
    """
    token_loss, clipped, lower = _dual_clipped(inputs, config)
    mode = config.loss_agg_mode
    return finished(token_loss, inputs, denominators, mode, pg_clipfrac=clipped, pg_clipfrac_lower=lower)


def decoupled(inputs: LossInputs, config: ActorConfig, denominators: Denominators) -> LossResult:
    """Decoupled PPO (Hilton et al. 2022, arXiv:2110.00641, eq. 2): the proximal policy apart from the behaviour policy.

    `vanilla` against the proximal policy (old_log_probs, recomputed by the trainer), each token times the detached
    weight ``pi_old / pi_rollout`` (guarded). Where the engine's log-probs are the trainer's, the weights are 1.

    Metrics: as `vanilla`; ``actor/behave_imp_weight``, mean of the weights.
    """
    rollout = inputs.require("rollout_log_probs", "decoupled")
    mask = inputs.tokens.mask
    weights = guarded(select(inputs.old_log_probs, mask) - select(rollout, mask)).exp().detach()
    token_loss, clipped, lower = _dual_clipped(inputs, config)
    loss, metrics = finished(
        token_loss * weights, inputs, denominators, config.loss_agg_mode, pg_clipfrac=clipped, pg_clipfrac_lower=lower
    )
    return loss, metrics | {"actor/behave_imp_weight": mean_metric(weights, mask)}


def cispo(inputs: LossInputs, config: ActorConfig, denominators: Denominators) -> LossResult:
    """CISPO (MiniMax 2025, arXiv:2506.13585, eq. 4): ``-sg(clip(rho, 1 - clip_low, 1 + clip_high)) A log pi``.

    The weight is clipped, the gradient of no token is lost. (The paper leaves out the lower bound:
    ``clip_ratio_low=1``.) Beyond the guard a token's loss is finite and has no gradient.

    Metrics: ``actor/pg_clipfrac``, share of tokens whose weight was clipped.
    """
    t = inputs.tokens
    weight = t.ratio.detach().clamp(1.0 - config.clip_low, 1.0 + config.clip_high)
    outside = t.log_ratio.abs() > LOG_RATIO_LIMIT
    log_probs = torch.where(outside, guarded(t.log_probs.detach()), t.log_probs)
    token_loss = -weight * t.advantages * log_probs
    return finished(token_loss, inputs, denominators, config.loss_agg_mode, pg_clipfrac=weight != t.ratio)


def gpg(inputs: LossInputs, config: ActorConfig, denominators: Denominators) -> LossResult:
    """The plain policy gradient, ``-A log pi`` (Williams 1992; Chu et al. 2025, arXiv:2504.02546, eq. 7).

    Without a ratio, updates after the first of a batch are not corrected.
    """
    t = inputs.tokens
    return finished(-t.advantages * t.log_probs, inputs, denominators, config.loss_agg_mode)


def sapo(inputs: LossInputs, config: ActorConfig, denominators: Denominators) -> LossResult:
    """Soft adaptive policy optimisation (Gao et al. 2025, arXiv:2511.20347): ``-(4 / tau) sigmoid(tau (rho - 1)) A``.

    A smooth gate in place of a clip: on-policy its gradient is the policy gradient's. tau is ``tau_pos`` for A > 0,
    ``tau_neg`` otherwise.
    """
    t = inputs.tokens
    tau = torch.full_like(t.ratio, config.tau_neg).masked_fill(t.advantages > 0, config.tau_pos)
    gate = torch.sigmoid(tau * (t.ratio - 1.0)) * (4.0 / tau)
    return finished(-gate * t.advantages, inputs, denominators, config.loss_agg_mode)


def dppo_tv(inputs: LossInputs, config: ActorConfig, denominators: Denominators) -> LossResult:
    """Divergence PPO by total variation (Qi et al. 2026, "Rethinking the Trust Region in LLM Reinforcement Learning").

    ``-A rho``, and no loss and no gradient for a token that the update would move further from the behaviour policy
    mu (rollout_log_probs; old_log_probs where there are none) while ``|pi - mu|`` of the sampled token is over
    ``clip_high`` (A > 0) or ``clip_low`` (A < 0).

    Metrics: ``actor/pg_clipfrac``, share of tokens that were masked.
    """
    policy, behaviour = _behaviour(inputs)
    return _divergence_masked(inputs, config, denominators, (policy.exp() - behaviour.exp()).abs())


def dppo_kl(inputs: LossInputs, config: ActorConfig, denominators: Denominators) -> LossResult:
    """As `dppo_tv`, by the KL divergence of the two-way split (sampled token or another):
    ``mu log(mu / pi) + (1 - mu) log((1 - mu) / (1 - pi))``.
    """
    policy, behaviour = _behaviour(inputs)
    mu, rest, rest_policy = behaviour.exp(), -torch.expm1(behaviour), -torch.expm1(policy)
    divergence = mu * (behaviour - policy) + torch.xlogy(rest, rest) - torch.xlogy(rest, rest_policy)
    return _divergence_masked(inputs, config, denominators, divergence)


# --- which hold back the tokens that lower the entropy most (Cui et al. 2025, arXiv:2505.22617) ----------------------
#
# A token's covariance is (A - mean A)(log pi - mean log pi), the means being over all trained tokens of the mini-batch.
# Which tokens are held back is decided over the whole mini-batch before the first backward, ties and random choices by
# the draws of slot and position: no split, order or retry changes the choice.

CHOSEN = "chosen"  # of the statistics: (B, R) bool


def clip_cov(inputs: LossInputs, config: ActorConfig, denominators: Denominators) -> LossResult:
    """Clip-Cov: PPO's clipped surrogate (no dual clip); chosen tokens have loss 0 and no gradient.

    Chosen at random: ``clip_cov_ratio`` of all trained tokens (rounded down), among those that are not clipped
    already and whose covariance is in (``clip_cov_lb``, ``clip_cov_ub``).

    Metrics: ``actor/pg_clipfrac``; ``actor/cov_frac``, share of tokens that were chosen.
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

    Metrics: ``actor/cov_frac``, share of tokens that were chosen.
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


# --- whose ratio belongs to a whole response -------------------------------------------------------------------------
#
# The mean over a response is of its trained tokens' log-ratios, each held within [-20, 20]: a token outside gives its
# response a finite ratio, and no gradient of its own.

SEQUENCE_MODE = "seq-mean-token-mean"  # their aggregation, always


def gspo(inputs: LossInputs, config: ActorConfig, denominators: Denominators) -> LossResult:
    """Group sequence policy optimisation (Zheng et al. 2025, arXiv:2507.18071, section 4.3, GSPO-token).

    ``s = exp(mean over a response of log rho)``; a token's log-ratio is ``sg(log s) + log pi - sg(log pi)``: the
    value of the response's, the gradient of its own. Then PPO's clipped term per token, without dual clip. The
    paper's ranges are far narrower than PPO's: ``clip_ratio_low`` 3e-4, ``clip_ratio_high`` 4e-4.

    Metrics: ``actor/pg_clipfrac``, share of tokens (all of a response together) where the clip won.
    """
    t = inputs.tokens
    sequence = masked_mean(t.held.detach(), t.mask, dim=-1)[:, None]  # (B, 1): log s
    ratio = (sequence + (t.held - t.held.detach())).exp()  # the bracket is exactly 0: one ratio for the response
    plain = -t.advantages * ratio
    clipped = -t.advantages * ratio.clamp(1.0 - config.clip_low, 1.0 + config.clip_high)
    token_loss = torch.maximum(plain, clipped)
    return finished(token_loss, inputs, denominators, SEQUENCE_MODE, pg_clipfrac=clipped > plain)


def geo_mean(inputs: LossInputs, config: ActorConfig, denominators: Denominators) -> LossResult:
    """Geometric-mean policy optimisation (Zhao et al. 2025, arXiv:2507.20673, eq. 4).

    Per token ``g = min(log rho, clip_high)`` for A > 0 and ``max(log rho, -clip_low)`` for A < 0 (ranges of the
    log-ratio; the paper's are 0.4 both); one loss a response, ``-A exp(mean of g)`` with A the mean of its tokens'.

    It is written as token losses of this value and this gradient, so that importance weights act on each token.

    Metrics: ``actor/pg_clipfrac``, share of tokens whose log-ratio was cut.
    """
    t = inputs.tokens
    held = torch.where(t.advantages > 0, t.held.clamp(max=config.clip_high), t.held)
    held = torch.where(t.advantages < 0, t.held.clamp(min=-config.clip_low), held)
    sequence = masked_mean(held.detach(), t.mask, dim=-1).exp()[:, None]  # (B, 1)
    advantage = masked_mean(t.advantages, t.mask, dim=-1)[:, None]
    token_loss = -advantage * sequence * (1.0 + held - held.detach())
    return finished(token_loss, inputs, denominators, SEQUENCE_MODE, pg_clipfrac=held != t.held)


def _dual_clipped(inputs: LossInputs, config: ActorConfig) -> tuple[Tensor, Tensor, Tensor]:
    """Token losses (B, R), where the clipped term won, and where the dual clip won."""
    pessimistic, clipped = clipped_surrogate(inputs, config)
    negative = inputs.tokens.advantages < 0
    bound = -inputs.tokens.advantages * config.clip_ratio_c
    token_loss = torch.where(negative, torch.minimum(pessimistic, bound), pessimistic)
    return token_loss, clipped, negative & (pessimistic > bound)


def _behaviour(inputs: LossInputs) -> tuple[Tensor, Tensor]:
    """Log-probs of the policy and of the behaviour policy, detached, within [-1000, 0], in float64: (B, R)."""
    behaviour = inputs.old_log_probs if inputs.rollout_log_probs is None else inputs.rollout_log_probs
    columns = inputs.tokens.log_probs, select(behaviour, inputs.tokens.mask)
    policy, mu = (column.detach().double().clamp(-1000.0, 0.0) for column in columns)
    return policy, mu


def _divergence_masked(
    inputs: LossInputs, config: ActorConfig, denominators: Denominators, divergence: Tensor
) -> LossResult:
    t = inputs.tokens
    policy, behaviour = _behaviour(inputs)
    limit = torch.full_like(divergence, config.clip_low).masked_fill(t.advantages > 0, config.clip_high)
    masked = (t.advantages * (policy - behaviour) > 0) & (divergence > limit)
    token_loss = torch.where(masked, 0.0, -t.advantages * t.ratio)
    # Of loss and gradient: the optimizer is to leave the step out.
    token_loss = token_loss * torch.where(divergence.isnan(), torch.nan, 1.0)
    return finished(token_loss, inputs, denominators, config.loss_agg_mode, pg_clipfrac=masked)


_STATISTICS = {clip_cov: clip_cov_statistics, kl_cov: kl_cov_statistics}
POLICY_LOSSES: dict[str, PolicyLoss] = {
    # The penalty of kl_cov is none of the advantages.
    loss.__name__: PolicyLoss(loss, _STATISTICS.get(loss), needs_advantage=loss is not kl_cov)
    for loss in (vanilla, decoupled, gspo, cispo, gpg, geo_mean, sapo, clip_cov, kl_cov, dppo_tv, dppo_kl)
}


def find_policy_loss(config: PolicyLossConfig) -> PolicyLoss:
    """The entry that the configuration names, or the user's own from ``path``.

    A user's function takes (inputs, config, denominators); one that needs statistics of the whole mini-batch carries
    them as an attribute: ``policy_loss.statistics = function``. Raises ConfigError: the user's file has no such
    function, or it takes other parameters.
    """
    if config.path is None:
        return POLICY_LOSSES[config.loss_mode]
    function, file = load_user_function(config.path, config.name, "policy loss", "actor.policy_loss.path", ConfigError)
    statistics = getattr(function, "statistics", None)
    _require_parameters(function, f"{config.name} in {file}", ("inputs", "config", "denominators"))
    if statistics is not None:
        _require_parameters(statistics, f"{config.name}.statistics in {file}", ("inputs", "config"))
    return PolicyLoss(function, statistics)


def _require_parameters(function: LossFunction, shown: str, names: tuple[str, ...]) -> None:
    try:
        inspect.signature(function).bind(*names)
    except TypeError as error:
        raise ConfigError(
            f"A policy loss is called with ({', '.join(names)}), and this one does not take them: {error}.", shown
        ) from error


def actor_loss(
    policy_loss: PolicyLoss, inputs: LossInputs, config: ActorConfig, denominators: Denominators
) -> LossResult:
    """Policy loss - entropy_coeff * entropy + kl_loss_coef * KL; the latter two aggregated by ``loss_agg_mode``.

    Metrics: the policy loss's; ``actor/entropy``, mean per trained token, whenever entropy is given; ``actor/kl_loss``,
    the aggregated KL before its coefficient. Raises ValueError: a term is switched on and its column is missing;
    ConfigError: a KL estimator that cannot serve as a loss.
    """
    mask, mode = inputs.response_mask.bool(), config.loss_agg_mode
    loss, metrics = policy_loss.function(inputs, config, denominators)
    if inputs.entropy is not None:
        metrics["actor/entropy"] = mean_metric(inputs.entropy, mask)
    if config.entropy_coeff != 0:
        if inputs.entropy is None:
            raise ValueError("actor.entropy_coeff is set, but no entropy was computed")
        loss = loss - config.entropy_coeff * aggregate_loss(inputs.entropy, mask, mode, denominators)
    if config.use_kl_loss:
        check_kl_loss(config.kl_loss_type)
        kl = kl_estimate(inputs.log_probs, inputs.ref_log_probs, mask, config.kl_loss_type, inputs.full_kl)
        kl_loss = aggregate_loss(kl, mask, mode, denominators)
        metrics["actor/kl_loss"] = loss_metric(kl_loss, mask, denominators)
        loss = loss + config.kl_loss_coef * kl_loss
    return loss, metrics
