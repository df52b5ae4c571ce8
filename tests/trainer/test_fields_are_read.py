"""B150: runs that between them read every field of the schema, outside the checks of the configuration itself."""

from __future__ import annotations

import io
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel
from rich.console import Console
from stage_cases import tiny_config, write_rows

from verl.config import Config
from verl.config.base import Section
from verl.config.schema_reward import SandboxConfig
from verl.trainer.run import train

# What these runs have no part of. Tests of their own show that each acts.
ELSEWHERE = {
    "actor.policy_loss.name",  # files of the user's own
    "algorithm.custom_estimator.name",
    "algorithm.custom_estimator.critic",
    "critic.model.trust_remote_code",  # models of their own: test_trusted_code.py
    "reward.model.trust_remote_code",
    "cluster.address",  # Ray
    "cluster.start_timeout",
    "cluster.collective_timeout",  # several ranks
    "cluster.dashboard",
    "trainer.max_restarts",
    "profiler.roles",  # where a step is profiled: test_profiling.py, test_profiled_run.py
    "profiler.steps",
    "profiler.memory",
    "actor.strategy",
    "rollout.partial",  # rollout workers of their own: test_rollout_pool.py
    "rollout.weight_sync",
    "rollout.compress_results",
    "rollout.worker_timeout",
    "rollout.response_timeout",
    "trainer.staleness_unit",  # async
    "trainer.project_name",  # noted in config.yaml and in the report
    "trainer.resume_from_path",
    "actor.optim.on_nonfinite",  # read when a gradient is not finite
    "critic.optim.on_nonfinite",
    "reward.model.weight",  # where there is a reward model: test_reward_model_run.py, test_reward_model.py
    "reward.model.max_length",
    "reward.model.truncation",
    "reward.model.max_token_len_per_gpu",
    "reward.model.param_offload",
    *(  # where there is a judge: test_judge.py
        f"reward.judge.{name}"
        for name in ("model", "prompt", "pattern", "weight", "api_key_env", "max_concurrency", "requests_per_minute")
    ),
    *(f"reward.sandbox.{name}" for name in SandboxConfig.model_fields),  # where programs are run: test_code.py
    *(f"reward.judge.{name}" for name in ("timeout", "retries", "max_tokens")),
}
ADAPTIVE = {"type": "adaptive", "target": 0.1}
RUNS: list[dict[str, Any]] = [
    {
        "algorithm": {"adv_estimator": "gae", "use_kl_in_reward": True, "kl_ctrl": {"type": "adaptive"}},
        "actor": {
            "use_kl_loss": True,
            "entropy_coeff": 0.01,
            "clip_ratio_schedule": ADAPTIVE,
            "entropy_coeff_schedule": ADAPTIVE,
            "kl_loss_coef_schedule": ADAPTIVE,
            "optim": {"lr_scheduler_type": "wsd"},
        },
        "critic": {"optim": {"lr_scheduler_type": "wsd"}},
        "model": {"dtype": "float16", "fp16": {"initial_scale_power": 4}},
        "trainer": {"total_training_steps": None},
        "reward": {"num_workers": 1},
    },
    {
        "algorithm": {
            "rollout_correction": {"rollout_is": "token", "rollout_rs": "token_k1", "rollout_rs_threshold": 2.0},
            "filter_groups": {"enable": True, "max_num_gen_batches": 50},
        },
        "reward": {
            "overlong_buffer": {"enable": True, "len": 2},
            "length_normalization": {"alpha": 0.1},
            "length_penalty": 0.1,
            "scaling": "batch",
            "clip": 3.0,
        },
        "actor": {"policy_loss": {"loss_mode": "clip_cov"}},
        "data": {"sampler": {"source_weights": {"tiny": 1}}},
    },
    {
        "algorithm": {"adv_estimator": "gdpo", "gdpo_reward_keys": ["score"]},
        "actor": {"policy_loss": {"loss_mode": "kl_cov"}},
        "trainer": {"n_gpus_per_node": 0, "device": "auto", "default_local_dir": None},
        "rollout": {"val_kwargs": {"temperature": 1.0}, "response_length": {"mode": "adaptive"}},
    },
    {
        "algorithm": {"rollout_correction": {"bypass_mode": True}},
        "actor": {"policy_loss": {"loss_mode": "sapo"}},
        "reward": {"custom_reward_function": {"path": None}, "rule": "exact_match"},
    },
]


def fields(section: type[BaseModel], prefix: str = "") -> Iterator[tuple[str, type[BaseModel], str]]:
    """Key, class and name of every field."""
    for name, field in section.model_fields.items():
        inner = field.annotation
        if isinstance(inner, type) and issubclass(inner, BaseModel):
            yield from fields(inner, f"{prefix}{name}.")
        else:
            yield prefix + name, section, name


def test_b150_every_field_is_read(tmp_path: Path, tiny_model_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read: set[tuple[type, str]] = set()
    plain = Section.__getattribute__

    def noted(self: Section, name: str) -> Any:
        read.add((type(self), name))
        return plain(self, name)

    monkeypatch.chdir(tmp_path)
    for number, settings in enumerate(RUNS):
        folder = tmp_path / str(number)
        folder.mkdir()
        common: dict[str, Any] = {
            "data": {"val_files": str(write_rows(folder / "val.jsonl", 2))},
            "trainer": {"total_training_steps": 2, "save_freq": 1, "test_freq": 1},
        }
        config = tiny_config(folder, tiny_model_dir, common, settings)
        with monkeypatch.context() as patched:  # after the configuration was checked
            patched.setattr(Section, "__getattribute__", noted)
            train(config, Console(file=io.StringIO()))
    unread = {key for key, section, name in fields(Config) if (section, name) not in read}
    assert (unread - ELSEWHERE, ELSEWHERE - unread) == (set(), set())
