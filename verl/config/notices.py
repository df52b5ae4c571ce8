"""Settings that are accepted but have no effect, or not the one that they seem to have: a sentence for each."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from verl.config.base import Section
from verl.config.checks import value_of
from verl.config.problems import as_written
from verl.config.schema_cluster import TRAINED

if TYPE_CHECKING:
    from verl.config.schema import Config

ESTIMATORS_OF = {
    "gamma": ("gae", "reinforce_plus_plus"),
    "lam": ("gae",),
    "whiten_advantages": ("gae",),
    "bootstrap_truncated": ("gae",),
    "norm_adv_by_std_in_grpo": ("grpo", "grpo_passk"),
    "gdpo_reward_keys": ("gdpo",),
    "gdpo_reward_weights": ("gdpo",),
}
"""The estimators that read a key of ``algorithm`` which not all of them read."""
SEQUENCE_LOSSES = ("gspo", "geo_mean")
WITHOUT_CLIP = ("gpg", "sapo", "kl_cov", "reinforce")
NEVER = "actor.recompute_old_log_probs=never takes the engine's log-probs for the trainer's"


def notices(config: Config) -> list[str]:
    """All sentences, those of one topic together."""
    topics = (_idle, _sampling, _rewards, _trained, _losses, _machines)
    return [notice for topic in topics for notice in topic(config)]


def _idle(config: Config) -> Iterator[str]:
    """Keys that nothing reads in this run, where they have another value than their default."""
    trainer, algorithm, actor, dtype = config.trainer, config.algorithm, config.actor, config.model.dtype
    estimator, correction, loss = algorithm.adv_estimator, algorithm.rollout_correction, actor.policy_loss
    loss_name = "reinforce" if correction.reinforce else loss.loss_mode
    corrects_nothing = actor.recompute_old_log_probs == "never" and correction.active and not correction.bypass_mode
    inline = config.cluster.backend == "inline" and "cluster.backend=inline is this process alone, without Ray"
    in_turns = inline and "cluster.backend=inline samples and trains in turns"
    not_async = trainer.mode != "async" and f"trainer.mode is {trainer.mode}, not async"
    streamed = trainer.stream_minibatches and config.streamed_prompts
    scale = dtype == "float16" and config.model.fp16.loss_scale
    reasons: dict[str, str | float] = {
        "rollout.weight_sync": not config.rollout_apart and "rollout shares the actor's process, and its weights",
        "rollout.compress_results": not config.rollout_apart and "rollout shares the actor's process",
        "critic.model.trust_remote_code": config.critic.model.path is None and "there is no critic.model.path",
        "reward.model.trust_remote_code": config.reward.model.path is None and "there is no reward.model.path",
        "model.fp16": dtype != "float16" and f"model.dtype={dtype} needs no loss scale",
        "model.fp16.initial_scale_power": scale and f"model.fp16.loss_scale={scale:g} is fixed",
        "trainer.test_freq": not config.data.val_files and "data.val_files is empty",
        "trainer.critic_warmup": not config.uses_critic and f"algorithm.adv_estimator={estimator} has no critic",
        "trainer.resume_from_path": trainer.resume_mode != "resume_path"
        and f"trainer.resume_mode is {trainer.resume_mode}, not resume_path",
        "trainer.memory_save_freq": (inline and "cluster.backend=inline")
        or (not trainer.max_restarts and "trainer.max_restarts=0"),
        "trainer.max_staleness": not_async,
        "trainer.staleness_unit": not_async,
        "trainer.stream_minibatches": in_turns
        or (streamed == config.data.train_batch_size and "data.train_batch_size is one mini-batch"),
        "trainer.balance_batch": config.ranks == 1 and "there is one rank",
        "cluster.address": inline,
        "cluster.pools": inline,
        "cluster.placement": inline,
        "actor.kl_loss_coef_schedule": not actor.use_kl_loss and "actor.use_kl_loss is false",
        "actor.clip_ratio_schedule": loss.path is None
        and loss_name in WITHOUT_CLIP
        and f"the policy loss {loss_name} clips nothing",
        "algorithm.rollout_correction": corrects_nothing and NEVER,
    }
    if config.rollout.response_length.mode == "fixed":
        why = "rollout.response_length.mode is fixed, not adaptive"
        reasons |= {
            f"rollout.response_length.{name}": why for name in type(config.rollout.response_length).model_fields
        }
    if algorithm.custom_estimator.path is None:
        why = f"algorithm.adv_estimator={estimator} does not use it"
        reasons |= {f"algorithm.{name}": estimator not in users and why for name, users in ESTIMATORS_OF.items()}
    for key, reason in reasons.items():
        section, _, name = key.rpartition(".")
        value, field = value_of(config, key), type(value_of(config, section)).model_fields[name]
        if reason and value != field.get_default(call_default_factory=True):
            shown = "" if isinstance(value, Section | dict) else f"={as_written(value)}"
            yield f"{key}{shown} has no effect: {reason}"


def _sampling(config: Config) -> Iterator[str]:
    val, settings = config.rollout.val_kwargs, config.rollout.response_length
    cut, most = 1 - settings.quantile, settings.max_cut_share
    if val.do_sample is False and val.temperature > 0:
        greedy = "do_sample=false makes validation greedy"
        yield f"rollout.val_kwargs.temperature={val.temperature} is set aside: {greedy}"
    if val.greedy and val.n > 1:
        yield f"rollout.val_kwargs.n={val.n}: validation is greedy, so the {val.n} responses to a prompt are the same"
    if settings.mode == "adaptive" and cut > most and settings.margin == 1:
        yield (
            f"rollout.response_length.quantile={settings.quantile:g} cuts about {cut:.0%} of responses, and more than "
            f"max_cut_share={most:g} opens the cap: it will open again and again"
        )
    if config.algorithm.mask_truncated and config.bootstraps:
        masked = "algorithm.mask_truncated=true trains on no cut response"
        yield f"algorithm.bootstrap_truncated has little effect: {masked}"


def _rewards(config: Config) -> Iterator[str]:
    actor, normalization = config.actor, config.reward.length_normalization
    if config.algorithm.use_kl_in_reward and actor.use_kl_loss:
        yield (
            "algorithm.use_kl_in_reward and actor.use_kl_loss are both on: "
            "the KL against the reference is penalised twice, in the reward and in the loss"
        )
    if actor.use_kl_loss and actor.kl_loss_coef == 0:
        yield "actor.kl_loss_coef=0: the KL loss is computed and logged, but trains nothing"
    if normalization.alpha > 0 and not normalization.positive_only:
        yield (
            f"reward.length_normalization.alpha={normalization.alpha:g} divides scores below 0 too, so that long wrong "
            "answers lose least; reward.length_normalization.positive_only=true leaves them alone"
        )


def _trained(config: Config) -> Iterator[str]:
    steps = config.trainer.total_training_steps
    for name in ("actor", "critic") if config.uses_critic else ("actor",):
        role = getattr(config, name)
        micro, optim = role.ppo_micro_batch_size_per_gpu, role.optim
        if micro is not None and role.use_dynamic_bsz:
            yield (
                f"{name}.ppo_micro_batch_size_per_gpu={micro} is set aside: {name}.use_dynamic_bsz=true fills "
                f"micro-batches by tokens ({name}.ppo_max_token_len_per_gpu)"
            )
        if steps is not None and optim.lr_warmup_steps > steps:
            yield (
                f"{name}.optim.lr_warmup_steps={optim.lr_warmup_steps} is more than "
                f"trainer.total_training_steps={steps}: the learning rate never reaches {optim.lr:g}"
            )


def _losses(config: Config) -> Iterator[str]:
    actor, algorithm = config.actor, config.algorithm
    loss, mode, clip = actor.policy_loss, actor.loss_agg_mode, actor.clip_ratio_schedule
    if algorithm.custom_estimator.path is not None and algorithm.adv_estimator != "gae":
        named = f"algorithm.adv_estimator={algorithm.adv_estimator}"
        yield f"{named} is set aside: algorithm.custom_estimator.path names the estimator"
    one_update = actor.ppo_epochs == 1 and actor.ppo_mini_batch_size == config.data.train_batch_size
    if clip.type == "adaptive" and one_update:
        always = f"with one optimizer step a batch actor/{clip.target_metric} is always 0"
        yield f"actor.clip_ratio_schedule.type=adaptive only widens the clip: {always}"
    if loss.path is not None and loss.loss_mode != "vanilla":
        yield f"actor.policy_loss.loss_mode={loss.loss_mode} is set aside: actor.policy_loss.path names the loss"
    if loss.path is not None:
        return
    if actor.recompute_old_log_probs == "never" and loss.loss_mode == "decoupled":
        yield f"actor.policy_loss.loss_mode=decoupled does what vanilla does: {NEVER}"
    if loss.loss_mode in SEQUENCE_LOSSES and mode != "seq-mean-token-mean":
        yield (
            f"actor.policy_loss.loss_mode={loss.loss_mode} is aggregated as seq-mean-token-mean; "
            f"actor.loss_agg_mode={mode} holds for entropy and KL terms only"
        )


def _machines(config: Config) -> Iterator[str]:
    trainer, cluster, place = config.trainer, config.cluster, config.cluster.placement
    if config.device_of("actor") == "cpu" and trainer.n_gpus_per_node not in ("auto", 0):
        yield f"trainer.n_gpus_per_node={trainer.n_gpus_per_node} is set aside: trainer.device=cpu uses no GPU"
    yield from trainer.checkpoint_notices(bool(config.data.val_files))
    if cluster.backend == "inline":
        if trainer.mode != "sync":
            yield (
                f"trainer.mode={trainer.mode} saves no time with cluster.backend=inline: one process samples and "
                "trains in turns (what it computes is the same as over Ray)"
            )
        return
    used = {*map(place.pool_of, config.roles), *place.rollout}
    for name in cluster.pools:
        pool = cluster.pool(name)
        if pool.gpus and (pool.device or trainer.device) == "cpu":
            yield f"cluster.pools.{name}.gpus={pool.gpus:g} is set aside: trainer.device=cpu uses no GPU"
        if name not in used:
            yield f"cluster.pools.{name} has no effect: no role of this run is placed there"
    for role in (role for role in TRAINED if role not in config.roles and getattr(place, role) is not None):
        yield f"cluster.placement.{role} has no effect: this run has no {role}"
