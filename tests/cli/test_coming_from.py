"""What the pages docs/coming-from-*.md promise: their scripts run, their keys exist."""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import subprocess
import sys
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import yaml

from verl.cli import entry
from verl.config import load_config
from verl.config.aliases import GLOBAL_MICRO_BATCH, canonical
from verl.config.keys import leaves, sections
from verl.config.translate import no_meaning
from verl.trainer import main_ppo

ROOT = Path(__file__).parents[2]
FROM_VERL = (ROOT / "docs" / "coming-from-verl.md").read_text(encoding="utf-8")
FROM_TRL = (ROOT / "docs" / "coming-from-trl.md").read_text(encoding="utf-8")
FROM_OPENRLHF = (ROOT / "docs" / "coming-from-openrlhf.md").read_text(encoding="utf-8")

SMALL = [
    "actor_rollout_ref.model.path=tiny-llama",
    "data.train_batch_size=4",
    "data.max_prompt_length=64",
    "data.max_response_length=8",
    "actor_rollout_ref.actor.ppo_mini_batch_size=4",
    "actor_rollout_ref.rollout.n=2",
    "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=8",
    "trainer.total_training_steps=1",
    "trainer.device=cpu",
    "cluster.backend=inline",
    "cluster.threads=1",
]


@pytest.fixture(autouse=True)
def own_sigterm() -> Iterator[None]:
    before = signal.getsignal(signal.SIGTERM)
    yield
    signal.signal(signal.SIGTERM, before)


def block(page: str, language: str, beginning: str = "") -> str:
    """The first code block of a page in that language that begins so."""
    return next(text for text in re.findall(rf"```{language}\n(.*?)```", page, re.S) if text.startswith(beginning))


def launch_line(home: Path) -> list[str]:
    """The words of the documented launch line, as the shell passes them on to the module."""
    words = shlex.split(block(FROM_VERL, "bash").replace("\\\n", " ").replace("$HOME", str(home)))
    assert words[:3] == ["python", "-m", "verl.trainer.main_ppo"]
    return words[3:]


def no_gpu() -> None:
    import torch

    if torch.cuda.is_available():
        pytest.skip("this machine has a GPU")


def test_the_launch_line_trains(tmp_path: Path) -> None:
    """Home of the files in verl's place, given with ~, the module as scripts call it, in a process of its own."""
    folder = tmp_path / "data" / "gsm8k"
    folder.mkdir(parents=True)
    prompt = [{"role": "user", "content": "3 + 4?"}]
    row = {"data_source": "openai/gsm8k", "prompt": prompt, "reward_model": {"style": "rule", "ground_truth": "7"}}
    import pyarrow as pa
    import pyarrow.parquet as pq

    for name in ("train", "test"):
        pq.write_table(pa.Table.from_pylist([row] * 4), folder / f"{name}.parquet")
    run = tmp_path / "run"
    words = [word.replace(str(tmp_path), "~") for word in launch_line(tmp_path)]
    command = [sys.executable, "-m", "verl.trainer.main_ppo", *words, *SMALL, f"trainer.default_local_dir={run}"]
    command.append("trainer.logger=[console]")  # wandb is not installed here
    environment = {**os.environ, "HOME": str(tmp_path), "PYTHONPATH": str(ROOT), "COLUMNS": "200"}
    environment["VERL_CACHE"] = os.environ.get("VERL_CACHE", str(Path.home() / ".cache" / "verl"))
    done = subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert [json.loads(line)["step"] for line in (run / "metrics.jsonl").read_text().splitlines()] == [0, 1]
    notes = [line for line in done.stdout.splitlines() if line.startswith("note: ")]
    assert len([note for note in notes if "vllm" in note]) == 1
    assert len([note for note in notes if "n_gpus_per_node=8 is set aside" in note]) == 1
    assert len(notes) == len(set(notes))


