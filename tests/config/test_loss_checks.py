"""Rules and notices about policy losses, schedules and rollout correction."""

from __future__ import annotations

import pytest

from verl.config import Config, dump_yaml, load_config
from verl.errors import ConfigError

BASE = ["data.train_files=[train.parquet]", "model.path=tiny", "algorithm.adv_estimator=grpo", "rollout.n=4"]
CORRECTION = "algorithm.rollout_correction."


def load(*overrides: str) -> Config:
    return load_config(None, [*BASE, *overrides]).config


def correction(*settings: str) -> list[str]:
    return [CORRECTION + setting for setting in settings]


REFUSED = [
    (["actor.policy_loss.loss_mode=gsp"], "did you mean gspo?"),
    (["actor.policy_loss.clip_cov_lb=5"], "clip_cov_lb must be below"),
    (["actor.policy_loss.loss_mode=decoupled", *correction("rollout_is=token")], "weighed twice"),
    (["actor.policy_loss.loss_mode=decoupled", *correction("bypass_mode=true")], "these are the same"),
    (correction("rollout_rs=seq_mean_k3"), "needs algorithm.rollout_correction.rollout_rs_threshold"),
    (correction("rollout_rs=seq_means_k3"), "did you mean seq_mean_k3?"),
    (correction("rollout_rs=seq_mean_k1", "rollout_rs_threshold=0.9"), "c must be above 1"),
    (correction("rollout_rs=token_k2", "rollout_rs_threshold=[0.5,2]"), "one number"),
    (correction("rollout_is_threshold=0"), "must be above 0"),
    (correction("rollout_is_threshold=[2,1]"), "from a lower to a higher ratio"),
    (correction("rollout_is_threshold=[-1,1]"), "from 0 up"),
    (correction("bypass_mode=true", "rollout_is=token"), "weighs twice"),
    (correction("loss_type=reinforce"), "belongs to bypass_mode"),
    ([*correction("bypass_mode=true", "loss_type=reinforce"), "actor.policy_loss.loss_mode=gspo"], "both name"),
    ([*correction("bypass_mode=true"), "actor.recompute_old_log_probs=always"], "remove one of them"),
    ([*correction("rollout_is_batch_normalize=true")], "not normalised"),
    (["actor.tis_imp_ratio_cap=2"], "rollout_is=token"),
    (["actor.entropy_coeff_schedule.type=linear"], "needs actor.entropy_coeff_schedule.end"),
    (["actor.clip_ratio_schedule.type=adaptive"], "needs actor.clip_ratio_schedule.target"),
    (["actor.entropy_coeff_schedule.type=adaptive"], "stays 0"),
    (
        [f"actor.clip_ratio_schedule.{setting}" for setting in ("type=adaptive", "target=1", "min=1")],
        "starts outside of the bounds",
    ),
    (["actor.optim.lr_wsd_decay_style=exponential"], "decays linearly"),
]  # fmt: skip


@pytest.mark.parametrize(("overrides", "complaint"), REFUSED)
def test_refused(overrides, complaint):
    with pytest.raises(ConfigError) as caught:
        load(*overrides)
    assert complaint in str(caught.value)
    assert caught.value.fix or "2 problems" in caught.value.what


NOTICED = [
    (["actor.policy_loss.loss_mode=gspo"], "aggregated as seq-mean-token-mean"),
    (["actor.policy_loss.path=a.py", "actor.policy_loss.loss_mode=gspo"], "is set aside"),
    (
        [
            "actor.clip_ratio_schedule.type=linear",
            "actor.clip_ratio_schedule.end=0.1",
            "actor.policy_loss.loss_mode=gpg",
        ],
        "clips nothing",
    ),
    (["actor.kl_loss_coef_schedule.type=linear", "actor.kl_loss_coef_schedule.end=0.1"], "use_kl_loss is false"),
    ([*correction("rollout_is=token"), "actor.recompute_old_log_probs=never"], "has no effect"),
    (
        [*correction("bypass_mode=true", "loss_type=reinforce"), "actor.clip_ratio_schedule={type: linear, end: 0.1}"],
        "clips nothing",
    ),
    (["actor.policy_loss.loss_mode=decoupled", "actor.recompute_old_log_probs=never"], "does what vanilla does"),
    (["actor.clip_ratio_schedule={type: adaptive, target: 0.01}", "data.train_batch_size=256"], "only widens the clip"),
]


@pytest.mark.parametrize(("overrides", "notice"), NOTICED)
def test_noticed(overrides, notice):
    (found,) = load_config(None, [*BASE, *overrides]).notices
    assert notice in found


def test_what_is_right_is_taken_without_a_word():
    loaded = load_config(None, [
        *BASE, *correction("rollout_is=token", "rollout_is_threshold=0.5_5.0", "rollout_rs=geometric",
                           "rollout_rs_threshold=0.999_1.001"),
        "actor.policy_loss.loss_mode=gspo", "actor.loss_agg_mode=seq-mean-token-mean",
        "actor.use_kl_loss=true", "actor.kl_loss_type=full",
        "actor.clip_ratio_schedule={type: adaptive, target: 0.01}", "actor.ppo_epochs=2",
    ])  # fmt: skip
    assert loaded.notices == []
    found = loaded.config.algorithm.rollout_correction
    assert (found.rollout_is_threshold, found.rollout_rs) == ((0.5, 5.0), "seq_mean_k1")
    assert found.rollout_rs_threshold == (0.999, 1.001)


def test_a_resolved_configuration_reads_back(tmp_path):
    config = load(*correction("rollout_is=token", "rollout_is_threshold=[0.5,5]", "rollout_rs=token_k2",
                              "rollout_rs_threshold=0.1"), "critic.cliprange_value=null")  # fmt: skip
    (tmp_path / "c.yaml").write_text(dump_yaml(config))
    assert load_config(tmp_path / "c.yaml", []).config == config
