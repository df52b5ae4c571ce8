"""A training step with a reward function in each of the three signatures: what it is told is what was sampled."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from rich.console import Console
from stage_cases import tiny_config

from verl.errors import RewardError
from verl.run_dir import RunDir
from verl.tracking.samples import read_samples
from verl.trainer.run import train

TRL = """
def reward(prompts, completions, completion_ids, answer, **columns):
    assert all(type(p) is type(c) is str for p, c in zip(prompts, completions))
    return [float(len(ids)) if a == p else None for p, ids, a in zip(prompts, completion_ids, answer)]
"""
OPENRLHF = """
async def reward(queries, prompts, labels):
    assert prompts == labels
    rewards = [float(len(query) - len(prompt)) for query, prompt in zip(queries, prompts)]
    return {"rewards": rewards, "extra_logs": {"batch": len(queries)}}
"""


@pytest.mark.parametrize("body", [TRL, OPENRLHF], ids=["TRL", "OpenRLHF"])
def test_a_step_with_a_function_for_the_whole_batch(tmp_path: Path, tiny_model_dir: Path, body: str) -> None:
    rows = [{"prompt": f"say {word}", "answer": f"say {word}"} for word in ("one", "two", "three", "four")]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "mine.py").write_text(body)
    reward = {"custom_reward_function": {"path": str(tmp_path / "mine.py"), "name": "reward"}}
    files = {"train_files": str(tmp_path / "rows.jsonl")}
    config = tiny_config(
        tmp_path, tiny_model_dir, {"data": files, "reward": reward, "trainer": {"total_training_steps": 1}}
    )
    train(config, Console(quiet=True))
    samples, _ = read_samples(RunDir(config.run_dir).samples(1))
    assert len(samples) == 12
    for sample in samples:
        expected = sample.response_length if body is TRL else len(sample.response)
        assert sample.score == expected
    if body is OPENRLHF:
        assert {sample.extras["batch"] for sample in samples} == {12}


def test_a_column_that_the_data_lacks_stops_before_anything_starts(tmp_path: Path, tiny_model_dir: Path) -> None:
    (tmp_path / "mine.py").write_text("def reward(completions, level): return level")
    reward = {"custom_reward_function": {"path": str(tmp_path / "mine.py"), "name": "reward"}}
    config = tiny_config(tmp_path, tiny_model_dir, {"reward": reward})
    with pytest.raises(RewardError, match="asks for level, and the data has no such column"):
        train(config, Console(quiet=True))
    assert not config.run_dir.exists()
