"""A PPO run whose critic, reference and reward model have processes of their own: the same run, parts of it at once.

On its way the critic's process is killed, so that the run restarts from its last checkpoint by itself.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForSequenceClassification
from verl_process import PPO, checkpoint_bytes, computed, metric_lines, reached, train, verl, verl_started

from verl.run_dir import RunDir

STEPS = 6
POOLS = (
    "cluster.backend=ray",
    *(f"cluster.pools.{role}.processes=1" for role in ("critic", "reference", "reward")),
    *(f"cluster.placement.{role}={role}" for role in ("critic", "reference", "reward")),
)


@pytest.fixture(scope="module")
def judge(tmp_path_factory: pytest.TempPathFactory, tiny_model_dir: Path) -> Path:
    """A reward model of random taste."""
    folder = tmp_path_factory.mktemp("judge") / "model"
    shutil.copytree(tiny_model_dir, folder)
    torch.manual_seed(3)
    AutoModelForSequenceClassification.from_pretrained(tiny_model_dir, num_labels=1).save_pretrained(folder)
    return folder


def test_roles_in_pools_of_their_own_make_the_same_run_also_after_a_death(tmp_path: Path, judge: Path) -> None:
    common = (
        f"reward.model.path={judge}",
        f"trainer.total_training_steps={STEPS}",
        "trainer.save_freq=2",
        "trainer.test_freq=-1",
        "data.val_files=[]",
    )
    one, apart = tmp_path / "one", tmp_path / "apart"
    done = verl(*train(PPO, one, *common), log=tmp_path / "log_one")
    assert done.code == 0, done.err
    with verl_started(*train(PPO, apart, *common, *POOLS), log=tmp_path / "log_apart") as command:
        command.wait_until(reached(apart, 3))
        workers = {pid: Path(f"/proc/{pid}/cmdline").read_text() for pid in command.running()}
        mine = [pid for pid, words in workers.items() if words.startswith("ray::Worker")]
        assert len(mine) == 4
        os.kill(mine[2], signal.SIGKILL)
        done = command.wait(120)
        command.wait_for_nothing_left()
    assert done.code == 0, done.err
    assert "critic: critic: 1 process of 1 thread" in done.out and "starting again from the last checkpoint" in done.out
    (event,) = [event for event in RunDir(apart).read_events() if event.kind == "restarted"]
    assert " died during " in event.detail and event.detail.endswith("; restart 1 of 1")
    assert metric_lines(apart)[-1]["training/restarts"] == 1 and metric_lines(one)[-1]["training/restarts"] == 0

    def results(folder: Path) -> list[dict[str, object]]:
        return [{k: v for k, v in line.items() if k != "training/restarts"} for line in computed(folder)]

    assert [line["step"] for line in results(one)] == list(range(1, STEPS + 1))
    assert results(one) == results(apart)
    assert checkpoint_bytes(one, STEPS) == checkpoint_bytes(apart, STEPS)

    lines = [json.loads(line) for line in (apart / "timeline.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == list(range(1, STEPS + 1))
    assert {name for line in lines for name in line["workers"]} == {"main_0", "critic_0", "reference_0", "reward_0"}
    assert {name for name, _, _ in lines[-1]["workers"]["critic_0"]} == {"values", "update_critic"}
    assert sum(at_once(line["parts"], "ref", "values") for line in lines) >= STEPS / 2
    assert sum(at_once(line["parts"], "update_critic", "update_actor") for line in lines) >= STEPS / 2
    lines = [json.loads(line) for line in (one / "timeline.jsonl").read_text().splitlines()]
    assert not any(at_once(line["parts"], "update_critic", "update_actor") for line in lines)


def at_once(parts: list[tuple[str, float, float]], one: str, other: str) -> bool:
    """Whether two parts of a step overlap."""
    times = {name: (began, ended) for name, began, ended in parts}
    return max(times[one][0], times[other][0]) < min(times[one][1], times[other][1])
