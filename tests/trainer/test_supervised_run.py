"""Whole runs of ``verl sft`` and ``verl reward-model train`` on the tiny model."""

from __future__ import annotations

import io
import json
import random
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from stage_cases import tiny_config
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from verl.checkpoint.export import export_hf
from verl.checkpoint.store import CheckpointStore
from verl.cli import main
from verl.config import RewardModelTrainingConfig, SftConfig, SupervisedConfig, load_supervised
from verl.errors import CheckpointError, ConfigError
from verl.models.loading import load_tokenizer
from verl.models.tiny import EOS_ID
from verl.run_dir import RunDir
from verl.tracking.facts import read_config
from verl.tracking.facts import settings as shown_settings
from verl.tracking.names import read_metrics
from verl.trainer import supervised
from verl.trainer.run import train
from verl.trainer.supervised import train_supervised
from verl.trainer.timer import StepTimer

STEPS = 5


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Sums, and pairs whose better answer is in vowels."""
    folder, draw = tmp_path_factory.mktemp("supervised"), random.Random(0)
    numbers = [(draw.randint(0, 9), draw.randint(0, 9)) for _ in range(24)]
    sums = [{"question": f"{a}+{b}", "answer": str(a + b)} for a, b in numbers]
    word = lambda letters: "".join(draw.choice(letters) for _ in range(4))  # noqa: E731
    pairs = [{"prompt": f"q{a}", "chosen": word("aeiou"), "rejected": word("bcdfg")} for a, _ in numbers]
    for name, rows in (("sums", sums), ("pairs", pairs)):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def config_in(files: Path, model: Path | str, run: Path, kind: str = "sft", **more: Any) -> SupervisedConfig:
    settings = {
        "data.train_files": str(files / ("sums.jsonl" if kind == "sft" else "pairs.jsonl")),
        "data.val_files": str(files / ("sums.jsonl" if kind == "sft" else "pairs.jsonl")),
        "data.train_batch_size": 10,  # 24 examples: the run crosses epochs
        "data.max_length": 64,
        "data.max_token_len_per_gpu": 160,
        "model.path": str(model),
        "optim.lr": 3e-3,
        "optim.lr_scheduler_type": "cosine",
        "optim.lr_warmup_steps": 2,
        "trainer.total_training_steps": STEPS,
        "trainer.default_local_dir": str(run),
        "trainer.save_freq": 2,
        "trainer.test_freq": 3,
        "trainer.device": "cpu",
        "cluster.threads": 1,
        **more,
    }
    schema = SftConfig if kind == "sft" else RewardModelTrainingConfig
    return load_supervised(schema, None, settings)[0]


def go(config: SupervisedConfig) -> str:
    screen = io.StringIO()
    train_supervised(config, Console(file=screen, width=120))
    return screen.getvalue()


def computed(run: Path) -> list[dict[str, Any]]:
    lines, torn = read_metrics(RunDir(run))
    assert not torn
    return [{k: v for k, v in line.items() if k != "time" and not k.startswith(("timing_s", "perf"))} for line in lines]


def checkpoint_bytes(run: Path) -> dict[str, bytes]:
    folder = RunDir(run).checkpoint(STEPS)
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file() and path.name != "manifest.json"
    }


@pytest.fixture(scope="module")
def sft_run(files: Path, tiny_model_dir: Path) -> tuple[Path, str]:
    """A finished run and what it printed."""
    run = files / "runs" / "sft"
    return run, go(config_in(files, tiny_model_dir, run, **{"model.dtype": "bfloat16"}))


def test_a_run_learns_and_says_so(sft_run: tuple[Path, str]) -> None:
    run, screen = sft_run
    lines = computed(run)
    assert [line["step"] for line in lines] == [0, 1, 2, 3, 4, 5]
    assert lines[-1]["val/loss"] < 0.85 * lines[0]["val/loss"]
    assert [round(line["train/lr"] / 3e-3, 4) for line in lines[1:]] == [0.5, 1.0, 1.0, 0.75, 0.25]
    assert lines[-1]["training/epoch"] == 2
    assert "sft of" in screen and "24 examples, 24 held-out; 5 steps of 10 examples" in screen
    assert "loss" in screen and "held-out: " in screen and RunDir(run).report.is_file()
    text, tree = read_config(RunDir(run))
    assert tree is not None and text
    assert not any(entry.get("unknown") for entry in shown_settings(tree))


@pytest.mark.parametrize("kind", ["sft", "pairs"])
def test_a_stopped_run_goes_on_to_the_same_bits(
    files: Path, tiny_model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    """In float16 too, where the learning rate waits for a step whose gradient did not overflow; by Ctrl-C after which
    the step is saved, too."""
    whole, stopped = tmp_path / "whole", tmp_path / "stopped"
    more = {"model.dtype": "float16", "model.fp16.initial_scale_power": 18} if kind == "sft" else {}
    go(config_in(files, tiny_model_dir, whole, kind, **more))
    steps = computed(whole)[1:]
    rates, skipped = ([line[f"train/{name}"] for line in steps] for name in ("lr", "skipped_steps"))
    if kind == "sft":
        assert (rates, skipped) == ([0.0015] * 3 + [0.003] * 2, [1.0] * 2 + [0.0] * 3)
    save = supervised.SupervisedLoop.save

    def save_and_die(loop: supervised.SupervisedLoop, *metrics: Any) -> None:
        save(loop, *metrics)
        raise KeyboardInterrupt

    def interrupted(self: StepTimer) -> dict[str, float]:
        if len(computed(stopped)) == 3:  # in step 3, behind its update
            signal.raise_signal(signal.SIGINT)
        return flush(self)

    flush = StepTimer.flush
    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        if kind == "sft":
            patched.setattr(supervised.SupervisedLoop, "save", save_and_die)
        else:
            patched.setattr(StepTimer, "flush", interrupted)
        go(config_in(files, tiny_model_dir, stopped, kind, **more | {"trainer.save_on_interrupt": kind != "sft"}))
    assert CheckpointStore(stopped / "checkpoints").steps() == ([2] if kind == "sft" else [2, 3])
    screen = go(config_in(files, tiny_model_dir, stopped, kind, **more))
    assert "going on from" in screen
    assert computed(stopped) == computed(whole)
    assert checkpoint_bytes(stopped) == checkpoint_bytes(whole)
    assert "This run is finished" in go(config_in(files, tiny_model_dir, stopped, kind, **more))


def test_steps_that_were_left_out_are_told(files: Path, tiny_model_dir: Path, tmp_path: Path) -> None:
    more = {"optim.lr": 1e9, "optim.lr_scheduler_type": "constant", "optim.lr_warmup_steps": 0, "trainer.save_freq": -1}
    screen = go(config_in(files, tiny_model_dir, tmp_path / "run", **more))
    assert "Optimizer steps skipped, the gradient was not finite: 4 (steps 2 to 5)" in screen


def test_the_export_is_the_trained_model(files: Path, sft_run: tuple[Path, str], tmp_path: Path) -> None:
    run, _ = sft_run
    folder = export_hf(CheckpointStore(run / "checkpoints").open(STEPS), tmp_path / "model", "float32")
    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder), load_tokenizer(folder)
    total = count = 0.0
    for line in (files / "sums.jsonl").read_text().splitlines():
        row = json.loads(line)
        messages = [{"role": "user", "content": row["question"]}]
        ids = list(tokenizer.apply_chat_template(messages, add_generation_prompt=True)["input_ids"])
        answer = [*row["answer"].encode(), EOS_ID]
        labels = torch.tensor([[-100] * len(ids) + answer])
        loss = model(input_ids=torch.tensor([ids + answer]), labels=labels).loss
        total, count = total + float(loss.detach()) * len(answer), count + len(answer)
    assert total / count == pytest.approx(computed(run)[-1]["val/loss"], abs=0.03)  # the run computes in bfloat16


def test_a_run_is_evaluated(
    files: Path, sft_run: tuple[Path, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--prompt-key", "question", "--answer-key", "answer", "--rule", "exact_match", "--limit", "2", "--plain"]
    out = ["--max-response-length", "4", "--out", str(tmp_path / "out")]
    assert main(["eval", str(sft_run[0]), str(files / "sums.jsonl"), *words, *out]) == 0
    assert "2 prompts x 1" in capsys.readouterr().out


def test_rl_goes_on_from_a_run(sft_run: tuple[Path, str], tmp_path: Path, tiny_model_dir: Path) -> None:
    """``model.path`` may be a run: its newest checkpoint, which a resumed run must find again."""
    run, _ = sft_run
    settings = {"trainer": {"total_training_steps": 1, "save_freq": 1, "default_local_dir": str(tmp_path / "rl")}}
    config = tiny_config(tmp_path, run, settings)
    screen = io.StringIO()
    train(config, Console(file=screen, width=200))
    assert f"model.path: {run} is its checkpoint of step 5" in screen.getvalue()
    checkpoint = CheckpointStore(tmp_path / "rl" / "checkpoints").open(1)
    assert checkpoint.meta["model"] == str(RunDir(run).checkpoint(5))
    with pytest.raises(CheckpointError, match="began with another checkpoint than model.path"):
        other = tiny_config(tmp_path, tiny_model_dir, settings, {"trainer": {"total_training_steps": 2}})
        train(other, Console(file=io.StringIO()))


def test_a_reward_model_tells_vowels_from_consonants(files: Path, tiny_model_dir: Path, tmp_path: Path) -> None:
    run = tmp_path / "rm"
    screen = go(config_in(files, tiny_model_dir, run, "pairs", **{"trainer.total_training_steps": 12}))
    lines = computed(run)
    assert (lines[0]["val/loss"], lines[0]["val/accuracy"]) == (pytest.approx(0.6931472), 0.5)  # the head starts at 0
    assert lines[-1]["val/accuracy"] > 0.9 and "accuracy" in screen
    folder = export_hf(CheckpointStore(run / "checkpoints").open(12), tmp_path / "model", "float32")
    model, tokenizer = AutoModelForSequenceClassification.from_pretrained(folder), load_tokenizer(folder)
    assert model.config.num_labels == 1 and type(model).__name__ == "LlamaForSequenceClassification"

    def score(answer: str) -> float:
        messages = [{"role": "user", "content": "q5"}, {"role": "assistant", "content": answer}]
        ids = tokenizer.apply_chat_template(messages)["input_ids"]
        return float(model(input_ids=torch.tensor([ids])).logits.detach())

    assert score("oaie") > score("gcbd")


def test_commands(files: Path, tiny_model_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["sft"]) == 2
    assert "there is nothing to train" in capsys.readouterr().err
    assert main(["sft", f"model.path={tiny_model_dir}", "data.train_files=x.jsonl", "data.max_lenght=3"]) == 2
    assert "did you mean data.max_length?" in capsys.readouterr().err
    assert main(["reward-model", "train", f"model.path={tiny_model_dir}", f"data.train_files={files}/sums.jsonl"]) == 2
    assert "data.chosen_key names a column that" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"data.max_token_len_per_gpu": 8}, "data.max_token_len_per_gpu is smaller than the longest example"),
        ({"trainer.critic_warmup": 3}, "trainer.critic_warmup has no meaning here"),
        ({"trainer.n_gpus_per_node": 2}, "supervised training runs in one process"),
        ({"trainer.experiment_name": "a/b", "trainer.default_local_dir": None}, "must be a plain folder name"),
    ],
)
def test_settings_that_do_not_fit(files: Path, settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        config_in(files, "tiny-llama", files / "x", **settings)


def test_a_file_of_the_other_kind_is_named_as_such(
    sft_run: tuple[Path, str], capsys: pytest.CaptureFixture[str]
) -> None:
    run, _ = sft_run
    assert main(["train", str(run)]) == 2
    assert "this is a configuration of supervised training" in capsys.readouterr().err
    example = Path(__file__).parents[2] / "examples" / "tiny" / "ppo.yaml"
    assert main(["sft", str(example)]) == 2
    assert "this is a configuration of RL training" in capsys.readouterr().err
    assert main(["config", "explain", "data.chosen_key"]) == 0
    assert "a key of verl reward-model train" in capsys.readouterr().out
    assert main(["run", "show", str(run)]) == 0
    assert "sft, 10 examples a step, seed 1" in capsys.readouterr().out


def test_an_example_that_is_longer_than_the_model_is_refused(files: Path, tiny_model_dir: Path, tmp_path: Path) -> None:
    settings = {"data.max_length": 4096, "data.max_token_len_per_gpu": 4096}
    with pytest.raises(ConfigError, match="data.max_length is more than the 2048 positions"):
        go(config_in(files, tiny_model_dir, tmp_path / "x", **settings))
