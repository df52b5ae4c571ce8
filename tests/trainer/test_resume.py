"""Law 4 in one process: stopped anywhere and started again, a run ends as if it had never stopped."""

from __future__ import annotations

import io
import json
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console
from stage_cases import tiny_config
from verl_process import assert_same_run, computed, steps

from verl.config import Config, build_config
from verl.errors import CheckpointError, ConfigError, DataError, VerlError
from verl.run_dir import RunDir
from verl.trainer import loop
from verl.trainer.run import train
from verl.trainer.sampling import Sampler
from verl.trainer.saving import Saver
from verl.trainer.state import TrainerState

STEPS = 5
PPO = {
    "algorithm": {
        "adv_estimator": "gae",
        "use_kl_in_reward": True,
        "kl_ctrl": {"type": "adaptive", "kl_coef": 0.05, "target_kl": 0.01, "horizon": 50},
    },
    "critic": {"optim": {"lr": 1e-3}},
    "actor": {
        "ppo_mini_batch_size": 2,
        "ppo_epochs": 2,
        "shuffle": True,
        "optim": {"lr_scheduler_type": "cosine", "lr_warmup_steps": 2},
    },
}
AHEAD = {"trainer": {"mode": "one_step_off"}, "algorithm": {"filter_groups": {"enable": True}}}
GRPO = {"actor": {"use_kl_loss": True, "ppo_mini_batch_size": 2}, "model": {"dtype": "bfloat16"}}
ASYNC = {"trainer": {"mode": "async", "max_staleness": 0}, "rollout": {"response_length": {"mode": "adaptive"}}}
KINDS = {"ppo": PPO, "grpo": GRPO, "ahead": AHEAD, "async": ASYNC}


def config_in(folder: Path, model: Path, settings: dict[str, Any], run: str, **trainer: Any) -> Config:
    """Eight prompts, four a step: the run crosses epochs. Checkpoints after steps 2, 4 and the last."""
    common = {
        "trainer": {
            "default_local_dir": str(folder / run),
            "total_training_steps": STEPS,
            "save_freq": 2,
            "val_before_train": True,
            "test_freq": 3,
            "log_val_generations": 0,
            **trainer,
        },
        "data": {"val_files": str(folder / "train.jsonl"), "val_max_samples": 2},
        "cluster": {"threads": 1},
    }
    return tiny_config(folder, model, settings, common)


def go(config: Config) -> str:
    screen = io.StringIO()
    train(config, Console(file=screen, width=200))
    return screen.getvalue()


class Killed(BaseException):
    """Stands in for a death at a chosen place."""


def kill_at(monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, call: int, after: bool) -> None:
    """Die at the given call of a function, before or after its work."""
    real = getattr(owner, name)
    calls = iter(range(1, 1000))

    def dying(*arguments: Any, **settings: Any) -> Any:
        number = next(calls)
        if number == call and not after:
            raise Killed
        result = real(*arguments, **settings)
        if number == call:
            raise Killed
        return result

    monkeypatch.setattr(owner, name, dying)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory, tiny_model_dir: Path) -> Iterator[dict[str, Path]]:
    """Folders in which an uninterrupted run lies, for all settings."""
    folders = {}
    for name, settings in KINDS.items():
        folders[name] = tmp_path_factory.mktemp(name)
        go(config_in(folders[name], tiny_model_dir, settings, "whole"))
    yield folders


