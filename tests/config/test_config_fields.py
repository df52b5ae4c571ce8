"""Every field: documented, settable, with an effect on the resolved configuration, and bounded."""

from __future__ import annotations

from functools import cache

import pytest

from verl.config import Config, dump_yaml, load_config
from verl.config.keys import defaults, leaves, sections
from verl.errors import ConfigError

BASE = ["data.train_files=[train.parquet]", "model.path=tiny"]

# For every field: a valid value that is not its default, and what else must be set for it to be valid.
OTHER = {
    "data.train_files": ("[other.parquet]",),
    "data.val_files": ("[val.parquet]",),
    "data.train_batch_size": ("512",),
    "data.val_batch_size": ("7",),
    "data.max_prompt_length": ("100",),
    "data.max_response_length": ("100",),
    "data.truncation": ("middle",),
    "data.filter_overlong_prompts": ("true",),
    "data.prompt_key": ("question",),
    "data.answer_key": ("label",),
    "data.reward_fn_key": ("source",),
    "data.shuffle": ("false",),
    "data.seed": ("5",),
    "data.train_max_samples": ("100",),
    "data.val_max_samples": ("100",),
    "data.drop_last": ("false",),
    "data.chat_template_kwargs": ("{enable_thinking: false}",),
    "data.on_bad_row": ("error",),
    "data.max_skipped_fraction": ("0.5",),
    "data.num_workers": ("2",),
    "data.custom_cls.path": ("mine.py", "data.custom_cls.name=Mine"),
    "data.custom_cls.name": ("Mine",),
    "data.sampler.kind": ("sequential",),
    "data.sampler.weights": ("[2]",),
    "data.sampler.source_weights": ("{math: 2}",),
    "data.sampler.weights_by": ("row",),
    "data.sampler.weight_column": ("w",),
    "data.sampler.class_path": ("mine.py", "data.sampler.class_name=Mine"),
    "data.sampler.class_name": ("Mine",),
    "model.path": ("other",),
    "model.tokenizer_path": ("tok",),
    "model.dtype": ("fp32",),
    "model.fp16.loss_scale": ("1024",),
    "model.fp16.initial_scale_power": ("8",),
    "model.fp16.loss_scale_window": ("100",),
    "model.trust_remote_code": ("true",),
    "data.trust_remote_code": ("true",),
    "critic.model.trust_remote_code": ("true", "critic.model.path=other"),
    "reward.model.trust_remote_code": ("true", "reward.model.path=other"),
    "model.enable_gradient_checkpointing": ("true",),
    "actor.world_size": ("2",),
    "actor.strategy": ("fsdp",),
    "actor.reshard_after_forward": ("false",),
    "actor.ppo_mini_batch_size": ("128",),
    "actor.ppo_micro_batch_size_per_gpu": ("8",),
    "actor.use_dynamic_bsz": ("true",),
    "actor.ppo_max_token_len_per_gpu": ("2048",),
    "actor.gradient_accumulation": ("32", "actor.ppo_micro_batch_size_per_gpu=8"),
    "actor.skip_zero_loss": ("false",),
    "actor.auto_micro_batch": ("true",),
    "actor.param_offload": ("true",),
    "actor.optimizer_offload": ("true",),
    "ref.param_offload": ("true", "actor.use_kl_loss=true"),
    "critic.param_offload": ("true", "algorithm.adv_estimator=gae"),
    "critic.optimizer_offload": ("true", "algorithm.adv_estimator=gae"),
    "reward.model.param_offload": ("true",),
    "actor.ppo_epochs": ("2",),
    "actor.shuffle": ("true",),
    "actor.grad_clip": ("0.5",),
    "actor.clip_ratio": ("0.3",),
    "actor.clip_ratio_low": ("0.1",),
    "actor.clip_ratio_high": ("0.28",),
    "actor.clip_ratio_c": ("10",),
    "actor.entropy_coeff": ("0.01",),
    "actor.use_kl_loss": ("true",),
    "actor.kl_loss_coef": ("0.1",),
    "actor.kl_loss_type": ("k2+",),
    "actor.loss_agg_mode": ("seq-mean-token-sum-norm",),
    "actor.loss_scale_factor": ("1024",),
    "actor.policy_loss.loss_mode": ("gspo",),
    "actor.policy_loss.path": ("mine.py",),
    "actor.policy_loss.name": ("mine",),
    "actor.policy_loss.clip_cov_ratio": ("0.1",),
    "actor.policy_loss.clip_cov_lb": ("0.5",),
    "actor.policy_loss.clip_cov_ub": ("9",),
    "actor.policy_loss.kl_cov_ratio": ("0.1",),
    "actor.policy_loss.ppo_kl_coef": ("0.5",),
    "actor.tau_pos": ("2",),
    "actor.tau_neg": ("2",),
    "actor.clip_ratio_schedule.target_metric": ("pg_clipfrac",),
    "actor.prefix_sharing": ("off",),
    "actor.recompute_old_log_probs": ("always",),
    "rollout.name": ("engine.py:Engine",),
    "rollout.n": ("4",),
    "rollout.temperature": ("0.7",),
    "rollout.top_p": None,  # fixed by law 3; refused in test_config_rules
    "rollout.top_k": None,  # likewise
    "rollout.max_num_seqs": ("8",),
    "rollout.max_num_batched_tokens": ("100",),
    "rollout.kv_cache_gb": ("0.5",),
    "rollout.partial": ("false", "trainer.mode=async"),
    "rollout.worker_timeout": ("20",),
    "rollout.response_timeout": ("20",),
    "rollout.min_workers": ("2",),
    "rollout.max_workers": ("2",),
    "rollout.enable_prefix_caching": ("true",),
    "rollout.enforce_eager": ("true",),
    "rollout.stop": ("['</answer>']",),
    "rollout.stop_token_ids": ("[5]",),
    "rollout.ignore_eos": ("true",),
    "rollout.response_length.mode": ("adaptive",),
    "rollout.response_length.quantile": ("0.9",),
    "rollout.response_length.margin": ("1.5",),
    "rollout.response_length.window": ("2",),
    "rollout.response_length.min": ("64",),
    "rollout.response_length.max_cut_share": ("0.2",),
    "rollout.val_kwargs.temperature": ("0.6",),
    "rollout.val_kwargs.top_p": ("0.9",),
    "rollout.val_kwargs.top_k": ("50",),
    "rollout.val_kwargs.n": ("4", "rollout.val_kwargs.temperature=1"),
    "rollout.val_kwargs.min_p": ("0.1",),
    "rollout.val_kwargs.repetition_penalty": ("1.2",),
    "rollout.val_kwargs.presence_penalty": ("-0.5",),
    "rollout.val_kwargs.frequency_penalty": ("0.5",),
    "rollout.val_kwargs.logit_bias": ("{11: -5}",),
    "rollout.val_kwargs.min_new_tokens": ("4",),
    "rollout.val_kwargs.do_sample": ("false",),
    "ref.log_prob_use_dynamic_bsz": ("true",),
    "ref.log_prob_micro_batch_size_per_gpu": ("8",),
    "ref.log_prob_max_token_len_per_gpu": ("4096",),
    "critic.model.path": ("other",),
    "critic.ppo_mini_batch_size": ("64",),
    "critic.ppo_micro_batch_size_per_gpu": ("8",),
    "critic.use_dynamic_bsz": ("true",),
    "critic.ppo_max_token_len_per_gpu": ("4096",),
    "critic.ppo_epochs": ("2",),
    "critic.cliprange_value": ("null",),
    "critic.huber_delta": ("1",),
    "critic.grad_clip": ("0.5",),
    "critic.loss_agg_mode": ("token-sum",),
    "algorithm.adv_estimator": ("grpo", "rollout.n=2"),
    "algorithm.gamma": ("0.9",),
    "algorithm.lam": ("0.95",),
    "algorithm.whiten_advantages": ("false",),
    "algorithm.use_kl_in_reward": ("true",),
    "algorithm.kl_penalty": ("low_var_kl",),
    "algorithm.kl_ctrl.type": ("adaptive",),
    "algorithm.kl_ctrl.kl_coef": ("0.2",),
    "algorithm.kl_ctrl.kl_coef_end": ("0.2",),
    "algorithm.rollout_correction.rollout_is": ("sequence",),
    "algorithm.rollout_correction.rollout_is_threshold": ("0.5_5.0",),
    "algorithm.rollout_correction.rollout_rs": (
        "seq_max_k3",
        "algorithm.rollout_correction.rollout_rs_threshold=0.01",
    ),
    "algorithm.rollout_correction.rollout_rs_threshold": ("0.01",),
    "algorithm.rollout_correction.bypass_mode": ("true",),
    "algorithm.rollout_correction.loss_type": ("reinforce", "algorithm.rollout_correction.bypass_mode=true"),
    "algorithm.kl_ctrl.target_kl": ("6",),
    "algorithm.kl_ctrl.horizon": ("100",),
    "algorithm.norm_adv_by_std_in_grpo": ("false",),
    "algorithm.custom_estimator.path": ("mine.py",),
    "algorithm.custom_estimator.name": ("mine",),
    "algorithm.custom_estimator.critic": ("true",),
    "algorithm.bootstrap_truncated": ("true",),
    "algorithm.mask_truncated": ("true",),
    "algorithm.gdpo_reward_keys": ("[accuracy, format]",),
    "algorithm.gdpo_reward_weights": ("[1.0, 0.5]",),
    "algorithm.filter_groups.enable": ("true", "rollout.n=2"),
    "algorithm.filter_groups.metric": ("acc",),
    "algorithm.filter_groups.max_num_gen_batches": ("10",),
    "reward.rule": ("gsm8k",),
    "reward.custom_reward_function.path": ("reward.py",),
    "reward.custom_reward_function.name": ("score",),
    "reward.reward_kwargs": ("{weight: 2}",),
    "reward.functions": ("{right: {rule: boxed}}",),
    "reward.model.path": ("judge",),
    "reward.model.weight": ("0.5",),
    "reward.model.max_length": ("512",),
    "reward.model.truncation": ("right",),
    "reward.model.max_token_len_per_gpu": ("4096",),
    "reward.judge.base_url": ("http://localhost:1/v1",),
    "reward.judge.model": ("wise",),
    "reward.judge.prompt": ("How good is {response}?",),
    "reward.judge.pattern": ("(yes|no)",),
    "reward.judge.weight": ("0.1",),
    "reward.judge.api_key_env": ("KEY",),
    "reward.judge.max_concurrency": ("2",),
    "reward.judge.requests_per_minute": ("60",),
    "reward.judge.timeout": ("5",),
    "reward.judge.retries": ("1",),
    "reward.judge.max_tokens": ("64",),
    "reward.on_error": ("stop",),
    "reward.num_workers": ("3",),
    "reward.min_workers": ("0",),
    "reward.timeout": ("5",),
    "reward.worker_memory_gb": ("2",),
    "reward.cache": ("false",),
    "reward.max_failed_fraction": ("0.1",),
    "reward.sandbox.time_limit": ("2.5",),
    "reward.sandbox.total_time_limit": ("20",),
    "reward.sandbox.memory_limit": ("256",),
    "reward.sandbox.file_limit": ("4",),
    "reward.sandbox.output_limit": ("1",),
    "reward.sandbox.processes": ("4",),
    "reward.sandbox.workers": ("2",),
    "reward.sandbox.allow_weaker": ("true",),
    "reward.length_normalization.alpha": ("0.5",),
    "reward.length_normalization.positive_only": ("true",),
    "reward.length_penalty": ("0.2",),
    "reward.overlong_buffer.enable": ("true", "reward.overlong_buffer.len=64"),
    "reward.overlong_buffer.len": ("64",),
    "reward.overlong_buffer.penalty_factor": ("0.5",),
    "reward.overlong_buffer.max_resp_len": ("256",),
    "reward.scaling": ("running",),
    "reward.clip": ("10",),
    "trainer.mode": ("one_step_off", "algorithm.rollout_correction.rollout_is=null"),
    "rollout.weight_sync": ("disk",),
    "rollout.compress_results": ("true",),
    "trainer.stream_minibatches": ("true", "algorithm.adv_estimator=grpo", "rollout.n=2"),
    "trainer.max_staleness": ("0", "trainer.mode=async", "algorithm.rollout_correction.rollout_is=null"),
    "trainer.staleness_unit": ("token", "trainer.mode=async"),
    "trainer.logger": ("[console, tensorboard]",),
    "trainer.project_name": ("p",),
    "trainer.experiment_name": ("e",),
    "trainer.total_epochs": ("3",),
    "trainer.total_training_steps": ("10",),
    "trainer.nnodes": ("2",),
    "trainer.n_gpus_per_node": ("0",),
    "trainer.save_freq": ("5",),
    "trainer.test_freq": ("5",),
    "trainer.val_before_train": ("false",),
    "trainer.balance_batch": ("false",),
    "trainer.critic_warmup": ("2",),
    "trainer.resume_mode": ("disable",),
    "trainer.resume_from_path": ("ckpt",),
    "trainer.default_local_dir": ("/tmp/x",),
    "trainer.log_val_generations": ("0",),
    "trainer.device": ("cpu",),
    "trainer.seed": ("2",),
    "trainer.keep_last": ("null",),
    "trainer.async_save": ("true",),
    "trainer.save_on_interrupt": ("true",),
    "trainer.keep_best.metric": ("val-core/gsm8k/acc/mean@1",),
    "trainer.keep_best.mode": ("min",),
    "trainer.max_restarts": ("3",),
    "trainer.memory_save_freq": ("1",),
    "trainer.dump_steps": ("[2, 4]",),
    "trainer.alarms.action": ("pause",),
    "trainer.alarms.kl": ("0.5",),
    "trainer.alarms.entropy": ("null",),
    "trainer.alarms.length": ("2",),
    "trainer.alarms.grad_norm": ("10",),
    "trainer.alarms.reward": ("0.3",),
    "cluster.backend": ("inline",),
    "cluster.address": ("10.0.0.1:6379",),
    "cluster.threads": ("2",),
    "cluster.stall_seconds": ("5",),
    "profiler.tool": ("torch",),
    "profiler.roles": ("[actor]",),
    "profiler.steps": ("[3]",),
    "profiler.memory": ("true",),
    "cluster.dashboard": ("true",),
    "cluster.pools": ("{main: {threads: 2}}",),
    "cluster.placement.actor": ("a", "cluster.pools.a.threads=1"),
    "cluster.placement.critic": ("a", "cluster.pools.a.threads=1"),
    "cluster.placement.reference": ("a", "cluster.pools.a.threads=1"),
    "cluster.placement.reward": ("a", "cluster.pools.a.threads=1"),
    "cluster.placement.rollout": ("[a]", "cluster.pools.a.threads=1"),
    "cluster.start_timeout": ("10",),
    "cluster.collective_timeout": ("60",),
} | {
    f"{role}.optim.{name}": (value,)
    for role in ("actor", "critic")
    for name, value in {
        "lr": "1e-3",
        "lr_scheduler_type": "cosine",
        "lr_warmup_steps": "3",
        "lr_warmup_steps_ratio": "0.1",
        "lr_wsd_decay_steps": "5",
        "min_lr_ratio": "0.1",
        "weight_decay": "0.0",
        "betas": "[0.8, 0.95]",
        "eps": "1e-6",
        "decay_norms_and_biases": "true",
        "on_nonfinite": "stop",
    }.items()
}


