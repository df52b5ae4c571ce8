"""Other spellings of our keys that users have in their scripts, and words that people write for them."""

from __future__ import annotations

# Longer prefixes first: the first that fits is taken.
PREFIXES = (
    ("custom_reward_function.reward_kwargs", "reward.reward_kwargs"),
    ("reward.custom_reward_function.reward_kwargs", "reward.reward_kwargs"),
    ("custom_reward_function", "reward.custom_reward_function"),
    ("reward_model.reward_kwargs.overlong_buffer_cfg", "reward.overlong_buffer"),
    ("reward_model.reward_kwargs.max_resp_len", "reward.overlong_buffer.max_resp_len"),
    ("reward.reward_kwargs.overlong_buffer_cfg", "reward.overlong_buffer"),
    ("reward_model.reward_manager", "reward.reward_manager.name"),
    ("reward_model.model.path", "reward.reward_model.model_path"),
    ("reward_model", "reward.reward_model"),
    ("data.apply_chat_template_kwargs", "data.chat_template_kwargs"),
    ("training.optimizer.params", "actor.optim"),
)

_FLAT = {
    "train_batch_size": "data.train_batch_size",
    "ppo_mini_batch_size": "actor.ppo_mini_batch_size",
    # The flat spelling counts responses on one rank; actor.ppo_micro_batch_size (older) counts those of all ranks.
    "ppo_micro_batch_size": "actor.ppo_micro_batch_size_per_gpu",
    "gradient_accumulation": "actor.gradient_accumulation",
}

ALIASES = {
    **_FLAT,
    **{f"training.{name}": key for name, key in _FLAT.items()},
    "training.gradient_clipping": "actor.grad_clip",
    "training.fp16.loss_scale": "model.fp16.loss_scale",
    "training.fp16.initial_scale_power": "model.fp16.initial_scale_power",
    "training.fp16.loss_scale_window": "model.fp16.loss_scale_window",
    "nccl_timeout": "cluster.collective_timeout",
    "actor.fsdp_config.reshard_after_forward": "actor.reshard_after_forward",
    "data.tokenizer": "model.tokenizer_path",
    "trainer.max_actor_ckpt_to_keep": "trainer.keep_last",
    **{f"{role}.optim.warmup_style": f"{role}.optim.lr_scheduler_type" for role in ("actor", "critic")},
    **{f"{role}.optim.lr_decay_style": f"{role}.optim.lr_scheduler_type" for role in ("actor", "critic")},
    **{f"{role}.optim.clip_grad": f"{role}.grad_clip" for role in ("actor", "critic")},
}
"""Exact other spellings. ``actor_rollout_ref.`` and the older reward roots are prefixes, see :func:`canonical`."""

GLOBAL_MICRO_BATCH = {
    "actor.ppo_micro_batch_size": "actor.ppo_micro_batch_size_per_gpu",
    "critic.ppo_micro_batch_size": "critic.ppo_micro_batch_size_per_gpu",
    "ref.log_prob_micro_batch_size": "ref.log_prob_micro_batch_size_per_gpu",
}
"""Older keys that count responses of all ranks together; divided by the ranks when the configuration is read."""

OTHER_ENGINES = ("vllm", "sglang", "hf", "trtllm")
"""Values of rollout.name that other systems know; the embedded engine takes their place."""

OTHER_STRATEGIES = ("megatron", "veomni", "torchtitan", "automodel")
"""Values of actor.strategy that other systems know; fsdp2 takes their place."""

OTHER_LOGGERS = ("vemlp_wandb", "clearml", "file", "rl_logging_board")
"""Entries of trainer.logger that other systems know and that are set aside."""