@pytest.mark.parametrize(
    ("owner", "name", "call", "after"),
    [
        (Sampler, "assemble", 3, True),  # before the first checkpoint: starts anew
        (loop, "update", 3, True),  # weights ahead of the checkpoint
        (Saver, "save", 2, False),  # the step is written down, its checkpoint is not
        (Saver, "save", 1, True),  # the checkpoint is there, nothing after it
        (Saver, "save", 3, True),  # the last checkpoint: finished, but for the report
        (loop, "evaluate", 2, True),
    ],
    ids=["rollout", "update", "before-saving", "after-saving", "after-the-last-saving", "validation"],
)
@pytest.mark.parametrize("kind", list(KINDS))
def test_law_4_stopped_anywhere(
    whole: dict[str, Path],
    tiny_model_dir: Path,
    monkeypatch: pytest.MonkeyPatch,
    kind: str,
    owner: Any,
    name: str,
    call: int,
    after: bool,
) -> None:
    """Also B146: the first step that is logged again is the one behind the checkpoint, and all counters go on."""
    folder = whole[kind]
    run = f"{name}-{call}-{after}"
    config = config_in(folder, tiny_model_dir, KINDS[kind], run)
    with monkeypatch.context() as patch:
        kill_at(patch, owner, name, call, after)
        with pytest.raises(Killed):
            go(config)
    said = go(config)
    if name == "save" and call == 3:
        assert f"This run is finished: step {STEPS} of {STEPS}" in said
    elif (name, call) != ("assemble", 3):
        assert f"going on from {folder / run}/checkpoints/step_00000" in said
    assert_same_run(folder / "whole", folder / run, STEPS)
    samples = [sorted(p.name for p in RunDir(folder / r).samples_dir.iterdir()) for r in ("whole", run)]
    assert samples[0] == samples[1]
    for sample in samples[0]:
        assert (folder / run / "samples" / sample).read_text() == (folder / "whole" / "samples" / sample).read_text()
    assert RunDir(folder / run).report.exists()


def test_the_run_really_depends_on_what_is_restored(whole: dict[str, Path]) -> None:
    """The settings above exercise the state: coefficient, learning rate and reward all move."""
    lines = computed(whole["ppo"] / "whole")
    for name in ("actor/reward_kl_penalty_coeff", "actor/lr", "critic/score/mean", "critic/vf_loss"):
        values = [line[name] for line in lines if name in line]
        assert len(set(values)) >= STEPS - 1, name
    assert [line["training/epoch"] for line in lines[1:]] == [0, 0, 1, 1, 2]


def test_validation_takes_place_before_at_every_third_step_and_at_the_end(whole: dict[str, Path]) -> None:
    lines = computed(whole["grpo"] / "whole")
    assert [line["step"] for line in lines if "val-core/tiny/reward/mean@1" in line] == [0, 3, 5]


def test_a_longer_run_goes_on_from_a_finished_one(tmp_path: Path, tiny_model_dir: Path) -> None:
    go(config_in(tmp_path, tiny_model_dir, GRPO, "run", total_training_steps=2))
    said = go(config_in(tmp_path, tiny_model_dir, GRPO, "run", total_training_steps=2))
    assert "This run is finished: step 2 of 2" in said and "note:" not in said
    said = go(config_in(tmp_path, tiny_model_dir, GRPO, "run", total_training_steps=3, test_freq=-1))
    assert "since this run last started: trainer.total_training_steps 2 -> 3, trainer.test_freq 3 -> -1\n" in said
    assert steps(tmp_path / "run") == [0, 1, 2, 3]


def test_resume_modes(tmp_path: Path, tiny_model_dir: Path) -> None:
    go(config_in(tmp_path, tiny_model_dir, GRPO, "run", total_training_steps=4))
    with pytest.raises(ConfigError, match="already holds a run"):
        go(config_in(tmp_path, tiny_model_dir, GRPO, "run", total_training_steps=4, resume_mode="disable"))
    assert steps(tmp_path / "run") == [0, 1, 2, 3, 4]
    back = config_in(
        tmp_path,
        tiny_model_dir,
        GRPO,
        "run",
        total_training_steps=4,
        resume_mode="resume_path",
        resume_from_path=str(tmp_path / "run" / "checkpoints" / "step_000002"),
    )
    before = computed(tmp_path / "run")
    assert "going on from" in go(back)
    assert computed(tmp_path / "run") == before


def test_a_run_that_saved_nothing_is_not_overwritten(tmp_path: Path, tiny_model_dir: Path) -> None:
    config = config_in(tmp_path, tiny_model_dir, GRPO, "run", total_training_steps=1, save_freq=-1)
    go(config)
    with pytest.raises(CheckpointError, match="without a checkpoint to go on from"):
        go(config)


