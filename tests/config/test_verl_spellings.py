"""Launch scripts written for verl: long names, older roots, and keys that have no meaning here."""

from __future__ import annotations

import pytest

from verl.config import load_config
from verl.config.keys import leaves
from verl.config.translate import NO_MEANING, NOT_YET, no_meaning, not_yet
from verl.errors import ConfigError

BASE = ["data.train_files=[train.parquet]", "model.path=tiny"]


def load(*overrides: str):
    return load_config(None, [*BASE, *overrides])


# The keys that published launch scripts set most, with values as these scripts give them.
SCRIPT_TEXT = """
data.train_files=/data/gsm8k/train.parquet data.val_files=/data/gsm8k/test.parquet data.train_batch_size=1024
data.max_prompt_length=512 data.max_response_length=1024 data.truncation=error data.filter_overlong_prompts=True
data.image_key=images data.shuffle=False data.return_raw_chat=True data.prompt_key=prompt
actor_rollout_ref.model.path=Qwen/Qwen2-7B-Instruct actor_rollout_ref.model.use_remove_padding=True
actor_rollout_ref.model.enable_gradient_checkpointing=True actor_rollout_ref.model.use_fused_kernels=True
actor_rollout_ref.model.trust_remote_code=False
actor_rollout_ref.actor.ppo_mini_batch_size=256 actor_rollout_ref.actor.optim.lr=1e-6
actor_rollout_ref.actor.use_kl_loss=True actor_rollout_ref.actor.use_dynamic_bsz=True
actor_rollout_ref.actor.entropy_coeff=0 actor_rollout_ref.actor.ppo_max_token_len_per_gpu=24000
actor_rollout_ref.actor.kl_loss_coef=0.001 actor_rollout_ref.actor.kl_loss_type=low_var_kl
actor_rollout_ref.actor.fsdp_config.param_offload=False actor_rollout_ref.actor.fsdp_config.optimizer_offload=False
actor_rollout_ref.actor.use_torch_compile=False actor_rollout_ref.actor.strategy=fsdp2
actor_rollout_ref.actor.megatron.pipeline_model_parallel_size=2
actor_rollout_ref.actor.megatron.tensor_model_parallel_size=2 actor_rollout_ref.actor.megatron.optimizer_offload=True
actor_rollout_ref.actor.megatron.param_offload=True actor_rollout_ref.actor.megatron.expert_model_parallel_size=8
actor_rollout_ref.actor.megatron.grad_offload=True actor_rollout_ref.actor.megatron.use_mbridge=True
actor_rollout_ref.actor.megatron.expert_tensor_parallel_size=1
actor_rollout_ref.actor.megatron.context_parallel_size=1 actor_rollout_ref.actor.megatron.vanilla_mbridge=False
actor_rollout_ref.actor.megatron.use_dist_checkpointing=False
+actor_rollout_ref.actor.megatron.override_transformer_config.recompute_granularity=full
+actor_rollout_ref.actor.megatron.override_transformer_config.recompute_method=uniform
+actor_rollout_ref.actor.megatron.override_transformer_config.recompute_num_layers=1
+actor_rollout_ref.actor.megatron.override_transformer_config.moe_permute_fusion=True
+actor_rollout_ref.actor.megatron.override_transformer_config.use_flash_attn=True
+actor_rollout_ref.actor.megatron.override_transformer_config.moe_router_dtype=fp32
+actor_rollout_ref.actor.megatron.override_transformer_config.apply_rope_fusion=True
+actor_rollout_ref.actor.megatron.override_transformer_config.moe_token_dispatcher_type=flex
actor_rollout_ref.actor.clip_ratio_high=0.28 actor_rollout_ref.actor.clip_ratio_low=0.2
actor_rollout_ref.actor.clip_ratio_c=10.0 actor_rollout_ref.actor.policy_loss.loss_mode=vanilla
actor_rollout_ref.actor.loss_agg_mode=token-mean actor_rollout_ref.actor.entropy_from_logits_with_chunking=True
actor_rollout_ref.actor.fsdp_config.ulysses_sequence_parallel_size=1
actor_rollout_ref.actor.fsdp_config.reshard_after_forward=True actor_rollout_ref.actor.fsdp_config.fsdp_size=-1
actor_rollout_ref.actor.fsdp_config.entropy_checkpointing=True actor_rollout_ref.actor.fsdp_config.offload_policy=True
actor_rollout_ref.actor.optim.lr_warmup_steps=10
+actor_rollout_ref.actor.optim.override_optimizer_config.optimizer_cpu_offload=True
+actor_rollout_ref.actor.optim.override_optimizer_config.overlap_cpu_optimizer_d2h_h2d=True
+actor_rollout_ref.actor.optim.override_optimizer_config.optimizer_offload_fraction=1
+actor_rollout_ref.actor.optim.override_optimizer_config.use_precision_aware_optimizer=True
actor_rollout_ref.actor.veomni.optimizer_offload=True actor_rollout_ref.actor.veomni.param_offload=True
actor_rollout_ref.rollout.name=vllm actor_rollout_ref.rollout.gpu_memory_utilization=0.6
actor_rollout_ref.rollout.tensor_model_parallel_size=2 actor_rollout_ref.rollout.n=5
actor_rollout_ref.rollout.log_prob_use_dynamic_bsz=True actor_rollout_ref.rollout.log_prob_max_token_len_per_gpu=24000
actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=32 actor_rollout_ref.rollout.enable_chunked_prefill=False
actor_rollout_ref.rollout.enforce_eager=False actor_rollout_ref.rollout.free_cache_engine=True
actor_rollout_ref.rollout.calculate_log_probs=True actor_rollout_ref.rollout.max_num_batched_tokens=8192
actor_rollout_ref.rollout.checkpoint_engine.update_weights_bucket_megabytes=512
actor_rollout_ref.rollout.val_kwargs.n=1 actor_rollout_ref.rollout.val_kwargs.temperature=1.0
actor_rollout_ref.rollout.val_kwargs.top_p=0.7 actor_rollout_ref.rollout.val_kwargs.do_sample=True
+actor_rollout_ref.rollout.engine_kwargs.vllm.compilation_config.cudagraph_mode=FULL
+actor_rollout_ref.rollout.engine_kwargs.vllm.compilation_config.cudagraph_capture_sizes=[8,16]
+actor_rollout_ref.rollout.engine_kwargs.vllm.mm_processor_cache_gb=0
actor_rollout_ref.rollout.expert_parallel_size=1 actor_rollout_ref.rollout.max_model_len=2048
actor_rollout_ref.rollout.enable_prefix_caching=True actor_rollout_ref.rollout.temperature=1.0
actor_rollout_ref.rollout.top_p=1.0 actor_rollout_ref.rollout.top_k=-1 actor_rollout_ref.rollout.data_parallel_size=1
actor_rollout_ref.rollout.mode=async actor_rollout_ref.rollout.ignore_eos=False
actor_rollout_ref.ref.log_prob_use_dynamic_bsz=True actor_rollout_ref.ref.log_prob_max_token_len_per_gpu=24000
actor_rollout_ref.ref.fsdp_config.param_offload=True actor_rollout_ref.ref.megatron.pipeline_model_parallel_size=2
actor_rollout_ref.ref.megatron.tensor_model_parallel_size=2 actor_rollout_ref.ref.megatron.expert_model_parallel_size=8
actor_rollout_ref.ref.megatron.param_offload=True actor_rollout_ref.ref.use_torch_compile=False
actor_rollout_ref.ref.strategy=fsdp2 actor_rollout_ref.ref.megatron.expert_tensor_parallel_size=1
actor_rollout_ref.ref.fsdp_config.ulysses_sequence_parallel_size=1
actor_rollout_ref.ref.megatron.context_parallel_size=1 actor_rollout_ref.ref.entropy_from_logits_with_chunking=True
actor_rollout_ref.ref.fsdp_config.reshard_after_forward=True actor_rollout_ref.ref.megatron.use_mbridge=True
actor_rollout_ref.ref.fsdp_config.offload_policy=True actor_rollout_ref.ref.megatron.use_dist_checkpointing=False
algorithm.adv_estimator=grpo algorithm.use_kl_in_reward=False algorithm.kl_ctrl.kl_coef=0.001
trainer.experiment_name=qwen2_7b trainer.project_name=verl_grpo trainer.n_gpus_per_node=8 trainer.nnodes=1
trainer.save_freq=20 trainer.test_freq=5 trainer.total_epochs=15 trainer.balance_batch=True trainer.critic_warmup=0
trainer.val_before_train=False trainer.total_training_steps=500 trainer.default_local_dir=/ckpts
trainer.resume_mode=auto
"""
SCRIPT = SCRIPT_TEXT.split()


