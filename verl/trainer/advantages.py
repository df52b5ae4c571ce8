"""From scores to advantages: shaping, the KL penalty, and what the estimator is given of a batch."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from verl.algorithms.advantage_inputs import AdvantageInputs, group_index, outcome_scores, zero_spread_metric
from verl.algorithms.advantages import estimate
from verl.algorithms.kl import apply_kl_penalty
from verl.algorithms.masking import count_nonfinite, place_at_last
from verl.algorithms.metric import Metric, mean_metric
from verl.algorithms.reward_shaping import RewardShaper
from verl.cluster.roles import Critic
from verl.config import Config
from verl.config.names import did_you_mean
from verl.errors import RewardError, VerlError
from verl.protocol import DataProto
from verl.protocol.keys import REWARD_EXTRA_PREFIX

Metrics = dict[str, Metric]


def advantage_columns(
    batch: DataProto, config: Config, kl_coef: float, shaper: RewardShaper
) -> tuple[DataProto, Metrics]:
    """``token_level_rewards, advantages, returns`` (and ``shaped_scores``) of a batch that is otherwise processed.

    Shaping makes one number of a response's score and puts it on its last trained token; the KL penalty is then taken
    off token by token. Raises VerlError: advantages that are not finite, or a user's estimator that failed;
    RewardError: a reward that ``algorithm.gdpo_reward_keys`` names and no response got.
    """
    columns, algorithm, metrics = batch.tensors, config.algorithm, Metrics()
    made: dict[str, Tensor] = {}
    mask, scored = columns["response_mask"], columns["scored"]
    rewards, baselines = columns["token_level_scores"], columns.get("baseline_scores")
    if config.reward.shapes:
        lengths = response_lengths(batch)
        shaped = shaper(outcome_scores(rewards, mask), lengths, scored, baselines, columns.get("baseline_lengths"))
        made["shaped_scores"] = shaped.scores.float()
        rewards, baselines = place_at_last(made["shaped_scores"], mask), shaped.baselines
        metrics |= shaped.metrics
    if baselines is not None:
        metrics["critic/baseline/mean"] = mean_metric(baselines, scored)
    if algorithm.use_kl_in_reward:
        penalty = apply_kl_penalty(
            rewards,
            columns["old_log_probs"],
            columns.get("ref_log_probs"),
            mask,
            kl_coef,
            algorithm.kl_penalty,
            columns.get("full_kl"),
        )
        rewards = penalty.token_level_rewards
        metrics["actor/reward_kl_penalty"] = penalty.mean_kl
        metrics["actor/reward_kl_penalty_coeff"] = Metric(kl_coef, 1.0, "mean")
    inputs = AdvantageInputs(
        token_level_rewards=rewards,
        response_mask=mask,
        group_ids=group_index(batch.non_tensor_batch["uid"].tolist()),
        scored=scored,
        values=columns.get("values"),
        bootstrap_values=columns.get("bootstrap_values"),
        reward_components=reward_components(batch, algorithm.gdpo_reward_keys) if algorithm.uses("gdpo") else None,
        baselines=baselines,
    )
    estimated = estimate(inputs, algorithm)
    _require_finite(estimated.advantages, mask, algorithm.estimator)
    metrics["training/frac_reward_zero_std"] = zero_spread_metric(inputs)
    metrics["training/reward_std_in_group"] = mean_metric(inputs.groups.std, inputs.counted & (inputs.groups.count > 1))
    made |= {"token_level_rewards": rewards, "advantages": estimated.advantages, "returns": estimated.returns}
    return DataProto.from_dict(made), metrics


def response_lengths(batch: DataProto) -> Tensor:
    """(B,) int64, tokens of each response, trained or not."""
    return batch.tensors["attention_mask"][:, batch.tensors["prompts"].shape[1] :].sum(1)


def cut_rows(batch: DataProto) -> Tensor:
    """(B,) bool, responses that were cut at their limit."""
    return torch.tensor([reason == "length" for reason in batch.non_tensor_batch["finish_reason"]])


def critic_columns(batch: DataProto, critic: Critic, bootstrap: bool) -> DataProto:
    """The critic's ``values`` and, for responses cut by the length limit, the value behind their last token.

    ``values[t]`` is read before token t, so the critic is asked about cut responses with one token more, whose own id
    changes nothing before it.
    """
    if not bootstrap:
        return critic.values(batch)
    tensors, lengths = batch.tensors, response_lengths(batch)
    cut = cut_rows(batch)
    attention = torch.nn.functional.pad(tensors["attention_mask"], (0, 1))
    end = (tensors["prompts"].shape[1] + lengths).unsqueeze(1)
    longer = DataProto.from_dict(
        tensors={
            "prompts": tensors["prompts"],
            "responses": torch.nn.functional.pad(tensors["responses"], (0, 1)),
            "attention_mask": attention.scatter(1, end, cut.to(attention.dtype).unsqueeze(1)),
        },
        non_tensors={"uid": batch.non_tensor_batch["uid"]},
    )
    values = critic.values(longer).batch["values"]  # (B, R + 1)
    behind = values.gather(1, lengths.unsqueeze(1)).squeeze(1)
    inside = torch.arange(values.shape[1] - 1) < lengths.unsqueeze(1)
    return DataProto.from_dict(
        {"values": torch.where(inside, values[:, :-1], 0.0), "bootstrap_values": torch.where(cut, behind, 0.0)}
    )


def reward_components(batch: DataProto, keys: list[str]) -> Tensor:
    """(B, K) float64 of what the reward function's dicts say under these keys; NaN where a row has none."""
    return torch.stack([reward_values(batch, key, "algorithm.gdpo_reward_keys") for key in keys], dim=1)


def reward_values(batch: DataProto, key: str, setting: str) -> Tensor:
    """(B,) float64: the score itself (``score``) or what the reward function returned beside it; NaN for None.
    ``setting``: of the configuration, that named the key. Raises RewardError: no response has such a value, or one is
    no number."""
    columns = batch.non_tensor_batch
    if key == "score":
        values: Iterable[Any] = columns["score"]
    elif REWARD_EXTRA_PREFIX + key in columns:
        values = columns[REWARD_EXTRA_PREFIX + key]
    else:
        known = ["score", *(n.removeprefix(REWARD_EXTRA_PREFIX) for n in columns if n.startswith(REWARD_EXTRA_PREFIX))]
        fix = f"{did_you_mean(key, known)}it returned: {', '.join(known)}"
        raise RewardError(f"{setting}: the reward function returned no such value for any response", key, fix)
    try:
        return torch.tensor([math.nan if value is None else float(value) for value in values], dtype=torch.float64)
    except (TypeError, ValueError):
        odd = next(value for value in values if not isinstance(value, int | float | None))
        what = f"{setting}={key}: the reward function returned something that is no number"
        raise RewardError(what, repr(odd), "return a number or None") from None


def _require_finite(advantages: Tensor, mask: Tensor, estimator: str) -> None:
    broken = count_nonfinite(advantages, mask)
    if broken:
        raise VerlError(
            f"algorithm.adv_estimator={estimator} gave advantages that are not finite; the step was not trained on",
            f"{broken} of {int(mask.sum())} tokens",
            "look at the newest sample file for rewards, values or log-probs that are not numbers",
        )