def test_gpus_that_are_not_there_are_named_before_anything_else(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The data files are missing, too: nothing was read."""
    no_gpu()
    assert main_ppo.main(launch_line(tmp_path)) == 2
    err = capsys.readouterr().err
    assert "wanted 8 GPU, available 0" in err and "trainer.device=cpu" in err and "parquet" not in err


@pytest.mark.parametrize(
    ("settings", "wanted"),
    [
        (["trainer.n_gpus_per_node=1"], "wanted 1 GPU"),
        (["trainer.n_gpus_per_node=8", "trainer.nnodes=2"], "wanted 16 GPU"),
        (["trainer.device=cuda"], "wanted 1 GPU"),
        (["trainer.nnodes=2"], "trainer.nnodes=2"),
    ],
)
def test_machines_and_gpus(settings: list[str], wanted: str, capsys: pytest.CaptureFixture[str]) -> None:
    no_gpu()
    assert main_ppo.main(["data.train_files=no.jsonl", "actor_rollout_ref.model.path=no", *settings]) == 2
    err = capsys.readouterr().err
    assert wanted in err and ("trainer.device=cpu" in err or "set trainer.nnodes=1" in err)


def test_fewer_gpus_than_asked_for(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    assert main_ppo.main(["data.train_files=no.jsonl", "model.path=no", "trainer.n_gpus_per_node=8"]) == 2
    err = capsys.readouterr().err
    assert "wanted 8 GPU, available 1" in err and "set trainer.nnodes=1 and trainer.n_gpus_per_node=1, or" in err


def test_errors_are_those_of_verl_train(capsys: pytest.CaptureFixture[str]) -> None:
    for words in (["actor_rollout_ref.actor.lerning=1"], ["algorithm.adv_estimator=grop"], []):
        codes = main_ppo.main(words), entry.main(["train", *words])
        assert codes == (2, 2)
        first, second = capsys.readouterr().err.split("error: ")[1:]
        assert first == second


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    seen: list[Any] = []
    monkeypatch.setattr(main_ppo, "run_training", lambda file, words, **more: seen.append((file, words, more)))
    return seen


def test_hydras_words_that_are_honoured(launched: list[Any], tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text("rollout: {n: 2}\n")
    at = f"--config-path={tmp_path}"
    quiet: dict[str, Any] = {"notices": [], "plain": False}
    for words, expected in [
        ([at, "--config-name=mine", "+a.b=1"], (str(file), ["+a.b=1"], quiet)),
        (
            ["x=1", "--config-path", str(tmp_path), "--config-name", "mine.yaml", "y=2"],
            (str(file), ["x=1", "y=2"], quiet),
        ),
        (["-cp", str(tmp_path), "-cn", "mine"], (str(file), [], quiet)),
        (["x=1", "--run"], (None, ["x=1"], quiet)),
    ]:
        launched.clear()
        assert main_ppo.main(words) == 0 and launched == [expected]
    launched.clear()
    assert main_ppo.main(["--config-path=./config", "--config-name=ppo_megatron_trainer.yaml", "x=1"]) == 0
    assert launched[0][:2] == (None, ["x=1"]) and "verl's own defaults" in launched[0][2]["notices"][0]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--multirun", "x=1"], "loop of the shell"),
        (["-m", "x=1"], "loop of the shell"),
        (["--cfg", "job"], "verl config show"),
        (["--cfg=job"], "verl config show"),
        (["--config-nam=x"], "did you mean --config-name?"),
        (["--config-path=examples/tiny", "--config-name=grop"], "did you mean examples/tiny/grpo.yaml?"),
        (["~trainer.logger"], "cannot be deleted by ~"),
        (["~trainer.logger=x"], "cannot be deleted by ~"),
        (["+actor_rollout_ref.actor.lerning=1"], "unknown key actor_rollout_ref.actor.lerning"),
        (["++algorithm.adv_estimatr=grpo"], "did you mean algorithm.adv_estimator?"),
        (["a.yaml", "--config-path=examples/tiny", "--config-name=grpo"], "two configuration files"),
    ],
)
def test_hydras_words_that_are_answered(
    words: list[str], said: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    assert main_ppo.main(words) == 2
    err = capsys.readouterr().err
    assert said in err and "fix:   " in err


def test_hydras_settings_are_set_aside() -> None:
    words = ["data.train_files=a.jsonl", "model.path=m", "hydra.run.dir=out", "+hydra.job.chdir=False"]
    (notice,) = load_config(None, words).notices
    assert "settings of Hydra" in notice


def train_as_converted(page: str, folder: Path, rows: str, scored: int) -> None:
    """The page's vowels.yaml as it stands, except for a smaller model and shorter run."""
    from verl import Trainer

    reward = re.search(r"path: (reward\w*\.py)", page)
    assert reward
    (folder / reward[1]).write_text(block(page, "python", f"# {reward[1]}"))
    (folder / "vowels.yaml").write_text(block(page, "yaml", "# vowels.yaml"))
    smaller = {
        "data.train_files": str(folder / rows),
        "reward.custom_reward_function.path": str(folder / reward[1]),
        "trainer.default_local_dir": str(folder / "run"),
        "model.path": "tiny-llama",
        "trainer.total_training_steps": 2,
        "data.max_response_length": 8,
        "cluster.backend": "inline",
        "cluster.threads": 1,
        "trainer.device": "cpu",
    }
    loaded = load_config(folder / "vowels.yaml", smaller)
    assert loaded.notices == []
    result = Trainer(loaded, display="quiet").fit()
    assert result.summary.trained_steps == 2 and all(line["reward/scored"] == scored for line in result.metrics)


def test_the_script_from_trl_trains_as_converted(tmp_path: Path) -> None:
    row = {"prompt": [{"role": "user", "content": "Say vowels"}], "answer": "aeiou"}
    (tmp_path / "train.jsonl").write_text((json.dumps(row) + "\n") * 8)
    train_as_converted(FROM_TRL, tmp_path, "train.jsonl", scored=4 * 8)
    trl, ours = block(FROM_TRL, "python", "# TRL"), block(FROM_TRL, "python", "# reward.py")
    assert ours.removeprefix("# reward.py\n").strip() in trl  # the function is unchanged


def test_the_script_from_openrlhf_trains_as_converted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    row = {"question": "Say vowels", "answer": "aeiou"}
    Path("train.jsonl").write_text((json.dumps(row) + "\n") * 8)
    convert = shlex.split(block(FROM_OPENRLHF, "bash", "verl data convert"))
    assert entry.main(convert[1:]) == 0
    assert json.loads(Path("chat.jsonl").read_text().splitlines()[0])["prompt"][0]["role"] == "user"
    train_as_converted(FROM_OPENRLHF, tmp_path, "chat.jsonl", scored=8 * 8)


def test_the_converted_openrlhf_script_has_the_sizes_of_its_flags() -> None:
    words = shlex.split(block(FROM_OPENRLHF, "bash", "# OpenRLHF").replace("\\\n", " "), comments=True)
    flags = dict(pairwise(words))
    config = load_config(yaml.safe_load(block(FROM_OPENRLHF, "yaml", "# vowels.yaml"))).config
    assert config.data.train_batch_size == int(flags["--rollout_batch_size"])
    responses = int(flags["--n_samples_per_prompt"])
    assert config.rollout.n == responses
    assert config.actor.ppo_mini_batch_size * responses == int(flags["--train_batch_size"])
    assert config.actor.ppo_micro_batch_size_per_gpu == int(flags["--micro_train_batch_size"])
    assert config.actor.kl_loss_coef == float(flags["--init_kl_coef"])


@pytest.mark.parametrize("page", [FROM_VERL, FROM_TRL, FROM_OPENRLHF], ids=["verl", "trl", "openrlhf"])
def test_every_key_that_a_page_names_exists(page: str) -> None:
    words = re.findall(r"`([a-z_]+(?:\.[a-z_0-9]+)+)(?:=[^`]*)?`", page)
    ours = [word for word in words if word.split(".")[0] in sections()]
    assert len(ours) > 10
    known = {*leaves(), *sections(), *GLOBAL_MICRO_BATCH}
    assert [word for word in ours if canonical(word) not in known and no_meaning(word) is None] == []


@pytest.mark.parametrize("page", [FROM_VERL, FROM_TRL, FROM_OPENRLHF], ids=["verl", "trl", "openrlhf"])
def test_every_command_that_a_page_names_exists(page: str) -> None:
    import argparse

    known = {"verl"}
    todo: list[tuple[str, argparse.ArgumentParser]] = [("verl", entry.build_parser())]
    while todo:
        prefix, parser = todo.pop()
        for action in parser._actions:
            if isinstance(action, argparse._SubParsersAction):
                known |= {f"{prefix} {name}" for name in action.choices}
                todo += [(f"{prefix} {name}", child) for name, child in action.choices.items()]
    named = re.findall(r"`(verl (?:(?:data|model|config|run) )?[a-z0-9-]+)", page)
    assert named and [name for name in named if name not in known] == []