def test_a_published_script_loads_as_it_is():
    loaded = load_config(None, [*SCRIPT, "trainer.logger=['console','wandb']"])
    config = loaded.config
    assert config.model.path == "Qwen/Qwen2-7B-Instruct"
    assert (config.actor.clip_low, config.actor.clip_high, config.actor.clip_ratio_c) == (0.2, 0.28, 10.0)
    assert config.actor.optim.lr_warmup_steps == 10
    assert config.rollout.name == "embedded" and config.rollout.n == 5
    assert config.trainer.logger == ["console", "wandb"]
    assert config.reference_batch() == (None, 24000)


@pytest.mark.parametrize("engine", ["vllm", "sglang", "hf"])
def test_other_engines_become_the_embedded_one(engine):
    loaded = load(f"actor_rollout_ref.rollout.name={engine}")
    assert loaded.config.rollout.name == "embedded"
    assert loaded.notices == [
        f"rollout.name={engine}: the embedded engine takes its place, the only one that is built in"
    ]
    assert load("rollout.name=embedded").notices == []
    with pytest.raises(ConfigError, match=r"rollout\.name: names no engine"):
        load("rollout.name=vlm")


ALIASES = [
    ("train_batch_size=2048", "data.train_batch_size", 2048),
    ("training.train_batch_size=2048", "data.train_batch_size", 2048),
    ("ppo_mini_batch_size=128", "actor.ppo_mini_batch_size", 128),
    ("ppo_micro_batch_size=4", "actor.ppo_micro_batch_size_per_gpu", 4),
    ("training.ppo_micro_batch_size=4", "actor.ppo_micro_batch_size_per_gpu", 4),
    ("training.gradient_clipping=0.5", "actor.grad_clip", 0.5),
    ("actor_rollout_ref.actor.fsdp_config.param_offload=True", "actor.param_offload", True),
    ("actor_rollout_ref.actor.fsdp_config.optimizer_offload=True", "actor.optimizer_offload", True),
    ("actor_rollout_ref.ref.fsdp_config.param_offload=True", "ref.param_offload", True),
    ("critic.model.fsdp_config.param_offload=True", "critic.param_offload", True),
    ("critic.model.fsdp_config.optimizer_offload=True", "critic.optimizer_offload", True),
    ("training.optimizer.params.lr=1e-4", "actor.optim.lr", 1e-4),
    ("training.optimizer.params.betas=[0.9,0.95]", "actor.optim.betas", (0.9, 0.95)),
    ("training.optimizer.params.weight_decay=0.1", "actor.optim.weight_decay", 0.1),
    ("training.optimizer.params.eps=1e-6", "actor.optim.eps", 1e-6),
    ("custom_reward_function.path=r.py", "reward.custom_reward_function.path", "r.py"),
    ("custom_reward_function.name=f", "reward.custom_reward_function.name", "f"),
    ("+custom_reward_function.reward_kwargs.x=1", "reward.reward_kwargs", {"x": 1}),
    ("reward.custom_reward_function.reward_kwargs.x=1", "reward.reward_kwargs", {"x": 1}),
    ("data.apply_chat_template_kwargs.enable_thinking=False", "data.chat_template_kwargs", {"enable_thinking": False}),
    ("actor_rollout_ref.actor.optim.warmup_style=cosine", "actor.optim.lr_scheduler_type", "cosine"),
    ("critic.optim.lr_decay_style=linear", "critic.optim.lr_scheduler_type", "linear"),
    ("actor_rollout_ref.actor.optim.clip_grad=2.0", "actor.grad_clip", 2.0),
    ("trainer.max_actor_ckpt_to_keep=5", "trainer.keep_last", 5),
    ("data.tokenizer=tok", "model.tokenizer_path", "tok"),
    ("actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu=3", "ref.log_prob_micro_batch_size_per_gpu", 3),
]


