"""The actor's whole loss: policy loss, entropy bonus and KL term."""

from __future__ import annotations

from verl.algorithms.aggregation import Denominators, aggregate_loss, loss_metric
from verl.algorithms.kl import check_kl_loss, kl_estimate
from verl.algorithms.loss_inputs import LossInputs, LossResult, PolicyLoss
from verl.algorithms.metric import mean_metric
from verl.config.schema_roles import ActorConfig


def actor_loss(
    policy_loss: PolicyLoss, inputs: LossInputs, config: ActorConfig, denominators: Denominators
) -> LossResult:
    """Policy loss - entropy_coeff * entropy + kl_loss_coef * KL; the latter two aggregated by ``loss_agg_mode``.

    Config: what the policy loss reads, ``entropy_coeff``, ``use_kl_loss``, ``kl_loss_coef``, ``kl_loss_type``.

    Metrics: the policy loss's; ``actor/entropy``, mean per trained token, whenever entropy is given;
    ``actor/kl_loss``, the aggregated KL before its coefficient.

    Raises:
        ValueError: a term is switched on and its column is missing.
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
