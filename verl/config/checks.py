"""Rules that tie fields together: what cannot work, found before anything starts."""

from __future__ import annotations

from collections.abc import Iterator
from functools import reduce
from typing import TYPE_CHECKING, Any

from verl.config import batches
from verl.config.problems import Problem, raise_problems

if TYPE_CHECKING:
    from verl.config.schema import Config


def check(config: Config) -> None:
    """Raise one :class:`~verl.errors.ConfigError` that holds every broken rule."""
    rules = (
        *(batches.problems, _limits, _data, _sampling, _groups, _gdpo, _overlong, _kl),
        *(_policy_loss, _rejection, _bypass, _schedules, _run, _streamed),
    )
    raise_problems([problem for rule in rules for problem in rule(config)])


def value_of(config: Any, key: str) -> Any:
    return reduce(getattr, key.split("."), config)


def _limits(config: Config) -> Iterator[Problem]:
    adaptive = config.rollout.response_length.mode == "adaptive"
    for low, high, unit, holds in (
        ("rollout.val_kwargs.min_new_tokens", "data.max_response_length", "tokens", True),
        ("rollout.response_length.min", "data.max_response_length", "tokens", adaptive),
        ("rollout.min_workers", "rollout.max_workers", "workers", True),
    ):
        least, most = value_of(config, low), value_of(config, high)
        if holds and least is not None and most is not None and least > most:
            what, fix = f"{low} is more than {high}; both count {unit}", f"set {low} to at most {most}"
            yield Problem(what, f"{least} > {most}", fix)


def _data(config: Config) -> Iterator[Problem]:
    custom, sampler = config.data.custom_cls, config.data.sampler
    for key, path, name_key, name in (
        ("data.custom_cls.path", custom.path, "data.custom_cls.name", custom.name),
        ("data.sampler.class_path", sampler.class_path, "data.sampler.class_name", sampler.class_name),
    ):
        if path is not None and not name:
            yield Problem(f"{key} names a file, and no class in it is named", path, f"set {name_key}")
    ways = ("weights", "source_weights", "weight_column", "class_path")
    given = [f"data.sampler.{name}" for name in ways if getattr(sampler, name)]
    if len(given) > 1:
        yield Problem(f"{' and '.join(given)} each say how rows are drawn", None, "keep one of them")
    elif given and sampler.kind not in ("auto", "weighted"):
        what = f"data.sampler.kind={sampler.kind} draws without {given[0]}"
        yield Problem(what, sampler.kind, f"remove it or {given[0]}")
    if sampler.kind == "weighted" and given in ([], ["data.sampler.class_path"]):
        fix = "set data.sampler.weights, data.sampler.source_weights or data.sampler.weight_column"
        yield Problem("data.sampler.kind=weighted has no weights", given[0] if given else None, fix)
    entries, weights = len(config.data.train_files), len(sampler.weights)
    if weights and weights != entries:
        what = "data.sampler.weights has not one weight for each entry of data.train_files"
        fix = f"give {entries} (a pattern or a folder is one entry)"
        yield Problem(what, f"{weights} weights, {entries} entries", fix)


def _sampling(config: Config) -> Iterator[Problem]:
    """Law 3: training samples from the very distribution whose log-probs the trainer computes."""
    rollout, val = config.rollout, config.rollout.val_kwargs
    why = (
        "training sampling must follow the model's own distribution: otherwise the engine's log-probs are of "
        "other probabilities than the trainer's, and every ratio is off"
    )
    for name, wrong, does, right in (
        ("top_p", rollout.top_p < 1, " below 1 cuts off the tail", "=1.0"),
        ("top_k", rollout.top_k > 0, " cuts off the tail", "=-1"),
        ("temperature", not rollout.temperature, "=0 makes all responses of a group the same", " above 0, usually 1.0"),
    ):
        if wrong:
            fix = f"set rollout.{name}{right} (rollout.val_kwargs.{name} is free)"
            yield Problem(f"rollout.{name}{does}; {why}", getattr(rollout, name), fix)
    if val.do_sample and val.temperature == 0:
        what = "rollout.val_kwargs.do_sample=true contradicts rollout.val_kwargs.temperature=0, which is greedy"
        fix = "set rollout.val_kwargs.temperature above 0, or leave do_sample out"
        yield Problem(what, "do_sample true, temperature 0", fix)
    if config.algorithm.mask_truncated and rollout.ignore_eos and not (rollout.stop or rollout.stop_token_ids):
        what = "rollout.ignore_eos=true cuts every response, and algorithm.mask_truncated=true trains on no cut one"
        fix = "set one of them to false, or give rollout.stop or rollout.stop_token_ids"
        yield Problem(what, "nothing would be trained", fix)


