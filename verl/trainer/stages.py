"""The three stages of a training step, over DataProto and roles; no Ray, no ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import TypeVar

import numpy as np
import torch

from verl.algorithms.advantage_inputs import outcome_scores
from verl.algorithms.aggregation import count_denominators
from verl.algorithms.kl import is_full
from verl.algorithms.metric import Metric, merge_all
from verl.algorithms.reward_shaping import RewardShaper, new_shaper
from verl.algorithms.rollout_correction import correct_rollout
from verl.algorithms.schedules import scheduled_values
from verl.cluster.at_once import at_once
from verl.cluster.roles import Critic, Policy, Reference, Roles
from verl.config import BatchPlan, Config
from verl.protocol import DataProto
from verl.rollout.protocol import BASELINE_INDEX
from verl.rollout.seeds import slot_seed, uniforms
from verl.trainer.advantages import Metrics, advantage_columns, critic_columns, cut_rows, response_lengths
from verl.trainer.sampling import Sampler
from verl.trainer.timer import StepTimer

T = TypeVar("T")


def rollout(prompts: DataProto, roles: Roles, sampler: Sampler, timer: StepTimer) -> DataProto:
    """Sample the responses of these prompts and score them, as :func:`scored` says."""
    with timer("gen"):
        results = roles.rollout.generate(sampler.requests(prompts), prompts)
    return scored(sampler.assemble(prompts, results), roles, sampler, timer)


def scored(batch: DataProto, roles: Roles, sampler: Sampler, timer: StepTimer) -> DataProto:
    """A batch of responses with its scores.

    Rows that no reward function could score train nothing: their response mask is cleared. Greedy baselines become
    columns of the rows of their prompt.
    """
    with timer("reward"):
        scores = roles.scorer.score(batch)
        batch = batch.union(scores)
        if sampler.plan.greedy_baseline:
            batch = take_baselines(batch)
        batch.batch["response_mask"] = batch.batch["response_mask"] & batch.batch["scored"][:, None]
    return batch


def take_baselines(batch: DataProto) -> DataProto:
    """The rows without the greedy ones, which give ``baseline_scores`` and ``baseline_lengths`` to their prompt's rows.

    Rows whose baseline could not be scored have nothing to be compared with and count as unscored themselves.
    """
    greedy = torch.tensor([index == BASELINE_INDEX for index in batch.non_tensor_batch["index"]])
    rows, baselines = batch.select_idxs(~greedy), batch.select_idxs(greedy)
    scores = outcome_scores(baselines.tensors["token_level_scores"], baselines.tensors["response_mask"]).float()
    scored = baselines.tensors["scored"]
    place = {uid: number for number, uid in enumerate(baselines.non_tensor_batch["uid"])}
    own = torch.tensor([place[uid] for uid in rows.non_tensor_batch["uid"]])
    rows.batch["baseline_scores"] = torch.where(scored, scores, 0.0)[own]
    rows.batch["baseline_lengths"] = response_lengths(baselines)[own]
    rows.batch["scored"] = rows.batch["scored"] & scored[own]
    rows.meta_info.setdefault("metrics", {})["reward/baseline_unscored"] = int((~scored).sum())
    return rows


def process(
    batch: DataProto, roles: Roles, config: Config, kl_coef: float, timer: StepTimer, shaper: RewardShaper | None = None
) -> tuple[DataProto, Metrics]:
    """Old and reference log-probs, values, rewards after shaping and KL, advantages.

    Old log-probs are the engine's where they are proven to be the trainer's (``actor.recompute_old_log_probs: auto``).
    ``shaper``: with the running statistics of a whole run; None: a new one.
    """
    metrics: Metrics = {}
    sampled = batch
    calls: list[tuple[str, object, Callable[[], DataProto]]] = [
        ("old_log_prob", roles.policy.worker, lambda: old_columns(sampled, roles, config))
    ]
    if (reference := roles.reference) is not None:
        calls.append(("ref", reference.worker, lambda: reference_columns(sampled, reference, config)))
    if (critic := roles.critic) is not None:
        calls.append(("values", critic.worker, lambda: critic_columns(sampled, critic, config.bootstraps)))
    for columns in timed_at_once(timer, calls):
        batch = batch.union(columns)
    if (checksum := batch.meta_info.pop("ref_checksum", None)) is not None:
        metrics["training/ref_checksum"] = Metric(checksum, 1.0, "max")
    correction = config.algorithm.rollout_correction
    if correction.active and not correction.bypass_mode:
        batch.batch["importance_weights"], found = correct_rollout(
            batch.batch["old_log_probs"], batch.batch["rollout_log_probs"], batch.batch["response_mask"], correction
        )
        metrics |= found
    with timer("adv"):
        columns, found = advantage_columns(batch, config, kl_coef, shaper or new_shaper(config))
        batch, metrics = batch.union(columns), metrics | found
    return batch, metrics


def timed_at_once(timer: StepTimer, calls: Sequence[tuple[str, object, Callable[[], T]]]) -> list[T]:
    """As :func:`verl.cluster.at_once.at_once`, each call timed as the part of the step that it is."""

    def timed(part: str, work: Callable[[], T]) -> T:
        with timer(part):
            return work()

    return at_once([(owner, partial(timed, part, work)) for part, owner, work in calls])


def old_columns(batch: DataProto, roles: Roles, config: Config) -> DataProto:
    """``old_log_probs``, of the trainer or, where that is the same, of the engine."""
    if needs_old_log_probs(config, roles):
        return roles.policy.log_probs(batch)
    return DataProto.from_dict({"old_log_probs": batch.batch["rollout_log_probs"].clone()})


def reference_columns(batch: DataProto, reference: Reference, config: Config) -> DataProto:
    """What the KL terms that are on need of the reference; a loss over the whole vocabulary needs no column."""
    actor, algorithm = config.actor, config.algorithm
    penalty = [algorithm.kl_penalty] if algorithm.use_kl_in_reward else []
    kinds = penalty + ([actor.kl_loss_type] if actor.use_kl_loss else [])
    columns = DataProto.from_dict({})
    if not all(map(is_full, kinds)):
        columns = columns.union(reference.log_probs(batch))
    if any(map(is_full, penalty)):
        columns = columns.union(reference.full_kl(batch))
    return columns


def needs_old_log_probs(config: Config, roles: Roles) -> bool:
    """Stale ones are not the trainer's."""
    choice = config.actor.recompute_old_log_probs
    if config.engine_log_probs:
        return False
    return choice == "always" or (choice == "auto" and (config.off_policy or not roles.exact_rollout))


