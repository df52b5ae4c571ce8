"""The files of examples/extending, which docs/extending.md explains, train together."""

from __future__ import annotations

from pathlib import Path

import pytest

from verl import Trainer, load_config
from verl.run_dir import RunDir
from verl.tracking.names import read_metrics

ROOT = Path(__file__).parents[2]


def test_loss_estimator_reward_tracker_and_engine(
    tmp_path: Path, tiny_model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    run = tmp_path / "run"
    settings = [f"model.path={tiny_model_dir}", f"trainer.default_local_dir={run}", "trainer.device=cpu"]
    Trainer(load_config("examples/extending/grpo.yaml", settings)).fit()

    steps = read_metrics(RunDir(run))[0]
    assert [step["step"] for step in steps] == [1, 2]
    assert all("actor/truncated" in step for step in steps)  # the loss reports it
    assert all(0 < step["critic/score/mean"] <= 1 for step in steps)  # the reward is a share
    assert any(step["actor/grad_norm"] > 0 for step in steps)
    # (r - m) / (1 + s) of scores within [0, 1] stays within (-1, 1); GRPO's own reach 1.5 in groups of four.
    assert all(-1 < step["critic/advantages/min"] < 0 < step["critic/advantages/max"] < 1 for step in steps)
    lines = (run / "score.csv").read_text().splitlines()
    # The engine recomputes what the trainer computes, and claims no parity.
    assert all(step["training/rollout_probs_diff_max"] < 1e-4 for step in steps)
    files = {Path(event.subject).name for event in RunDir(run).read_events() if event.kind == "user_code"}
    assert files >= {"engine.py", "estimator.py", "loss.py", "reward.py", "tracker.py"}
    assert lines == ["step,score"] + [f"{step['step']},{step['critic/score/mean']}" for step in steps]