OTHER |= {
    f"actor.{name}_schedule.{field}": (value, *needs)
    for name in ("clip_ratio", "entropy_coeff", "kl_loss_coef")
    for field, value, *needs in (
        ("type", "linear", f"actor.{name}_schedule.end=0.1"),
        ("end", "0.1"),
        ("target", "0.1"),
        ("rate", "0.2"),
        ("min", "0.001"),
        ("max", "9"),
    )
}


def value_of(config: Config, key: str) -> object:
    place: object = config
    for part in key.split("."):
        place = getattr(place, part)
    return place


def test_the_table_covers_the_schema():
    assert OTHER.keys() == leaves().keys()


@cache
def loaded(*words: str) -> tuple[Config, str]:
    """A configuration, and how it is written; of many keys the same stands before the change."""
    config = load_config(None, [*BASE, *words]).config
    return config, dump_yaml(config)


@pytest.mark.parametrize("key", [key for key, other in OTHER.items() if other])
def test_changing_a_field_changes_the_resolved_configuration(key):
    value, *needs = OTHER[key]
    (before, before_written), (after, after_written) = loaded(*needs), loaded(*needs, f"{key}={value}")
    assert value_of(after, key) != value_of(before, key) and after_written != before_written
    changed = [other for other in leaves() if value_of(after, other) != value_of(before, other)]
    assert changed == [key]