def update(
    batch: DataProto,
    roles: Roles,
    config: Config,
    learning_rates: dict[str, float],
    step: int,
    timer: StepTimer,
    before: int = 0,
) -> Metrics:
    """Mini-batches through critic and actor; the actor waits for ``trainer.critic_warmup`` steps to pass.

    Where they live in different processes, both learn at the same time. ``config``: with this step's values of
    scheduled coefficients. ``before``: rows that this step has trained on already, where it is done in parts.
    """
    calls: list[tuple[str, object, Callable[[], list[Metrics]]]] = []
    if (critic := roles.critic) is not None:
        calls.append(
            ("update_critic", critic.worker, lambda: update_critic(batch, critic, config, learning_rates, step))
        )
    if step >= config.trainer.critic_warmup or critic is None:
        policy = roles.policy
        work = partial(update_actor, batch, policy, config, learning_rates, step, before)
        calls.append(("update_actor", policy.worker, work))
    return merge_all([part for parts in timed_at_once(timer, calls) for part in parts])


def update_critic(
    batch: DataProto, critic: Critic, config: Config, learning_rates: Mapping[str, float], step: int
) -> list[Metrics]:
    """Metrics of each optimizer step."""
    parts: list[Metrics] = []
    for mini_batch in mini_batches(batch, config.critic_batch(1), config, step):
        mini_batch.meta_info = {"learning_rate": learning_rates["critic"]}
        mask = mini_batch.batch["response_mask"]
        parts.append(critic.update(mini_batch, count_denominators(mask, config.loss_scale_factor)))
    return parts


def update_actor(
    batch: DataProto, policy: Policy, config: Config, learning_rates: Mapping[str, float], step: int, before: int = 0
) -> list[Metrics]:
    """Metrics of each optimizer step."""
    parts: list[Metrics] = []
    scheduled, plan = scheduled_values(config.actor), config.actor_batch(1)
    for number, mini_batch in enumerate(mini_batches(batch, plan, config, step), before // plan.rows_per_mini_batch):
        mini_batch.meta_info = {
            "learning_rate": learning_rates["actor"],
            "fresh_weights": number == 0,
            "scheduled": scheduled,
        }
        if config.actor.policy_loss.needs_draws:
            mini_batch.batch["draws"] = loss_draws(mini_batch, config.trainer.seed, step, number)
        mask = mini_batch.batch["response_mask"]
        parts.append(policy.update(mini_batch, count_denominators(mask, config.loss_scale_factor)))
    return parts


def loss_draws(mini_batch: DataProto, seed: int, step: int, number: int) -> torch.Tensor:
    """Uniform numbers (B, R) by slot and position, other ones for each optimizer step (``step``, ``number``)."""
    columns = mini_batch.non_tensor_batch
    rows, width = mini_batch.tensors["response_mask"].shape
    stream = f"policy_loss\0{step}\0{number}\0"
    seeds = [slot_seed(seed, stream + uid, index) for uid, index in zip(columns["uid"], columns["index"], strict=True)]
    draws = uniforms(np.repeat(np.array(seeds, dtype=np.uint64), width), np.tile(np.arange(width), rows))
    return torch.from_numpy(draws).view(rows, width)


def mini_batches(batch: DataProto, plan: BatchPlan, config: Config, step: int) -> Iterator[DataProto]:
    """Whole groups, ``plan.mini_batch_prompts`` of them at a time, ``plan.epochs`` times over.

    With ``actor.shuffle`` groups are drawn anew each epoch, from (seed, step, epoch). The last part of a short batch
    may be smaller; a part without a trained token is left out, as nothing could be learnt from it. With
    ``algorithm.mask_truncated`` cut responses have counted in their group's advantages and are masked here.
    """
    n = config.rollout.n
    groups = len(batch) // n
    for epoch in range(plan.epochs):
        order = np.arange(groups)
        if config.actor.shuffle:
            order = np.random.default_rng([config.trainer.seed, step, epoch]).permutation(groups)
        for start in range(0, groups, plan.mini_batch_prompts):
            chosen = order[start : start + plan.mini_batch_prompts]
            rows = (chosen[:, None] * n + np.arange(n)).reshape(-1)
            part = batch.select_idxs(rows)
            if config.algorithm.mask_truncated:
                part.batch["response_mask"] = part.batch["response_mask"] & ~cut_rows(part)[:, None]
            if bool(part.batch["response_mask"].any()):
                yield part
