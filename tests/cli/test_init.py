"""``verl init``: what it writes trains as it stands, fits the machine by its own arithmetic, and overwrites nothing."""

from __future__ import annotations

import json
import re
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from verl import Trainer, load_config
from verl.cli import entry
from verl.cli.init import DataFacts, choose_lengths, choose_prompts, choose_settings, fitted
from verl.config.settings import presets, read_preset
from verl.diagnostics.plan import GIB, Lengths, Machine, needed, planned, this_machine
from verl.models.facts import ModelFacts

TINY = ModelFacts(100_000, 2, 64, 128, 4, 2, 16, 2048)
SEVEN_B = ModelFacts(7_600_000_000, 28, 3584, 18944, 28, 4, 128, 32768)
HALF_B = ModelFacts(494_000_000, 24, 896, 4864, 14, 2, 64, 32768)
LAPTOP, SERVER = Machine(16 * GIB, 8, 0), Machine(141 * GIB, 64, 1)


@pytest.fixture(autouse=True)
def in_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.chdir(tmp_path)
    before = signal.getsignal(signal.SIGTERM)
    yield
    signal.signal(signal.SIGTERM, before)


def rows(name: str, *many: dict[str, Any]) -> str:
    Path(name).write_text("".join(json.dumps(row) + "\n" for row in many))
    return name


SUMS = [{"prompt": f"{a} + 1 =", "answer": str(a + 1)} for a in range(20)]
WORDS = [{"question": f"Spell {word}", "label": word} for word in ("river", "stone", "leaf", "cloud") * 5]


def made(*arguments: str, model: str = "tiny-llama") -> int:
    return entry.main(["init", "--model", model, *arguments])


# --- what is written ----------------------------------------------------------------------------------------------