@pytest.mark.parametrize("key", [*leaves(), *sections()])
def test_every_field_is_documented(key):
    description = (leaves() | sections())[key].description
    assert description is not None and len(description) > 5 and description.endswith(".")


def test_defaults_are_those_of_the_field():
    stated = {
        "data.train_batch_size": 1024,
        "data.max_prompt_length": 512,
        "data.max_response_length": 512,
        "data.truncation": "error",
        "data.reward_fn_key": "data_source",
        "actor.ppo_mini_batch_size": 256,
        "actor.ppo_max_token_len_per_gpu": 16384,
        "actor.optim.lr": 1e-6,
        "critic.optim.lr": 1e-5,
        "actor.optim.weight_decay": 0.01,
        "actor.clip_ratio": 0.2,
        "actor.clip_ratio_c": 3.0,
        "actor.kl_loss_coef": 0.001,
        "actor.kl_loss_type": "low_var_kl",
        "actor.loss_agg_mode": "token-mean",
        "rollout.n": 1,
        "rollout.temperature": 1.0,
        "rollout.top_k": -1,
        "rollout.val_kwargs.temperature": 0.0,
        "critic.cliprange_value": 0.5,
        "critic.ppo_max_token_len_per_gpu": 32768,
        "algorithm.adv_estimator": "gae",
        "algorithm.kl_penalty": "kl",
        "algorithm.kl_ctrl.horizon": 10000,
        "trainer.n_gpus_per_node": "auto",
        "trainer.save_freq": -1,
    }
    assert {key: defaults()[key] for key in stated} == stated


