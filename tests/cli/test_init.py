"""``verl init``: what it writes trains as it stands, fits the machine by its own arithmetic, and overwrites nothing."""

from __future__ import annotations

import itertools
import json
import re
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from verl import Trainer, load_config
from verl.cli import entry, init
from verl.cli.init import DataFacts, choose_lengths
from verl.cli.sizes import GIB, Machine, Wanted, choose_sizes
from verl.config.overlays import presets
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
    assert 'prompt_key: "question"' in text and "20 rows" in text
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


# --- the arithmetic -----------------------------------------------------------------------------------------------


def wanted(**other: Any) -> Wanted:
    return Wanted(**({"rows": 10_000, "longest": 768, "n": 8, "critic": False, "reference": False, "bytes": 2} | other))


def test_weights_by_hand() -> None:
    """18 bytes a trained parameter in bfloat16, 16 in float32; 2 a frozen one."""
    assert choose_sizes(HALF_B, SERVER, wanted()).weights == 494_000_000 * 18
    assert choose_sizes(HALF_B, SERVER, wanted(reference=True)).weights == 494_000_000 * 20
    assert choose_sizes(HALF_B, SERVER, wanted(critic=True, reference=True)).weights == 494_000_000 * 38
    assert choose_sizes(HALF_B, SERVER, wanted(bytes=4)).weights == 494_000_000 * 16
    sizes = choose_sizes(HALF_B, SERVER, wanted())
    assert sizes.per_sequence == 2 * 24 * 2 * 64 * 2 * 768  # keys and values of every layer


def test_activations_are_near_those_measured() -> None:
    smollm = ModelFacts(134_515_008, 30, 576, 1536, 9, 3, 64, 8192)
    for longest, measured in ((304, 1.67), (1024, 3.34)):
        sizes = choose_sizes(smollm, SERVER, wanted(longest=longest))
        assert sizes.per_token / 2**20 == pytest.approx(measured, rel=0.1) and not sizes.checkpointing


@pytest.mark.parametrize("machine", [LAPTOP, SERVER, Machine(4 * GIB, 2, 0), Machine(40 * GIB, 8, 0)])
@pytest.mark.parametrize("model", [TINY, HALF_B, SEVEN_B])
@pytest.mark.parametrize("critic", [False, True])
def test_what_is_chosen_fits_or_is_said_not_to(model: ModelFacts, machine: Machine, critic: bool) -> None:
    want = wanted(critic=critic)
    sizes = choose_sizes(model, machine, want)
    total = sizes.weights + sizes.sequences * sizes.per_sequence + sizes.tokens * sizes.per_token
    assert sizes.fits == (total <= 0.75 * machine.memory)
    assert sizes.tokens >= want.longest and sizes.sequences >= 1 and sizes.prompts <= want.rows


def test_more_memory_never_chooses_less() -> None:
    chosen = [choose_sizes(HALF_B, Machine(gib * GIB, 8, 0), wanted()) for gib in range(12, 200, 4)]
    for less, more in itertools.pairwise(chosen):
        assert more.sequences >= less.sequences and more.fits >= less.fits
        assert more.tokens >= less.tokens or (less.checkpointing and not more.checkpointing)
    assert not chosen[-1].checkpointing and choose_sizes(HALF_B, Machine(14 * GIB, 8, 0), wanted()).checkpointing
    assert not choose_sizes(SEVEN_B, LAPTOP, wanted()).fits


def test_few_rows_make_small_batches() -> None:
    assert [choose_sizes(TINY, LAPTOP, wanted(rows=n)).prompts for n in (1, 3, 15, 16, 99)] == [1, 2, 8, 16, 16]
    assert choose_sizes(TINY, SERVER, wanted()).prompts == 64
    assert [choose_sizes(TINY, LAPTOP, wanted(n=n)).prompts for n in (1, 2, 16, 1000)] == [128, 64, 8, 1]


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
    machine = init.this_machine()
    assert 0 < machine.memory < 2**50 and machine.cores >= 1