def test_what_it_writes_trains_as_it_stands(tiny_model_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Own jsonl, own model folder, no rule that fits: a file, a reward template, and two steps of training."""
    data = rows("words.jsonl", *WORDS)
    assert made("--data", data, "--response-length", "8", model=str(tiny_model_dir)) == 0
    said = capsys.readouterr().out
    assert "my_reward.py: the beginning of a reward function" in said
    assert "verl train my.yaml trainer.total_training_steps=2" in said
    assert "note: prompts that are plain text go to the model without its chat template" in said
    text = Path("my.yaml").read_text()
    assert re.search(r"train_batch_size: 16 +# prompts a step; x 8 = 128 responses", text)
    assert re.search(r"max_prompt_length: 16 +# prompt tokens: median 11, 90% 11, 99% 11, longest 11", text)
    assert "prompt_key: question" in text and "20 rows" in text
    loaded = load_config("my.yaml", ["trainer.total_training_steps=2", "cluster.backend=inline", "cluster.threads=1"])
    assert loaded.notices == []
    result = Trainer(loaded, display="plain").fit()
    assert result.summary.trained_steps == 2 and all(line["reward/scored"] == 128 for line in result.metrics)
    assert "20 prompts of plain text, without the model's chat template; 2 steps" in capsys.readouterr().out
    assert result.checkpoint is not None and result.folder == Path("runs/my")


@pytest.mark.parametrize("preset", presets())
def test_every_preset_is_written_and_loads(preset: str) -> None:
    data = rows("sums.jsonl", *SUMS)
    assert made("--data", data, "--val", data, "--preset", preset, "--out", "a.yaml") == 0
    loaded = load_config("a.yaml")
    whole = load_config({"data.train_files": data, "model.path": "m"}, presets=[preset]).config
    config = loaded.config
    assert config.algorithm == whole.algorithm and config.rollout.n == whole.rollout.n
    assert (
        config.actor.loss_agg_mode == whole.actor.loss_agg_mode and config.actor.use_kl_loss == whole.actor.use_kl_loss
    )
    assert config.reward.rule == "number" and config.trainer.test_freq == 20


def test_a_rule_of_the_data_source_is_found() -> None:
    data = rows("g.jsonl", *({**row, "data_source": "openai/gsm8k"} for row in SUMS))
    assert made("--data", data, "--out", "g.yaml") == 0
    assert load_config("g.yaml").config.reward.rule == "auto"
    assert "# a built-in rule belongs to openai/gsm8k" in Path("g.yaml").read_text()
    assert not Path("g_reward.py").exists()


def test_own_reward_and_columns() -> None:
    data = rows("odd.jsonl", *({"ask": "Say a", "want": "a"} for _ in range(8)))
    Path("mine.py").write_text("def compute_score(data_source, solution_str, ground_truth):\n    return 1.0\n")
    assert made("--data", data, "--prompt-key", "ask", "--answer-key", "want", "--reward", "mine.py") == 0
    config = load_config("my.yaml").config
    assert (config.data.prompt_key, config.data.answer_key) == ("ask", "want")
    assert config.reward.custom_reward_function.path == "mine.py" and config.data.train_batch_size == 8


def test_a_few_long_prompts_do_not_decide() -> None:
    data = rows("long.jsonl", *SUMS * 10, {"prompt": "x" * 500, "answer": "1"})
    assert made("--data", data) == 0
    config = load_config("my.yaml").config
    assert config.data.max_prompt_length == 8 and config.data.filter_overlong_prompts
    assert "# 1 of 201 prompts are longer; they are left out" in Path("my.yaml").read_text()


# --- what is refused ----------------------------------------------------------------------------------------------


def refused(capsys: pytest.CaptureFixture[str], *arguments: str, model: str = "tiny-llama") -> str:
    before = sorted(Path().iterdir())
    assert made(*arguments, model=model) == 2
    err = capsys.readouterr().err
    assert err.startswith("error: ") and "fix:   " in err and sorted(Path().iterdir()) == before
    return err


def test_nothing_is_overwritten_without_force(capsys: pytest.CaptureFixture[str]) -> None:
    data = rows("words.jsonl", *WORDS)
    Path("my.yaml").write_text("mine")
    assert "--force" in refused(capsys, "--data", data)
    assert Path("my.yaml").read_text() == "mine"
    Path("other_reward.py").write_text("mine")
    assert "other_reward.py" in refused(capsys, "--data", data, "--out", "other.yaml")
    assert made("--data", data, "--force") == 0 and "adv_estimator" in Path("my.yaml").read_text()


def test_typos_are_answered(capsys: pytest.CaptureFixture[str], tiny_model_dir: Path) -> None:
    data = rows("words.jsonl", *WORDS)
    rows("odd.jsonl", {"ask": "a", "want": "b"})
    Path("mine.py").write_text("def compute_score(data_source, solution_str, ground_truth):\n    return 1.0\n")
    (Path("models") / "tiny").mkdir(parents=True)
    (Path("models") / "tiny" / "config.json").write_text("{}")
    assert "did you mean words.jsonl?" in refused(capsys, "--data", "wrods.jsonl")
    assert "did you mean tiny-llama?" in refused(capsys, "--data", data, model="tiny-lama")
    assert "did you mean models/tiny?" in refused(capsys, "--data", data, model="./models/tinny")
    assert "did you mean grpo?" in refused(capsys, "--data", data, "--preset", "gpro")
    assert "did you mean mine.py?" in refused(capsys, "--data", data, "--reward", "mien.py")
    assert "did you mean" in refused(capsys, "--data", data, "--prompt-key", "questoin")
    assert "ask, want" in refused(capsys, "--data", "odd.jsonl")
    assert "--answer-key" in refused(capsys, "--data", "odd.jsonl", "--prompt-key", "ask")
    assert "did you mean --preset?" in refused(capsys, "--data", data, "--presett", "grpo")


# --- the sizes ----------------------------------------------------------------------------------------------------


def sizes(model: ModelFacts, machine: Machine, preset: str = "grpo") -> tuple[dict[str, Any], bool]:
    """The settings for prompts of 512 and responses of 256 tokens."""
    words = ["--model", "m", "--data", "d", "--preset", preset]
    arguments = entry.build_parser().parse_args(["init", *words])
    data = DataFacts("prompt", None, 10_000, [], [512] * 100, [])
    entries, fits = fitted(choose_settings(arguments, model, machine, data, read_preset(preset)), machine, model)
    return {key: value for key, (value, _) in entries.items()}, fits


@pytest.mark.parametrize("machine", [LAPTOP, SERVER])
@pytest.mark.parametrize("model", [TINY, HALF_B, SEVEN_B])
@pytest.mark.parametrize("preset", ["grpo", "ppo"])
def test_what_is_written_fits_by_the_plan_or_is_said_not_to(model: ModelFacts, machine: Machine, preset: str) -> None:
    settings, fits = sizes(model, machine, preset)
    critic = model if preset == "ppo" else None
    _, found = planned(load_config(settings).config, machine, model, critic, Lengths(512, 256))
    assert fits == (needed(found) <= 0.9 * machine.memory)
    # 18 bytes a trained parameter: float32 weight, gradient and two moments, and the copy that computes.
    assert fits == (model.parameters * 18 * (2 if critic else 1) < 0.9 * machine.memory)
    assert settings["actor.ppo_max_token_len_per_gpu"] >= 768 and settings["rollout.max_num_seqs"] >= 1


def test_memory_that_is_short_takes_smaller_batches() -> None:
    plenty, short = sizes(HALF_B, SERVER)[0], sizes(HALF_B, LAPTOP)[0]
    assert plenty["actor.ppo_max_token_len_per_gpu"] == 16384 and plenty["rollout.max_num_seqs"] == 256
    assert short["actor.ppo_max_token_len_per_gpu"] < 16384


def test_few_rows_make_small_batches() -> None:
    assert [choose_prompts(rows, 8, "cpu") for rows in (1, 3, 15, 16, 99)] == [1, 2, 8, 16, 16]
    assert choose_prompts(10_000, 8, "cuda") == 64
    assert [choose_prompts(10_000, n, "cpu") for n in (1, 2, 16, 1000)] == [128, 64, 8, 1]


def test_lengths_stay_within_the_positions() -> None:
    def facts(*lengths: int) -> DataFacts:
        return DataFacts("prompt", None, len(lengths), [], sorted(lengths), [])

    assert choose_lengths(TINY, facts(10, 21), 256) == (24, 0, 256)
    assert choose_lengths(TINY, facts(10, 2000), 256) == (1792, 1, 256)
    assert choose_lengths(TINY, facts(10), 5000) == (16, 0, 2032)
    assert choose_lengths(TINY, facts(*[40] * 199, 2000), 256) == (40, 1, 256)
    assert choose_lengths(ModelFacts(1, 1, 1, 1, 1, 1, 1, None), facts(10), 256) == (16, 0, 256)


def test_a_reward_function_is_named_as_for_eval(capsys: pytest.CaptureFixture[str]) -> None:
    data = rows("sums.jsonl", *SUMS)
    Path("r.py").write_text("def vowels(completions, **columns):\n    return [0.0] * len(completions)\n")
    assert made("--data", data, "--reward", "r.py", "--reward-name", "vowles") == 2
    assert "did you mean vowels?" in capsys.readouterr().err
    assert made("--data", data, "--reward-name", "vowels") == 2
    assert "add --reward FILE.py" in capsys.readouterr().err
    assert made("--data", data, "--reward", "r.py", "--reward-name", "vowels") == 0
    custom = load_config("my.yaml").config.reward.custom_reward_function
    assert (custom.path, custom.name) == ("r.py", "vowels")


def test_a_file_without_a_readable_row_says_why(capsys: pytest.CaptureFixture[str]) -> None:
    Path("latin.jsonl").write_bytes('{"prompt": "café", "answer": "1"}\n'.encode("latin-1"))
    assert made("--data", "latin.jsonl") == 2
    assert "latin.jsonl, line 1: not UTF-8" in capsys.readouterr().err


def test_memory_is_within_that_of_the_machine() -> None:
    machine = this_machine()
    assert 0 < machine.memory < 2**50 and machine.cores >= 1