def _groups(config: Config) -> Iterator[Problem]:
    algorithm, one = config.algorithm, "rollout.n = 1 response per prompt"
    n = "set rollout.n to 2 or more (often 8), or"
    if config.rollout.n > 1:
        return
    if algorithm.compares_group:
        what = (
            f"algorithm.adv_estimator={algorithm.adv_estimator} compares the responses of one prompt, and rollout.n=1 "
            "leaves nothing to compare: every advantage would be 0"
        )
        yield Problem(what, one, f"{n} use algorithm.adv_estimator=gae, reinforce_plus_plus or remax")
    if algorithm.filter_groups.enable:
        what = "algorithm.filter_groups keeps prompts of unlike responses; of rollout.n=1 no prompt would ever be kept"
        yield Problem(what, one, f"{n} algorithm.filter_groups.enable=false")


def _gdpo(config: Config) -> Iterator[Problem]:
    if not config.algorithm.uses("gdpo"):
        return
    keys, weights = config.algorithm.gdpo_reward_keys, config.algorithm.gdpo_reward_weights
    if not keys:
        what = "algorithm.adv_estimator=gdpo normalises several rewards apart; algorithm.gdpo_reward_keys names none"
        fix = "name keys of the dict that the reward function returns, for example [accuracy, format]"
        yield Problem(what, keys, fix)
    elif weights is not None and len(weights) != len(keys):
        what = "algorithm.gdpo_reward_weights has not one weight for each of algorithm.gdpo_reward_keys"
        fix = f"give {len(keys)} weights, or null for 1 each"
        yield Problem(what, f"{len(weights)} weights, {len(keys)} keys", fix)
    elif weights is not None and not any(weights):
        what = "algorithm.gdpo_reward_weights are all 0: every advantage would be 0"
        yield Problem(what, weights, "give at least one a weight")
    why = "algorithm.adv_estimator=gdpo forms advantages from algorithm.gdpo_reward_keys alone"
    if config.algorithm.use_kl_in_reward:
        what = f"{why}: algorithm.use_kl_in_reward would change nothing"
        yield Problem(what, True, "use the KL loss, actor.use_kl_loss=true")
    if config.reward.shapes:
        shaping = "length_normalization, length_penalty, overlong_buffer, scaling and clip of section reward"
        fix = "turn it off; a penalty of your own can be one of the reward function's keys"
        yield Problem(f"{why}: {shaping} would change nothing", "reward shaping is on", fix)


def _overlong(config: Config) -> Iterator[Problem]:
    buffer, limit = config.reward.overlong_buffer, config.data.max_response_length
    longest, length = buffer.place(limit)
    name = "reward.overlong_buffer.max_resp_len" if buffer.max_resp_len else "data.max_response_length"
    if not buffer.enable:
        return
    if not 0 < length <= longest:
        what = f"reward.overlong_buffer.len must be from 1 up to {name}; both count tokens"
        yield Problem(what, f"{length} tokens, {name} is {longest}", "use null for a fifth of it")
    elif longest - length >= limit:
        what = "reward.overlong_buffer penalises no response: all end, at data.max_response_length, before it begins"
        said = f"it begins behind {longest - length} tokens, data.max_response_length is {limit}"
        yield Problem(what, said, "lower reward.overlong_buffer.max_resp_len, or leave it out")


def _kl(config: Config) -> Iterator[Problem]:
    actor, algorithm, place = config.actor, config.algorithm, config.cluster.placement
    kinds = [algorithm.kl_penalty] * algorithm.use_kl_in_reward + [actor.kl_loss_type] * actor.use_kl_loss
    if actor.use_kl_loss and actor.kl_loss_type in ("kl", "k1"):
        kind = f"actor.kl_loss_type={actor.kl_loss_type}"
        what = f"{kind} has a gradient whose expectation is zero: as a loss it does nothing but add noise"
        fix = "set actor.kl_loss_type to low_var_kl (k3), k2, or k1+ (value of k1, gradient of k2)"
        yield Problem(what, actor.kl_loss_type, fix)
    if algorithm.kl_ctrl.type == "adaptive" and algorithm.kl_ctrl.kl_coef == 0:
        what = "algorithm.kl_ctrl.kl_coef=0 stays 0 under algorithm.kl_ctrl.type=adaptive, which multiplies it"
        yield Problem(what, 0.0, "set algorithm.kl_ctrl.kl_coef above 0, for example 0.001, or type=fixed")
    if place.pool_of("reference") != place.actor and any(kind.startswith("full") for kind in kinds):
        what = "a KL over the whole vocabulary needs the logits of actor and reference in one process"
        fix = "leave cluster.placement.reference out, or choose another estimator of the KL"
        yield Problem(what, f"cluster.placement: actor {place.actor}, reference {place.reference}", fix)