@pytest.mark.parametrize(("override", "key", "value"), ALIASES)
def test_other_spellings(override, key, value):
    loaded = load(override)
    place: object = loaded.config
    for part in key.split("."):
        place = getattr(place, part)
    assert place == value
    assert loaded.notices == []


def test_accumulation_flat():
    sizes = ["ppo_mini_batch_size=64", "ppo_micro_batch_size=4", "trainer.device=cpu"]
    assert load(*sizes, "gradient_accumulation=16").config.actor_batch().accumulation == 16
    with pytest.raises(ConfigError, match=r"actor\.gradient_accumulation does not agree"):
        load(*sizes, "gradient_accumulation=8")


def test_the_older_micro_batch_size_counts_all_ranks():
    loaded = load("actor_rollout_ref.actor.ppo_micro_batch_size=32", "trainer.n_gpus_per_node=8")
    assert loaded.config.actor.ppo_micro_batch_size_per_gpu == 4
    assert loaded.notices == [
        "actor_rollout_ref.actor.ppo_micro_batch_size=32 counts the responses of all 8 rank(s) together: "
        "read as actor.ppo_micro_batch_size_per_gpu=4 responses on each; set that key instead"
    ]
    assert load("critic.ppo_micro_batch_size=4", "trainer.device=cpu").config.critic_batch().micro_batch_rows == 4


