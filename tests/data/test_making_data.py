"""Makers of data files: rows in the convention, distinct problems, and errors that name what is there."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest

from verl.data.generate import make_gsm8k, make_reasoning_gym
from verl.data.output import parse_options, parse_value
from verl.data.tables import read_rows
from verl.data.typed_json import dump_typed, load_typed
from verl.errors import DataError
from verl.rewards.rules import reasoning_gym

TWO_TERMS = {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1}


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("2", 2), ("-3", -3), ("0.5", 0.5), ("1e-3", 0.001), ("true", True), ("False", False), ("null", None),
        ("[1, 2]", [1, 2]), ('{"a": 1}', {"a": 1}), ('"7"', "7"), ("word", "word"), ("nan", "nan"), ("", ""),
    ],
)  # fmt: skip
def test_values_from_text(text, value):
    parsed = parse_value(text)
    assert parsed == value and type(parsed) is type(value)


def test_options_from_text():
    assert parse_options(["min_terms=2", "ops=[\"+\", \"-\"]", "sep==x"]) == {
        "min_terms": 2, "ops": ["+", "-"], "sep": "=x",
    }  # fmt: skip
    for bad in (["novalue"], ["=3"], ["a=1", "a=2"], ["a=[1"]):
        with pytest.raises(DataError):
            parse_options(bad)


@pytest.mark.parametrize(
    "value", [(1, (2, "x")), {1: "a", (2, 3): [4]}, {"__kind__": 1}, [{1, 2}], {"a": None, "b": [1.5, True]}]
)
def test_typed_json_gives_back_what_it_was_given(value):
    assert load_typed(dump_typed(value)) == value


def test_reasoning_gym_rows_follow_the_convention_and_score_themselves(tmp_path, prompt_rows):
    out = tmp_path / "deep" / "chain.parquet"
    train, val = make_reasoning_gym(
        "chain_sum", 30, out, seed=4, options=TWO_TERMS, val_size=10, instruction="Answer with the number only."
    )
    assert (train.path, train.rows, val.path.name, val.rows) == (out, 30, "chain_val.parquet", 10)
    rows = prompt_rows(out)
    assert rows[0].data_source == "reasoning_gym/chain_sum"
    assert [m["role"] for m in rows[0].prompt] == ["system", "user"]
    for row in rows:
        assert reasoning_gym(f"  {row.ground_truth}\n", row.ground_truth, row.extra_info)["score"] == 1.0
        assert reasoning_gym("no idea", row.ground_truth, row.extra_info)["score"] == 0.0
    assert json.loads(rows[0].extra_info["metadata"])["num_terms"] == 2
    assert [p.name for p in out.parent.iterdir() if p.name.endswith("tmp")] == []


def test_held_out_problems_are_not_training_problems(tmp_path):
    # One digit, two terms: a few hundred problems in all, so that chance alone would certainly repeat some.
    out = tmp_path / "a.parquet"
    make_reasoning_gym("chain_sum", 60, out, seed=1, options=TWO_TERMS, val_size=40)
    train = [row.values["prompt"][-1]["content"] for row in read_rows(out)]
    val = [row.values["prompt"][-1]["content"] for row in read_rows(tmp_path / "a_val.parquet")]
    assert len(train) == 60 and len(val) == 40 and len({*train, *val}) == 100


def test_the_same_seed_gives_the_same_rows(tmp_path):
    for name, seed in (("a", 1), ("b", 1), ("c", 2)):
        make_reasoning_gym("chain_sum", 5, tmp_path / f"{name}.parquet", seed=seed)
    a, b, c = ([r.values for r in read_rows(tmp_path / f"{n}.parquet")] for n in "abc")
    assert a == b != c


def test_a_task_that_compares_tuples_scores_its_own_answer(tmp_path):
    # ARC grids are tuples in the metadata; as JSON lists the right answer would score 0.05.
    make_reasoning_gym("arc_agi", 2, tmp_path / "a.parquet", seed=1)
    for row in read_rows(tmp_path / "a.parquet"):
        assert reasoning_gym(row.values["extra_info"]["answer"], None, row.values["extra_info"])["score"] == 1.0


def test_a_task_without_a_single_answer_has_a_ground_truth_that_loads(tmp_path, prompt_rows):
    out = tmp_path / "a.parquet"
    make_reasoning_gym("graph_color", 2, out, seed=1)
    (first, _) = prompt_rows(out)
    assert first.ground_truth == "(any valid answer)" and first.extra_info["answer"] is None


def test_too_few_distinct_problems(tmp_path):
    with pytest.raises(DataError, match=r"(?s)too few distinct problems.*5000 asked for"):
        make_reasoning_gym("chain_sum", 5000, tmp_path / "a.parquet", options={**TWO_TERMS, "min_digits": 1})
    assert not (tmp_path / "a.parquet").exists()


def test_unknown_task_and_option(tmp_path):
    with pytest.raises(DataError, match="did you mean chain_sum"):
        make_reasoning_gym("chain_sums", 2, tmp_path / "a.parquet")
    with pytest.raises(DataError, match=r"did you mean min_terms\?.*max_digits"):
        make_reasoning_gym("chain_sum", 2, tmp_path / "a.parquet", options={"min_term": 2})
    with pytest.raises(DataError, match="refuses its options"):
        make_reasoning_gym("chain_sum", 2, tmp_path / "a.parquet", options={"min_terms": 9, "max_terms": 2})
    with pytest.raises(DataError, match="not positive"):
        make_reasoning_gym("chain_sum", 0, tmp_path / "a.parquet")


def test_the_missing_library_is_named(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "reasoning_gym.factory", None)
    with pytest.raises(DataError, match="pip install reasoning-gym"):
        make_reasoning_gym("chain_sum", 2, tmp_path / "a.parquet")


@pytest.mark.parametrize("name", ["a.txt", "folder.parquet"])
def test_outputs_that_are_no_parquet_file(tmp_path, name):
    (tmp_path / "folder.parquet").mkdir()
    with pytest.raises(DataError):
        make_reasoning_gym("chain_sum", 2, tmp_path / name)


def test_a_folder_that_cannot_be_written(tmp_path):
    blocked = tmp_path / "file"
    blocked.write_text("in the way")  # serves root too, for whom permissions do not count
    with pytest.raises(DataError, match=r"(?s)cannot be written.*file"):
        make_reasoning_gym("chain_sum", 2, blocked / "a.parquet")


@pytest.mark.skipif(os.geteuid() == 0, reason="root writes everywhere")
def test_a_read_only_folder(tmp_path):
    tmp_path.chmod(0o500)
    with pytest.raises(DataError, match="cannot be written"):
        make_reasoning_gym("chain_sum", 2, tmp_path / "a.parquet")
    tmp_path.chmod(0o700)


def test_a_failed_write_leaves_nothing(tmp_path, monkeypatch):
    import pyarrow.parquet as pq

    def full(writer, table):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(pq.ParquetWriter, "write_table", full)
    with pytest.raises(DataError, match="No space left"):
        make_reasoning_gym("chain_sum", 2, tmp_path / "a.parquet")
    assert list(tmp_path.iterdir()) == []


def gsm8k_file(tmp_path: Path, rows: list[dict]) -> Path:
    path = tmp_path / "in.jsonl"
    path.write_text("\n".join(json.dumps(row) for row in rows))
    return path


def test_gsm8k_rows(tmp_path):
    source = gsm8k_file(tmp_path, [{"question": "How many?", "answer": "1000 + 234 = 1234\n#### 1,234"}])
    made = make_gsm8k(source, tmp_path / "out.parquet", split="test")
    (row,) = read_rows(made.path)
    assert row.values["reward_model"]["ground_truth"] == "1234"
    assert row.values["data_source"] == "openai/gsm8k" and row.values["extra_info"]["split"] == "test"
    assert row.values["prompt"][0]["content"].startswith("How many? Let's think step by step")
    make_gsm8k(source, tmp_path / "bare.parquet", instruction=None)
    assert read_rows(tmp_path / "bare.parquet")[0].values["prompt"] == [{"role": "user", "content": "How many?"}]


@pytest.mark.parametrize(
    "row", [{"question": "q"}, {"question": "q", "answer": "12"}, {"question": "q", "answer": "####"}]
)
def test_gsm8k_rows_that_are_none(tmp_path, row):
    good = {"question": "q", "answer": "#### 1"}
    with pytest.raises(DataError, match="line 2"):
        make_gsm8k(gsm8k_file(tmp_path, [good, row]), tmp_path / "out.parquet")
    assert not (tmp_path / "out.parquet").exists()
