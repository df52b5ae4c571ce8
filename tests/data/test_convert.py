"""Any file into the row format."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from verl.data import output
from verl.data.generate import Mapping, convert
from verl.data.tables import read_rows
from verl.errors import DataError


@pytest.fixture
def made(tmp_path):
    """Rows that come out of rows."""

    def make(rows: list[dict[str, Any]], out: str = "out.jsonl", **mapping: Any) -> list[dict[str, Any]]:
        source = tmp_path / "in.jsonl"
        source.write_bytes(b"".join(json.dumps(row).encode() + b"\n" for row in rows))
        convert(str(source), tmp_path / out, Mapping(**mapping))
        return [row.values for row in read_rows(tmp_path / out)]

    return make


def user(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}]


QA = [{"question": "2+2?", "answer": 4, "level": "easy"}, {"question": "3+3?", "answer": 6, "level": "hard"}]


@pytest.mark.parametrize("out", ["out.jsonl", "deep/out.parquet"])
def test_usual_names_are_found_and_the_rest_is_kept(made, out):
    assert made(QA, out) == [
        {
            "data_source": "unknown",
            "prompt": user("2+2?"),
            "reward_model": {"style": "rule", "ground_truth": "4"},
            "extra_info": {"index": 0, "level": "easy"},
        },
        {
            "data_source": "unknown",
            "prompt": user("3+3?"),
            "reward_model": {"style": "rule", "ground_truth": "6"},
            "extra_info": {"index": 1, "level": "hard"},
        },
    ]


def test_maps_constants_and_a_system_message(made):
    rows = [{"q": "2+2?", "meta": {"answer": 4.0, "by": "x"}, "kind": "sum"}]
    (row,) = made(
        rows,
        columns={"prompt": "q", "ground_truth": "meta.answer", "ability": "kind", "author": "meta.by"},
        constants={"data_source": "mine", "split": "train"},
        system="Be brief.",
    )
    assert row == {
        "data_source": "mine",
        "prompt": [{"role": "system", "content": "Be brief."}, *user("2+2?")],
        "reward_model": {"style": "rule", "ground_truth": "4"},
        "extra_info": {"index": 0, "author": "x", "split": "train"},
        "ability": "sum",
    }


def test_a_template(made):
    template = "{question} ({level}, {{x}}) Answer in \\boxed{}."
    rows = made([*QA, {"question": "", "answer": 1, "level": "x"}], template=template)
    assert [row["prompt"] for row in rows] == [
        user("2+2? (easy, {x}) Answer in \\boxed{}."),
        user("3+3? (hard, {x}) Answer in \\boxed{}."),
    ]
    assert rows[0]["extra_info"]["question"] == "2+2?"  # at hand for a reward function


def test_a_file_in_the_row_format_stays_as_it_is(made, row_of):
    rows = [row_of(user("2+2?"), truth="4", source="mine", index=7)]
    assert made(rows) == rows


def test_messages_and_plain_text(made):
    rows = [{"prompt": [{"role": "system", "content": "old"}, *user("q")], "label": "1"}]
    assert made(rows, system="new")[0]["prompt"] == [{"role": "system", "content": "new"}, *user("q")]
    assert made(rows)[0]["prompt"] == rows[0]["prompt"]
    assert made(QA, plain=True)[0]["prompt"] == "2+2?"


def test_ground_truths_of_every_type(made):
    rows = [{"prompt": "q", "label": value} for value in ("x", 3, 3.0, 0.5, True, ["a", 1], {"k": [1]})]
    truths = [row["reward_model"]["ground_truth"] for row in made(rows)]
    assert truths == ["x", "3", "3", "0.5", "true", ["a", "1"], '{"k": [1]}']


def test_rows_that_are_left_out(tmp_path):
    source = tmp_path / "in.csv"
    source.write_text("question,answer\n2+2?,4\n,5\n3+3?,\n4+4?\n5+5?,10\n")
    done = convert(str(source), tmp_path / "out.jsonl", Mapping())
    assert (done.rows, [(row.where, row.reason) for row in done.skipped]) == (
        2,
        [
            ("line 3", "the prompt in column 'question' is empty"),
            ("line 4", "the ground truth in column 'answer' is empty"),
            ("line 5", "1 fields, the first line names 2"),
        ],
    )
    assert done.origins == {
        "prompt": "column question",
        "ground_truth": "column answer",
        "data_source": 'always "unknown"',
    }


def test_several_files_of_several_kinds(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"question": "a", "answer": "1"}\n')
    (tmp_path / "b.csv").write_text("question,answer\nb,2\n")
    done = convert([str(tmp_path / "a.jsonl"), str(tmp_path / "b.csv")], tmp_path / "out.parquet", Mapping())
    rows = pq.read_table(tmp_path / "out.parquet").to_pylist()
    assert done.rows == 2 and [row["extra_info"]["index"] for row in rows] == [0, 1]


@pytest.mark.parametrize(
    ("mapping", "words"),
    [
        ({"columns": {"prompt": "questoin"}}, "did you mean question?"),
        ({"template": "Solve {questoin}"}, "did you mean question?"),
        ({"template": "Solve it"}, "names no column"),
        ({"template": "{question}", "columns": {"prompt": "question"}}, "give one of them"),
        ({"columns": {"ground_truth": "answer"}, "constants": {"ground_truth": "1"}}, "both mapped and set"),
    ],
)
def test_mappings_that_are_refused(made, mapping, words):
    with pytest.raises(DataError) as caught:
        made(QA, **mapping)
    assert words in str(caught.value)


@pytest.mark.parametrize(
    ("rows", "words"),
    [
        ([{"frage": "q", "answer": "1"}], "--map prompt=COLUMN, or --template"),
        ([{"question": "q", "antwort": "1"}], "--set ground_truth=VALUE"),
        ([{"question": "", "answer": "1"}], "No row can be converted"),
        ([], "hold no rows"),
    ],
)
def test_files_that_cannot_be_converted(made, tmp_path, rows, words):
    if not rows:
        (tmp_path / "in.jsonl").write_text("\n")
        with pytest.raises(DataError, match=words):
            convert(str(tmp_path / "in.jsonl"), tmp_path / "out.jsonl", Mapping())
        return
    with pytest.raises(DataError) as caught:
        made(rows)
    assert words in str(caught.value) and not (tmp_path / "out.jsonl").exists()


def test_a_file_without_a_readable_row_says_why(tmp_path):
    (tmp_path / "latin.jsonl").write_bytes('{"question": "café", "answer": "1"}\n'.encode("latin-1"))
    with pytest.raises(DataError, match=r"latin.jsonl, line 1: not UTF-8"):
        convert(str(tmp_path / "latin.jsonl"), tmp_path / "out.jsonl", Mapping())


def test_a_target_of_its_own_is_seen_to_be_one(tmp_path):
    (tmp_path / "in.jsonl").write_text('{"question": "q", "answer": "1"}\n')
    done = convert(
        str(tmp_path / "in.jsonl"), tmp_path / "out.jsonl", Mapping({"promt": "question"}, {"data_source": "a"})
    )
    assert done.origins == {
        "extra_info.promt": "column question",
        "prompt": "column question",
        "ground_truth": "column answer",
        "data_source": 'always "a"',
    }


def test_the_output_is_checked_first(tmp_path):
    (tmp_path / "in.jsonl").write_text('{"prompt": "q", "label": "1"}\n')
    for out, words in (
        ("out.csv", "parquet or jsonl"),
        ("in.jsonl", "one of the inputs"),
        ("in.jsonl/x.jsonl", "cannot be written"),
    ):
        with pytest.raises(DataError, match=words):
            convert(str(tmp_path / "in.jsonl"), tmp_path / out, Mapping())
    assert [path.name for path in tmp_path.iterdir()] == ["in.jsonl"]


def test_types_that_parquet_cannot_mix_name_the_column(made, tmp_path):
    rows = [{"prompt": "q", "label": "1", "note": value} for value in ("text", {"deep": 1})]
    with pytest.raises(DataError, match=r"(?s)extra_info\.note.*ends in \.jsonl"):
        made(rows, "out.parquet")
    assert [path.name for path in tmp_path.iterdir()] == ["in.jsonl"]
    assert [row["extra_info"]["note"] for row in made(rows)] == ["text", {"deep": 1}]


def test_types_are_found_over_all_rows(made, monkeypatch):
    monkeypatch.setattr(output, "ROWS_AT_ONCE", 2)
    rows = [{"prompt": f"q{i}", "label": "1", "n": value} for i, value in enumerate([None, None, 1, 2, 0.5])]
    rows[3]["late"] = "x"
    found = made(rows, "out.parquet")
    assert [row["extra_info"]["n"] for row in found] == [None, None, 1.0, 2.0, 0.5]
    assert [row["extra_info"]["late"] for row in found] == [None, None, None, "x", None]


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    rows=st.lists(st.dictionaries(st.sampled_from(["question", "answer", "x"]), st.text(max_size=5)), max_size=5),
    out=st.sampled_from(["out.jsonl", "out.parquet"]),
    template=st.none() | st.text(max_size=12) | st.just("{question} {{}} {x}"),
)
def test_any_rows_are_converted_or_refused(tmp_path, rows, out, template):
    source = tmp_path / "in.jsonl"
    source.write_bytes(b"".join(json.dumps(row).encode() + b"\n" for row in [*rows, {"question": "q", "answer": "a"}]))
    try:
        done = convert(str(source), Path(tmp_path / out), Mapping(template=template))
    except DataError:
        return
    assert len(read_rows(tmp_path / out)) == done.rows and done.rows + len(done.skipped) == len(rows) + 1