def test_a_critic_section_without_lr_keeps_the_critics_lr():
    config = load_config(None, [*BASE, "critic.optim.weight_decay=0"]).config
    assert config.critic.optim.lr == 1e-5 and config.critic.optim.weight_decay == 0


# B151, B027: (override, rule that the message states)
NONSENSE = [
    ("actor.optim.lr=-1", "at least 0"),
    ("critic.optim.lr=-1e-6", "at least 0"),
    ("actor.optim.eps=0", "above 0"),
    ("actor.optim.lr_warmup_steps=-2", "at least -1"),
    ("actor.optim.lr=.nan", "a finite number"),
    ("actor.optim.lr=.inf", "a finite number"),
    ("rollout.n=0", "at least 1"),
    ("rollout.n=2.5", "a whole number"),
    ("algorithm.gamma=1.5", "at most 1"),
    ("algorithm.lam=-0.1", "at least 0"),
    ("actor.clip_ratio=-0.1", "above 0"),
    ("actor.clip_ratio_low=-0.1", "above 0"),
    ("actor.clip_ratio_c=0.9", "above 1"),
    ("actor.clip_ratio_c=1", "above 1"),
    ("actor.clip_ratio_c=3i", "a number"),
    ("data.max_prompt_length=0", "at least 1"),
    ("data.max_response_length=0", "at least 1"),
    ("data.train_batch_size=0", "at least 1"),
    ("rollout.temperature=-1", "at least 0"),
    ("rollout.val_kwargs.temperature=-1", "at least 0"),
    ("rollout.top_p=0", "above 0"),
    ("rollout.val_kwargs.top_p=1.1", "at most 1"),
    ("rollout.val_kwargs.min_p=-0.1", "at least 0"),
    ("rollout.response_length.quantile=0", "above 0"),
    ("rollout.response_length.margin=0.9", "at least 1"),
    ("rollout.response_length.window=0", "at least 1"),
    ("rollout.response_length.max_cut_share=1.1", "at most 1"),
    ("rollout.val_kwargs.repetition_penalty=-1.5", "above 0"),
    ("rollout.val_kwargs.presence_penalty=2.5", "at most 2"),
    ("rollout.val_kwargs.frequency_penalty=.nan", "a finite number"),
    ("rollout.val_kwargs.min_new_tokens=-1", "at least 0"),
    ("algorithm.kl_ctrl.horizon=0", "at least 1"),
    ("algorithm.kl_ctrl.target_kl=0", "above 0"),
    ("trainer.total_epochs=0", "at least 1"),
    ("reward.max_failed_fraction=1.5", "at most 1"),
    ("trainer.seed=-1", "at least 0"),
    ("trainer.val_before_train=perhaps", "true or false"),
]


