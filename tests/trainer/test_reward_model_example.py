"""The commands of docs/reward-models.md, on the tiny model: pairs from a rule, a reward model, PPO with four models."""

from __future__ import annotations

from pathlib import Path

import pytest

from verl.cli import main
from verl.run_dir import RunDir
from verl.tracking.names import read_metrics

FOLDER = Path(__file__).parents[2] / "examples" / "reward_model"


def test_the_example(tmp_path: Path, tiny_model_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "examples").mkdir()
    (tmp_path / "examples" / "reward_model").symlink_to(FOLDER)
    example, model = "examples/reward_model", str(tiny_model_dir)
    common = [f"model.path={model}", "trainer.device=cpu", "cluster.threads=2"]
    for split, name in (("train", "cheerful_pairs"), ("val", "cheerful_pairs_val")):
        asked = [f"{example}/{split}.jsonl", "--model", model, "--reward", f"{example}/rule.py", "-n", "4"]
        limits = ["--max-response-length", "24", "--limit", "20"]
        assert main(["data", "preferences", *asked, *limits, "--out", f"data/{name}.jsonl"]) == 0
    assert main(["reward-model", "train", f"{example}/reward_model.yaml", *common, "optim.lr=3e-3"]) == 0
    judged = read_metrics(RunDir("runs/cheerful-judge"))[0]
    assert judged[-1]["train/loss"] < judged[1]["train/loss"]
    short = ["trainer.total_training_steps=1", "trainer.save_freq=1", "trainer.val_before_train=false"]
    assert main(["train", f"{example}/ppo.yaml", *common, *short, "cluster.backend=inline"]) == 0
    steps = read_metrics(RunDir("runs/cheerful-ppo"))[0]
    assert steps[-1]["reward/scored"] == 32 and steps[-1]["critic/vf_loss"] > 0
    data = f"{example}/val.jsonl"
    assert main(["eval", "runs/cheerful-ppo", data, "--limit", "2", "--max-response-length", "8", "--plain"]) == 0
    assert main(["export", "runs/cheerful-ppo", "--to", "model"]) == 0
    assert main(["generate", "runs/cheerful-judge", "--prompt", "hi"]) == 2  # it gives scores, no text
