"""What differs between the modes, and what does not."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from stage_cases import tiny_config
from verl_process import checkpoint_bytes, computed

from verl.config import load_config
from verl.errors import CheckpointError
from verl.run_dir import RunDir
from verl.trainer.run import train

STEPS = 4
SHORT_BATCHES = {"data": {"train_batch_size": 3, "drop_last": False}, "actor": {"ppo_mini_batch_size": 3}}


def run_in(folder: Path, model: Path, name: str, trainer: dict[str, Any], lr: float = 1e-2, **settings: Any) -> Path:
    from rich.console import Console

    base = {"default_local_dir": str(folder / name), "total_training_steps": STEPS}
    config = tiny_config(
        folder,
        model,
        {"trainer": base | trainer, "actor": {"optim": {"lr": lr}}, "cluster": {"threads": 1}},
        settings,
    )
    train(config, Console(quiet=True))
    return folder / name


def sample_files(run: Path) -> list[str]:
    return [path.read_text() for path in sorted(RunDir(run).samples_dir.iterdir())]


def test_one_step_off_trains_what_the_weights_before_sampled(tmp_path: Path, tiny_model_dir: Path) -> None:
    """The same prompts as sync; with weights that stand still the same samples, with moving ones other ones."""
    sync = run_in(tmp_path, tiny_model_dir, "sync", {}, lr=0.0)
    still = run_in(tmp_path, tiny_model_dir, "still", {"mode": "one_step_off"}, lr=0.0)
    scores = [[line["critic/score/mean"] for line in computed(run)] for run in (sync, still)]
    assert scores[0] == scores[1] and len(set(scores[0])) > 1
    moving = run_in(tmp_path, tiny_model_dir, "moving", {"mode": "one_step_off"})
    lines = computed(moving)
    assert [line["training/staleness/mean"] for line in lines] == [0, 1, 1, 1]
    assert [line["training/staleness/max"] for line in computed(sync)] == [0, 0, 0, 0]
    # Old log-probs are the trainer's own, the engine's difference from them is weighed.
    assert lines[0]["training/rollout_probs_diff_max"] == 0 < lines[1]["training/rollout_probs_diff_max"]
    assert all(line["actor/ppo_kl"] == 0 for line in lines)
    assert lines[0]["rollout_corr/kl"] == 0 != lines[1]["rollout_corr/kl"]


def test_async_without_staleness_is_sync(tmp_path: Path, tiny_model_dir: Path) -> None:
    """Also where the last batch of an epoch is short: 3, 3 and 2 prompts."""
    settings: dict[str, Any] = {"rollout": {"response_length": {"mode": "adaptive"}}, **SHORT_BATCHES}
    sync = run_in(tmp_path, tiny_model_dir, "sync", {"save_freq": STEPS}, **settings)
    found = run_in(
        tmp_path, tiny_model_dir, "async", {"save_freq": STEPS, "mode": "async", "max_staleness": 0}, **settings
    )
    assert sample_files(sync) == sample_files(found)
    shared = computed(sync)[0].keys()
    assert [{k: v for k, v in line.items() if k in shared} for line in computed(found)] == computed(sync)
    one, other = checkpoint_bytes(sync, STEPS), checkpoint_bytes(found, STEPS)
    assert all(one[name] == other[name] for name in one if name != "trainer.json")


@pytest.mark.parametrize("unit", ["sample", "token"])
def test_async_keeps_the_bound_and_trains_every_prompt_once(tmp_path: Path, tiny_model_dir: Path, unit: str) -> None:
    run = run_in(tmp_path, tiny_model_dir, "async", {"mode": "async", "max_staleness": 1, "staleness_unit": unit})
    lines = computed(run)
    assert [line["training/staleness/max"] for line in lines] == [0, 1, 0, 1]
    prompts = [json.loads(row)["uid"] for file in sample_files(run) for row in file.splitlines()]
    assert len(set(prompts)) == 4 * STEPS == len(prompts) / 3


def test_async_goes_on_with_the_prompts_that_were_under_way(tmp_path: Path, tiny_model_dir: Path) -> None:
    """Every one once, every row once an epoch, whose last batch is short."""
    mode = {"mode": "async", "max_staleness": 2, "save_freq": 1, "total_training_steps": 4}
    run_in(tmp_path, tiny_model_dir, "run", mode, **SHORT_BATCHES)
    run = run_in(tmp_path, tiny_model_dir, "run", mode | {"total_training_steps": 6}, **SHORT_BATCHES)
    batches = [{json.loads(row)["uid"] for row in file.splitlines()} for file in sample_files(run)]
    assert [len(batch) for batch in batches] == [3, 3, 2, 3, 3, 2]
    uids = [uid.split(":") for uid in set.union(*batches)]
    assert sorted(int(draw) for _, draw, _, _ in uids) == list(range(16))
    assert sorted(int(row) for *_, row in uids) == sorted([*range(8), *range(8)])


def test_a_mode_may_change_on_resume_unless_samples_would_be_lost(tmp_path: Path, tiny_model_dir: Path) -> None:
    saving = {"save_freq": 1, "total_training_steps": 2, "keep_last": None}
    folder = run_in(tmp_path, tiny_model_dir, "run", saving)
    run_in(tmp_path, tiny_model_dir, "run", saving | {"mode": "async", "total_training_steps": 4})
    prompts = [json.loads(row)["uid"] for file in sample_files(folder) for row in file.splitlines()]
    assert sorted({int(uid.split(":")[1]) for uid in prompts}) == list(range(16))
    back = {"resume_mode": "resume_path", "resume_from_path": str(folder / "checkpoints" / "step_000003")}
    with pytest.raises(CheckpointError, match=r"sampled ahead(.|\n)*then async, now one_step_off"):
        run_in(tmp_path, tiny_model_dir, "run", saving | back | {"mode": "one_step_off", "total_training_steps": 4})


@pytest.mark.parametrize(
    ("overrides", "found"),
    [
        ([], None),
        (["trainer.mode=one_step_off"], "token"),
        (["trainer.mode=async"], "token"),
        (["trainer.mode=async", "trainer.max_staleness=0"], None),
        (["trainer.mode=async", "algorithm.rollout_correction.rollout_is=null"], None),
        (["trainer.mode=async", "algorithm.rollout_correction.rollout_is=sequence"], "sequence"),
    ],
)
def test_stale_responses_are_weighed_unless_the_user_says_otherwise(overrides: list[str], found: str | None) -> None:
    base = ["data.train_files=[train.parquet]", "model.path=tiny"]
    config = load_config(None, [*base, *overrides]).config
    assert config.algorithm.rollout_correction.rollout_is == found
    assert config.off_policy == (overrides != [] and "trainer.max_staleness=0" not in overrides)
