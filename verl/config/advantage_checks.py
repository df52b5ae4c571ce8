"""Rules and notices about the advantage estimator, the shaping of rewards and the filtering of groups."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from verl.config.problems import Problem

if TYPE_CHECKING:
    from verl.config.schema import Config


def problems(config: Config) -> Iterator[Problem]:
    yield from _groups(config)
    if config.algorithm.uses("gdpo"):
        yield from _gdpo(config)
    if config.reward.overlong_buffer.enable:
        yield from _overlong(config)


def _groups(config: Config) -> Iterator[Problem]:
    algorithm = config.algorithm
    if config.rollout.n > 1:
        return
    if algorithm.compares_group:
        yield Problem(
            f"algorithm.adv_estimator={algorithm.adv_estimator} compares the responses of one prompt, and rollout.n=1 "
            "leaves nothing to compare: every advantage would be 0",
            "rollout.n = 1 response per prompt",
            "set rollout.n to 2 or more (often 8), or use algorithm.adv_estimator=gae, reinforce_plus_plus or remax",
        )
    if algorithm.filter_groups.enable:
        yield Problem(
            "algorithm.filter_groups.enable keeps the prompts whose responses differ, and rollout.n=1 leaves nothing "
            "to differ: no prompt would ever be kept",
            "rollout.n = 1 response per prompt",
            "set rollout.n to 2 or more (often 8), or algorithm.filter_groups.enable=false",
        )


def _gdpo(config: Config) -> Iterator[Problem]:
    keys, weights = config.algorithm.gdpo_reward_keys, config.algorithm.gdpo_reward_weights
    if not keys:
        yield Problem(
            "algorithm.adv_estimator=gdpo normalises several rewards apart, and algorithm.gdpo_reward_keys names none",
            keys,
            "name keys of the dict that the reward function returns, for example [accuracy, format]",
        )
    elif weights is not None and len(weights) != len(keys):
        yield Problem(
            "algorithm.gdpo_reward_weights has not one weight for each of algorithm.gdpo_reward_keys",
            f"{len(weights)} weights, {len(keys)} keys",
            f"give {len(keys)} weights, or null for 1 each",
        )
    elif weights is not None and not any(weights):
        yield Problem(
            "algorithm.gdpo_reward_weights are all 0: every advantage would be 0", weights, "give at least one a weight"
        )
    why = "algorithm.adv_estimator=gdpo forms advantages from algorithm.gdpo_reward_keys alone"
    if config.algorithm.use_kl_in_reward:
        yield Problem(
            f"{why}: algorithm.use_kl_in_reward would change nothing", True, "use the KL loss, actor.use_kl_loss=true"
        )
    if config.reward.shapes:
        yield Problem(
            f"{why}: length_normalization, length_penalty, overlong_buffer, scaling and clip of section reward would "
            "change nothing",
            "reward shaping is on",
            "turn it off; a penalty of your own can be one of the reward function's keys",
        )


def _overlong(config: Config) -> Iterator[Problem]:
    buffer, limit = config.reward.overlong_buffer, config.data.max_response_length
    longest, length = buffer.place(limit)
    name = "reward.overlong_buffer.max_resp_len" if buffer.max_resp_len else "data.max_response_length"
    if not 0 < length <= longest:
        yield Problem(
            f"reward.overlong_buffer.len must be from 1 up to {name}; both count tokens",
            f"{length} tokens, {name} is {longest}",
            "use null for a fifth of it",
        )
    elif longest - length >= limit:
        yield Problem(
            "reward.overlong_buffer penalises no response: all end, at data.max_response_length, before it begins",
            f"it begins behind {longest - length} tokens, data.max_response_length is {limit}",
            "lower reward.overlong_buffer.max_resp_len, or leave it out",
        )


def notices(config: Config) -> Iterator[str]:
    algorithm, reward = config.algorithm, config.reward
    if algorithm.custom_estimator.path is not None and algorithm.adv_estimator != "gae":
        yield (
            f"algorithm.adv_estimator={algorithm.adv_estimator} is set aside: algorithm.custom_estimator.path names "
            "the estimator"
        )
    if algorithm.custom_estimator.path is None:
        used = {
            "gamma": ("gae", "reinforce_plus_plus"),
            "lam": ("gae",),
            "whiten_advantages": ("gae",),
            "bootstrap_truncated": ("gae",),
            "norm_adv_by_std_in_grpo": ("grpo", "grpo_passk"),
            "gdpo_reward_keys": ("gdpo",),
            "gdpo_reward_weights": ("gdpo",),
        }
        for name, estimators in used.items():
            default = type(algorithm).model_fields[name].get_default(call_default_factory=True)
            value = getattr(algorithm, name)
            if value != default and algorithm.adv_estimator not in estimators:
                yield (
                    f"algorithm.{name}={value} has no effect: algorithm.adv_estimator={algorithm.adv_estimator} does "
                    "not use it"
                )
    if reward.length_normalization.alpha > 0 and not reward.length_normalization.positive_only:
        yield (
            f"reward.length_normalization.alpha={reward.length_normalization.alpha:g} divides scores below 0 too, so "
            "that long wrong answers lose least; reward.length_normalization.positive_only=true leaves them alone"
        )