def _policy_loss(config: Config) -> Iterator[Problem]:
    loss, correction = config.actor.policy_loss, config.algorithm.rollout_correction
    low, high = loss.clip_cov_lb, loss.clip_cov_ub
    if low >= high:
        what = "actor.policy_loss.clip_cov_lb must be below actor.policy_loss.clip_cov_ub: nothing is between them"
        yield Problem(what, f"{low:g}, {high:g}", "use for example 1.0 and 5.0")
    if loss.path is None and loss.loss_mode == "decoupled" and (correction.bypass_mode or correction.rollout_is):
        key = f"algorithm.rollout_correction.{'bypass_mode' if correction.bypass_mode else 'rollout_is'}"
        but = "these are the same" if correction.bypass_mode else "tokens would be weighed twice"
        what = f"actor.policy_loss.loss_mode=decoupled weighs by pi_old / pi_rollout itself: with {key} {but}"
        yield Problem(what, value_of(config, key), f"remove {key}, or set actor.policy_loss.loss_mode=vanilla")


def _rejection(config: Config) -> Iterator[Problem]:
    correction = config.algorithm.rollout_correction
    statistic, threshold = correction.rollout_rs, correction.rollout_rs_threshold
    key = "algorithm.rollout_correction.rollout_rs_threshold"
    if statistic is None:
        return
    ratio = statistic.endswith("k1")
    if threshold is None:
        kept = "ratios kept, for example [0.999, 1.001]" if ratio else "largest divergence kept, for example 0.01"
        what = f"algorithm.rollout_correction.rollout_rs={statistic} needs {key}"
        yield Problem(what, threshold, f"set it to the {kept}")
    elif ratio and isinstance(threshold, float) and threshold <= 1:
        what = f"{key} of a ratio keeps [1/c, c], so c must be above 1"
        yield Problem(what, threshold, "for example 1.001, or [0.999, 1.001]")
    elif not ratio and isinstance(threshold, tuple):
        what = f"{key} of {statistic} is the largest divergence kept, one number"
        yield Problem(what, list(threshold), f"set it to {threshold[1]:g}")


def _bypass(config: Config) -> Iterator[Problem]:
    correction, loss = config.algorithm.rollout_correction, config.actor.policy_loss
    bypass, section = correction.bypass_mode, "algorithm.rollout_correction"
    if bypass and config.actor.recompute_old_log_probs == "always":
        what = f"{section}.bypass_mode takes the engine's log-probs as old ones, which are not recomputed then"
        yield Problem(what, "bypass_mode true, recompute_old_log_probs always", "remove one of them")
    if bypass and correction.loss_type == "ppo_clip" and correction.rollout_is is not None:
        what = (
            f"{section}.rollout_is weighs twice with bypass_mode and loss_type=ppo_clip: there the loss's ratio is "
            "pi / pi_rollout already"
        )
        fix = f"remove {section}.rollout_is, or set {section}.loss_type=reinforce"
        yield Problem(what, correction.rollout_is, fix)
    if correction.loss_type == "reinforce" and not bypass:
        what, plain = f"{section}.loss_type=reinforce belongs to bypass_mode", "actor.policy_loss.loss_mode=gpg"
        fix = f"set {section}.bypass_mode=true, or for the plain policy gradient {plain}"
        yield Problem(what, "bypass_mode false", fix)
    if correction.reinforce and (loss.path is not None or loss.loss_mode != "vanilla"):
        what = f"{section}.loss_type=reinforce and actor.policy_loss both name the policy loss"
        yield Problem(what, loss.path or loss.loss_mode, "remove one of them")


def _schedules(config: Config) -> Iterator[Problem]:
    actor = config.actor
    for name, start, schedule in (
        ("clip_ratio", actor.clip_high, actor.clip_ratio_schedule),
        ("entropy_coeff", actor.entropy_coeff, actor.entropy_coeff_schedule),
        ("kl_loss_coef", actor.kl_loss_coef, actor.kl_loss_coef_schedule),
    ):
        key = f"actor.{name}"
        kind, (low, high) = f"{key}_schedule.type={schedule.type}", schedule.bounds(start)
        if schedule.type in ("linear", "cosine") and schedule.end is None:
            yield Problem(f"{kind} needs {key}_schedule.end", None, "set it to the value after the last step")
        if schedule.type != "adaptive":
            continue
        if schedule.target is None:
            yield Problem(f"{kind} needs {key}_schedule.target", None, "set it to the metric's value to hold")
        if start == 0:
            yield Problem(f"{key}=0 stays 0 under {kind}, which multiplies it", start, f"set {key} above 0")
        elif not low <= start <= high:
            what = f"{key} starts outside of the bounds {key}_schedule.min and {key}_schedule.max"
            yield Problem(what, f"{start:g} in [{low:g}, {high:g}]", "widen the bounds, or move the start")


