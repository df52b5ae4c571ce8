"""Launch lines that people have: the keys that published scripts set, and three whole scripts."""

from __future__ import annotations

from pathlib import Path

import pytest

from verl.config import load_config
from verl.config.aliases import GLOBAL_MICRO_BATCH, canonical
from verl.config.keys import free_dict_of, leaves
from verl.config.translate import no_meaning, not_yet
from verl.errors import ConfigError

DATA = Path(__file__).with_name("data")


def counts() -> dict[str, int]:
    lines = (DATA / "verl_keys.txt").read_text().splitlines()
    pairs = (line.split() for line in lines if not line.startswith("#"))
    return {key: int(count) for count, key in pairs}


def words(script: str) -> list[str]:
    lines = (DATA / f"launch_{script}.txt").read_text().splitlines()
    return [line for line in lines if not line.startswith("#")]


def fate(key: str) -> str:
    name = canonical(key)
    if name in leaves() or free_dict_of(name) or name in GLOBAL_MICRO_BATCH:
        return "honoured"
    return "named" if no_meaning(name) or not_yet(name) else "unknown"


def test_the_keys_of_published_scripts() -> None:
    """All of them (the aim is 95% by weight); about two thirds are honoured, the rest is about other machinery."""
    keys = counts()
    assert len(keys) == 130 and sum(keys.values()) == 5918
    assert [key for key in keys if fate(key) == "unknown"] == []
    honoured = sum(count for key, count in keys.items() if fate(key) == "honoured")
    assert honoured / sum(keys.values()) > 0.65


# What a script gets out of the words that matter.
EXPECTED = {
    "grpo_fsdp_vllm": {
        "algorithm.adv_estimator": "grpo",
        "data.train_files": ["/data/gsm8k/train.parquet"],
        "model.path": "Qwen/Qwen2.5-7B-Instruct",
        "actor.optim.weight_decay": 0.1,
        "actor.ppo_max_token_len_per_gpu": 24576,
        "actor.use_kl_loss": True,
        "rollout.name": "embedded",
        "rollout.n": 5,
        "trainer.logger": ["console", "wandb"],
        "trainer.n_gpus_per_node": 8,
    },
    "ppo_megatron": {
        "algorithm.adv_estimator": "gae",
        "algorithm.lam": 0.95,
        "data.train_files": ["/data/gsm8k/train.parquet", "/data/math/train.parquet"],
        "actor.grad_clip": 1.0,
        "actor.optim.lr_scheduler_type": "constant",
        "critic.model.path": "deepseek-ai/deepseek-llm-7b-chat",
        "critic.ppo_micro_batch_size_per_gpu": 4,
        "trainer.total_training_steps": 100,
    },
    "dapo": {
        "algorithm.adv_estimator": "grpo",
        "algorithm.filter_groups.enable": True,
        "algorithm.filter_groups.metric": "acc",
        "algorithm.filter_groups.max_num_gen_batches": 10,
        "actor.clip_ratio_high": 0.28,
        "rollout.val_kwargs.top_p": 0.7,
        "reward.overlong_buffer.enable": True,
        "reward.overlong_buffer.len": 4096,
        "reward.overlong_buffer.max_resp_len": 20480,
        "reward.custom_reward_function.path": "/code/math_reward.py",
        "trainer.nnodes": 16,
    },
}


@pytest.mark.parametrize("script", EXPECTED)
def test_a_script_loads_as_it_is(script: str) -> None:
    loaded = load_config(None, words(script))
    for key, value in EXPECTED[script].items():
        place: object = loaded.config
        for name in key.split("."):
            place = getattr(place, name)
        assert place == value, key


@pytest.mark.parametrize("script", EXPECTED)
def test_every_word_of_a_script_is_honoured_or_named_and_the_notices_are_few(script: str) -> None:
    loaded = load_config(None, words(script))
    lines = "\n".join(loaded.notices).splitlines()
    assert len(lines) <= 13 and len("\n".join(lines)) < 2500
    head = loaded.notices[0].splitlines()[0]
    named = [key for key in (word.lstrip("+").partition("=")[0] for word in words(script)) if fate(key) == "named"]
    assert head.startswith(f"{len(named)} keys have no meaning here")
    for key in named:
        short = key.removeprefix("actor_rollout_ref.")
        parents = [short.rpartition(".")[0]] + [short[:end] for end in range(len(short)) if short[end] == "."]
        last = short.rpartition(".")[2]
        assert short in head + loaded.notices[0] or any(
            f"{parent}.* (" in loaded.notices[0] or (f"{parent}.{{" in loaded.notices[0] and last in loaded.notices[0])
            for parent in parents
        ), key


