"""Rules between fields: batch sizes with units, sampling laws, KL, estimators; and the derived values."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from verl.config import BatchPlan, Config, SamplingPlan, build_config, load_config
from verl.errors import ConfigError

SIZES = {"data.train_batch_size": 32, "actor.ppo_mini_batch_size": 16, "rollout.n": 8}


def load(*overrides: str, **sizes: int):
    base = ["data.train_files=[train.parquet]", "model.path=tiny"]
    return load_config(None, base + [f"{key}={value}" for key, value in (SIZES | sizes).items()] + list(overrides))


def refused(*overrides: str, **sizes: int) -> ConfigError:
    with pytest.raises(ConfigError) as caught:
        load(*overrides, **sizes)
    return caught.value


def test_mini_batch_counts_prompts_not_responses():
    """B147: 64 would divide the 256 responses, but it counts prompts, and there are 32."""
    error = refused("actor.ppo_mini_batch_size=64")
    assert error.what == "actor.ppo_mini_batch_size is larger than data.train_batch_size; both count prompts"
    assert error.value == "64 prompts > 32 prompts"
    assert error.fix == "set actor.ppo_mini_batch_size to at most 32 prompts (prompts, not responses: rollout.n=8)"


def test_train_batch_is_a_multiple_of_the_mini_batch():
    """B148"""
    error = refused("data.train_batch_size=10", "actor.ppo_mini_batch_size=4")
    assert error.what == "data.train_batch_size is not a multiple of actor.ppo_mini_batch_size; both count prompts"
    assert error.value == "10 prompts / 4 prompts"
    assert error.fix == "for example actor.ppo_mini_batch_size=2"


def test_mini_batch_divides_into_micro_batches():
    """B148: mini 4, micro 3"""
    error = refused(
        "actor.ppo_mini_batch_size=4", "rollout.n=1", "actor.ppo_micro_batch_size_per_gpu=3", "trainer.device=cpu"
    )
    assert error.what.startswith("actor.ppo_mini_batch_size x rollout.n = 4 x 1 = 4 responses do not divide")
    assert error.value == "4 responses / (3 responses x 1 rank(s))"
    assert error.fix == "for example actor.ppo_micro_batch_size_per_gpu=2"


@pytest.mark.parametrize("micro", [(), ("actor.ppo_micro_batch_size_per_gpu=1",)])
def test_fewer_responses_than_ranks(micro):
    """B148: mini*n // ranks == 0"""
    error = refused("actor.ppo_mini_batch_size=2", "rollout.n=1", "trainer.n_gpus_per_node=4", *micro)
    assert "2 x 1 = 2 responses" in error.what and "4 rank" in error.what
    ranks = ("data.train_batch_size=4", "trainer.n_gpus_per_node=4", "rollout.n=1")
    assert refused(*ranks, "actor.ppo_mini_batch_size=2").value == "2 responses / 4 ranks"
    with pytest.raises(ConfigError, match="cannot be spread over 5 ranks"):
        load(*ranks, "actor.ppo_mini_batch_size=4").config.actor_batch(ranks=5)


def test_accumulation_is_derived():
    config = load("actor.ppo_micro_batch_size_per_gpu=4", "trainer.n_gpus_per_node=2", "actor.ppo_epochs=3").config
    # 16 prompts x 8 responses = 128 responses; 4 on each of 2 ranks at a time: 16 micro-batches
    assert config.actor_batch() == BatchPlan(16, 128, 4, None, 16, 3)
    assert config.critic_batch() == BatchPlan(16, 128, 4, None, 16, 3)


def test_given_accumulation_must_agree():
    sizes = ("actor.ppo_micro_batch_size_per_gpu=4", "trainer.n_gpus_per_node=2")
    assert load(*sizes, "actor.gradient_accumulation=16").config.actor_batch().accumulation == 16
    error = refused(*sizes, "actor.gradient_accumulation=8")
    assert "16 x 8 = 128 responses" in error.what and "are 16 micro-batches" in error.what
    assert error.value == "8 micro-batches"
    assert error.fix == "remove actor.gradient_accumulation (it is derived), or set it to 16"


