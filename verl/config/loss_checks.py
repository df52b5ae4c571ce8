"""Rules and notices about the policy loss, the schedules of its coefficients and the correction of the rollout."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from verl.config.problems import Problem
from verl.config.schema_losses import ScheduleConfig

if TYPE_CHECKING:
    from verl.config.schema import Config

SEQUENCE_LOSSES = ("gspo", "geo_mean")
WITHOUT_CLIP = ("gpg", "sapo", "kl_cov", "reinforce")


def problems(config: Config) -> Iterator[Problem]:
    yield from _policy_loss(config)
    yield from _rejection(config)
    yield from _bypass(config)
    actor = config.actor
    for name, start, schedule in (
        ("clip_ratio", actor.clip_high, actor.clip_ratio_schedule),
        ("entropy_coeff", actor.entropy_coeff, actor.entropy_coeff_schedule),
        ("kl_loss_coef", actor.kl_loss_coef, actor.kl_loss_coef_schedule),
    ):
        yield from _schedule(f"actor.{name}", start, schedule)


def _policy_loss(config: Config) -> Iterator[Problem]:
    loss, correction = config.actor.policy_loss, config.algorithm.rollout_correction
    if loss.clip_cov_lb >= loss.clip_cov_ub:
        yield Problem(
            "actor.policy_loss.clip_cov_lb must be below actor.policy_loss.clip_cov_ub: no covariance is between them",
            f"{loss.clip_cov_lb:g}, {loss.clip_cov_ub:g}",
            "use for example 1.0 and 5.0",
        )
    if loss.path is None and loss.loss_mode == "decoupled" and (correction.bypass_mode or correction.rollout_is):
        key = "bypass_mode" if correction.bypass_mode else "rollout_is"
        yield Problem(
            "actor.policy_loss.loss_mode=decoupled weighs by pi_old / pi_rollout itself: with "
            f"algorithm.rollout_correction.{key} "
            + ("these are the same" if correction.bypass_mode else "tokens would be weighed twice"),
            getattr(correction, key),
            f"remove algorithm.rollout_correction.{key}, or set actor.policy_loss.loss_mode=vanilla",
        )


def _rejection(config: Config) -> Iterator[Problem]:
    correction = config.algorithm.rollout_correction
    statistic, threshold = correction.rollout_rs, correction.rollout_rs_threshold
    key = "algorithm.rollout_correction.rollout_rs_threshold"
    if statistic is None:
        return
    ratio = statistic.endswith("k1")
    if threshold is None:
        fix = (
            "the ratios kept, for example [0.999, 1.001]" if ratio else "the largest divergence kept, for example 0.01"
        )
        yield Problem(f"algorithm.rollout_correction.rollout_rs={statistic} needs {key}", threshold, f"set it to {fix}")
    elif ratio and isinstance(threshold, float) and threshold <= 1:
        yield Problem(
            f"{key} of a ratio keeps [1/c, c], so c must be above 1", threshold, "for example 1.001, or [0.999, 1.001]"
        )
    elif not ratio and isinstance(threshold, tuple):
        yield Problem(
            f"{key} of {statistic} is the largest divergence kept, one number",
            list(threshold),
            f"set it to {threshold[1]:g}",
        )


def _bypass(config: Config) -> Iterator[Problem]:
    correction, loss = config.algorithm.rollout_correction, config.actor.policy_loss
    section = "algorithm.rollout_correction"
    if correction.bypass_mode and config.actor.recompute_old_log_probs == "always":
        yield Problem(
            f"{section}.bypass_mode takes the engine's log-probs as old ones, and actor.recompute_old_log_probs=always "
            "recomputes them",
            "bypass_mode true, recompute_old_log_probs always",
            "remove one of them",
        )
    if correction.bypass_mode and correction.loss_type == "ppo_clip" and correction.rollout_is is not None:
        yield Problem(
            f"{section}.rollout_is weighs twice with bypass_mode and loss_type=ppo_clip: there the loss's ratio is "
            "pi / pi_rollout already",
            correction.rollout_is,
            f"remove {section}.rollout_is, or set {section}.loss_type=reinforce",
        )
    if correction.loss_type == "reinforce" and not correction.bypass_mode:
        yield Problem(
            f"{section}.loss_type=reinforce belongs to bypass_mode",
            "bypass_mode false",
            f"set {section}.bypass_mode=true, or for the plain policy gradient actor.policy_loss.loss_mode=gpg",
        )
    if correction.reinforce and (loss.path is not None or loss.loss_mode != "vanilla"):
        yield Problem(
            f"{section}.loss_type=reinforce and actor.policy_loss both name the policy loss",
            loss.path or loss.loss_mode,
            "remove one of them",
        )


def _schedule(key: str, start: float, schedule: ScheduleConfig) -> Iterator[Problem]:
    if schedule.type in ("linear", "cosine") and schedule.end is None:
        yield Problem(
            f"{key}_schedule.type={schedule.type} needs {key}_schedule.end",
            None,
            "set it to the value after the last step",
        )
    if schedule.type != "adaptive":
        return
    if schedule.target is None:
        yield Problem(
            f"{key}_schedule.type=adaptive needs {key}_schedule.target", None, "set it to the metric's value to hold"
        )
    if start == 0:
        yield Problem(
            f"{key}=0 stays 0 under {key}_schedule.type=adaptive, which multiplies it", start, f"set {key} above 0"
        )
    low, high = schedule.bounds(start)
    if start and not low <= start <= high:
        yield Problem(
            f"{key} starts outside of the bounds {key}_schedule.min and {key}_schedule.max",
            f"{start:g} in [{low:g}, {high:g}]",
            "widen the bounds, or move the start",
        )


def notices(config: Config) -> Iterator[str]:
    actor, correction = config.actor, config.algorithm.rollout_correction
    loss, mode = actor.policy_loss, actor.loss_agg_mode
    if actor.kl_loss_coef_schedule.type != "constant" and not actor.use_kl_loss:
        yield "actor.kl_loss_coef_schedule has no effect: actor.use_kl_loss is false"
    one_update = actor.ppo_epochs == 1 and actor.ppo_mini_batch_size == config.data.train_batch_size
    if actor.clip_ratio_schedule.type == "adaptive" and one_update:
        yield (
            f"actor.clip_ratio_schedule.type=adaptive only widens the clip: with one optimizer step a batch "
            f"actor/{actor.clip_ratio_schedule.target_metric} is always 0"
        )
    same = "actor.recompute_old_log_probs=never takes the engine's log-probs for the trainer's"
    never = actor.recompute_old_log_probs == "never"
    if never and correction.active and not correction.bypass_mode:
        yield f"algorithm.rollout_correction has no effect: {same}"
    if loss.path is not None:
        if loss.loss_mode != "vanilla":
            yield f"actor.policy_loss.loss_mode={loss.loss_mode} is set aside: actor.policy_loss.path names the loss"
        return
    if never and loss.loss_mode == "decoupled":
        yield f"actor.policy_loss.loss_mode=decoupled does what vanilla does: {same}"
    if loss.loss_mode in SEQUENCE_LOSSES and mode != "seq-mean-token-mean":
        yield (
            f"actor.policy_loss.loss_mode={loss.loss_mode} is aggregated as seq-mean-token-mean; "
            f"actor.loss_agg_mode={mode} holds for entropy and KL terms only"
        )
    name = "reinforce" if correction.reinforce else loss.loss_mode
    if actor.clip_ratio_schedule.type != "constant" and name in WITHOUT_CLIP:
        yield f"actor.clip_ratio_schedule has no effect: the policy loss {name} clips nothing"
