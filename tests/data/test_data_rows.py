"""What rows mean, which of them are bad, and which columns a file must have (B065)."""

from __future__ import annotations

import json

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from verl.config import DataConfig
from verl.data.rows import BadRow, FileRows
from verl.errors import DataError


def source_of(path, **fields) -> FileRows:
    return FileRows(str(path), DataConfig(train_files="unused", **fields))


def test_parquet_and_jsonl_give_the_same_rows(write, row_of, prompt_rows):
    rows = [row_of([{"role": "user", "content": f"q{i} 中文 🙂"}], str(i), index=i) for i in range(3)]
    a, b = prompt_rows(write("a.parquet", rows)), prompt_rows(write("a.jsonl", rows))
    assert [(r.prompt, r.ground_truth, r.data_source, r.extra_info, r.row_index) for r in a] == [
        (r.prompt, r.ground_truth, r.data_source, r.extra_info, r.row_index) for r in b
    ]
    assert a[2].prompt == [{"role": "user", "content": "q2 中文 🙂"}]
    assert (a[2].ground_truth, a[2].extra_info) == ("2", {"split": "train", "index": 2})


def test_rows_of_many_files_are_numbered_through(write, row_of, prompt_rows, tmp_path):
    for name in ("b", "a"):
        write(f"{name}.jsonl", [row_of(f"{name}{i}") for i in range(2)])
    rows = prompt_rows([tmp_path / "b.jsonl", tmp_path / "a*.jsonl"])
    assert [(r.prompt, r.row_index) for r in rows] == [("b0", 0), ("b1", 1), ("a0", 2), ("a1", 3)]
    source = source_of(tmp_path / "*.jsonl")
    assert [row.prompt for row in source.read(1, 3)] == ["a1", "b0"] and source.entry_starts == [0, 4]


def test_lone_surrogates_in_a_row_are_kept(tmp_path, prompt_rows):
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'{"prompt": "x\\ud835y", "label": "1"}\n')
    assert prompt_rows(path)[0].prompt == "x\ud835y"


def test_openrlhf_and_trl_rows(write, prompt_rows):
    path = write("a.jsonl", [{"input": "2+2", "label": 4, "level": 3}])
    (row,) = prompt_rows(path, prompt_key="input", answer_key="label")
    assert (row.prompt, row.ground_truth, row.data_source) == ("2+2", 4, "unknown")
    assert row.extra_info == {"level": 3} and row.columns == {"label": 4, "level": 3}
    trl = write("b.jsonl", [{"prompt": [{"role": "user", "content": "q"}], "solution": "s", "topic": "t"}])
    (row,) = prompt_rows(trl)
    assert (row.ground_truth, row.extra_info) == ("s", {"topic": "t"})


def test_a_csv_file_as_it_comes(tmp_path, prompt_rows):
    (tmp_path / "a.csv").write_text('question,answer,data_source\n"2+2, then?",4,mine\n')
    (row,) = prompt_rows(tmp_path / "a.csv", prompt_key="question")
    assert (row.prompt, row.ground_truth, row.data_source) == ("2+2, then?", "4", "mine")


def test_a_folder_of_save_to_disk(tmp_path, prompt_rows):
    for i in range(2):
        table = pa.table({"question": [f"q{i}", "x"], "answer": [f"a{i}", "1"]})
        features = {"info": {"features": {name: {"dtype": "string", "_type": "Value"} for name in table.column_names}}}
        table = table.replace_schema_metadata({"huggingface": json.dumps(features)})
        with pa.ipc.new_stream(str(tmp_path / f"data-0000{i}-of-00002.arrow"), table.schema) as writer:
            writer.write_table(table)
    shards = [{"filename": f"data-0000{i}-of-00002.arrow"} for i in range(2)]
    (tmp_path / "state.json").write_text(json.dumps({"_data_files": shards, "_fingerprint": "f", "_split": "train"}))
    (tmp_path / "dataset_info.json").write_text("{}")
    rows = prompt_rows(tmp_path, prompt_key="question")
    assert [(row.prompt, row.ground_truth) for row in rows] == [("q0", "a0"), ("x", "1"), ("q1", "a1"), ("x", "1")]


