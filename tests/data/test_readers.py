"""Files in, rows out: what is read, and what is refused by name (cases B057, B065, B066)."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from verl.config import DataConfig
from verl.data.readers import expand_files, read_rows
from verl.data.rows import read_prompt_rows
from verl.errors import DataError


def config(**fields) -> DataConfig:
    return DataConfig(train_files="unused", **fields)


def test_parquet_and_jsonl_give_the_same_rows(write, row_of):
    rows = [row_of([{"role": "user", "content": f"q{i} 中文 🙂"}], str(i), index=i) for i in range(3)]
    a = read_prompt_rows(str(write("a.parquet", rows)), config())
    b = read_prompt_rows(str(write("a.jsonl", rows)), config())
    assert [(r.prompt, r.ground_truth, r.data_source, r.extra_info, r.row_index) for r in a] == [
        (r.prompt, r.ground_truth, r.data_source, r.extra_info, r.row_index) for r in b
    ]
    assert a[2].prompt == [{"role": "user", "content": "q2 中文 🙂"}]
    assert (a[2].ground_truth, a[2].extra_info) == ("2", {"split": "train", "index": 2})


def test_many_files_and_globs_keep_order_and_number_rows_through(write, row_of, tmp_path):
    for name in ("b", "a"):
        write(f"{name}.jsonl", [row_of(f"{name}{i}") for i in range(2)])
    rows = read_prompt_rows([str(tmp_path / "b.jsonl"), str(tmp_path / "a*.jsonl")], config())
    assert [(r.prompt, r.row_index) for r in rows] == [("b0", 0), ("b1", 1), ("a0", 2), ("a1", 3)]
    assert [r.prompt for r in read_prompt_rows(str(tmp_path / "*.jsonl"), config())] == ["a0", "a1", "b0", "b1"]


def test_a_name_with_brackets_is_a_file_before_it_is_a_pattern(write, row_of):
    path = write("a[1].jsonl", [row_of("x")])
    assert expand_files(str(path)) == [path]


def test_json_lines_end_at_newline_bytes_only(tmp_path):
    # U+2028, U+0085, form feed: text.splitlines() would break each of these rows.
    texts = ["one\u2028two", "one\u0085two", "one\x0ctwo"]
    path = tmp_path / "a.jsonl"
    lines = [json.dumps({"prompt": t, "label": "1"}, ensure_ascii=False) for t in texts]
    path.write_bytes(b"\xef\xbb\xbf" + "\r\n".join(lines).encode() + b"\n\n")
    assert [r.prompt for r in read_prompt_rows(str(path), config())] == texts


def test_a_json_file_holds_lines_or_one_list(tmp_path):
    rows = [{"prompt": "a", "label": "1"}, {"prompt": "b", "label": "2"}]
    (tmp_path / "list.json").write_text(json.dumps(rows))
    (tmp_path / "lines.json").write_text("\n".join(map(json.dumps, rows)))
    for name in ("list.json", "lines.json"):
        assert [r.ground_truth for r in read_prompt_rows(str(tmp_path / name), config())] == ["1", "2"]


def test_utf8_is_read_under_an_ascii_locale(write, row_of):
    path = write("a.jsonl", [])
    path.write_bytes(json.dumps(row_of("多少🙂"), ensure_ascii=False).encode())
    code = (
        "import sys; from verl.data.readers import read_rows; print(ascii(read_rows(sys.argv[1])[0].values['prompt']))"
    )
    env = {**os.environ, "LC_ALL": "C", "LANG": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    done = subprocess.run(
        [sys.executable, "-c", code, str(path)],
        env=env, capture_output=True, text=True, cwd=Path(__file__).parents[2], check=False,
    )  # fmt: skip
    assert done.stdout.strip() == ascii("多少🙂"), done.stderr


def test_lone_surrogates_in_a_row_are_kept(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'{"prompt": "x\\ud835y", "label": "1"}\n')
    assert read_prompt_rows(str(path), config())[0].prompt == "x\ud835y"


# --- files that are refused


def test_missing_file_names_the_nearest(write, row_of, tmp_path):
    write("train.parquet", [row_of("a")])
    with pytest.raises(DataError) as caught:
        read_prompt_rows(str(tmp_path / "trian.parquet"), config())
    assert "trian.parquet" in str(caught.value) and f"did you mean {tmp_path / 'train.parquet'}?" in str(caught.value)


@pytest.mark.parametrize("name", ["nowhere/a.parquet", "*.parquet", "."])
def test_paths_that_name_no_file(tmp_path, name):
    with pytest.raises(DataError) as caught:
        expand_files(str(tmp_path / name))
    assert str(tmp_path) in str(caught.value)


def test_one_file_twice_is_refused(write, row_of, tmp_path):
    path = write("a.jsonl", [row_of("a")])
    with pytest.raises(DataError, match="named twice"):
        expand_files([str(path), str(tmp_path / "*.jsonl")])


def test_no_file_and_unknown_kind(tmp_path):
    with pytest.raises(DataError, match="No data file"):
        expand_files([])
    (tmp_path / "a.txt").write_text("x")
    with pytest.raises(DataError, match=r"(?s)kind.*a\.txt"):
        read_rows(tmp_path / "a.txt")


def _cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-10])


def _empty(path: Path) -> None:
    path.write_bytes(b"")


def _foreign(path: Path) -> None:
    path.write_bytes(b"this is no parquet file at all")


def _unknown_feature(path: Path) -> None:
    table = pq.read_table(str(path))
    features = {"info": {"features": {"prompt": {"dtype": "string", "_type": "Hologram"}}}}
    pq.write_table(table.replace_schema_metadata({"huggingface": json.dumps(features)}), str(path))


@pytest.mark.parametrize("damage", [_cut, _empty, _foreign, _unknown_feature])
def test_a_damaged_parquet_is_named_and_the_good_one_is_not_used_alone(write, row_of, damage):
    good, bad = write("good.parquet", [row_of("a")]), write("bad.parquet", [row_of("b")])
    damage(bad)
    with pytest.raises(DataError) as caught:
        read_prompt_rows([str(good), str(bad)], config())
    assert str(bad) in str(caught.value)


def test_known_feature_metadata_is_accepted(write, row_of):
    path = write("a.parquet", [row_of("a")])
    features = {"info": {"features": {"prompt": {"dtype": "string", "_type": "Value"}, "x": [{"_type": "Sequence"}]}}}
    pq.write_table(pq.read_table(str(path)).replace_schema_metadata({"huggingface": json.dumps(features)}), str(path))
    assert len(read_rows(path)) == 1


@pytest.mark.parametrize(
    ("raw", "expected"),
    [
        (b'{"prompt": "a", "label": "1"}\n{"prompt": "b", "la', "line 2"),
        (b'{"prompt": "a", "label": "1"}\n[1, 2]\n', "line 2"),
        (b'{"prompt": "caf\xe9", "label": "1"}\n', "line 1"),
    ],
)
def test_a_bad_json_line_is_named(tmp_path, raw, expected):
    path = tmp_path / "a.jsonl"
    path.write_bytes(raw)
    with pytest.raises(DataError) as caught:
        read_rows(path)
    assert str(path) in str(caught.value) and expected in str(caught.value)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(raw=st.binary(max_size=200), name=st.sampled_from(["f.parquet", "f.jsonl", "f.json"]))
def test_random_bytes_give_rows_or_a_named_error(tmp_path, raw, name):
    path = tmp_path / name
    path.write_bytes(raw)
    try:
        rows = read_rows(path)
    except DataError as error:
        assert name in str(error)
    else:
        assert all(isinstance(row.values, dict) for row in rows)


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_any_truncation_or_flipped_byte_of_a_parquet_never_escapes(tmp_path, data):
    path = tmp_path / "t.parquet"
    pq.write_table(pa.table({"prompt": ["a", "b"], "label": ["1", "2"]}), str(path))
    raw = bytearray(path.read_bytes())
    at = data.draw(st.integers(0, len(raw) - 1))
    if data.draw(st.booleans()):
        raw = raw[:at]
    else:
        raw[at] ^= data.draw(st.integers(1, 255))
    path.write_bytes(bytes(raw))
    try:
        read_prompt_rows(str(path), config())
    except DataError as error:
        assert "t.parquet" in str(error)


# --- rows


def test_openrlhf_and_trl_rows(write):
    path = write("a.jsonl", [{"input": "2+2", "label": 4, "level": 3}])
    (row,) = read_prompt_rows(str(path), config(prompt_key="input", answer_key="label"))
    assert (row.prompt, row.ground_truth, row.data_source) == ("2+2", 4, "unknown")
    assert row.extra_info == {"level": 3} and row.columns == {"label": 4, "level": 3}
    trl = write("b.jsonl", [{"prompt": [{"role": "user", "content": "q"}], "solution": "s", "topic": "t"}])
    (row,) = read_prompt_rows(str(trl), config())
    assert (row.ground_truth, row.extra_info) == ("s", {"topic": "t"})


def test_further_columns_never_replace_extra_info(write, row_of):
    (row,) = read_prompt_rows(str(write("a.jsonl", [{**row_of("q", index=7), "index": 99}])), config())
    assert row.extra_info["index"] == 7 and row.columns == {"index": 99}


def test_a_wrong_prompt_column_shows_the_columns_and_the_nearest(write, row_of):
    with pytest.raises(DataError) as caught:
        read_prompt_rows(str(write("a.jsonl", [row_of("q")])), config(prompt_key="promt"))
    text = str(caught.value)
    assert "promt" in text and "did you mean data.prompt_key=prompt?" in text and "reward_model" in text


def test_a_usual_name_is_offered_where_none_is_near(write):
    with pytest.raises(DataError, match=r"did you mean data\.prompt_key=question"):
        read_prompt_rows(str(write("a.jsonl", [{"question": "q", "answer": "1"}])), config())


def test_no_truth_column_at_all(write):
    with pytest.raises(DataError, match=r"(?s)no column with the ground truth.*a\.jsonl.*prompt, topic"):
        read_prompt_rows(str(write("a.jsonl", [{"prompt": "q", "topic": "t"}])), config())


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
def test_bad_rows_are_reported_with_file_and_row(write, row_of, name):
    change, reason = BAD[name]
    path = write("a.jsonl", [row_of("fine"), {**row_of("q"), **change}])
    with pytest.raises(DataError) as caught:
        read_prompt_rows(str(path), config())
    text = str(caught.value)
    assert f"{path}, line 2" in text and reason in text and "1 of 2 rows" in text


def test_a_missing_key_in_one_row_counts_and_parquet_rows_have_numbers(write, row_of):
    rows = [row_of("a"), row_of(None), row_of(""), row_of("b", truth=None)]
    path = write("a.parquet", rows)
    with pytest.raises(DataError) as caught:
        read_prompt_rows(str(path), config())
    text = str(caught.value)
    assert "3 of 4 rows" in text and all(f"row {i} (counted from 0)" in text for i in (1, 2, 3))
    assert "row 0" not in text


def test_only_the_first_bad_rows_are_listed(write, row_of):
    path = write("a.jsonl", [row_of("")] * 9)
    with pytest.raises(DataError) as caught:
        read_prompt_rows(str(path), config())
    assert "9 of 9" in str(caught.value) and "and 4 more" in str(caught.value) and "line 6" not in str(caught.value)


def test_a_column_that_is_null_everywhere_is_accepted(write, row_of):
    rows = [row_of("a", note=None), row_of("b", note=None)]
    assert len(read_prompt_rows(str(write("a.parquet", rows)), config())) == 2


@pytest.mark.parametrize("name", ["a.jsonl", "a.parquet"])
def test_an_empty_dataset_is_an_error(write, tmp_path, name):
    path = tmp_path / name
    if name.endswith("parquet"):
        pq.write_table(pa.table({"prompt": pa.array([], pa.string()), "label": pa.array([], pa.string())}), str(path))
    else:
        path.write_bytes(b"\n\n")
    with pytest.raises(DataError, match="holds no rows"):
        read_prompt_rows(str(path), config())
