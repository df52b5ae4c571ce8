"""Roles with known answers, and configurations of the tiny model, for the tests of stages and loop."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from verl.algorithms.aggregation import Denominators
from verl.algorithms.metric import Metric
from verl.cluster.roles import Roles
from verl.config import Config, build_config
from verl.protocol import DataProto

WORDS = ["stone", "river", "cloud", "apple", "grass", "night", "sugar", "bread"]


def write_rows(path: Path, count: int = 8) -> Path:
    rows = [
        {"data_source": "tiny", "prompt": f"say {WORDS[i % 8]}{i}", "reward_model": {"ground_truth": "a"}}
        for i in range(count)
    ]
    path.write_text("\n".join(map(json.dumps, rows)) + "\n")
    return path


def write_reward(path: Path, body: str) -> Path:
    path.write_text(f"def compute_score(data_source, solution_str, ground_truth, extra_info=None):\n    {body}\n")
    return path


def tiny_config(folder: Path, model: str | Path, *overrides: dict[str, Any]) -> Config:
    """Four prompts of three responses a step on the tiny model, inline; ``overrides`` are merged in one by one."""
    tree: dict[str, Any] = {
        "data": {
            "train_files": str(write_rows(folder / "train.jsonl")),
            "train_batch_size": 4,
            "max_prompt_length": 24,
            "max_response_length": 6,
        },
        "model": {"path": str(model), "dtype": "float32"},
        "actor": {"ppo_mini_batch_size": 4, "optim": {"lr": 1e-3}},
        "rollout": {"n": 3},
        "algorithm": {"adv_estimator": "grpo"},
        "reward": {
            "num_workers": 0,
            "custom_reward_function": {
                "path": str(write_reward(folder / "reward.py", "return len(set(solution_str))"))
            },
        },
        "trainer": {"default_local_dir": str(folder / "run"), "device": "cpu", "val_before_train": False},
        "cluster": {"backend": "inline"},
    }
    for override in overrides:
        tree = merged(tree, override)
    return build_config(tree)


def merged(tree: dict[str, Any], over: dict[str, Any]) -> dict[str, Any]:
    both = dict(tree)
    for key, value in over.items():
        both[key] = merged(both[key], value) if isinstance(value, dict) and isinstance(both.get(key), dict) else value
    return both


def hand_batch(scores: list[float | None], lengths: list[int], n: int, width: int = 4) -> DataProto:
    """Scored rows, ``n`` a prompt; the score stands on the last token. Padding of every float column is NaN.

    Log-probs of the engine are -1, -2, -3, ... along a row.
    """
    rows = len(scores)
    mask = torch.arange(width) < torch.tensor(lengths)[:, None]
    token_scores = torch.full((rows, width), torch.nan)
    for row, (score, length) in enumerate(zip(scores, lengths, strict=True)):
        token_scores[row, :length] = 0.0
        if length:
            token_scores[row, length - 1] = score or 0.0
    scored = torch.tensor([score is not None for score in scores])
    return DataProto.from_dict(
        tensors={
            "prompts": torch.ones(rows, 2, dtype=torch.int64),
            "responses": torch.arange(rows * width).view(rows, width),
            "attention_mask": torch.cat([torch.ones(rows, 2, dtype=torch.int64), mask.long()], 1),
            "response_mask": mask & scored[:, None],
            "rollout_log_probs": torch.where(mask, -torch.arange(1.0, width + 1).expand(rows, width), torch.nan),
            "token_level_scores": token_scores,
            "scored": scored,
        },
        non_tensors={"uid": [f"train:{row // n}:tiny:{row // n}" for row in range(rows)]},
    )


Answer = Callable[[DataProto], DataProto]


def column(name: str, values: Tensor | list[list[float]]) -> Answer:
    return lambda batch: DataProto.from_dict({name: torch.as_tensor(values)})


@dataclass
class StubRole:
    """Answers with a given column and notes its updates."""

    answer: Answer | None = None
    log: list[tuple[str, DataProto, Denominators]] = field(default_factory=list)
    name: str = "actor"
    worker: object = None  # one for all: calls come one after another

    def log_probs(self, batch: DataProto) -> DataProto:
        assert self.answer is not None, f"{self.name} was asked and should not be"
        return self.answer(batch)

    values = log_probs

    def update(self, mini_batch: DataProto, denominators: Denominators) -> dict[str, Metric]:
        self.log.append((self.name, mini_batch, denominators))
        return {f"{self.name}/updates": Metric(1.0, 1.0, "sum")}


def stub_roles(
    policy: Answer | None = None,
    reference: Answer | None = None,
    critic: Answer | None = None,
    *,
    exact: bool = True,
) -> Roles:
    """Roles that share one log of updates, in the order in which they came."""
    actor = StubRole(policy)
    return Roles(
        policy=actor,  # type: ignore[arg-type]
        rollout=None,  # type: ignore[arg-type]
        scorer=None,  # type: ignore[arg-type]
        reference=StubRole(reference, name="reference") if reference else None,  # type: ignore[arg-type]
        critic=StubRole(critic, actor.log, "critic") if critic else None,  # type: ignore[arg-type]
        exact_rollout=exact,
    )


def updates(roles: Roles) -> list[tuple[str, DataProto, Denominators]]:
    return roles.policy.log  # type: ignore[attr-defined, no-any-return]