@pytest.mark.parametrize(("override", "rule"), NONSENSE)
def test_nonsense_is_refused_with_field_value_and_fix(override, rule):
    key, _, value = override.partition("=")
    with pytest.raises(ConfigError) as caught:
        load_config(None, [*BASE, override])
    assert caught.value.what == f"{key} must be {rule}"
    shown = str(caught.value.value)
    assert shown == value or shown == value.lstrip(".") or float(shown) == float(value)
    assert caught.value.fix.startswith(f"set {key} to {rule} (")


@pytest.mark.parametrize("key", ["trainer.save_freq", "trainer.test_freq", "data.train_max_samples"])
@pytest.mark.parametrize("value", [0, -2])
def test_never_is_minus_one_and_nothing_else(key, value):
    with pytest.raises(ConfigError) as caught:
        load_config(None, [*BASE, f"{key}={value}"])
    assert caught.value.what == f"{key}: must be -1 or at least 1"
    assert caught.value.value == value
    assert "-1 for never" in caught.value.fix


@pytest.mark.parametrize("key", ["rollout.n", "actor.optim.lr", "rollout.top_k", "trainer.n_gpus_per_node"])
def test_a_boolean_is_not_a_number(key):
    with pytest.raises(ConfigError, match=f"{key}: must be a number, not true or false"):
        load_config(None, [*BASE, f"{key}=true"])


