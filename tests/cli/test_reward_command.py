"""``verl reward test``: what people see of a reward before a run depends on it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from verl.cli import main

REWARD = """
import time
def compute_score(data_source, solution_str, ground_truth, extra_info=None, scale=1):
    if solution_str == "slow":
        time.sleep(0.05)
    if solution_str == "bad":
        raise ValueError("cannot read it")
    return {"score": scale * float(ground_truth in solution_str), "pred": solution_str[-2:]}
"""
ROWS = [
    {"prompt": "1+1?", "answer": "2", "response": "it is 2", "data_source": "a"},
    {"prompt": "2+2?", "answer": "4", "response": ["#### 4", "bad"], "data_source": "b"},
    {"prompt": "3+3?", "answer": "6", "response": "slow", "data_source": "b"},
]


@pytest.fixture
def files(in_this_process, tmp_path: Path) -> Path:
    (tmp_path / "mine.py").write_text(REWARD)
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    plain = [{key: value for key, value in row.items() if key != "response"} for row in ROWS]
    (tmp_path / "plain.jsonl").write_text("".join(json.dumps(row) + "\n" for row in plain))
    return tmp_path


def as_json(capsys, *words: str) -> dict:
    assert main(["reward", "test", *words, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_a_column_of_the_data(files, capsys):
    (report,) = as_json(capsys, "mine.py", "--data", "rows.jsonl")["reports"]
    assert report["scores"] == [1.0, 1.0, None, 0.0]
    assert (report["responses"], report["scored"], report["failed"]) == (4, 3, 1)
    assert report["score"] == {"mean": 2 / 3, "min": 0.0, "max": 1.0}
    assert report["distribution"] == [
        {"from": 0.0, "to": 0.0, "responses": 1}, {"from": 1.0, "to": 1.0, "responses": 2}
    ]  # fmt: skip
    assert report["by_source"] == {"a": 1.0, "b": 0.5}
    (failure,) = report["failures"]
    assert failure["reason"].startswith("ValueError: cannot read it (mine.py:7)") and failure["response"] == "bad"
    assert failure["where"] == "rows.jsonl, line 2" or failure["where"].endswith("rows.jsonl, line 2")
    assert report["slowest"][0]["response"] == "slow" and report["slowest"][0]["seconds"] >= 0.05


def test_what_people_read(files, capsys):
    assert main(["reward", "test", "mine.py", "--data", "rows.jsonl", "--compare", "gsm8k", "--plain"]) == 0
    out = capsys.readouterr().out
    assert "mine.py: 4 responses in " in out and "3 scored, 1 failed" in out
    assert "mean 0.6667, least 0, most 1" in out and "1 x ValueError: cannot read it" in out
    assert "source b: mean 0.5" in out and "slowest" in out
    assert "mine.py and gsm8k give 1 of 3 responses unequal scores (33.3%)" in out
    assert "1 (read 2) and 0  truth 2" in out and "it is 2" in out


def test_truths_stand_in_for_responses(files, capsys):
    (report,) = as_json(capsys, "gsm8k", "--data", "plain.jsonl", "--template", "#### {truth}")["reports"]
    assert report["scores"] == [1.0, 1.0, 1.0]
    unchanged = {"compared": 2, "unchanged": 0, "highest": 2, "highest_unchanged": 0, "mean": 0.0, "warning": None}
    assert report["other_truth"] == unchanged  # source a has one row only
    assert main(["reward", "test", "gsm8k", "--data", "plain.jsonl"]) == 0
    assert "give responses, or --template" in capsys.readouterr().out
    assert main(["reward", "test", "gsm8k", "--data", "plain.jsonl", "--template", "####"]) == 2
    assert "write it as {truth}" in capsys.readouterr().err


def test_a_reward_that_ignores_the_truth_is_told(files, capsys):
    signature = "def compute_score(data_source, solution_str, ground_truth, extra_info=None):\n    return "
    rewards = {"form.py": "float('####' in solution_str)", "same.py": "0.5", "half.py": "ground_truth in '24'"}
    for name, body in rewards.items():
        (files / name).write_text(signature + body)
    rows = [
        {"prompt": "?", "answer": str(i), "response": response} for i, response in ((2, "#### 2"), (4, "4"), (6, ""))
    ]
    (files / "three.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))

    def found(*words: str) -> dict:
        return as_json(capsys, *words, "--data", "three.jsonl")["reports"][0]["other_truth"]

    told = found("form.py")
    assert (told["compared"], told["unchanged"], told["highest_unchanged"]) == (3, 3, 1)
    assert "does not look at the ground truth" in told["warning"]
    assert found("same.py")["warning"].startswith("all scores are 0.5, whatever the ground truth")
    told = found("half.py")  # 2 has the truth 4 instead, 4 has 6, 6 has 2
    assert (told["unchanged"], told["highest"], told["highest_unchanged"], told["warning"]) == (1, 2, 1, None)
    assert main(["reward", "test", "form.py", "--data", "three.jsonl", "--plain"]) == 0
    out = capsys.readouterr().out
    assert "3 of 3 scores unchanged (100.0%), of the highest 1 of 1" in out and "warning: the reward does not" in out
    assert found("form.py", "--limit", "1") is None
    assert main(["reward", "test", "form.py", "--data", "three.jsonl", "--limit", "1", "--plain"]) == 0
    assert "no row has another truth" in capsys.readouterr().out


def test_numbers_as_truths_that_no_text_equals_are_told(files, capsys):
    (files / "equal.py").write_text(
        "def compute_score(data_source, solution_str, ground_truth): return solution_str == ground_truth"
    )
    (files / "int.jsonl").write_text("".join(json.dumps({"prompt": "?", "answer": i}) + "\n" for i in (2, 4)))
    warning = as_json(capsys, "equal.py", "--data", "int.jsonl")["reports"][0]["other_truth"]["warning"]
    assert "ground truths are int" in warning and "str(ground_truth)" in warning


def test_functions_of_columns_get_another_rows(files, capsys):
    body = (
        "def reward(completions, answer, **columns):\n    return [float(a in c) for a, c in zip(answer, completions)]\n"
    )
    (files / "trl.py").write_text(body)
    rows = [{"prompt": "?", "answer": str(i), "response": str(i)} for i in range(300)]
    (files / "many.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (report,) = as_json(capsys, "trl.py", "--name", "reward", "--data", "many.jsonl")["reports"]
    assert report["responses"] == 300 and report["other_truth"]["compared"] == 150  # every second, at most 256
    assert report["other_truth"]["mean"] == 0 and report["score"]["mean"] == 1


def test_responses_of_a_file_by_order_by_row_and_by_themselves(files, capsys):
    lines = [{"row": 2, "response": "#### 6"}, {"uid": "val:0:0:0", "response": ["#### 2", "#### 3"]}]
    (files / "named.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    words = ["gsm8k", "--data", "plain.jsonl", "--responses", "named.jsonl"]
    assert as_json(capsys, *words)["reports"][0]["scores"] == [1.0, 1.0, 0.0]
    lines = [{"response": f"#### {i}"} for i in (2, 4, 6)]
    (files / "ordered.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert as_json(capsys, *words[:-1], "ordered.jsonl")["reports"][0]["scores"] == [1.0, 1.0, 1.0]
    (files / "ordered.jsonl").write_text(json.dumps(lines[0]))
    assert main(["reward", "test", *words[:-1], "ordered.jsonl"]) == 2
    assert "1 lines of responses for 3 rows" in capsys.readouterr().err
    sample = {"split": "train", "uid": "u", "index": 0, "prompt": "p", "response": "#### 5", "ground_truth": "5"}
    (files / "step.jsonl").write_text(json.dumps(sample | {"data_source": "openai/gsm8k", "step": 1}))
    assert as_json(capsys, "auto", "--responses", "step.jsonl")["reports"][0]["scores"] == [1.0]
    del sample["ground_truth"]
    (files / "step.jsonl").write_text(json.dumps(sample))
    assert main(["reward", "test", "gsm8k", "--responses", "step.jsonl"]) == 2
    assert "has no ground_truth" in capsys.readouterr().err


def test_options_limits_and_time(files, capsys):
    words = ["mine.py", "--data", "rows.jsonl"]
    assert as_json(capsys, *words, "--option", "scale=3", "--limit", "1")["reports"][0]["scores"] == [3.0]
    report = as_json(capsys, *words, "--timeout", "0.02")["reports"][0]
    assert report["scores"] == [1.0, 1.0, None, None]
    assert {failure["reason"] for failure in report["failures"]} >= {"no answer within reward.timeout=0.02 s"}


def test_functions_for_a_batch_get_texts_and_columns(files, capsys):
    body = "def reward(prompts, completions, completion_ids, answer, **columns):\n"
    body += "    return [float(a in c) + len(i) / 100 for a, c, i in zip(answer, completions, completion_ids)]\n"
    (files / "trl.py").write_text(body)
    scores = as_json(capsys, "trl.py", "--name", "reward", "--data", "rows.jsonl")["reports"][0]["scores"]
    assert scores == [1.07, 1.06, 0.03, 0.04]
    body = "def reward_func(queries, prompts, labels):\n"
    body += "    rows = zip(queries, prompts, labels)\n"
    body += "    return {'rewards': [float(q.startswith(p) and p[-1] == '?' and l in q) for q, p, l in rows]}\n"
    (files / "rlhf.py").write_text(body)
    report = as_json(capsys, "rlhf.py", "--name", "reward_func", "--data", "rows.jsonl")["reports"][0]
    assert report["scores"] == [1.0, 1.0, 0.0, 0.0]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["gsm8", "--data", "rows.jsonl"], "did you mean gsm8k"),
        (["min.py", "--data", "rows.jsonl"], "did you mean mine.py"),
        (["mine.py", "--data", "rose.jsonl"], "rose.jsonl"),
        (["mine.py"], "give --data, --responses or both"),
        (["mine.py", "--data", "rows.jsonl", "--name", "compute"], "did you mean compute_score"),
        (["mine.py", "--data", "rows.jsonl", "--answer-key", "anser"], "did you mean answer"),
        (["mine.py", "--responses", "rows.jsonl", "--response-key", "respons"], "did you mean response"),
        (["mine.py", "--data", "rows.jsonl", "--option", "scal=3"], "does not take scal"),
        (["auto", "--data", "rows.jsonl"], "belongs to this data source"),
        (["mine.py", "--data", "rows.jsonl", "--timeout", "0"], "0 is not above 0"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_said_with_the_way_out(files, capsys, words, said):
    assert main(["reward", "test", *words]) == 2
    err = capsys.readouterr().err
    assert said in err and "Traceback" not in err