def test_given_accumulation_with_unknown_ranks_is_checked_when_they_are_known():
    config = load("actor.ppo_micro_batch_size_per_gpu=4", "actor.gradient_accumulation=16").config
    assert config.ranks is None
    assert config.actor_batch(ranks=2).accumulation == 16
    with pytest.raises(ConfigError, match="gradient_accumulation does not agree"):
        config.actor_batch(ranks=1)
    assert "no number of them" in refused("actor.ppo_micro_batch_size_per_gpu=4", "actor.gradient_accumulation=5").what


def test_accumulation_has_no_meaning_with_dynamic_batching():
    error = refused("actor.gradient_accumulation=16")
    assert error.what.startswith("actor.gradient_accumulation has no meaning with dynamic batching")


def test_static_batching_needs_a_size():
    text = str(refused("actor.use_dynamic_bsz=false", "algorithm.adv_estimator=grpo"))
    assert "actor.use_dynamic_bsz=false needs a micro-batch size" in text
    assert "set actor.ppo_micro_batch_size_per_gpu (responses" in text


@pytest.mark.parametrize("role", ["actor", "critic"])
def test_token_limit_holds_the_longest_sequence(role):
    """B111: limit 9, a sequence of 10"""
    lengths = ("data.max_prompt_length=6", "data.max_response_length=4")
    error = refused(*lengths, f"{role}.ppo_max_token_len_per_gpu=9")
    assert error.what.startswith(f"{role}.ppo_max_token_len_per_gpu is smaller than the longest sequence")
    assert error.value == "9 tokens < 6 + 4 = 10 tokens"
    assert error.fix == f"set {role}.ppo_max_token_len_per_gpu to at least 10 tokens"
    assert load(*lengths, f"{role}.ppo_max_token_len_per_gpu=10").config


def test_token_limit_is_not_checked_where_it_is_not_used():
    assert load("actor.ppo_max_token_len_per_gpu=9", "actor.ppo_micro_batch_size_per_gpu=4").config
    assert load("critic.ppo_max_token_len_per_gpu=9", "algorithm.adv_estimator=grpo").config


def test_reference_token_limit_counts_only_with_a_reference():
    limit = "ref.log_prob_max_token_len_per_gpu=9"
    assert load(limit).config
    assert refused(limit, "actor.use_kl_loss=true").value == "9 tokens < 512 + 512 = 1024 tokens"


def test_critic_batches_follow_the_actors_unless_given():
    assert load().config.critic_batch() == BatchPlan(16, 128, None, 32768, None, 1)
    config = load(
        "critic.ppo_micro_batch_size_per_gpu=8", "critic.ppo_mini_batch_size=32", "critic.ppo_epochs=2"
    ).config
    assert config.critic_batch() == BatchPlan(32, 256, 8, None, 32, 2)
    assert config.actor_batch() == BatchPlan(16, 128, None, 16384, None, 1)
    static = load("actor.ppo_micro_batch_size_per_gpu=4", "critic.use_dynamic_bsz=true").config
    assert static.critic_batch().micro_batch_rows is None
    assert refused("critic.ppo_mini_batch_size=64").value == "64 prompts > 32 prompts"
    assert load("critic.ppo_mini_batch_size=64", "algorithm.adv_estimator=grpo").config