@pytest.mark.parametrize(
    ("overrides", "complaint", "value"),
    [
        (("actor.ppo_micro_batch_size=2", "trainer.n_gpus_per_node=4"), "does not divide", "2 responses / 4 ranks"),
        (("actor.ppo_micro_batch_size=6", "trainer.n_gpus_per_node=4"), "does not divide", "6 responses / 4 ranks"),
        (("actor.ppo_micro_batch_size=8",), "the number of ranks is not known", 8),
        (("actor.ppo_micro_batch_size=0", "trainer.device=cpu"), "must be a whole number", 0),
        (("actor.ppo_micro_batch_size=x", "trainer.device=cpu"), "must be a whole number", "x"),
        (
            ("actor.ppo_micro_batch_size=8", "actor.ppo_micro_batch_size_per_gpu=2", "trainer.device=cpu"),
            "are both given",
            "8 and 2",
        ),
    ],
)
def test_an_older_micro_batch_size_that_does_not_fit(overrides, complaint, value):
    """B116"""
    with pytest.raises(ConfigError) as caught:
        load(*overrides)
    assert complaint in caught.value.what and "actor.ppo_micro_batch_size" in caught.value.what
    assert caught.value.value == value
    assert "actor.ppo_micro_batch_size_per_gpu" in caught.value.fix


