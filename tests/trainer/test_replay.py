"""A kept step trained on again: the same to the bit, and with other settings what they change."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from stage_cases import tiny_config

from verl.checkpoint.store import CheckpointStore
from verl.cli import main
from verl.config import load_config
from verl.errors import CheckpointError, DataError
from verl.run_dir import RunDir
from verl.trainer.replay import Replayed, replay
from verl.trainer.run import train

KEPT = {"save_freq": 1, "keep_last": None, "dump_steps": [1, 3], "total_training_steps": 3}
PPO = {
    "algorithm": {
        "adv_estimator": "gae",
        "use_kl_in_reward": True,
        "kl_ctrl": {"type": "adaptive", "kl_coef": 0.05, "target_kl": 0.01, "horizon": 50},
    },
    "critic": {"optim": {"lr": 1e-3}},
    "actor": {"ppo_mini_batch_size": 2, "ppo_epochs": 2, "shuffle": True, "optim": {"lr_scheduler_type": "cosine"}},
}
AHEAD = {"trainer": {"mode": "one_step_off"}, "actor": {"use_kl_loss": True}, "model": {"dtype": "bfloat16"}}


@pytest.fixture(scope="module", params=[PPO, AHEAD], ids=["ppo", "ahead"])
def run(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, tiny_model_dir: Path) -> RunDir:
    folder = tmp_path_factory.mktemp("run")
    settings: list[dict[str, Any]] = [request.param, {"trainer": KEPT, "cluster": {"threads": 1}}]
    train(tiny_config(folder, tiny_model_dir, *settings), Console(file=io.StringIO()))
    return RunDir(folder / "run")


def again(run: RunDir, step: int, *settings: str) -> Replayed:
    return replay(load_config(run.path, settings).config, run, step, lambda line: None)


@pytest.mark.parametrize("step", [1, 3])
def test_with_the_same_settings_every_figure_is_the_same(run: RunDir, step: int) -> None:
    before = {path: path.stat().st_mtime_ns for path in run.path.rglob("*")}
    replayed = again(run, step)
    assert not replayed.differing
    assert {"actor/pg_loss", "actor/grad_norm", "critic/score/mean", "actor/lr"} <= replayed.compared.keys()
    assert len(replayed.compared) > 40
    assert {path: path.stat().st_mtime_ns for path in run.path.rglob("*")} == before


def test_with_other_settings_what_they_change_differs(run: RunDir) -> None:
    changed = again(run, 3, "actor.entropy_coeff=0.5", "algorithm.gamma=0.9").differing
    assert "actor/grad_norm" in changed and "critic/score/mean" not in changed and "response_length/mean" not in changed


def test_the_command(run: RunDir, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["replay", str(run.path), "--step", "3"]) == 0
    said = capsys.readouterr().out
    total = said.split(" of ")[1].split()[0]
    assert said.startswith(f"step 3: {total} of {total} metrics are the same to the bit")
    assert main(["replay", str(run.path), "--step", "3", "actor.optim.lr=0.5", "--json"]) == 0
    then, now = json.loads(capsys.readouterr().out)["actor/lr"]
    assert then <= 1e-3 and now > 0.05
    assert main(["replay", str(run.path), "--step", "3", "actor.optim.lrr=0.5"]) == 2
    assert main(["replay", str(run.path), "--step", "3", "rollout.n=1"]) == 2  # another split into mini-batches
    assert "did you mean" in capsys.readouterr().err


def test_what_is_missing_is_named(run: RunDir) -> None:
    with pytest.raises(DataError, match="the batch of step 2 was not kept") as error:
        again(run, 2)
    assert "steps: 1, 3" in str(error.value) and "trainer.dump_steps=[2]" in str(error.value)
    store = CheckpointStore(run.checkpoints)
    place = store.open(2).path
    away = place.rename(place.with_name("away"))
    with pytest.raises(CheckpointError, match="needs the checkpoint of step 2") as missing:
        again(run, 3)
    assert "steps: 1, 3" in str(missing.value)
    away.rename(place)
