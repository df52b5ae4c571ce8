"""Short runs of the real trainer on a tiny model of a few letters, healthy or with a fault put in at a seam."""

from __future__ import annotations

import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from transformers import AutoModelForCausalLM

from verl.config import Config, build_config
from verl.diagnostics.doctor import examine, of_run
from verl.diagnostics.evidence import Finding
from verl.models.tiny import EOS_ID, build_tiny
from verl.run_dir import RunDir
from verl.trainer.run import train

LETTERS = "abcd"
WORDS = ["stone", "river", "cloud", "apple", "grass", "night", "sugar", "bread"]
STEPS, PROMPTS, N, LONGEST = 3, 8, 4, 24


def build_letters(to: Path) -> Path:
    """A tiny Llama that mostly says single letters and spaces, and ends after some eight tokens."""
    build_tiny(to, tie_embeddings=False)
    model = AutoModelForCausalLM.from_pretrained(to, dtype=torch.float32)
    with torch.no_grad():
        # Every token's embedding shares one large coordinate, which the head reads as a bias.
        model.model.embed_tokens.weight[:, 0] = 1.0
        model.lm_head.weight[:, 0] = 0.0
        for token, bias in ((ord(" "), 0.95), (EOS_ID, 0.85), *((ord(letter), 0.75) for letter in LETTERS)):
            model.lm_head.weight[token, 0] = bias
    model.save_pretrained(to)
    return to


def row(i: int, **changes: Any) -> dict[str, Any]:
    return {"data_source": "letters", "prompt": f"{WORDS[i % 8]} {i}", "answer": LETTERS[i % 4]} | changes


def right(data_source: str, solution_str: str, ground_truth: str, extra_info: Any = None) -> float:
    """1 where the letter stands alone in the response."""
    return float(ground_truth in solution_str.split())


def config_of(folder: Path, model: Path, rows: list[dict[str, Any]] | None = None, **settings: Any) -> Config:
    """``settings`` by dotted keys, with ``__`` for the dots."""
    data = folder / "train.jsonl"
    data.write_text("".join(json.dumps(line) + "\n" for line in rows or map(row, range(16))))
    tree: dict[str, Any] = {
        "data.train_files": str(data),
        "data.train_batch_size": PROMPTS,
        "data.max_prompt_length": 16,
        "data.max_response_length": LONGEST,
        "model.path": str(model),
        "model.dtype": "float32",
        "actor.ppo_mini_batch_size": PROMPTS,
        "actor.optim.lr": 1e-3,
        "rollout.n": N,
        "algorithm.adv_estimator": "grpo",
        "reward.num_workers": 0,
        "trainer.default_local_dir": str(folder / "run"),
        "trainer.device": "cpu",
        "trainer.total_epochs": 100,
        "trainer.total_training_steps": STEPS,
        "cluster.backend": "inline",
        "cluster.threads": 1,
    } | {key.replace("__", "."): value for key, value in settings.items()}
    nested: dict[str, Any] = {}
    for key, value in tree.items():
        *parents, name = key.split(".")
        place = nested
        for parent in parents:
            place = place.setdefault(parent, {})
        place[name] = value
    return build_config(nested)


def trained(config: Config, reward: Callable[..., Any] = right) -> RunDir:
    train(config, Console(file=io.StringIO()), reward)
    return RunDir(config.run_dir)


def found(run_dir: RunDir) -> dict[str, Finding]:
    return {finding.name: finding for finding in examine(of_run(run_dir))}
