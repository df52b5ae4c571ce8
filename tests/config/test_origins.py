"""Where each value comes from: defaults, presets, files with lines, mappings, the command line, other spellings."""

from __future__ import annotations

import textwrap
from pathlib import Path

import pytest

from verl.config import load_config
from verl.config.keys import leaves
from verl.config.load import Origin
from verl.errors import ConfigError

BASE = ["data.train_files=a", "model.path=m"]

FILE = """\
# a comment first
data: {train_files: a, train_batch_size: 64}
model:
  path: m
actor_rollout_ref:
  actor:
    optim:
      lr: 1e-3
    ppo_mini_batch_size: ${data.train_batch_size}
  rollout.n: 4
reward.reward_kwargs:
  x: 1
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "run.yaml"
    path.write_text(FILE)
    return path


def test_every_key_has_an_origin(file: Path) -> None:
    origins = load_config(file, ["rollout.temperature=0.9"], ["grpo"]).origins
    assert list(origins) == list(leaves())
    long = "actor_rollout_ref.actor.ppo_mini_batch_size=${data.train_batch_size}"
    given = {key: str(origin) for key, origin in origins.items() if origin.kind not in ("default", "preset")}
    assert given == {
        "data.train_files": f"{file}:2",
        "data.train_batch_size": f"{file}:2",
        "model.path": f"{file}:4",
        "actor.optim.lr": f"{file}:8, as actor_rollout_ref.actor.optim.lr",
        "actor.ppo_mini_batch_size": f"{file}:9, as {long}",
        "rollout.n": f"{file}:10, as actor_rollout_ref.rollout.n",
        "reward.reward_kwargs": f"{file}:11",
        "rollout.temperature": "command line",
    }
    assert origins["algorithm.adv_estimator"].kind == "preset"
    assert origins["algorithm.adv_estimator"].place.startswith("preset grpo:")
    assert origins["actor.grad_clip"] == Origin("default", "default")


def test_layers_win_in_order(file: Path) -> None:
    """defaults < presets < file < command line, seen in value and origin alike."""
    from_preset = load_config(None, BASE, ["grpo"])
    assert from_preset.config.rollout.n == 8 and from_preset.origins["rollout.n"].kind == "preset"
    from_file = load_config(file, (), ["grpo"])
    assert from_file.config.rollout.n == 4 and from_file.origins["rollout.n"].kind == "file"
    given = load_config(file, ["rollout.n=2"], ["grpo"])
    assert given.config.rollout.n == 2 and given.origins["rollout.n"] == Origin("command line", "command line")
    later = load_config(None, BASE, ["grpo", "ppo"])
    assert later.config.algorithm.adv_estimator == "gae"
    assert later.origins["algorithm.adv_estimator"].place.startswith("preset ppo:")


def test_mappings_have_an_origin_of_their_own() -> None:
    origins = load_config({"data": {"train_files": "a"}, "model.path": "m"}, {"rollout": {"n": 3}}).origins
    assert str(origins["rollout.n"]) == str(origins["model.path"]) == "given mapping"


def test_values_of_verl_that_were_turned_into_ours_are_shown_as_they_were_written() -> None:
    words = ["actor.ppo_micro_batch_size=32", "rollout.name=vllm", "trainer.logger=[console,clearml]"]
    origins = load_config(None, [*BASE, *words, "trainer.n_gpus_per_node=8"]).origins
    assert str(origins["actor.ppo_micro_batch_size_per_gpu"]) == "command line, as actor.ppo_micro_batch_size=32"
    assert str(origins["rollout.name"]) == "command line, as rollout.name=vllm"
    assert str(origins["trainer.logger"]) == "command line, as trainer.logger=['console', 'clearml']"


def test_the_command_line_wins_over_the_other_key_for_the_same_size(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    sizes = "trainer: {device: cpu}\nactor: {ppo_micro_batch_size: 8}\n"
    path.write_text("data: {train_files: a}\nmodel: {path: m}\n" + sizes)
    loaded = load_config(path, ["actor.ppo_micro_batch_size_per_gpu=2"])
    assert loaded.config.actor.ppo_micro_batch_size_per_gpu == 2
    path.write_text(path.read_text().replace("ppo_micro_batch_size:", "ppo_micro_batch_size_per_gpu:"))
    assert load_config(path, ["actor.ppo_micro_batch_size=4"]).config.actor.ppo_micro_batch_size_per_gpu == 4


def test_a_mapping_given_whole_replaces_what_lower_layers_put_into_it(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text("data: {train_files: a}\nmodel: {path: m}\nreward.reward_kwargs.x: 1\n")
    assert load_config(path, ["reward.reward_kwargs.y=2"]).config.reward.reward_kwargs == {"x": 1, "y": 2}
    assert load_config(path, ["reward.reward_kwargs={z: 3}"]).config.reward.reward_kwargs == {"z": 3}


def test_what_is_required_may_stay_open_for_a_look() -> None:
    loaded = load_config(None, ["rollout.n=2", "model.path=???"], allow_missing=True)
    assert loaded.missing == ("data.train_files", "model.path")
    assert loaded.config.rollout.n == 2 and loaded.config.model.path == "???"
    assert load_config(None, BASE, allow_missing=True).missing == ()
    with pytest.raises(ConfigError, match="data.train_files is required"):
        load_config(None, ["model.path=m"])
    with pytest.raises(ConfigError, match="rollout.n must be at least 1"):
        load_config(None, ["rollout.n=0"], allow_missing=True)


def test_errors_name_file_and_line(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text(
        textwrap.dedent("""
        data: {train_files: a}
        model: {path: m}
        rollout:
          n: 0
          stop_token_ids: [1, -1, x]
        trainer:
          logger: [1]
          sed: 2
    """)
    )
    with pytest.raises(ConfigError) as caught:
        load_config(path)
    assert caught.value.what == f"unknown key trainer.sed (in {path}:9)"
    path.write_text(path.read_text().replace("  sed: 2\n", ""))
    with pytest.raises(ConfigError) as caught:
        load_config(path)
    text = str(caught.value)
    assert f"value: 0 (in {path}:5)" in text and f"value: x (in {path}:6)" in text
    with pytest.raises(ConfigError) as caught:
        load_config(path, ["rollout.n=-1", "rollout.stop_token_ids=[]"])
    assert caught.value.value == -1  # what the user has just typed needs no place


def test_a_runs_folder_stands_for_its_configuration(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text("data: {train_files: a}\nmodel: {path: m}\n")
    loaded = load_config(tmp_path)
    assert loaded.origins["model.path"].place == f"{tmp_path / 'config.yaml'}:2"
