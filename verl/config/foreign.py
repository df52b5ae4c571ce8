"""Keys of verl's that this system does not have: those without a meaning here, and those not supported yet.

The first table's keys are accepted and named once at start. The second table's are accepted at the values that ask
for nothing, and refused at any other: dropping them silently would train something else than was asked for.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import cache


@dataclass(frozen=True)
class NoMeaning:
    """Keys that change nothing here (``*`` stands for anything), and why."""

    reason: str
    patterns: tuple[str, ...]


@dataclass(frozen=True)
class NotYet:
    """A key that asks for something not built yet, unless it has one of the harmless values."""

    pattern: str
    harmless: tuple[object, ...]
    what: str
    fix: str = "remove it"


NO_MEANING = (
    NoMeaning("how weights and optimizer are shared out is said by actor.strategy alone", (
        "*.megatron.*", "*.optim.override_optimizer_config.*", "*.fsdp_config.*",
        "*.veomni.*", "*.torchtitan.*", "*.automodel.*", "critic.strategy", "ref.strategy",
        "reward*.strategy", "*.fsdp_size",
        "*.ulysses_sequence_parallel_size", "model_engine", "actor.load_weight", "actor.fsdp_size",
        "*.nccl_timeout", "hybrid_engine",
    )),
    NoMeaning("settings of other engines and their servers", (
        "rollout.mode", "rollout.max_model_len", "rollout.multi_stage_wake_up",
        "rollout.gpu_memory_utilization", "rollout.*_parallel_size", "rollout.enforce_eager", "rollout.dtype",
        "rollout.enable_chunked_prefill", "rollout.free_cache_engine",
        "rollout.load_format", "rollout.layered_summon_param", "rollout.engine_kwargs.*", "rollout.quantization*",
        "rollout.cudagraph_capture_sizes", "rollout.disable_log_stats", "rollout.logprobs_mode",
        "rollout.scheduling_policy", "rollout.swap_space", "rollout.server.*", "rollout.prometheus.*",
        "rollout.enable_sleep_mode", "rollout.enable_rollout_routing_replay", "rollout.mtp.*",
        "rollout.checkpoint_engine.*", "rollout.update_weights_bucket_megabytes", "rollout.skip_*",
        "rollout.n_gpus_per_node", "rollout.disaggregation.*", "rollout.limit_images",
    )),
    NoMeaning("lengths are data.max_prompt_length and data.max_response_length", (
        "rollout.prompt_length", "rollout.response_length", "critic.max_length",
    )),
    NoMeaning("log-probs come with the samples; where they are recomputed, the actor's batching is used", (
        "rollout.calculate_log_probs", "rollout.log_prob_*",
    )),
    NoMeaning("forward passes of the critic use its training batch sizes", (
        "critic.forward_micro_batch_size*", "critic.forward_max_token_len_per_gpu", "actor.ppo_infer_*",
        "critic.ppo_infer_*",
    )),
    NoMeaning("one response after another: there are no tools and turns yet", (
        "rollout.multi_turn.*", "rollout.agent.*", "rollout.trace.*", "data.tool_config_path",
        "data.need_tools_kwargs", "data.return_raw_input_ids",
    )),
    NoMeaning("rows are always packed, log-probs computed in chunks, and nothing is compiled", (
        "*.use_remove_padding", "*.use_fused_kernels", "model.fused_kernel_options.*", "model.use_liger",
        "*.entropy_from_logits_with_chunking", "*.entropy_checkpointing", "model.tiled_mlp.*", "model.mtp.*",
        "actor.use_prefix_grouper", "model.enable_activation_offload", "*.use_torch_compile", "*.use_dynamic_compile",
    )),
    NoMeaning("the model's own configuration is used as it is", ("*.override_*config.*", "model.hf_config_path")),
    NoMeaning("AdamW is configured by lr, betas, eps, weight_decay and the schedule's keys alone", (
        "*.optim.total_training_steps", "*.optim.optimizer_impl", "*.optim.num_cycles", "*.optim.lr_warmup_init",
        "*.optim.lr_decay_steps", "*.optim.weight_decay_incr_style",
        "*.optim.use_checkpoint_opt_param_scheduler", "*.optim.min_lr", "*.optim.zero_indexed_step",
    )),
    NoMeaning("there is no LoRA yet, and model.lora_rank=0 asks for none", (
        "model.lora_alpha", "model.target_modules", "model.exclude_modules", "model.lora.*",
        "model.target_parameters", "model.lora_*",
    )),
    NoMeaning("the critic's settings follow from the actor's model and from algorithm.adv_estimator", (
        "critic.model.enable_gradient_checkpointing", "critic.model.trust_remote_code", "critic.model.tokenizer_path",
        "critic.model.use_shm", "critic.model.external_lib", "critic.model.enable_activation_offload",
        "critic.model.lora_alpha", "critic.model.target_modules",
        "critic.enable", "critic.rollout_n", "critic.shuffle", "critic.data_loader_seed",
    )),
    NoMeaning("seeds follow from trainer.seed", ("*.data_loader_seed", "rollout.seed", "actor.rollout_n")),
    NoMeaning("checkpoints hold everything that resuming needs; verl export writes a model", (
        "*.checkpoint.*", "trainer.max_critic_ckpt_to_keep", "trainer.default_hdfs_dir",
        "trainer.del_local_ckpt_after_load", "trainer.esi_redundant_time", "trainer.remove_previous_ckpt_in_save",
    )),
    NoMeaning("samples are always written to the run folder", (
        "trainer.rollout_data_dir", "trainer.validation_data_dir",
    )),
    NoMeaning("this trainer has one implementation and starts Ray by itself", (
        "trainer.use_legacy_worker_impl", "trainer.log_freq", "trainer.ray_wait_register_center_timeout",
        "ray_init.*", "ray_kwargs.*", "transfer_queue.*", "trainer.use_v1", "trainer.v1.*", "trainer.npu_*",
    )),
    NoMeaning("there is no profiler yet", (
        "*.profiler.*", "*.profile.*", "global_profiler.*", "trainer.profile_steps", "trainer.controller_nsight_*",
        "trainer.worker_nsight_*",
    )),
    NoMeaning("prompts are text only", (
        "data.image_key", "data.video_key", "data.audio_key", "data.image_patch_size", "data.mm_*",
        "data.return_multi_modal_inputs", "data.process_image", "actor.freeze_vision_tower",
    )),
    NoMeaning("data.num_workers processes prepare prompts; the loader keeps messages and text as they are", (
        "data.dataloader_num_workers", "data.filter_overlong_prompts_workers",
        "data.return_raw_chat", "data.return_full_prompt", "data.use_shm", "model.use_shm", "data.cache_dir",
        "data.validation_shuffle", "data.datagen.name",
    )),
    NoMeaning("prompts are drawn as training needs them, data.train_batch_size at a time", ("data.gen_batch_size",)),
    NoMeaning("set model.trust_remote_code, which covers model and tokenizer", (
        "data.trust_remote_code", "reward.reward_model.trust_remote_code",
    )),
    NoMeaning("settings of a reward model, and none is used", (
        "reward.reward_model.model.*", "reward.reward_model.model_path", "reward.reward_model.rollout.*",
        "reward.reward_model.micro_batch_size*", "reward.reward_model.max_length",
        "reward.reward_model.use_dynamic_bsz", "reward.reward_model.forward_max_token_len_per_gpu",
        "reward.reward_model.n_gpus_per_node", "reward.reward_model.nnodes", "reward.reward_model.use_reward_loop",
        "reward.reward_model.num_workers",
    )),
    NoMeaning("responses are scored once those of a step are there, by reward.num_workers processes", (
        "reward.reward_model.launch_reward_fn_async",
        "reward.reward_manager.module.*",
        "reward.reward_model.sandbox_fusion.*", "reward.sandbox_fusion.*", "reward.reward_loop_*",
        "reward.reward_model.reward_loop_*",
    )),
    NoMeaning("the overlong penalty is always logged", ("reward.overlong_buffer.log",)),
    NoMeaning("settings of the older rollout correction; algorithm.rollout_correction has its own", (
        "algorithm.rollout_is_threshold*", "algorithm.rollout_is_level", "algorithm.rollout_is_mode",
        "algorithm.rollout_is_veto_threshold",
    )),
    NoMeaning("settings of other estimators", ("algorithm.pf_ppo.*",)),
    NoMeaning("entropy and log-probs are always computed where they are needed", (
        "actor.calculate_entropy", "actor.calculate_sum_pi_squared", "actor.sum_pi_squared_checkpointing",
        "actor.use_rollout_log_probs", "actor.router_replay.*",
    )),
    NoMeaning("float16 is chosen by model.dtype=float16, and training.fp16.enabled=true is read as that", (
        "training.fp16.enabled",
    )),
    NoMeaning("a loss scale is halved at every overflow, down to 1", (
        "training.fp16.hysteresis", "training.fp16.min_loss_scale",
    )),
    NoMeaning("settings of Hydra, which is not used", ("hydra.*", "defaults", "_target_", "*._target_")),
)  # fmt: skip

_COMPUTE_TYPES = ("bfloat16", "bf16", "float32", "fp32", "auto", None)
_DTYPE_FIX = "set model.dtype=float16, the compute type of trainer and engine alike"
_LAW = "training must sample the model's own distribution, of which the trainer takes log-probs; this changes it"
_LAW_FIX = "remove it, or set it under rollout.val_kwargs, which acts on validation alone"

NOT_YET = (
    NotYet("training.optimizer.type", ("adamw", "adam"), "AdamW is the only optimizer", "use AdamW"),
    NotYet("*.optim.optimizer", ("adamw", "adam", None), "AdamW is the only optimizer", "use AdamW"),
    NotYet("*model.lora_rank", (0, None), "LoRA is not supported yet", "set it to 0 to train all weights"),
    NotYet("model.lora.rank", (0, None), "LoRA is not supported yet", "set it to 0 to train all weights"),
    NotYet("model.lora_adapter_path", (None,), "LoRA is not supported yet"),
    NotYet("model.custom_chat_template", (None, ""), "another chat template than the tokenizer's is not supported yet",
           "remove it, or put the template into the tokenizer at model.tokenizer_path"),
    NotYet("model.external_lib", (None, ""), "loading code beside the model is not supported"),
    NotYet("algorithm.rollout_correction.rollout_is_batch_normalize", (False, None),
           "importance weights are not normalised over the batch"),
    NotYet("algorithm.rollout_correction.rollout_*_veto_*", (None,), "there is no veto threshold",
           "use algorithm.rollout_correction.rollout_rs=seq_max_k2 or seq_max_k3 and its threshold"),
    NotYet("actor.tis_imp_ratio_cap", (-1, -1.0, None), "an older spelling",
           "set algorithm.rollout_correction.rollout_is=token and rollout_is_threshold to the cap"),
    NotYet("*.optim.lr_wsd_decay_style", ("linear", None), "wsd decays linearly", "remove it"),
    NotYet("algorithm.use_pf_ppo", (False, None), "PF-PPO is not supported yet"),
    NotYet("reward.reward_model.enable", (False, None), "reward.model.path turns a reward model on",
           "set reward.model.path to the model, and remove reward_model.enable"),
    NotYet("reward.reward_model.enable_resource_pool", (False, None), "pools are named in cluster.pools",
           "set cluster.pools.reward.gpus=1 and cluster.placement.reward=reward"),
    NotYet("rollout.nnodes", (0, None), "rollout workers of their own are placed by cluster.pools",
           "set cluster.pools.rollout.processes and cluster.placement.rollout=rollout"),
    NotYet("reward.reward_manager.name", ("naive", "dapo", None), "this reward manager is not supported yet",
           "use naive, or your own function (reward.custom_reward_function.path)"),
    NotYet("reward.reward_manager.source", ("register", None), "a reward manager of your own is not supported yet",
           "use your own function (reward.custom_reward_function.path)"),
    NotYet("reward.*sandbox_fusion.url", (None, ""), "scoring by another service is not supported yet"),
    NotYet("algorithm.rollout_is", (False, None), "an older spelling",
           "set algorithm.rollout_correction.rollout_is=token (or sequence)"),
    NotYet("rollout.multi_turn.enable", (False, None), "multi-turn rollout is not supported yet"),
    NotYet("rollout.agent.default_agent_loop", ("single_turn_agent", None), "agent loops are not supported yet"),
    NotYet("rollout.agent.agent_loop_config_path", (None, ""), "agent loops are not supported yet"),
    NotYet("rollout.skip_rollout", (False, None), "reading responses from a file is not supported"),
    NotYet("rollout.over_sample_rate", (0, 0.0, None), "sampling more than is trained is not supported yet"),
    NotYet("rollout.dtype", _COMPUTE_TYPES, "float16 is chosen elsewhere", _DTYPE_FIX),
    NotYet("*.fsdp_config.*dtype", _COMPUTE_TYPES, "float16 is chosen elsewhere", _DTYPE_FIX),
    NotYet("rollout.do_sample", (True, None), "training always samples: greedy responses of a group are all the same"),
    NotYet("rollout.repetition_penalty", (1, 1.0, None), _LAW, _LAW_FIX),
    *(NotYet(f"rollout.{name}", (0, 0.0, None), _LAW, _LAW_FIX)
      for name in ("presence_penalty", "frequency_penalty", "min_p", "min_tokens", "min_new_tokens")),
    NotYet("rollout.logit_bias.*", (None, {}), _LAW, _LAW_FIX),
    NotYet("async_training.*", (), "asynchronous training is not supported yet"),
    NotYet("trainer.val_only", (False, None), "validation without training is not supported yet"),
    NotYet("data.datagen.path", (None,), "generating data while training is not supported yet"),
    NotYet("actor.router_replay.mode", ("disabled", None), "router replay is not supported yet"),
)  # fmt: skip


def _fits(key: str, pattern: str) -> bool:
    # "x.*" also stands for x itself, given whole (x: {} or x: null).
    return fnmatchcase(key, pattern) or (pattern.endswith(".*") and fnmatchcase(key, pattern[:-2]))


def no_meaning(key: str) -> NoMeaning | None:
    """The row of the first table that covers a key."""
    return next((row for row in NO_MEANING if any(_fits(key, pattern) for pattern in row.patterns)), None)


def not_yet(key: str) -> NotYet | None:
    """The row of the second table that covers a key."""
    return next((row for row in NOT_YET if _fits(key, row.pattern)), None)


def is_harmless(row: NotYet, value: object) -> bool:
    """Whether a value asks for nothing; words are compared without case, so that "False" and "null" count."""
    words = {str(harmless).lower() for harmless in row.harmless} | ({"null"} if None in row.harmless else set())
    return str(value).lower() in words


def folded(keys: Iterable[str]) -> list[str]:
    """Keys without meaning in few words: a family by its name and number, keys of one section in braces."""
    families: dict[str, list[str]] = {}
    for key in keys:
        families.setdefault(_family(key), []).append(key)
    alone: dict[str, list[str]] = {}
    named = []
    for family, members in families.items():
        if family and len(members) > 1:
            named.append(f"{family}.* ({len(members)} keys)")
            continue
        for key in members:
            section, _, name = key.rpartition(".")
            alone.setdefault(section, []).append(name)
    return named + [
        (f"{section}.{{{', '.join(names)}}}" if len(names) > 1 else f"{section}.{names[0]}").lstrip(".")
        for section, names in alone.items()
    ]


def _family(key: str) -> str:
    """The shortest name ``x`` with a row for ``x.*`` that ``key`` lies in, such as ``actor.megatron``; else empty."""
    parts = key.split(".")
    names = [".".join(parts[:end]) for end in range(1, len(parts))]
    families = [pattern for pattern in _patterns() if pattern.endswith(".*")]
    return next((name for name in names if any(fnmatchcase(name, pattern[:-2]) for pattern in families)), "")


@cache
def _patterns() -> tuple[str, ...]:
    return (*(row.pattern for row in NOT_YET), *(pattern for row in NO_MEANING for pattern in row.patterns))


@cache
def exact_names() -> frozenset[str]:
    """The keys of both tables that stand there in full."""
    return frozenset(pattern for pattern in _patterns() if "*" not in pattern)


def foreign_keys(section: str) -> list[tuple[str, str]]:
    """The rows of both tables that lie in a section: pattern, and what is said about it."""
    rows = [(row.pattern, f"not built: {row.what}") for row in NOT_YET]
    rows += [(pattern, row.reason) for row in NO_MEANING for pattern in row.patterns]
    return [(pattern, said) for pattern, said in rows if pattern.startswith(section + ".")]


@cache
def foreign_sections() -> frozenset[str]:
    """Names that hold other keys only in these tables, such as ``algorithm.filter_groups``."""
    found: set[str] = set()
    for pattern in _patterns():
        parts = pattern.split(".")
        found.update(".".join(parts[:end]) for end in range(1, len(parts)))
    return frozenset(name for name in found if "*" not in name)
