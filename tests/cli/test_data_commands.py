"""``verl data`` and the data of a run, as a person sees them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from verl_process import GRPO, Done, WarmVerl, metric_lines, train, verl

from verl.checkpoint.store import CheckpointStore


@pytest.fixture(scope="module")
def warm() -> Iterator[WarmVerl]:
    runner = WarmVerl()
    yield runner
    runner.close()


@pytest.fixture
def data(warm: WarmVerl, tmp_path: Path):
    def run(*arguments: object) -> Done:
        return warm("data", *map(str, arguments), log=tmp_path / "log")

    return run


@pytest.fixture
def qa(tmp_path: Path) -> Path:
    file = tmp_path / "qa.csv"
    file.write_text('frage,answer,quelle\n"2+2?",4,sums\n,5,sums\n"3+3?",6,sums\n"3+3?",6,more\nx\n')
    return file


def test_convert_then_inspect(data, qa, tmp_path):
    out = tmp_path / "qa.parquet"
    done = data("convert", qa, "--out", out, "--map", "prompt=frage", "--map", "data_source=quelle", "--system", "Hm.")
    assert done.code == 0 and done.err == ""
    assert done.out.splitlines() == [
        "prompt: column frage",
        "data_source: column quelle",
        "ground_truth: column answer",
        f"skipped {qa}, line 3: the prompt in column 'frage' is empty",
        f"skipped {qa}, line 6: 1 fields, the first line names 3",
        f"{out}: 3 rows written, 2 skipped",
    ]
    done = data("inspect", out, "--model", "tiny-llama", "--limit", "10")
    assert done.code == 0 and done.err == ""
    for line in (
        "3 rows, 3 can be used",
        "  sums: 2 rows, no built-in reward rule: reward.rule or your own function",
        "prompt length in tokens (with the chat template)",
        "  least 10, mean 10.0, p50 10, p90 10, p95 10, p99 10, most 10",
        "  0 of 3 (0.0%) are longer than 10",
        "duplicates: 1 row with an earlier prompt",
        f"  {out}, row 2 (counted from 0) repeats {out}, row 1 (counted from 0)",
        "nothing looks wrong with the rows",
        "<|system|>Hm.<|user|>2+2?<|assistant|>",
        "-> ground truth: 4",
    ):
        assert line in done.out.splitlines(), (line, done.out)
    plain = tmp_path / "plain.jsonl"
    plain.write_text('{"prompt": "2+2?"}\n')
    said = data("inspect", plain, "--model", "tiny-llama").out.splitlines()
    assert "prompt length in tokens (plain text, which gets no chat template)" in said and "2+2?" in said
    plain.write_text(plain.read_text() + '{"prompt": [{"role": "user", "content": "3+3?"}]}\n')
    said = data("inspect", plain, "--model", "tiny-llama").out
    assert "(1 of 2 plain text, the others with the chat template)" in said
    report = json.loads(data("inspect", out, "--model", "tiny-llama", "--limit", "9", "--json").out)
    assert (report["rows"], report["lengths"]["over"], report["sources"]) == (3, 3, {"sums": 2, "more": 1})


def test_inspecting_a_file_as_it_comes(data, qa):
    lines = data("inspect", qa).out.splitlines()
    assert "no column looks like the prompt: name it with --prompt-key (data.prompt_key in training)" in lines
    lines = data("inspect", qa, "--prompt-key", "frage").out.splitlines()
    assert "5 rows, 3 can be used" in lines and "prompts are in frage: training needs data.prompt_key=frage" in lines
    assert "cannot be used: 1 row: the prompt in column 'frage' is empty" in lines and f"  {qa}, line 3" in lines


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["convert", "qa.cvs", "--out", "o.jsonl"], ["qa.cvs", "did you mean"]),
        (["convert", "qa.csv", "--out", "o.txt"], ["o.txt", "o.parquet"]),
        (["convert", "qa.csv", "--out", "o.jsonl"], ["looks like the prompt", "--map prompt=COLUMN", "frage"]),
        (["convert", "qa.csv", "--out", "o.jsonl", "--map", "prompt=fage"], ["fage", "did you mean frage?"]),
        (["convert", "qa.csv", "--out", "o.jsonl", "--map", "prompt"], ["not of the form name=value"]),
        (["convert", "qa.csv", "--out", "o.jsonl", "--templat", "{frage}"], ["--templat", "did you mean --template"]),
        (["inspect", "qa.csv", "--prompt-key", "fage"], ["fage", "did you mean frage?"]),
        (["inspect", "qa.csv", "--model", "tiny-lama"], ["tiny-lama", "did you mean tiny-llama"]),
        (["inspect", "nowhere"], ["nowhere", "does not exist"]),
    ],
)
def test_typos(data, qa, tmp_path, arguments, words):
    done = data(*(tmp_path / word if word.startswith(("qa.", "nowhere")) else word for word in arguments))
    assert done.code == 2 and done.err.startswith("error: ") and "Traceback" not in done.err
    assert all(word in done.err for word in words), done.err
    assert not (tmp_path / "o.jsonl").exists()


def test_a_run_skips_bad_rows_lists_them_and_follows_a_curriculum(tmp_path):
    rows = Path(__file__).parents[2].joinpath("examples/tiny/train.jsonl").read_bytes().splitlines(keepends=True)
    file, folder = tmp_path / "train.jsonl", tmp_path / "run"
    file.write_bytes(b"".join([*rows[:5], b"{torn\n", *rows[5:]]))
    overrides = [f"data.train_files={file}", "data.val_files=[]", "data.max_skipped_fraction=0.1"]
    overrides += ["data.sampler.kind=curriculum", "trainer.total_training_steps=1", "trainer.save_freq=1"]
    done = verl(*train(GRPO, folder, *overrides), log=tmp_path / "log")
    assert done.code == 0, done.err
    assert "1 that cannot be used and are listed in skipped.jsonl" in done.out
    (line,) = (folder / "skipped.jsonl").read_text().splitlines()
    listed = json.loads(line)
    assert (listed["file"], listed["row"], listed["where"]) == (str(file), 5, "line 6") and "not JSON" in listed[
        "reason"
    ]
    (metrics,) = [line for line in metric_lines(folder) if line["step"] == 1]
    assert 0 < metrics["perf/padding_waste"] < 1
    # The rates of the rows that were drawn have moved, and are in the checkpoint.
    state = CheckpointStore(folder / "checkpoints").open(1).read_state("trainer")
    assert any(rate != 0.5 for rate in state["loader"]["sampler"]["rates"])