@given(st.integers(1, 64), st.integers(1, 64), st.integers(1, 8), st.integers(1, 64), st.integers(1, 8))
def test_batch_rules_against_plain_arithmetic(train, mini, n, micro, gpus):
    """What loads is exactly what divides, whatever the numbers."""
    fits = mini <= train and train % mini == 0 and (mini * n) % (micro * gpus) == 0
    tree = {
        "data": {"train_files": ["a"], "train_batch_size": train},
        "model": {"path": "m"},
        "actor": {"ppo_mini_batch_size": mini, "ppo_micro_batch_size_per_gpu": micro},
        "rollout": {"n": n},
        "trainer": {"n_gpus_per_node": gpus},
    }
    if not fits:
        with pytest.raises(ConfigError, match=r"prompts|responses"):
            Config.model_validate(tree)
        return
    plan = Config.model_validate(tree).actor_batch()
    assert plan.accumulation * micro * gpus == plan.rows_per_mini_batch == mini * n


@pytest.mark.parametrize(
    ("override", "shown", "fix"),
    [
        ("rollout.top_p=0.9", 0.9, "set rollout.top_p=1.0"),
        ("rollout.top_k=1", 1, "set rollout.top_k=-1"),
        ("rollout.temperature=0", 0.0, "set rollout.temperature above 0"),
    ],
)
def test_training_sampling_keeps_the_distribution(override, shown, fix):
    """B042, B043"""
    error = refused(override)
    assert error.what.startswith(override.split("=")[0])
    assert "the model's own distribution" in error.what
    assert error.value == shown
    assert error.fix.startswith(fix)


def test_a_tiny_training_temperature_is_allowed():
    assert load("rollout.temperature=1e-6").config.training_sampling == SamplingPlan(1e-6, 1.0, -1, 8)


def test_validation_sampling_is_its_own():
    """B090"""
    config = load("rollout.temperature=0.7").config
    assert config.validation_sampling == SamplingPlan(0.0, 1.0, -1, 1)
    val = [f"rollout.val_kwargs.{setting}" for setting in ("temperature=0.6", "top_p=0.9", "top_k=20", "n=4")]
    loaded = load("rollout.temperature=0.7", *val)
    assert loaded.config.validation_sampling == SamplingPlan(0.6, 0.9, 20, 4)
    assert loaded.config.training_sampling == SamplingPlan(0.7, 1.0, -1, 8)
    assert loaded.notices == []
    more = {"min_p": 0.1, "repetition_penalty": 1.2, "presence_penalty": -0.5, "frequency_penalty": 0.25}
    more |= {"logit_bias": {11: -5.0}, "min_new_tokens": 3}
    loaded = load(*(f"rollout.val_kwargs.{name}={value}" for name, value in more.items()))
    assert loaded.config.validation_sampling == SamplingPlan(0.0, 1.0, -1, 1, **more)
    again = build_config(loaded.config.model_dump(mode="json"))
    assert again.validation_sampling.logit_bias == {11: -5.0}
    error = refused("rollout.val_kwargs.min_new_tokens=513")
    assert "data.max_response_length" in error.what and error.value == "513 > 512"
    assert "at least 0" in refused("rollout.val_kwargs.logit_bias={-1: 2}").what
    assert refused("rollout.val_kwargs.logit_bias={x: 2}").what.startswith("rollout.val_kwargs.logit_bias")


def test_validation_do_sample():
    off = load("rollout.val_kwargs.do_sample=false", "rollout.val_kwargs.temperature=0.6")
    assert off.config.validation_sampling.temperature == 0
    assert off.notices == [
        "rollout.val_kwargs.temperature=0.6 is set aside: do_sample=false makes validation greedy",
    ]
    assert load("rollout.val_kwargs.do_sample=true", "rollout.val_kwargs.temperature=0.6").notices == []
    error = refused("rollout.val_kwargs.do_sample=true")
    assert "rollout.val_kwargs.do_sample=true contradicts rollout.val_kwargs.temperature=0" in error.what
    assert error.fix.startswith("set rollout.val_kwargs.temperature above 0")


def test_greedy_copies_are_named():
    assert load("rollout.val_kwargs.n=4").notices == [
        "rollout.val_kwargs.n=4: validation is greedy, so the 4 responses to a prompt are the same"
    ]


