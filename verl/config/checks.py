"""Rules that tie fields together, and notices about settings that will have no effect."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from verl.config import advantage_checks, batches, loss_checks
from verl.config.problems import Problem, raise_problems
from verl.config.schema_cluster import TRAINED

if TYPE_CHECKING:
    from verl.config.schema import Config


def check(config: Config) -> None:
    """Raise one :class:`~verl.errors.ConfigError` that holds every broken rule."""
    rules = (
        batches.problems,
        _data,
        _sampling,
        _validation,
        _response_length,
        advantage_checks.problems,
        _kl,
        loss_checks.problems,
        _run,
        _schedule,
    )
    raise_problems([problem for rule in rules for problem in rule(config)])


def _data(config: Config) -> Iterator[Problem]:
    custom, sampler = config.data.custom_cls, config.data.sampler
    for key, path, name_key, name in (
        ("data.custom_cls.path", custom.path, "data.custom_cls.name", custom.name),
        ("data.sampler.class_path", sampler.class_path, "data.sampler.class_name", sampler.class_name),
    ):
        if path is not None and not name:
            yield Problem(f"{key} names a file, and no class in it is named", path, f"set {name_key}")
    named = {
        "weights": sampler.weights,
        "source_weights": sampler.source_weights,
        "weight_column": sampler.weight_column,
    }
    given = [f"data.sampler.{name}" for name, value in named.items() if value]
    if sampler.class_path is not None:
        given.append("data.sampler.class_path")
    if len(given) > 1:
        yield Problem(f"{' and '.join(given)} each say how rows are drawn", None, "keep one of them")
    elif given and sampler.kind not in ("auto", "weighted"):
        yield Problem(
            f"data.sampler.kind={sampler.kind} draws without {given[0]}", sampler.kind, f"remove it or {given[0]}"
        )
    if sampler.kind == "weighted" and given in ([], ["data.sampler.class_path"]):
        yield Problem(
            "data.sampler.kind=weighted has no weights",
            given[0] if given else None,
            "set data.sampler.weights, data.sampler.source_weights or data.sampler.weight_column",
        )
    entries = len(config.data.train_files)
    if sampler.weights and len(sampler.weights) != entries:
        yield Problem(
            "data.sampler.weights has not one weight for each entry of data.train_files",
            f"{len(sampler.weights)} weights, {entries} entries",
            f"give {entries} (a pattern or a folder is one entry)",
        )


def _sampling(config: Config) -> Iterator[Problem]:
    """Law 3: training samples from the very distribution whose log-probs the trainer computes."""
    rollout = config.rollout
    why = (
        "training sampling must follow the model's own distribution: otherwise the engine's log-probs are of "
        "other probabilities than the trainer's, and every ratio is off"
    )
    if rollout.top_p < 1:
        yield Problem(
            f"rollout.top_p below 1 cuts off the tail; {why}",
            rollout.top_p,
            "set rollout.top_p=1.0 (rollout.val_kwargs.top_p is free)",
        )
    if rollout.top_k > 0:
        yield Problem(
            f"rollout.top_k cuts off the tail; {why}",
            rollout.top_k,
            "set rollout.top_k=-1 (rollout.val_kwargs.top_k is free)",
        )
    if rollout.temperature == 0:
        yield Problem(
            f"rollout.temperature=0 is greedy: every response of a group would be the same; {why}",
            rollout.temperature,
            "set rollout.temperature above 0, usually 1.0 (rollout.val_kwargs.temperature may be 0)",
        )


def _validation(config: Config) -> Iterator[Problem]:
    val = config.rollout.val_kwargs
    if val.do_sample and val.temperature == 0:
        yield Problem(
            "rollout.val_kwargs.do_sample=true contradicts rollout.val_kwargs.temperature=0, which is greedy",
            "do_sample true, temperature 0",
            "set rollout.val_kwargs.temperature above 0, or leave do_sample out",
        )
    if val.min_new_tokens > config.data.max_response_length:
        yield Problem(
            "rollout.val_kwargs.min_new_tokens is more than data.max_response_length; both count tokens",
            f"{val.min_new_tokens} > {config.data.max_response_length}",
            f"set rollout.val_kwargs.min_new_tokens to at most {config.data.max_response_length}",
        )


def _response_length(config: Config) -> Iterator[Problem]:
    settings, longest = config.rollout.response_length, config.data.max_response_length
    if settings.mode == "adaptive" and settings.min is not None and settings.min > longest:
        yield Problem(
            "rollout.response_length.min is more than data.max_response_length; both count tokens",
            f"{settings.min} > {longest}",
            f"set rollout.response_length.min to at most {longest}",
        )
    ends = config.rollout.stop or config.rollout.stop_token_ids
    if config.algorithm.mask_truncated and config.rollout.ignore_eos and not ends:
        yield Problem(
            "rollout.ignore_eos=true has every response cut, and algorithm.mask_truncated=true trains on none that is",
            "nothing would be trained",
            "set one of them to false, or give rollout.stop or rollout.stop_token_ids",
        )


def _kl(config: Config) -> Iterator[Problem]:
    actor, control = config.actor, config.algorithm.kl_ctrl
    if actor.use_kl_loss and actor.kl_loss_type in ("kl", "k1"):
        yield Problem(
            "actor.kl_loss_type=" + actor.kl_loss_type + " has a gradient whose expectation is zero: "
            "as a loss it does nothing but add noise",
            actor.kl_loss_type,
            "set actor.kl_loss_type to low_var_kl (k3), k2, or k1+ (value of k1, gradient of k2)",
        )
    if control.type == "adaptive" and control.kl_coef == 0:
        yield Problem(
            "algorithm.kl_ctrl.kl_coef=0 stays 0 under algorithm.kl_ctrl.type=adaptive, which multiplies it",
            control.kl_coef,
            "set algorithm.kl_ctrl.kl_coef above 0, for example 0.001, or type=fixed",
        )


def _run(config: Config) -> Iterator[Problem]:
    reward = config.reward
    yield from config.trainer.problems()
    yield from config.cluster.problems()
    if config.trainer.memory_save_freq > 0 and config.cluster.address is not None:
        what = (
            "trainer.memory_save_freq keeps states on this machine, and cluster.address may have the actor on another"
        )
        yield Problem(what, config.trainer.memory_save_freq, "set trainer.save_freq")
    if config.profiler.tool == "nsight" and config.cluster.backend == "inline":
        fix = "set cluster.backend=ray, or profiler.tool=torch"
        yield Problem("profiler.tool=nsight starts worker processes under nsys, and inline there are none", None, fix)
    kinds = [config.algorithm.kl_penalty] * config.algorithm.use_kl_in_reward
    kinds += [config.actor.kl_loss_type] * config.actor.use_kl_loss
    place = config.cluster.placement
    if place.pool_of("reference") != place.actor and any(kind.startswith("full") for kind in kinds):
        yield Problem(
            "a KL over the whole vocabulary needs the logits of actor and reference in one process, and "
            "cluster.placement keeps the reference elsewhere",
            f"actor: {place.actor}, reference: {place.reference}",
            "leave cluster.placement.reference out, or choose another estimator of the KL",
        )
    if reward.custom_reward_function.path is not None and reward.rule != "auto":
        yield Problem(
            "reward.rule and reward.custom_reward_function.path both say how to score",
            f"{reward.rule}, {reward.custom_reward_function.path}",
            "remove one of them",
        )


def _schedule(config: Config) -> Iterator[Problem]:
    rollout, trainer = config.rollout, config.trainer
    least, most = rollout.min_workers, rollout.max_workers
    if least is not None and most is not None and least > most:
        yield Problem(
            "rollout.min_workers is more than rollout.max_workers",
            f"{least} > {most}",
            "raise the one or lower the other",
        )
    place = config.cluster.placement
    if trainer.stream_minibatches:
        yield from _streamed(config)
    if config.overlaps and place.rollout == [place.actor]:
        key = "stream_minibatches=true" if trainer.stream_minibatches else f"mode={trainer.mode}"
        yield Problem(
            f"trainer.{key} needs rollout workers of their own, and cluster.placement.rollout is the actor's pool",
            place.actor,
            "leave cluster.placement.rollout out, or name another pool",
        )
    if trainer.mode != "async":
        return
    if config.algorithm.filter_groups.enable and trainer.max_staleness == 0:
        what = (
            "algorithm.filter_groups does not go with trainer.max_staleness=0, which samples whole batches as sync does"
        )
        yield Problem(what, trainer.max_staleness, "use trainer.mode=sync, or allow staleness")


def _streamed(config: Config) -> Iterator[Problem]:
    """Mini-batches that are trained while others are sampled know nothing of these others, and see moved weights."""
    trainer, actor, algorithm = config.trainer, config.actor, config.algorithm
    correction, own = algorithm.rollout_correction, algorithm.custom_estimator.path is not None
    epochs = (config.uses_critic and config.critic.ppo_epochs) or 1
    whole = "of the whole batch, which is not there yet"
    sync = trainer.mode == "sync"
    for key, on, why in (
        (f"trainer.mode={trainer.mode}", not sync, "there rollout goes on beside training anyway"),
        ("actor.shuffle=true", actor.shuffle, f"it draws mini-batches {whole}"),
        (f"actor.ppo_epochs={actor.ppo_epochs}", actor.ppo_epochs > 1, f"later passes are {whole}"),
        (f"critic.ppo_epochs={epochs}", epochs > 1, f"later passes are {whole}"),
        (
            "algorithm.whiten_advantages=true",
            algorithm.uses("gae") and algorithm.whiten_advantages,
            f"it takes mean and deviation {whole}",
        ),
        (
            f"algorithm.adv_estimator={algorithm.adv_estimator}",
            any(map(algorithm.uses, ("reinforce_plus_plus", "reinforce_plus_plus_baseline", "gpg", "gdpo"))),
            f"it takes statistics {whole}",
        ),
        ("algorithm.custom_estimator.path", own, f"an estimator of your own may use statistics {whole}"),
        (f"reward.scaling={config.reward.scaling}", config.reward.scaling != "none", f"it takes the deviation {whole}"),
        ("algorithm.filter_groups.enable=true", algorithm.filter_groups.enable, "it samples batch by batch"),
        (
            "actor.recompute_old_log_probs=always",
            actor.recompute_old_log_probs == "always",
            "the weights that sampled are moved on by then, so the engine's log-probs are the old ones",
        ),
        (
            "algorithm.rollout_correction",
            correction.active and not correction.bypass_mode and sync,
            "it compares the engine's log-probs with the trainer's of the same weights, which are moved on by then "
            "(bypass_mode=true compares with the current ones)",
        ),
        (
            f"algorithm.kl_penalty={algorithm.kl_penalty}",
            algorithm.use_kl_in_reward and algorithm.kl_penalty.startswith("full"),
            "it needs the trainer's weights that sampled, which are moved on by then",
        ),
    ):
        if on:
            name, _, value = key.partition("=")
            fix = f"change {name}, or set trainer.stream_minibatches=false"
            yield Problem(f"{key} does not go with trainer.stream_minibatches: {why}", value or "set", fix)


def notices(config: Config) -> list[str]:
    """One sentence for every setting that is accepted but has no effect, or not the one it seems to have."""
    sections = (
        _sampling_notices,
        _response_length_notices,
        _training_notices,
        advantage_checks.notices,
        loss_checks.notices,
        _trainer_notices,
    )
    return [notice for section in sections for notice in section(config)]


def _sampling_notices(config: Config) -> Iterator[str]:
    val = config.rollout.val_kwargs
    if val.do_sample is False and val.temperature > 0:
        yield (
            f"rollout.val_kwargs.temperature={val.temperature} is set aside: do_sample=false makes validation greedy"
        )
    if val.greedy and val.n > 1:
        yield f"rollout.val_kwargs.n={val.n}: validation is greedy, so the {val.n} responses to a prompt are the same"


def _response_length_notices(config: Config) -> Iterator[str]:
    settings = config.rollout.response_length
    if settings.mode == "fixed":
        fields = type(settings).model_fields.items()
        for name in (name for name, field in fields if getattr(settings, name) != field.default):
            yield f"rollout.response_length.{name} has no effect: rollout.response_length.mode is fixed, not adaptive"
    elif 1 - settings.quantile > settings.max_cut_share and settings.margin == 1:
        yield (
            f"rollout.response_length.quantile={settings.quantile:g} cuts about {1 - settings.quantile:.0%} of "
            f"responses, and more than max_cut_share={settings.max_cut_share:g} opens the cap: it will open again and "
            "again"
        )
    if config.algorithm.mask_truncated and config.bootstraps:
        yield (
            "algorithm.bootstrap_truncated has little effect: algorithm.mask_truncated=true trains on no cut response"
        )


def _training_notices(config: Config) -> Iterator[str]:
    algorithm, actor = config.algorithm, config.actor
    if algorithm.use_kl_in_reward and actor.use_kl_loss:
        yield (
            "algorithm.use_kl_in_reward and actor.use_kl_loss are both on: "
            "the KL against the reference is penalised twice, in the reward and in the loss"
        )
    if actor.use_kl_loss and actor.kl_loss_coef == 0:
        yield "actor.kl_loss_coef=0: the KL loss is computed and logged, but trains nothing"
    for role, micro, dynamic in (
        ("actor", actor.ppo_micro_batch_size_per_gpu, actor.use_dynamic_bsz),
        ("critic", config.critic.ppo_micro_batch_size_per_gpu, config.uses_critic and config.critic.use_dynamic_bsz),
    ):
        if micro is not None and dynamic:
            yield (
                f"{role}.ppo_micro_batch_size_per_gpu={micro} is set aside: {role}.use_dynamic_bsz=true fills "
                f"micro-batches by tokens ({role}.ppo_max_token_len_per_gpu)"
            )
    for name, model in (("critic", config.critic.model), ("reward", config.reward.model)):
        if model.trust_remote_code and model.path is None:
            yield f"{name}.model.trust_remote_code has no effect: there is no {name}.model.path"
    fp16 = config.model.fp16.model_dump(exclude_defaults=True)
    if fp16 and config.model.dtype != "float16":
        yield f"model.fp16 has no effect: model.dtype={config.model.dtype} needs no loss scale"
    elif fp16.get("loss_scale") and "initial_scale_power" in fp16:
        yield f"model.fp16.initial_scale_power has no effect: model.fp16.loss_scale={fp16['loss_scale']:g} is fixed"
    steps = config.trainer.total_training_steps
    roles = [("actor", actor.optim)] + ([("critic", config.critic.optim)] if config.uses_critic else [])
    for role, optim in roles:
        if steps is not None and optim.lr_warmup_steps > steps:
            yield (
                f"{role}.optim.lr_warmup_steps={optim.lr_warmup_steps} is more than "
                f"trainer.total_training_steps={steps}: the learning rate never reaches {optim.lr:g}"
            )


def _trainer_notices(config: Config) -> Iterator[str]:
    trainer = config.trainer
    if config.device_of("actor") == "cpu" and trainer.n_gpus_per_node not in ("auto", 0):
        yield f"trainer.n_gpus_per_node={trainer.n_gpus_per_node} is set aside: trainer.device=cpu uses no GPU"
    if trainer.test_freq > 0 and not config.data.val_files:
        yield f"trainer.test_freq={trainer.test_freq} has no effect: data.val_files is empty"
    yield from trainer.checkpoint_notices(bool(config.data.val_files))
    if trainer.memory_save_freq > 0 and (config.cluster.backend == "inline" or not trainer.max_restarts):
        why = "cluster.backend=inline" if trainer.max_restarts else "trainer.max_restarts=0"
        yield f"trainer.memory_save_freq={trainer.memory_save_freq} has no effect: {why}"
    if trainer.critic_warmup and not config.uses_critic:
        yield (
            f"trainer.critic_warmup={trainer.critic_warmup} has no effect: "
            f"algorithm.adv_estimator={config.algorithm.adv_estimator} has no critic"
        )
    if trainer.resume_from_path is not None and trainer.resume_mode != "resume_path":
        yield (f"trainer.resume_from_path has no effect: trainer.resume_mode is {trainer.resume_mode}, not resume_path")
    if trainer.mode != "async":
        for name in ("max_staleness", "staleness_unit"):
            if getattr(trainer, name) != type(trainer).model_fields[name].default:
                yield f"trainer.{name} has no effect: trainer.mode is {trainer.mode}, not async"
    if trainer.mode != "sync" and config.cluster.backend == "inline":
        yield (
            f"trainer.mode={trainer.mode} saves no time with cluster.backend=inline: one process samples and trains in "
            "turns (what it computes is the same as over Ray)"
        )
    if trainer.stream_minibatches and config.cluster.backend == "inline":
        yield "trainer.stream_minibatches has no effect: cluster.backend=inline samples and trains in turns"
    elif trainer.stream_minibatches and config.streamed_prompts == config.data.train_batch_size:
        yield "trainer.stream_minibatches has no effect: data.train_batch_size is one mini-batch"
    if config.rollout.weight_sync == "disk" and not config.rollout_apart:
        yield "rollout.weight_sync=disk has no effect: rollout shares the actor's process, and its weights"
    if config.ranks == 1 and not trainer.balance_batch:
        yield "trainer.balance_batch=false has no effect: there is one rank"
    yield from _placement_notices(config)


def _placement_notices(config: Config) -> Iterator[str]:
    cluster, place = config.cluster, config.cluster.placement
    if cluster.backend == "inline":
        aside = {
            "address": cluster.address,
            "pools": cluster.pools,
            "placement": place.model_dump(exclude_defaults=True),
        }
        for key in (key for key, value in aside.items() if value):
            yield f"cluster.{key} has no effect: cluster.backend=inline is this process alone, without Ray"
        return
    for name in cluster.pools:
        pool = cluster.pool(name)
        if pool.gpus and (pool.device or config.trainer.device) == "cpu":
            yield f"cluster.pools.{name}.gpus={pool.gpus:g} is set aside: trainer.device=cpu uses no GPU"
    for role in (role for role in TRAINED if role not in config.roles and getattr(place, role) is not None):
        yield f"cluster.placement.{role} has no effect: this run has no {role}"
    used = {*map(place.pool_of, config.roles), *place.rollout}
    for name in (name for name in cluster.pools if name not in used):
        yield f"cluster.pools.{name} has no effect: no role of this run is placed there"