def _run(config: Config) -> Iterator[Problem]:
    rule, path, place = config.reward.rule, config.reward.custom_reward_function.path, config.cluster.placement
    yield from config.trainer.problems()
    yield from config.cluster.problems()
    if config.trainer.memory_save_freq > 0 and config.cluster.address is not None:
        what = "trainer.memory_save_freq keeps states on this machine, and cluster.address may put the actor on another"
        yield Problem(what, config.trainer.memory_save_freq, "set trainer.save_freq")
    if config.profiler.tool == "nsight" and config.cluster.backend == "inline":
        what = "profiler.tool=nsight starts worker processes under nsys, and cluster.backend=inline has none"
        yield Problem(what, None, "set cluster.backend=ray, or profiler.tool=torch")
    if path is not None and rule != "auto":
        what = "reward.rule and reward.custom_reward_function.path both say how to score"
        yield Problem(what, f"{rule}, {path}", "remove one of them")
    if config.overlaps and place.rollout == [place.actor]:
        mode = "stream_minibatches=true" if config.trainer.stream_minibatches else f"mode={config.trainer.mode}"
        what = f"trainer.{mode} needs rollout workers of their own, and cluster.placement.rollout is the actor's pool"
        yield Problem(what, place.actor, "leave cluster.placement.rollout out, or name another pool")
    unmoved = config.trainer.mode == "async" and config.trainer.max_staleness == 0
    if unmoved and config.algorithm.filter_groups.enable:
        alone = "trainer.max_staleness=0, which samples whole batches as sync does"
        what = f"algorithm.filter_groups does not go with {alone}"
        yield Problem(what, 0, "use trainer.mode=sync, or allow staleness")


def _streamed(config: Config) -> Iterator[Problem]:
    """Mini-batches that are trained while others are sampled know nothing of these others, and see moved weights."""
    trainer, actor, algorithm = config.trainer, config.actor, config.algorithm
    if not trainer.stream_minibatches:
        return
    correction, kl, scaling = algorithm.rollout_correction, algorithm.kl_penalty, config.reward.scaling
    epochs, estimator = (config.uses_critic and config.critic.ppo_epochs) or 1, algorithm.adv_estimator
    own, whitens = algorithm.custom_estimator.path is not None, algorithm.uses("gae") and algorithm.whiten_advantages
    over_batch = not own and estimator in ("reinforce_plus_plus", "reinforce_plus_plus_baseline", "gpg", "gdpo")
    corrects = correction.active and not correction.bypass_mode and trainer.mode == "sync"
    compares = (
        "it compares the engine's log-probs with the trainer's of the same weights, which are moved on by then "
        "(bypass_mode=true compares with the current ones)"
    )
    recomputes, penalises = actor.recompute_old_log_probs == "always", algorithm.use_kl_in_reward
    whole, moved = "of the whole batch, which is not there yet", "the weights that sampled, which are moved on by then"
    for key, on, why in (
        (f"trainer.mode={trainer.mode}", trainer.mode != "sync", "there rollout goes on beside training anyway"),
        ("actor.shuffle=true", actor.shuffle, f"it draws mini-batches {whole}"),
        (f"actor.ppo_epochs={actor.ppo_epochs}", actor.ppo_epochs > 1, f"later passes are {whole}"),
        (f"critic.ppo_epochs={epochs}", epochs > 1, f"later passes are {whole}"),
        ("algorithm.whiten_advantages=true", whitens, f"it takes mean and deviation {whole}"),
        (f"algorithm.adv_estimator={estimator}", over_batch, f"it takes statistics {whole}"),
        ("algorithm.custom_estimator.path", own, f"an estimator of your own may use statistics {whole}"),
        (f"reward.scaling={scaling}", scaling != "none", f"it takes the deviation {whole}"),
        ("algorithm.filter_groups.enable=true", algorithm.filter_groups.enable, "it samples batch by batch"),
        ("actor.recompute_old_log_probs=always", recomputes, f"it needs {moved}: old log-probs are the engine's"),
        ("algorithm.rollout_correction", corrects, compares),
        (f"algorithm.kl_penalty={kl}", penalises and kl.startswith("full"), f"it needs {moved}"),
    ):
        if on:
            name, _, value = key.partition("=")
            fix = f"change {name}, or set trainer.stream_minibatches=false"
            yield Problem(f"{key} does not go with trainer.stream_minibatches: {why}", value or "set", fix)
