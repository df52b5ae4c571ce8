"""Rules and notices about estimators, reward shaping and the filtering of groups."""

from __future__ import annotations

import pytest

from verl.algorithms.advantages import ESTIMATORS
from verl.config import SamplingPlan, load_config
from verl.config.keys import choices
from verl.errors import ConfigError

ALONE = ("gae", "reinforce_plus_plus", "remax")
MORE = {"gdpo": ["algorithm.gdpo_reward_keys=[a, b]"]}


def load(*overrides: str):
    return load_config(None, ["data.train_files=[train.parquet]", "model.path=tiny", *overrides])


def refused(*overrides: str) -> ConfigError:
    with pytest.raises(ConfigError) as caught:
        load(*overrides)
    return caught.value


def test_the_names_are_those_of_the_estimators():
    assert choices("algorithm.adv_estimator") == list(ESTIMATORS)


@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_which_estimators_need_a_group_and_which_a_critic(estimator):
    """B011"""
    own = [f"algorithm.adv_estimator={estimator}", *MORE.get(estimator, [])]
    config = load(*own, "rollout.n=2").config
    assert config.uses_critic == (estimator == "gae")
    assert config.training_sampling == SamplingPlan(1.0, 1.0, -1, 2, greedy_baseline=estimator == "remax")
    assert not config.validation_sampling.greedy_baseline
    if estimator in ALONE:
        assert load(*own, "rollout.n=1").config
    else:
        assert "every advantage would be 0" in refused(*own, "rollout.n=1").what


def test_an_estimator_of_the_users_own_takes_the_place_of_the_named_one():
    own = "algorithm.custom_estimator.path=mine.py"
    config = load(own, "rollout.n=1").config
    assert not config.uses_critic and config.algorithm.estimator == "estimator"
    assert load(own, "algorithm.custom_estimator.critic=true").config.uses_critic
    assert not load(
        "algorithm.custom_estimator.critic=true", "algorithm.adv_estimator=grpo", "rollout.n=2"
    ).config.uses_critic
    assert load(own, "algorithm.adv_estimator=remax").config.training_sampling.greedy_baseline is False
    assert load(own, "algorithm.adv_estimator=grpo").notices == [
        "algorithm.adv_estimator=grpo is set aside: algorithm.custom_estimator.path names the estimator"
    ]


def test_gdpo_needs_rewards_and_a_weight_for_each():
    gdpo = ("algorithm.adv_estimator=gdpo", "rollout.n=4")
    assert "algorithm.gdpo_reward_keys names none" in refused(*gdpo).what
    keys = "algorithm.gdpo_reward_keys=[a, b]"
    assert refused(*gdpo, keys, "algorithm.gdpo_reward_weights=[1]").value == "1 weights, 2 keys"
    assert load(*gdpo, keys, "algorithm.gdpo_reward_weights=[1, 2]").notices == []
    assert "are all 0" in refused(*gdpo, keys, "algorithm.gdpo_reward_weights=[0, 0]").what
    assert load(*gdpo, "algorithm.gdpo_reward_keys=a").config.algorithm.gdpo_reward_keys == ["a"]
    assert "use_kl_in_reward would change nothing" in refused(*gdpo, keys, "algorithm.use_kl_in_reward=true").what
    assert "would change nothing" in refused(*gdpo, keys, "reward.clip=1").what


def test_b053_the_overlong_buffer_fits_into_the_response():
    """B053: buffer > max is refused."""
    on = ("reward.overlong_buffer.enable=true", "data.max_response_length=10")
    assert refused(*on, "reward.overlong_buffer.len=11").value == "11 tokens, data.max_response_length is 10"
    assert "from 1 up to" in refused(*on, "reward.overlong_buffer.len=0").what
    assert load(*on).config.reward.overlong_buffer.place(10) == (10, 2)
    limit = "reward.overlong_buffer.max_resp_len=4"
    assert "max_resp_len is 4" in refused(*on, limit, "reward.overlong_buffer.len=5").value
    assert load(*on, "reward.overlong_buffer.len=10").config.reward.shapes
    beyond = refused(*on, "reward.overlong_buffer.max_resp_len=20", "reward.overlong_buffer.len=10")
    assert "penalises no response" in beyond.what
    assert not load("reward.overlong_buffer.len=99999").config.reward.shapes


def test_verls_spellings_of_the_overlong_buffer():
    old = "reward_model.reward_kwargs"
    buffer = f"{old}.overlong_buffer_cfg"
    loaded = load(
        f"{buffer}.enable=True", f"{buffer}.len=64", f"{buffer}.penalty_factor=0.5", f"{old}.max_resp_len=256"
    )
    reward = loaded.config.reward.overlong_buffer
    assert (reward.enable, reward.len, reward.penalty_factor, reward.max_resp_len) == (True, 64, 0.5, 256)
    assert loaded.notices == []


def test_filtering_needs_groups():
    on = "algorithm.filter_groups.enable=true"
    assert "no prompt would ever be kept" in refused(on).what
    assert load(on, "rollout.n=2").config.algorithm.filter_groups.metric == "score"
    for spelled, metric in (("seq_reward", "score"), ("null", "score"), ("acc", "acc")):
        filtering = load(on, "rollout.n=2", f"algorithm.filter_groups.metric={spelled}").config.algorithm.filter_groups
        assert filtering.metric == metric
    assert refused(on, "algorithm.filter_groups.metric=seq_final_reward").fix == "use seq_reward"


def test_the_bootstrap_takes_one_token_more():
    sizes = ("data.max_prompt_length=6", "data.max_response_length=4", "critic.ppo_max_token_len_per_gpu=10")
    assert load(*sizes).config
    error = refused(*sizes, "algorithm.bootstrap_truncated=true")
    assert error.value == "10 tokens < 6 + 4 + 1 = 11 tokens"
    assert load(*sizes, "algorithm.bootstrap_truncated=true", "algorithm.adv_estimator=grpo", "rollout.n=2").config


@pytest.mark.parametrize(
    ("overrides", "notice"),
    [
        (("algorithm.adv_estimator=remax", "algorithm.gamma=0.9"), "algorithm.gamma=0.9 has no effect"),
        (("algorithm.adv_estimator=reinforce_plus_plus", "algorithm.lam=0.9"), "algorithm.lam=0.9 has no effect"),
        (("algorithm.gdpo_reward_keys=[a]",), "algorithm.gdpo_reward_keys=['a'] has no effect"),
        (("reward.length_normalization.alpha=1",), "reward.length_normalization.alpha=1 divides scores below 0 too"),
    ],
)
def test_what_has_no_effect_is_named(overrides, notice):
    notices = load(*overrides).notices
    assert len(notices) == 1 and notices[0].startswith(notice)
    assert load("algorithm.gamma=0.9", "algorithm.lam=0.9").notices == []
