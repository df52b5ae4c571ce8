"""Weights for what the engine that sampled and the trainer differ in.

With ``d = log pi_old - log pi_rollout`` of each trained token, where old is the trainer's policy at the start of the
update (`verl.algorithms.loss_inputs`), weights and rejection multiply the token losses of any policy loss:

- ``rollout_is: token``: ``w = exp(d)``; ``sequence``: ``w = exp(sum of d)``, the same for all tokens of a response.
  With a number C as the threshold ``w = min(w, C)`` (truncated importance sampling, TIS; Yao et al. 2025, "Your
  efficient RL framework secretly brings you off-policy RL training"). With a range [lo, hi] weights outside become 0
  and those inside stay as they are (IcePop; Ring team 2025, arXiv:2510.18855; lo = 0 is masked importance sampling,
  MIS; Liu et al. 2025, "When speed kills stability").
- ``rollout_rs: <over>_<k>``: tokens (or whole responses) whose statistic is out of bounds get weight 0.
  k1 is ``d``, judged as ``exp`` of it against a range of ratios (a number c: [1/c, c]); k2 ``d^2 / 2`` and k3
  ``exp(d) - 1 - d``, judged against an upper bound. Over: ``token``, each token by its own; ``seq_sum``, ``seq_mean``
  (of k1: the geometric mean of the ratio) and ``seq_max`` (its worst token), the whole response.

**Denominators**: a rejected or masked token has weight 0 and stays in every denominator, of the loss and of the
metrics: what is left keeps its size, and a batch of rejected tokens gives loss 0 with zero gradient. Entropy and KL
terms are of all trained tokens. Weights are detached. Log-ratios are held within [-20, 20]; a NaN log-prob gives a
NaN weight, never a rejected token.
"""

from __future__ import annotations

import torch
from torch import Tensor

from verl.algorithms.loss_inputs import guarded
from verl.algorithms.masking import masked_mean, masked_sum, select
from verl.algorithms.metric import Metric, effective_sample_size_metrics, mean_metric, spread_metrics
from verl.config.schema_roles import RolloutCorrectionConfig


@torch.no_grad()
def correct_rollout(
    log_probs: Tensor, rollout_log_probs: Tensor, mask: Tensor, config: RolloutCorrectionConfig
) -> tuple[Tensor, dict[str, Metric]]:
    """Importance weights (B, R), 1 at masked positions. ``log_probs``: of the trainer, old ones, or in bypass mode the
    current ones.

    Metrics: ``rollout_corr/kl`` and ``rollout_corr/k3_kl``, estimates (k1 and k3) of KL(rollout || trainer) per
    token; of the weights before rejection ``rollout_corr/rollout_is/{mean, max, min}``,
    ``rollout_corr/rollout_is_eff_sample_size`` (see `effective_sample_size_metrics`), and
    ``rollout_corr/rollout_is_clipped_frac`` or ``rollout_is_masked_frac``, the share of tokens cut or set to 0; by
    rejection ``rollout_corr/rollout_rs_masked_frac`` and ``rollout_rs_seq_masked_frac``, the share of tokens, and of
    responses that lost a token.
    """
    chosen = mask.bool()
    difference = select(log_probs, chosen) - select(rollout_log_probs, chosen)
    metrics = {
        "rollout_corr/kl": mean_metric(-difference, chosen),
        "rollout_corr/k3_kl": mean_metric(_statistic(difference, "k3"), chosen),
    }
    weights = torch.ones_like(difference)
    if config.rollout_is is not None:
        weights, found = _importance(difference, chosen, config)
        metrics |= found
    if config.rollout_rs is not None:
        rejected = chosen & ~_kept(difference, chosen, config)
        weights = torch.where(rejected, 0.0, weights)
        metrics["rollout_corr/rollout_rs_masked_frac"] = mean_metric(rejected.double(), chosen)
        rows = rejected.any(dim=-1).double()
        metrics["rollout_corr/rollout_rs_seq_masked_frac"] = mean_metric(rows, chosen.any(dim=-1))
    weights = torch.where(difference.isnan(), torch.nan, weights)
    return torch.where(chosen, weights, 1.0), metrics


def _importance(difference: Tensor, mask: Tensor, config: RolloutCorrectionConfig) -> tuple[Tensor, dict[str, Metric]]:
    if config.rollout_is == "sequence":
        difference = masked_sum(difference, mask, dim=-1)[:, None].expand_as(difference)
    weights, threshold = guarded(difference).exp(), config.rollout_is_threshold
    if isinstance(threshold, tuple):
        touched, done = (weights < threshold[0]) | (weights > threshold[1]), "masked"
        weights = torch.where(touched, 0.0, weights)
    else:
        touched, done = weights > threshold, "clipped"
        weights = weights.clamp(max=threshold)
    name = "rollout_corr/rollout_is"
    return weights, {
        **spread_metrics(name, weights, mask),
        **effective_sample_size_metrics(f"{name}_eff_sample_size", weights, mask),
        f"{name}_{done}_frac": mean_metric(touched.double(), mask),
    }


def _kept(difference: Tensor, mask: Tensor, config: RolloutCorrectionConfig) -> Tensor:
    """(B, R) bool; what cannot be compared (NaN) is not rejected."""
    assert config.rollout_rs is not None and config.rollout_rs_threshold is not None
    over, kind = config.rollout_rs.rsplit("_", 1)
    threshold = config.rollout_rs_threshold
    values = _statistic(difference, kind)  # (B, R)
    if over in ("seq_sum", "seq_mean"):
        reduce = masked_sum if over == "seq_sum" else masked_mean
        values = reduce(values, mask, dim=-1)[:, None]
    low, high = threshold if isinstance(threshold, tuple) else (1.0 / threshold, threshold)
    if kind == "k1":
        ratio = guarded(values).exp()
        outside = (ratio < low) | (ratio > high)
    else:
        outside = values > high
    if over == "seq_max":
        outside = (outside & mask).any(dim=-1, keepdim=True)
    return ~outside.expand_as(difference)


def _statistic(difference: Tensor, kind: str) -> Tensor:
    if kind == "k1":
        return difference
    if kind == "k2":
        return 0.5 * difference.square()
    held = guarded(difference)
    return (torch.expm1(held) - held).clamp(min=0.0)