MISNOMERS = {
    "actor.learning_rate": "actor.optim.lr",
    "actor.lr": "actor.optim.lr",
    "critic.learning_rate": "critic.optim.lr",
    "critic.lr": "critic.optim.lr",
    "learning_rate": "actor.optim.lr",
    "lr": "actor.optim.lr",
    "batch_size": "data.train_batch_size",
    "data.batch_size": "data.train_batch_size",
    "actor.mini_batch_size": "actor.ppo_mini_batch_size",
    "actor.micro_batch_size": "actor.ppo_micro_batch_size_per_gpu",
    "actor.entropy_coef": "actor.entropy_coeff",
    "actor.kl_coef": "actor.kl_loss_coef",
    "algorithm.lambda": "algorithm.lam",
    "algorithm.kl_coef": "algorithm.kl_ctrl.kl_coef",
    "rollout.num_return_sequences": "rollout.n",
    "rollout.max_new_tokens": "data.max_response_length",
    "rollout.val_kwargs.min_tokens": "rollout.val_kwargs.min_new_tokens",
    "trainer.epochs": "trainer.total_epochs",
    "trainer.steps": "trainer.total_training_steps",
    "trainer.max_steps": "trainer.total_training_steps",
    "trainer.output_dir": "trainer.default_local_dir",
    "trainer.eval_freq": "trainer.test_freq",
    "model.name": "model.path",
    "reward.path": "reward.custom_reward_function.path",
    "reward.name": "reward.custom_reward_function.name",
}
"""Names that are no keys, and the key that was probably meant; used in error messages only."""


def canonical(key: str) -> str:
    """The name under which a key of any accepted spelling is looked up; unknown keys come back as they are."""
    key = key.removeprefix("actor_rollout_ref.")
    for old, new in PREFIXES:
        if key == old or key.startswith(old + "."):
            return new + key[len(old) :]
    return ALIASES.get(key, key)


VERL_DEFAULTS = {
    "data.drop_last": "always drops it",
    "model.enable_gradient_checkpointing": "true",
    "actor.strategy": "fsdp",
    "actor.use_dynamic_bsz": "false",
    "actor.clip_ratio": "0.2, but it changes nothing there: clip_ratio_low and clip_ratio_high have defaults that win",
    "actor.optim.decay_norms_and_biases": "true, without such a key",
    "critic.optim.decay_norms_and_biases": "true, without such a key",
    "rollout.max_num_seqs": "1024",
    "trainer.logger": "[console, wandb]",
    "trainer.project_name": "verl_examples",
    "trainer.experiment_name": "gsm8k",
    "trainer.total_epochs": "30",
    "trainer.n_gpus_per_node": "8",
    "trainer.default_local_dir": "checkpoints/<project_name>/<experiment_name>",
    "trainer.log_val_generations": "0",
    "cluster.collective_timeout": "600 (as actor_rollout_ref.nccl_timeout)",
    "trainer.keep_last": "null (as max_actor_ckpt_to_keep): all",
}
"""verl's defaults where ours are others."""


def spellings(key: str) -> list[str]:
    """Every other name under which a key of ours is accepted."""
    longer = [f"actor_rollout_ref.{key}"] if key.partition(".")[0] in ("actor", "rollout", "ref", "model") else []
    prefixed = [old + key[len(new) :] for old, new in PREFIXES if key == new or key.startswith(new + ".")]
    return longer + prefixed + [old for old, new in (ALIASES | GLOBAL_MICRO_BATCH).items() if new == key]


def aliases_in(section: str) -> dict[str, str]:
    """The other spellings that begin with a name, each with the key that it stands for."""
    found = {old: new for old, new in [*ALIASES.items(), *PREFIXES] if old.startswith(section + ".")}
    if section == "actor_rollout_ref":
        found |= {f"{section}.{name}": name for name in ("model", "actor", "rollout", "ref")}
    return found


def alias_sections() -> set[str]:
    """Names that hold other keys only in an accepted spelling, such as ``training.optimizer``."""
    found = {"actor_rollout_ref"}
    for key in [*ALIASES, *(old for old, _ in PREFIXES)]:
        parts = key.split(".")
        found.update(".".join(parts[:end]) for end in range(1, len(parts)))
    return found