def test_further_columns_never_replace_extra_info(write, row_of, prompt_rows):
    (row,) = prompt_rows(write("a.jsonl", [{**row_of("q", index=7), "index": 99}]))
    assert row.extra_info["index"] == 7 and row.columns == {"index": 99}


def test_a_wrong_prompt_column_shows_the_columns_and_the_nearest(write, row_of):
    with pytest.raises(DataError) as caught:
        source_of(write("a.jsonl", [row_of("q")]), prompt_key="promt")
    text = str(caught.value)
    assert "promt" in text and "did you mean data.prompt_key=prompt?" in text and "reward_model" in text


def test_a_usual_name_is_offered_where_none_is_near(write):
    with pytest.raises(DataError, match=r"did you mean data\.prompt_key=question"):
        source_of(write("a.jsonl", [{"question": "q", "answer": "1"}]))


def test_columns_that_a_file_must_have(write, row_of):
    with pytest.raises(DataError, match=r"(?s)no column with the ground truth.*a\.jsonl.*prompt, topic"):
        source_of(write("a.jsonl", [{"prompt": "q", "topic": "t"}]))
    with pytest.raises(DataError, match=r"(?s)data\.reward_fn_key.*a\.jsonl.*source"):
        source_of(write("a.jsonl", [row_of("q")]), reward_fn_key="source")


BAD = {
    "no truth": ({"reward_model": {"style": "rule"}}, "no ground truth"),
    "null truth": ({"reward_model": None}, "no ground truth"),
    "empty truth": ({"reward_model": {"ground_truth": " "}}, "'reward_model.ground_truth' is empty"),
    "null prompt": ({"prompt": None}, "no prompt"),
    "empty prompt": ({"prompt": ""}, "the prompt in column 'prompt' is empty"),
    "no messages": ({"prompt": []}, "empty list"),
    "blank messages": ({"prompt": [{"role": "user", "content": " "}]}, "every message"),
    "no role": ({"prompt": [{"content": "x"}]}, "message 0 of the prompt has no role"),
    "null content": ({"prompt": [{"role": "user", "content": None}]}, "no content"),
    "a number": ({"prompt": 3}, "int"),
    "extra_info text": ({"extra_info": "x"}, "extra_info is str"),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_bad_rows_say_where_and_why(write, row_of, name):
    change, reason = BAD[name]
    path = write("a.jsonl", [row_of("fine"), {**row_of("q"), **change}])
    fine, bad = source_of(path).read(0, 2)
    assert fine.prompt == "fine" and isinstance(bad, BadRow)
    assert (bad.file, bad.row, bad.index, bad.where) == (str(path), 1, 1, "line 2") and reason in bad.reason


def test_numbers_of_bad_rows_are_of_file_and_dataset(write, row_of, tmp_path):
    write("a.parquet", [row_of("a"), row_of(None)])
    write("b.parquet", [row_of("b"), row_of("c", truth=None), row_of("")])
    bad = [row for row in source_of(tmp_path / "*.parquet").read(0, 5) if isinstance(row, BadRow)]
    assert [(row.row, row.index, row.where) for row in bad] == [
        (1, 1, "row 1 (counted from 0)"),
        (1, 3, "row 1 (counted from 0)"),
        (2, 4, "row 2 (counted from 0)"),
    ]


def test_a_column_that_is_null_everywhere_is_accepted(write, row_of, prompt_rows):
    assert len(prompt_rows(write("a.parquet", [row_of("a", note=None), row_of("b", note=None)]))) == 2


@pytest.mark.parametrize("name", ["a.jsonl", "a.parquet", "a.csv"])
def test_an_empty_dataset_is_an_error(tmp_path, name):
    path = tmp_path / name
    if name.endswith("parquet"):
        pq.write_table(pa.table({"prompt": pa.array([], pa.string()), "label": pa.array([], pa.string())}), str(path))
    else:
        path.write_bytes(b"\n\n")
    with pytest.raises(DataError, match="holds no rows"):
        source_of(path)
