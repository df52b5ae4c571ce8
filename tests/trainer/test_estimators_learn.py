"""Each estimator end to end with the vanilla loss: a short run on the tiny model, finite, with a reward that rises."""

from __future__ import annotations

import io
import math
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from stage_cases import tiny_config, write_reward
from verl_process import metric_lines

from verl.algorithms.advantages import ESTIMATORS
from verl.config import Config
from verl.trainer.run import train

STEPS = 12
LEAST_RISE = 0.2  # of the share of vowels, which is 0.02 at the start
REWARD = """vowels = sum(c in 'aeiou' for c in solution_str) / max(len(solution_str), 1)
    return {'score': vowels, 'vowels': vowels, 'length': len(solution_str) / 8}"""

SETTINGS: dict[str, dict[str, Any]] = {
    "gae": {
        "algorithm": {"lam": 0.95, "bootstrap_truncated": True},
        "critic": {"optim": {"lr": 3e-3}, "ppo_max_token_len_per_gpu": 4096},
    },
    # At first the greedy response has no vowel, so that every response looks good: it starts slowly.
    "remax": {"trainer": {"total_training_steps": 24}},
    "gdpo": {"algorithm": {"gdpo_reward_keys": ["vowels", "length"], "gdpo_reward_weights": [1.0, 0.2]}},
}


def config_of(folder: Path, model: Path, estimator: str, *overrides: dict[str, Any]) -> Config:
    reward = write_reward(folder / "vowels.py", REWARD)
    common = {
        "data": {"train_batch_size": 8, "max_response_length": 8},
        "actor": {"ppo_mini_batch_size": 8, "optim": {"lr": 1e-2}},
        "rollout": {"n": 8},
        "algorithm": {"adv_estimator": estimator},
        "reward": {"custom_reward_function": {"path": str(reward)}},
        "trainer": {"total_training_steps": STEPS, "log_val_generations": 0},
        "cluster": {"threads": 1},
    }
    return tiny_config(folder, model, common, SETTINGS.get(estimator, {}), *overrides)


def run(config: Config) -> list[dict[str, Any]]:
    """The lines of its training steps, all of whose numbers must be finite."""
    train(config, Console(file=io.StringIO()))
    lines = [line for line in metric_lines(config.run_dir) if line["step"] > 0]
    assert all(math.isfinite(value) for line in lines for value in line.values() if isinstance(value, int | float))
    return lines


def rise(lines: list[dict[str, Any]]) -> float:
    scores = [line["critic/score/mean"] for line in lines]
    return sum(scores[-3:]) / 3 - sum(scores[:3]) / 3


@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_it_learns(tmp_path: Path, tiny_model_dir: Path, estimator: str) -> None:
    lines = run(config_of(tmp_path, tiny_model_dir, estimator))
    print(estimator, rise(lines), [round(line["critic/score/mean"], 3) for line in lines])
    assert rise(lines) > LEAST_RISE
    assert ("critic/baseline/mean" in lines[0]) == (estimator == "remax")