def test_other_data_than_the_checkpoints_is_refused(tmp_path: Path, tiny_model_dir: Path) -> None:
    go(config_in(tmp_path, tiny_model_dir, GRPO, "run", total_training_steps=2))
    tree = json.loads(config_in(tmp_path, tiny_model_dir, GRPO, "run", total_training_steps=4).model_dump_json())
    tree["data"]["train_max_samples"] = 6
    with pytest.raises(DataError, match="not the data that the checkpoint was made with"):
        go(build_config(tree))


def test_an_older_checkpoint_lacks_what_came_later(tmp_path: Path, tiny_model_dir: Path) -> None:
    """Without a response cap, held steps or one of the schedules: those start fresh. Without a step: refused."""
    loader = SimpleNamespace(state_dict=dict, load_state_dict=lambda state: None)
    state = TrainerState.fresh(config_in(tmp_path, tiny_model_dir, GRPO, "run"), loader)  # type: ignore[arg-type]
    tree: dict[str, Any] = {"step": 3, "loader": {}, "shaper": state.shaper.state_dict(), "schedules": {}}
    loaded: list[str] = []
    roles: Any = SimpleNamespace(load=loaded.append)
    old: Any = SimpleNamespace(path=tmp_path, verify=lambda: None, read_state=lambda name: tree)
    state.restore(old, roles)
    assert (state.step, state.held, state.cap.state_dict()["recent"]) == (3, {"actor": 0, "critic": 0}, [])
    del tree["step"]
    with pytest.raises(CheckpointError, match="lacks step"):
        state.restore(old, roles)
    assert loaded == [str(tmp_path)]


def test_a_folder_in_use_is_refused(tmp_path: Path, tiny_model_dir: Path) -> None:
    config = config_in(tmp_path, tiny_model_dir, GRPO, "run")
    with RunDir(tmp_path / "run").create().lock(), pytest.raises(VerlError, match="another run is writing"):
        go(config)


def test_the_resolved_configuration_is_in_the_folder_and_runs_again(whole: dict[str, Path]) -> None:
    from verl.config import load_config

    again = load_config(whole["ppo"] / "whole" / "config.yaml").config
    assert again.algorithm.kl_ctrl.horizon == 50 and again.actor.ppo_epochs == 2


def test_b060_b065_inputs_are_checked_before_a_worker_starts(
    tmp_path: Path, tiny_model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from verl.trainer import run

    def started(*_: Any) -> None:
        raise AssertionError("a worker was started")

    monkeypatch.setattr(run, "start_workers", started)
    few = tmp_path / "few.jsonl"
    few.write_text('{"data_source": "tiny", "prompt": "a", "reward_model": {"ground_truth": "a"}}\n')
    cases: list[dict[str, Any]] = [
        {"data": {"train_files": str(few)}},
        {"data": {"prompt_key": "question"}},
        {"data": {"max_prompt_length": 2044}},
        {"reward": {"custom_reward_function": {"name": "other"}}},
        {"model": {"path": str(tmp_path / "nothing")}},
    ]
    for case in cases:
        with pytest.raises(VerlError) as caught:
            go(tiny_config(tmp_path, tiny_model_dir, case))
        assert caught.value.what and caught.value.fix
        assert not (tmp_path / "run").exists()


def test_the_critics_positions_count_too(tmp_path: Path, tiny_model_dir: Path) -> None:
    from verl.models.tiny import build_tiny
    from verl.trainer.inputs import check_model_limits

    short = build_tiny(tmp_path / "short", hidden_size=32, max_positions=29)
    settings = {"algorithm": {"adv_estimator": "gae"}, "critic": {"model": {"path": str(short)}}}
    with pytest.raises(ConfigError, match="more than the 29 positions") as caught:
        check_model_limits(tiny_config(tmp_path, tiny_model_dir, settings))
    assert caught.value.value == "30 tokens"
    check_model_limits(tiny_config(tmp_path, tiny_model_dir, settings, {"data": {"max_response_length": 5}}))
    check_model_limits(tiny_config(tmp_path, tiny_model_dir, settings, {"algorithm": {"adv_estimator": "grpo"}}))