def test_families_are_one_line_with_their_number() -> None:
    notices = load_config(None, words("ppo_megatron")).notices[0]
    assert "actor.megatron.* (15 keys), ref.megatron.* (3 keys), critic.megatron.* (2 keys)" in notices
    assert "tensor_model_parallel_size, gpu_memory_utilization}" in notices


@pytest.mark.parametrize(
    "override",
    [
        "actor_rollout_ref.rollout.agent.default_agent_loop=tool_agent",
        "actor_rollout_ref.rollout.multi_turn.enable=True",
        "actor_rollout_ref.rollout.dtype=float16",
        "actor_rollout_ref.actor.fsdp_config.dtype=float16",
        "actor_rollout_ref.actor.fsdp_config.mixed_precision.param_dtype=fp16",
        "actor_rollout_ref.actor.tis_imp_ratio_cap=2",
        "actor_rollout_ref.model.lora_rank=32",
        "reward_model.sandbox_fusion.url=http://localhost:1",
        "reward_model.enable=True",
        "trainer.val_only=True",
        "algorithm.use_pf_ppo=True",
        "actor_rollout_ref.rollout.top_p=0.9",
        "actor_rollout_ref.rollout.do_sample=False",
    ],
)
def test_a_value_that_asks_for_something_else_is_refused_with_a_fix(override: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(None, [*words("grpo_fsdp_vllm"), override])
    assert override.partition("=")[0].removeprefix("actor_rollout_ref.") in caught.value.what
    assert caught.value.fix


@pytest.mark.parametrize(
    ("given", "kept"),
    [
        (["console", "clearml"], ["console"]),
        (["clearml"], ["console"]),
        ("clearml", ["console"]),
        (["console", "vemlp_wandb", "tensorboard"], ["console", "tensorboard"]),
    ],
)
def test_loggers_of_other_systems_are_set_aside_with_one_notice(given: object, kept: list[str]) -> None:
    loaded = load_config({"data": {"train_files": "a"}, "model": {"path": "m"}, "trainer": {"logger": given}})
    assert loaded.config.trainer.logger == kept
    (notice,) = loaded.notices
    assert notice.startswith(f"trainer.logger: {'vemlp_wandb' if len(kept) > 1 else 'clearml'} set aside")


REF = [*["data.train_files=a", "model.path=m", "actor.use_kl_loss=true"]]


@pytest.mark.parametrize(
    ("sizes", "limits"),
    [
        ("rows=4", (4, None)),
        ("tokens=2048", (None, 2048)),
        ("rows=4 tokens=2048", (None, 2048)),  # as the actor, which is dynamic here
        ("rows=4 tokens=2048 dynamic=false", (4, None)),
        ("rows=4 tokens=2048 dynamic=true", (None, 2048)),
        ("rows=4 dynamic=true", (None, 16384)),  # the actor's tokens
        ("tokens=2048 dynamic=false actor=3", (3, None)),  # the actor's responses
        ("rows=4 tokens=2048 actor=3", (4, None)),
        ("actor=3", (3, None)),
        ("", (None, 16384)),
    ],
)
def test_one_forward_pass_of_the_reference(sizes: str, limits: tuple[int | None, int | None]) -> None:
    names = {
        "rows": "ref.log_prob_micro_batch_size_per_gpu",
        "tokens": "ref.log_prob_max_token_len_per_gpu",
        "dynamic": "ref.log_prob_use_dynamic_bsz",
        "actor": "actor.ppo_micro_batch_size_per_gpu",
    }
    given = [f"{names[name]}={value}" for name, _, value in (size.partition("=") for size in sizes.split())]
    if "actor=3" in sizes:
        given += ["data.train_batch_size=3", "actor.ppo_mini_batch_size=3"]
    assert load_config(None, [*REF, *given]).config.reference_batch() == limits


def test_a_reference_without_any_size() -> None:
    with pytest.raises(ConfigError, match="ref.log_prob_use_dynamic_bsz=false needs a size"):
        load_config(None, [*REF, "ref.log_prob_use_dynamic_bsz=false"])


def test_dynamic_batching_sets_a_micro_batch_size_aside() -> None:
    """Scripts give both; as in verl the tokens decide."""
    sizes = ["data.train_files=a", "model.path=m", "actor.ppo_micro_batch_size_per_gpu=7"]
    loaded = load_config(None, [*sizes, "actor.use_dynamic_bsz=true"])
    plan = loaded.config.actor_batch()
    assert (plan.micro_batch_rows, plan.max_tokens) == (None, 16384)
    assert [notice.partition(":")[0] for notice in loaded.notices] == [
        "actor.ppo_micro_batch_size_per_gpu=7 is set aside"
    ]
