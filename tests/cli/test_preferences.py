"""``verl data preferences``: the best and the worst response to each prompt."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from verl.cli import main
from verl.config.schema_supervised import PairDataConfig
from verl.data.examples import load_pairs
from verl.data.rows import PromptRow
from verl.models.tiny import EOS_ID, byte_tokenizer
from verl.trainer.offline_evaluation import Answer, PairCounts, pairs_of


def row(number: int) -> PromptRow:
    return PromptRow(f"q{number}", "src", "t", {}, number)


def test_pairs_by_hand() -> None:
    scores: list[list[float | None]] = [[0.0, 1.0, 0.5, 1.0], [1.0, 1.0], [None, 2.0, None], [None, 3.0, -1.0], []]
    groups = [[Answer(row(n), f"a{i}", s) for i, s in enumerate(group)] for n, group in enumerate(scores)]
    counts = PairCounts()
    found = list(pairs_of(groups, counts))
    assert [(pair["prompt"], pair["chosen"], pair["rejected"]) for pair in found] == [
        ("q0", "a1", "a0"),
        ("q3", "a1", "a2"),
    ]
    assert (found[1]["chosen_score"], found[1]["rejected_score"], found[1]["data_source"]) == (3.0, -1.0, "src")
    assert counts == PairCounts(pairs=2, equal=1, few=2)


@pytest.fixture
def data(tmp_path: Path) -> Path:
    rows = [
        {"data_source": "x", "prompt": [{"role": "user", "content": f"{n}"}], "reward_model": {"ground_truth": f"{n}"}}
        for n in range(3)
    ]
    file = tmp_path / "data.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_responses_of_a_file(data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    answers = [
        {"prompt": [{"role": "user", "content": f"{n}"}], "index": i, "response": text}
        for n, texts in ((0, ["0", "7", "0"]), (1, ["5", "6"]), (2, ["no", None, "2"]))
        for i, text in enumerate(texts)
    ]
    given, out = tmp_path / "answers.jsonl", tmp_path / "pairs.jsonl"
    given.write_text("".join(json.dumps(answer) + "\n" for answer in answers))
    command = ["data", "preferences", str(data), "--responses", str(given), "--rule", "exact_match", "--out", str(out)]
    assert main(command) == 0
    assert "2 pairs from 3 prompts; 1 prompts without a difference" in capsys.readouterr().out
    assert [(pair["chosen"], pair["rejected"]) for pair in lines(out)] == [("0", "7"), ("2", "no")]
    config = PairDataConfig(train_files=[str(out)])
    assert len(load_pairs(config.train_files, config, byte_tokenizer(), [EOS_ID])) == 2
    for kept in (data, given):
        before = kept.read_text()
        assert main([*command[:-1], str(kept)]) == 2
        assert "The output is one of the inputs." in capsys.readouterr().err and kept.read_text() == before
    given.write_text(json.dumps({"prompt": "another", "response": "x"}) + "\n")
    assert main(command) == 2
    assert "No line of the responses has a prompt of the data." in capsys.readouterr().err


def test_a_model_is_sampled(
    data: Path, tmp_path: Path, tiny_model_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    reward, out = tmp_path / "reward.py", tmp_path / "pairs.parquet"
    reward.write_text("def compute_score(data_source, solution_str, ground_truth): return len(set(solution_str))\n")
    words = ["--model", str(tiny_model_dir), "--reward", str(reward), "-n", "3", "--max-response-length", "8"]
    assert main(["data", "preferences", str(data), *words, "--out", str(out)]) == 0
    assert "pairs from 3 prompts" in capsys.readouterr().out
    import pyarrow.parquet as pq

    rows = pq.read_table(out).to_pylist()
    assert rows
    for pair in rows:
        assert pair["chosen_score"] == len(set(pair["chosen"])) > pair["rejected_score"] == len(set(pair["rejected"]))
        assert pair["prompt"][0]["content"] in "012"
