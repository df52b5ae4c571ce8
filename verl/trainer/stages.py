"""The three stages of a training step, over DataProto and roles; no Ray, no ranks."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch

from verl.algorithms.advantages import ESTIMATORS, AdvantageInputs, group_index, zero_spread_metric
from verl.algorithms.aggregation import count_denominators
from verl.algorithms.kl import apply_kl_penalty
from verl.algorithms.metric import Metric, merge_all
from verl.cluster.roles import Roles
from verl.config import BatchPlan, Config
from verl.errors import VerlError
from verl.protocol import DataProto
from verl.trainer.sampling import Sampler
from verl.trainer.timer import StepTimer

Metrics = dict[str, Metric]


def rollout(prompts: DataProto, roles: Roles, sampler: Sampler, timer: StepTimer) -> DataProto:
    """Sample the responses of these prompts and score them.

    Rows that no reward function could score train nothing: their response mask is cleared.
    """
    with timer("gen"):
        results = roles.rollout.generate(sampler.requests(prompts))
        batch = sampler.assemble(prompts, results)
    with timer("reward"):
        scores = roles.scorer.score(batch)
        batch = batch.union(scores)
        batch.batch["response_mask"] = batch.batch["response_mask"] & batch.batch["scored"][:, None]
    return batch


def process(
    batch: DataProto, roles: Roles, config: Config, kl_coef: float, timer: StepTimer
) -> tuple[DataProto, Metrics]:
    """Old and reference log-probs, values, rewards after KL, advantages.

    Old log-probs are the engine's where they are proven to be the trainer's (``actor.recompute_old_log_probs: auto``).
    """
    metrics: Metrics = {}
    with timer("old_log_prob"):
        if needs_old_log_probs(config, roles):
            batch = batch.union(roles.policy.log_probs(batch))
        else:
            batch.batch["old_log_probs"] = batch.batch["rollout_log_probs"].clone()
    if roles.reference is not None:
        with timer("ref"):
            batch = batch.union(roles.reference.log_probs(batch))
    if roles.critic is not None:
        with timer("values"):
            batch = batch.union(roles.critic.values(batch))
    with timer("adv"):
        columns = batch.tensors
        rewards = columns["token_level_scores"]
        if config.algorithm.use_kl_in_reward:
            penalty = apply_kl_penalty(
                rewards,
                columns["old_log_probs"],
                columns["ref_log_probs"],
                columns["response_mask"],
                kl_coef,
                config.algorithm.kl_penalty,
            )
            rewards = penalty.token_level_rewards
            metrics["actor/reward_kl_penalty"] = penalty.mean_kl
            metrics["actor/reward_kl_penalty_coeff"] = Metric(kl_coef, 1.0, "mean")
        inputs = AdvantageInputs(
            token_level_rewards=rewards,
            response_mask=columns["response_mask"],
            group_ids=group_index(batch.non_tensor_batch["uid"].tolist()),
            scored=columns["scored"],
            values=columns.get("values"),
        )
        estimated = ESTIMATORS[config.algorithm.adv_estimator](inputs, config.algorithm)
        _require_finite(estimated.advantages[columns["response_mask"]], config.algorithm.adv_estimator)
        metrics["training/frac_reward_zero_std"] = zero_spread_metric(inputs)
        finished = {
            "token_level_rewards": rewards,
            "advantages": estimated.advantages,
            "returns": estimated.returns,
        }
        batch = batch.union(DataProto.from_dict(finished))
    return batch, metrics


def needs_old_log_probs(config: Config, roles: Roles) -> bool:
    choice = config.actor.recompute_old_log_probs
    return choice == "always" or (choice == "auto" and not roles.exact_rollout)


def _require_finite(advantages: torch.Tensor, estimator: str) -> None:
    broken = int((~torch.isfinite(advantages)).sum())
    if broken:
        raise VerlError(
            f"algorithm.adv_estimator={estimator} gave advantages that are not finite; the step was not trained on",
            f"{broken} of {advantages.numel()} tokens",
            "look at the newest sample file for rewards, values or log-probs that are not numbers",
        )


def update(
    batch: DataProto,
    roles: Roles,
    config: Config,
    learning_rates: dict[str, float],
    step: int,
    timer: StepTimer,
) -> Metrics:
    """Mini-batches through critic and actor; the actor waits for ``trainer.critic_warmup`` steps to pass."""
    parts: list[Metrics] = []
    if roles.critic is not None:
        with timer("update_critic"):
            for mini_batch in mini_batches(batch, config.critic_batch(1), config, step):
                mini_batch.meta_info = {"learning_rate": learning_rates["critic"]}
                mask = mini_batch.batch["response_mask"]
                parts.append(roles.critic.update(mini_batch, count_denominators(mask, config.loss_scale_factor)))
    if step >= config.trainer.critic_warmup or roles.critic is None:
        with timer("update_actor"):
            for number, mini_batch in enumerate(mini_batches(batch, config.actor_batch(1), config, step)):
                mini_batch.meta_info = {"learning_rate": learning_rates["actor"], "fresh_weights": number == 0}
                mask = mini_batch.batch["response_mask"]
                parts.append(roles.policy.update(mini_batch, count_denominators(mask, config.loss_scale_factor)))
    return merge_all(parts)


def mini_batches(batch: DataProto, plan: BatchPlan, config: Config, step: int) -> Iterator[DataProto]:
    """Whole groups, ``plan.mini_batch_prompts`` of them at a time, ``plan.epochs`` times over.

    With ``actor.shuffle`` groups are drawn anew each epoch, from (seed, step, epoch). The last part of a short batch
    may be smaller; a part without a trained token is left out, as nothing could be learnt from it.
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
            if bool(part.batch["response_mask"].any()):
                yield part