@pytest.mark.parametrize(
    ("override", "fix"),
    [
        ("algorithm.adv_estimator=grop", "did you mean grpo?"),
        ("actor.loss_agg_mode=token-meen", "did you mean token-mean?"),
        ("actor.kl_loss_type=low_var", "did you mean low_var_kl?"),
        ("trainer.device=cudaa", "did you mean cuda?"),
        ("trainer.resume_mode=resume", "did you mean resume_path?"),
        ("model.dtype=bfloat", "did you mean bfloat16?"),
    ],
)
def test_a_bad_choice_names_the_nearest(override, fix):
    key, _, value = override.partition("=")
    with pytest.raises(ConfigError) as caught:
        load_config(None, [*BASE, override])
    assert caught.value.what.startswith(key)
    assert caught.value.value == value
    assert fix in caught.value.fix


def test_all_bad_fields_are_in_one_message():
    with pytest.raises(ConfigError) as caught:
        load_config(None, ["rollout.n=0", "actor.optim.lr=-1", "actor.optim.betas=[0.9]"])
    text = str(caught.value)
    assert text.startswith("the configuration has 5 problems:")
    for key in ("data.train_files is required", "model.path is required", "rollout.n", "actor.optim.lr must"):
        assert key in text
    assert "actor.optim.betas has too few values" in text


@pytest.mark.parametrize("value", ["{a: .nan}", "{a: [{b: .inf}]}", "{a: {1: b}}", "{a: !!binary aGk=}"])
def test_free_mappings_hold_what_json_can_hold(value):
    with pytest.raises(ConfigError, match=r"reward\.reward_kwargs: ") as caught:
        load_config(None, [*BASE, f"reward.reward_kwargs={value}"])
    assert caught.value.fix


@pytest.mark.parametrize(("value", "dtype"), [("fp32", "float32"), ("float", "float32"), ("bf16", "bfloat16")])
def test_dtype_names(value, dtype):
    assert load_config(None, [*BASE, f"model.dtype={value}"]).config.model.dtype == dtype


@pytest.mark.parametrize("value", ["-1", "0", "null"])
def test_top_k_sentinels_all_mean_off(value):
    """B089"""
    config = load_config(None, [*BASE, f"rollout.top_k={value}", f"rollout.val_kwargs.top_k={value}"]).config
    assert config.training_sampling.top_k == -1
    assert config.validation_sampling.top_k == -1


def test_validation_top_k_one_stays_one():
    assert load_config(None, [*BASE, "rollout.val_kwargs.top_k=1"]).config.validation_sampling.top_k == 1


def test_configurations_are_frozen():
    config = load_config(None, BASE).config
    with pytest.raises(ValueError, match="frozen"):
        config.rollout.n = 4