@pytest.mark.parametrize("estimator", ["grpo", "rloo"])
def test_group_estimators_need_a_group(estimator):
    """B011"""
    error = refused(f"algorithm.adv_estimator={estimator}", "rollout.n=1")
    assert f"algorithm.adv_estimator={estimator}" in error.what and "every advantage would be 0" in error.what
    assert error.value == "rollout.n = 1 response per prompt"
    assert error.fix.startswith("set rollout.n to 2 or more")
    assert load(f"algorithm.adv_estimator={estimator}", "rollout.n=2").config.uses_critic is False


def test_kl_in_reward_and_in_the_loss_is_named():
    """B019"""
    loaded = load("algorithm.use_kl_in_reward=true", "actor.use_kl_loss=true")
    assert len(loaded.notices) == 1
    assert "algorithm.use_kl_in_reward and actor.use_kl_loss are both on" in loaded.notices[0]
    for one in ("algorithm.use_kl_in_reward=true", "actor.use_kl_loss=true"):
        alone = load(one)
        assert alone.notices == [] and alone.config.uses_reference
    assert not load().config.uses_reference


def test_adaptive_kl_needs_a_start():
    """B054"""
    adaptive = "algorithm.kl_ctrl.type=adaptive"
    error = refused(adaptive, "algorithm.kl_ctrl.kl_coef=0")
    assert error.what.startswith("algorithm.kl_ctrl.kl_coef=0 stays 0 under algorithm.kl_ctrl.type=adaptive")
    assert error.fix.startswith("set algorithm.kl_ctrl.kl_coef above 0")
    assert load("algorithm.kl_ctrl.kl_coef=0").config and load(adaptive).config
    assert refused(adaptive, "algorithm.kl_ctrl.horizon=0").what == "algorithm.kl_ctrl.horizon must be at least 1"


@pytest.mark.parametrize("kind", ["kl", "k1"])
def test_a_kl_loss_without_gradient_is_refused(kind):
    error = refused("actor.use_kl_loss=true", f"actor.kl_loss_type={kind}")
    assert f"actor.kl_loss_type={kind} has a gradient whose expectation is zero" in error.what
    assert error.value == kind
    assert "low_var_kl" in error.fix and "k1+" in error.fix
    assert load(f"actor.kl_loss_type={kind}").config  # not used
    assert load("actor.use_kl_loss=true", f"actor.kl_loss_type={kind}+").config.actor.kl_loss_type == f"{kind}+"


def test_clip_ratio_sets_both_sides_unless_one_is_given():
    assert [
        load("actor.clip_ratio=0.3").config.actor.clip_low,
        load("actor.clip_ratio=0.3").config.actor.clip_high,
    ] == [
        0.3,
        0.3,
    ]
    actor = load("actor.clip_ratio=0.3", "actor.clip_ratio_high=0.28").config.actor
    assert (actor.clip_low, actor.clip_high) == (0.3, 0.28)
    actor = load("actor.clip_ratio_low=0.1").config.actor
    assert (actor.clip_low, actor.clip_high) == (0.1, 0.2)


def test_resume_path_needs_a_path():
    error = refused("trainer.resume_mode=resume_path")
    assert error.what == "trainer.resume_mode=resume_path needs trainer.resume_from_path"
    assert error.value == "null"
    assert load("trainer.resume_mode=resume_path", "trainer.resume_from_path=x").notices == []
    assert load("trainer.resume_from_path=x").notices == [
        "trainer.resume_from_path=x has no effect: trainer.resume_mode is auto, not resume_path"
    ]


def test_reward_rule_and_own_function_exclude_each_other():
    error = refused("reward.rule=gsm8k", "custom_reward_function.path=reward.py")
    assert error.value == "gsm8k, reward.py"


