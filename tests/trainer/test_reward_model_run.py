"""PPO with all four models on the tiny one: actor, critic, reference, and a reward model that a run trained."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from stage_cases import tiny_config

from verl.config import RewardModelTrainingConfig, load_config, load_supervised
from verl.errors import ConfigError, ModelError
from verl.run_dir import RunDir
from verl.tracking.names import read_metrics
from verl.trainer.run import train
from verl.trainer.supervised import train_supervised

QUIET = Console(file=io.StringIO())


@pytest.fixture(scope="module")
def judge(tmp_path_factory: pytest.TempPathFactory, tiny_model_dir: Path) -> Path:
    """The run of a reward model that prefers vowels."""
    folder = tmp_path_factory.mktemp("judge")
    good, bad = ("aeiou", "eaoui", "ooaei", "iueoa"), ("bcdfg", "kzxtp", "\x01\x90rs", "#%QWx")
    rows = [
        {"prompt": f"say {word}", "chosen": chosen, "rejected": rejected}
        for word in ("stone", "river", "cloud")
        for chosen in good
        for rejected in bad
    ]
    (folder / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    settings = {
        "data.train_files": str(folder / "pairs.jsonl"),
        "data.train_batch_size": 16,
        "model.path": str(tiny_model_dir),
        "model.dtype": "float32",
        "optim.lr": 3e-3,
        "trainer.total_epochs": 4,
        "trainer.save_freq": 100,
        "trainer.default_local_dir": str(folder / "run"),
        "trainer.device": "cpu",
    }
    train_supervised(load_supervised(RewardModelTrainingConfig, None, settings)[0], QUIET)
    return folder / "run"


def test_ppo_with_four_models_raises_the_reward(judge: Path, tmp_path: Path, tiny_model_dir: Path) -> None:
    settings: dict[str, Any] = {
        "reward": {"custom_reward_function": {"path": None}, "model": {"path": str(judge)}},
        "algorithm": {"adv_estimator": "gae", "use_kl_in_reward": True, "lam": 0.95},
        "critic": {"model": {"path": str(judge)}, "optim": {"lr": 1e-3}},
        "data": {"train_batch_size": 8},
        "actor": {"ppo_mini_batch_size": 4, "optim": {"lr": 5e-3}},
        "rollout": {"n": 8},
        "trainer": {"total_training_steps": 24, "save_freq": 24},
    }
    config = tiny_config(tmp_path, tiny_model_dir, settings)
    train(config, QUIET)
    steps = [line for line in read_metrics(RunDir(tmp_path / "run"))[0] if "critic/score/mean" in line]
    rewards = [line["critic/score/mean"] for line in steps]
    assert sum(rewards[-4:]) / 4 > sum(rewards[:4]) / 4 + 0.4
    assert all(line["reward/scored"] == 64 for line in steps)


def test_a_model_and_a_rule_add_up_and_are_logged_apart(judge: Path, tmp_path: Path, tiny_model_dir: Path) -> None:
    function = str(tmp_path / "reward.py")  # how many different characters
    settings: dict[str, Any] = {
        "reward": {
            "custom_reward_function": {"path": None},
            "functions": {"variety": {"path": function, "weight": 0.5}},
            "model": {"path": str(judge), "weight": 2.0},
        },
        "trainer": {"total_training_steps": 1},
    }
    train(tiny_config(tmp_path, tiny_model_dir, settings), QUIET)
    rows = [json.loads(line) for line in RunDir(tmp_path / "run").samples(1).read_text().splitlines()]
    assert rows
    for row in rows:
        parts = row["extras"]
        assert row["score"] == pytest.approx(0.5 * parts["variety"] + 2.0 * parts["model"], rel=1e-5)
        assert parts["variety"] == len(set(row["response"]))


def test_what_is_no_reward_model_is_refused_at_the_start(tmp_path: Path, tiny_model_dir: Path) -> None:
    settings = {"reward": {"custom_reward_function": {"path": None}, "model": {"path": str(tiny_model_dir)}}}
    with pytest.raises(ModelError, match=r"reward\.model\.path: not a sequence-classification model"):
        train(tiny_config(tmp_path, tiny_model_dir, settings), QUIET)


def test_verls_switch_says_where_the_model_is_named() -> None:
    with pytest.raises(ConfigError, match=r"reward\.model\.path turns a reward model on"):
        load_config({"data.train_files": "x", "model.path": "y"}, ["reward_model.enable=true"])