@pytest.mark.parametrize(
    ("override", "complaint"),
    [
        ("training.optimizer.type=SGD", "AdamW is the only optimizer"),
        ("actor_rollout_ref.model.lora_rank=32", "LoRA is not supported yet"),
        ("reward_model.enable=True", "reward.model.path turns a reward model on"),
        ("reward_model.reward_manager=prime", "this reward manager is not supported yet"),
        ("actor_rollout_ref.rollout.multi_turn.enable=True", "multi-turn rollout is not supported yet"),
        ("rollout.repetition_penalty=1.1", "the model's own distribution"),
        ("rollout.presence_penalty=0.1", "the model's own distribution"),
        ("rollout.frequency_penalty=-0.1", "the model's own distribution"),
        ("rollout.min_p=0.1", "the model's own distribution"),
        ("rollout.logit_bias.5=1", "the model's own distribution"),
        ("rollout.min_tokens=3", "the model's own distribution"),
        ("rollout.min_new_tokens=3", "the model's own distribution"),
    ],
)
def test_what_is_not_built_is_refused_not_dropped(override, complaint):
    key, _, value = override.partition("=")
    with pytest.raises(ConfigError) as caught:
        load(override)
    assert caught.value.what.startswith(key + ": ") and complaint in caught.value.what
    assert str(caught.value.value) == (value.lower() if value in ("True", "true") else value)
    assert caught.value.fix


def test_fp16_in_the_flat_spelling():
    loaded = load("training.fp16.enabled=true", "training.fp16.loss_scale=1024", "training.fp16.initial_scale_power=4")
    model = loaded.config.model
    assert (model.dtype, model.fp16.loss_scale, model.fp16.initial_scale_power) == ("float16", 1024, 4)
    assert loaded.notices == [
        "model.fp16.initial_scale_power=4 has no effect: model.fp16.loss_scale=1024 is fixed",
    ]
    with pytest.raises(ConfigError, match="training.fp16.enabled and model.dtype ask for different compute types"):
        load("training.fp16.enabled=true", "model.dtype=bf16")
    assert load("training.fp16.enabled=false", "model.dtype=fp32").config.model.dtype == "float32"
    assert "needs no loss scale" in load("model.fp16.loss_scale=8").notices[0]


@pytest.mark.parametrize(
    "override",
    [
        "training.fp16.enabled=false",
        "training.optimizer.type=AdamW",
        "model.lora_rank=0",
        "model.target_modules=all-linear",
        "reward_model.enable=False",
        "reward_model.model.path=x",
        "reward_model.reward_manager=dapo",
        "reward.reward_manager.name=naive",
        "rollout.multi_turn.enable=False",
        "rollout.mode=async",
        "rollout.repetition_penalty=1.0",
        "actor_rollout_ref.hybrid_engine=True",
        "actor.fsdp_config=null",
        "actor.checkpoint.save_contents=[model,optimizer]",
        "data.dataloader_num_workers=8",
        "ray_kwargs.ray_init.num_cpus=8",
        "global_profiler.save_path=x",
    ],
)
def test_what_asks_for_nothing_is_accepted_with_one_notice(override):
    loaded = load(override)
    assert loaded.config == load().config
    assert len(loaded.notices) == 1
    key = override.partition("=")[0].removeprefix("actor_rollout_ref.")
    assert loaded.notices[0].startswith(f"no meaning here: {key} (")


def test_overlong_settings_need_nothing_else_while_off():
    """B053: with the feature off or absent, no other field is required."""
    assert not load("reward.overlong_buffer.len=4").config.reward.overlong_buffer.enable


def test_the_tables_hide_none_of_our_keys():
    for patterns in ([p for row in NO_MEANING for p in row.patterns], [row.pattern for row in NOT_YET]):
        assert len(patterns) == len(set(patterns))
    assert all(row.reason for row in NO_MEANING) and all(row.what and row.fix for row in NOT_YET)
    hidden = [key for key in leaves() if no_meaning(key) or not_yet(key)]
    assert hidden == []


def test_strategies_of_verl():
    assert load("actor.strategy=fsdp", "actor.fsdp_config.reshard_after_forward=false").config.actor.strategy == "fsdp2"
    read = load("actor_rollout_ref.actor.strategy=megatron")
    assert read.config.actor.strategy == "fsdp2" and any("fsdp2 takes its place" in notice for notice in read.notices)
    assert load("actor.strategy=fsdp", "trainer.device=cpu").config.ranks == 1  # nothing is cut