@pytest.mark.parametrize(
    ("overrides", "notice"),
    [
        (("trainer.device=cpu", "trainer.n_gpus_per_node=8"), "trainer.n_gpus_per_node=8 is set aside"),
        (("trainer.test_freq=5",), "trainer.test_freq=5 has no effect: data.val_files is empty"),
        (("trainer.critic_warmup=5", "algorithm.adv_estimator=grpo"), "trainer.critic_warmup=5 has no effect"),
        (("cluster.backend=inline", "cluster.address=a:1"), "cluster.address=a:1 has no effect"),
        (("actor.use_kl_loss=true", "actor.kl_loss_coef=0"), "actor.kl_loss_coef=0"),
        (
            ("actor.optim.lr_warmup_steps=10", "trainer.total_training_steps=5"),
            "actor.optim.lr_warmup_steps=10 is more than trainer.total_training_steps=5",
        ),
    ],
)
def test_settings_without_effect_are_named_once(overrides, notice):
    notices = load(*overrides).notices
    assert len(notices) == 1 and notices[0].startswith(notice)


def test_ranks():
    assert load().config.ranks is None
    assert load("trainer.device=cpu", "trainer.n_gpus_per_node=8").config.ranks == 1
    assert load("trainer.n_gpus_per_node=0").config.ranks == 1
    assert load("trainer.device=cpu", "actor.world_size=2").config.ranks == 2
    assert load("trainer.n_gpus_per_node=4", "trainer.nnodes=2").config.ranks == 8


def test_reference_batch():
    assert load().config.reference_batch() == (None, 16384)
    assert load("actor.ppo_micro_batch_size_per_gpu=4").config.reference_batch() == (4, None)
    assert load("ref.log_prob_micro_batch_size_per_gpu=3").config.reference_batch() == (3, None)
    assert load("ref.log_prob_max_token_len_per_gpu=2048").config.reference_batch() == (None, 2048)


def test_total_training_steps():
    assert load("trainer.total_epochs=3").config.total_training_steps(100) == 9
    assert load("trainer.total_epochs=3", "data.drop_last=false").config.total_training_steps(100) == 12
    assert load("trainer.total_training_steps=7").config.total_training_steps(100) == 7
    with pytest.raises(ConfigError) as caught:
        load().config.total_training_steps(31)
    assert caught.value.what == "data.train_files do not fill one batch of data.train_batch_size=32 prompts"
    assert caught.value.value == "31 prompts"
    with pytest.raises(ConfigError, match="at least one usable prompt"):
        load("data.drop_last=false").config.total_training_steps(0)


def test_run_dir():
    assert load("trainer.experiment_name=first").config.run_dir == Path("runs/first")
    assert load("trainer.default_local_dir=/data/x").config.run_dir == Path("/data/x")
    for name in ("a/b", "..", "a\\b"):
        assert refused(f"trainer.experiment_name={name}").value == name
    assert load("trainer.experiment_name=a/b", "trainer.default_local_dir=/data/x").config


def test_small_derived_values():
    config = load("trainer.seed=5").config
    assert (config.data_seed, config.critic_model_path, config.loss_scale_factor) == (5, "tiny", 512.0)
    config = load("data.seed=6", "critic.model.path=v", "actor.loss_scale_factor=7").config
    assert (config.data_seed, config.critic_model_path, config.loss_scale_factor) == (6, "v", 7.0)


def test_the_world_size_must_fit_the_gpus_and_the_backend():
    for overrides, complaint in (
        (["actor.world_size=3", "trainer.n_gpus_per_node=4"], "the number of training ranks is given more than once"),
        (
            ["actor.world_size=2", "trainer.device=cpu", "cluster.backend=inline"],
            "cluster.backend=inline is one process",
        ),
    ):
        with pytest.raises(ConfigError, match=complaint):
            load(*overrides)
    assert load("actor.world_size=4", "trainer.n_gpus_per_node=4").config.ranks == 4
    # B116: 2 responses of all ranks together cannot be one on each of 4.
    with pytest.raises(ConfigError, match="does not divide over the ranks"):
        load("actor.world_size=4", "trainer.device=cpu", "actor.ppo_micro_batch_size=2")
