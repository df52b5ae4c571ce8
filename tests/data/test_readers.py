"""Files of every kind in, rows out: what is read, what is a bad row, what is refused by name (B057, B066)."""

from __future__ import annotations

import csv
import io
import json
import os
import subprocess
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.feather
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from verl.data import readers
from verl.data.tables import RawRow, open_table, read_rows
from verl.errors import DataError

ROWS = [
    {"prompt": "one\u2028two", "n": "1", "note": None},
    {"prompt": "中文 🙂, \"quoted\"\nline", "n": "2", "note": "x"},
    {"prompt": "\u0085\x0c\t", "n": "3", "note": ""},
]  # fmt: skip
PLAIN = settings(suppress_health_check=[HealthCheck.function_scoped_fixture])


def as_jsonl(rows: list[dict[str, Any]]) -> bytes:
    return b"".join(json.dumps(row, ensure_ascii=False).encode() + b"\n" for row in rows)


def as_csv(rows: list[dict[str, Any]]) -> bytes:
    text = io.StringIO(newline="")
    writer = csv.DictWriter(text, list(rows[0]))
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue().encode()


def as_arrow(rows: list[dict[str, Any]], stream: bool) -> bytes:
    table, sink = pa.Table.from_pylist(rows), pa.BufferOutputStream()
    with (pa.ipc.new_stream if stream else pa.ipc.new_file)(sink, table.schema) as writer:
        writer.write_table(table, max_chunksize=2)
    return sink.getvalue().to_pybytes()


def as_feather(rows: list[dict[str, Any]]) -> bytes:
    sink = pa.BufferOutputStream()
    pyarrow.feather.write_feather(pa.Table.from_pylist(rows), sink, compression="zstd")
    return sink.getvalue().to_pybytes()


def as_parquet(rows: list[dict[str, Any]]) -> bytes:
    sink = pa.BufferOutputStream()
    pq.write_table(pa.Table.from_pylist(rows), sink, row_group_size=2)
    return sink.getvalue().to_pybytes()


KINDS: dict[str, Callable[[list[dict[str, Any]]], bytes]] = {
    "a.jsonl": as_jsonl,
    "b.ndjson": lambda rows: b"\xef\xbb\xbf" + as_jsonl(rows).replace(b"\n", b"\r\n") + b"\n \n",
    "c.json": lambda rows: json.dumps(rows, indent=2).encode(),
    "d.json": as_jsonl,
    "e.csv": as_csv,
    "f.arrow": lambda rows: as_arrow(rows, stream=True),
    "g.ipc": lambda rows: as_arrow(rows, stream=False),
    "h.feather": as_feather,
    "i.parquet": as_parquet,
    "parquet-without-ending": as_parquet,
}


@pytest.mark.parametrize("name", KINDS)
def test_every_kind_gives_the_same_rows(tmp_path, name):
    path = tmp_path / name
    path.write_bytes(KINDS[name](ROWS))
    expected = [{**row, "note": row["note"] or ""} for row in ROWS] if name == "e.csv" else ROWS
    assert [row.values for row in read_rows(path)] == expected
    table = open_table(path)
    assert table.columns == ["prompt", "n", "note"] and len(table) == 3
    assert [row.values for row in table.read(1, 2)] == expected[1:2] and table.read(3, 9) == []


def test_rows_say_where_they_are(tmp_path):
    (tmp_path / "a.jsonl").write_bytes(b'\n{"a": 1}\n\n{"a": 2}')
    (tmp_path / "b.csv").write_bytes(b'a,b\n"x\ny",1\nz,2\n')
    (tmp_path / "c.json").write_bytes(b'[{"a": 1},\n {"a": 2}]')
    assert [row.where for row in read_rows(tmp_path / "a.jsonl")] == ["line 2", "line 4"]
    assert [row.where for row in read_rows(tmp_path / "b.csv")] == ["line 3", "line 4"]
    assert str(read_rows(tmp_path / "c.json")[1]) == f"{tmp_path / 'c.json'}, row 1 (counted from 0)"


def test_what_only_json_can_hold_is_kept(tmp_path):
    rows = [{"a": "x\ud835y", "b": [1, "two", None]}, {"a": 3.5, "b": {"deep": [{}]}, "c": 2**70}]
    path = tmp_path / "a.jsonl"
    path.write_bytes(b"".join(json.dumps(row).encode() + b"\n" for row in rows))
    assert [row.values for row in read_rows(path)] == rows
    assert open_table(path).columns == ["a", "b", "c"]


def test_categories_and_types_of_arrow(tmp_path):
    table = pa.table(
        {"a": pa.array(["x", "y", "x"]).dictionary_encode(), "b": pa.array([1.5, None, 2.0], pa.float32())}
    )
    pq.write_table(table, tmp_path / "a.parquet")
    assert [row.values for row in read_rows(tmp_path / "a.parquet")] == [
        {"a": "x", "b": 1.5},
        {"a": "y", "b": None},
        {"a": "x", "b": 2.0},
    ]


def test_lists_of_json_are_read_piece_by_piece(tmp_path, monkeypatch):
    monkeypatch.setattr(readers, "READ_BYTES", 3)
    rows = [{"a": 'quote " brace } bracket ] \\', "b": [[], {"c": "," * i}]} for i in range(9)]
    path = tmp_path / "a.json"
    path.write_text(json.dumps(rows, indent=1))
    assert [row.values for row in read_rows(path)] == rows
    path.write_text(" [ ] ")
    assert read_rows(path) == []


def test_utf8_is_read_under_an_ascii_locale(tmp_path):
    for name in ("a.jsonl", "a.csv"):
        (tmp_path / name).write_bytes(KINDS["a.jsonl" if name == "a.jsonl" else "e.csv"]([{"prompt": "多少🙂"}]))
    code = "import sys; from verl.data.tables import read_rows\n"
    code += "for name in sys.argv[1:]: print(ascii(read_rows(name)[0].values['prompt']))"
    env = {**os.environ, "LC_ALL": "C", "LANG": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path / "a.jsonl"), str(tmp_path / "a.csv")],
        env=env, capture_output=True, text=True, cwd=Path(__file__).parents[2], check=False,
    )  # fmt: skip
    assert done.stdout.split() == [ascii("多少🙂")] * 2, done.stderr


# --- rows that are bad, in files that are good


def problems(path: Path) -> list[str | None]:
    table = open_table(path)
    return [row.problem for row in table.read(0, len(table))]


@pytest.mark.parametrize(
    ("name", "raw", "expected"),
    [
        ("a.jsonl", b'{"a": 1}\n{"a": \n{"a": 2}\n', [None, "not JSON", None]),
        ("a.jsonl", b'[1, 2]\n"text"\n{"a": 2}\n', ["not a JSON object but list", "but str", None]),
        ("a.jsonl", b'{"a": "caf\xe9"}\n{"a": 2}', ["not UTF-8 text (byte 10 is 0xe9)", None]),
        ("a.jsonl", b'{"a": ' + b"[" * 100_000 + b"\n" + b'{"a": ' + b"9" * 5000 + b"}\n", ["not JSON", "not JSON"]),
        (
            "a.jsonl",
            b'{"a": ' + b"[" * 99 + b"]" * 99 + b"}\n" + b'{"a": ' + b"[" * 100 + b"]" * 100 + b"}",
            [None, "deep"],
        ),
        ("a.json", b'[{"a": 1}, {"a": }, 3, {"a": 2}]', [None, "not JSON", "not a JSON object but int", None]),
        ("a.csv", b"a,b\n1,2\n1\n1,2,3\n\n3,4\n", [None, "1 fields, the first line names 2", "3 fields", None]),
        ("a.csv", b'a,b\n"x"y,2\n1,2\n', ["not CSV", None]),
        ("a.csv", b"a,b\ncaf\xe9,2\n1,2\n", ["not UTF-8", None]),
    ],
)
def test_a_bad_row_does_not_spoil_the_others(tmp_path, name, raw, expected):
    path = tmp_path / name
    path.write_bytes(raw)
    found = problems(path)
    assert len(found) == len(expected)
    for text, part in zip(found, expected, strict=True):
        assert (text is None) if part is None else (part in text)
    first = next(i for i, part in enumerate(expected) if part)
    with pytest.raises(DataError) as caught:
        read_rows(path)
    assert str(path) in str(caught.value) and found[first] in str(caught.value)


@pytest.mark.parametrize("kind", ["parquet", "arrow"])
def test_text_that_is_not_utf8_in_a_column(tmp_path, kind):
    texts = pa.array([b"ok", b"caf\xe9", b"fine"], pa.binary()).view(pa.string())
    table, path = pa.table({"a": texts, "b": [1, 2, 3]}), tmp_path / f"a.{kind}"
    if kind == "parquet":
        pq.write_table(table, path)
    else:
        with pa.ipc.new_file(str(path), table.schema) as writer:
            writer.write_table(table)
    rows = open_table(path).read(0, 3)
    assert [row.values for row in rows] == [{"a": "ok", "b": 1}, {}, {"a": "fine", "b": 3}]
    assert "UTF8" in rows[1].problem and rows[1].where == "row 1 (counted from 0)"


def test_a_value_that_python_cannot_hold(tmp_path):
    days = pa.array([0, 2**40], pa.int64()).cast(pa.timestamp("s"))
    pq.write_table(pa.table({"a": days}), tmp_path / "a.parquet")
    rows = open_table(tmp_path / "a.parquet").read(0, 2)
    assert rows[0].values["a"].year == 1970 and "Python cannot hold" in rows[1].problem


# --- files that are refused


def cut(raw: bytes) -> bytes:
    return raw[:-10]


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("damage", [cut, lambda raw: b"", lambda raw: raw[: len(raw) // 2]])
def test_a_cut_file_is_an_error_that_names_it(tmp_path, name, damage):
    path = tmp_path / name
    path.write_bytes(damage(KINDS[name](ROWS)))
    if damage is cut and name == "e.csv":
        # What is cut off here is the last row as a whole, which nobody can see.
        assert [row.values["n"] for row in read_rows(path)] == ["1", "2"]
        return
    with pytest.raises(DataError) as caught:
        open_table(path)
    assert str(path) in str(caught.value)


def test_a_stream_without_its_end_is_cut(tmp_path):
    # Cut between two batches: nothing but the missing mark of the end tells.
    path = tmp_path / "a.arrow"
    path.write_bytes(as_arrow(ROWS, stream=True)[:-8])
    with pytest.raises(DataError, match="no end"):
        open_table(path)


@pytest.mark.parametrize(
    ("name", "raw", "words"),
    [
        ("a.txt", b"x", "is of a kind that is not read"),
        ("a.parquet", b"this is no parquet file at all", "cut, damaged or not parquet"),
        ("a.arrow", b"this is no Arrow file at all", "cut, damaged or not Arrow"),
        ("a.jsonl", b"\x1f\x8b\x08\x00abc", "gunzip"),
        ("a.csv", b"PK\x03\x04abc", "zip archive"),
        ("a.csv", "a,b\n1,2\n".encode("utf-16"), "UTF-16"),
        ("a.parquet.jsonl", b"version https://git-lfs.github.com/spec/v1\noid", "git lfs pull"),
        ("a.csv", b"a,a\n1,2\n", "does not name its columns"),
        ("a.csv", b"a,\n1,2\n", "does not name its columns"),
        ("a.csv", b'a,b\n"never closed\n1,2\n', "ends in the middle of a row"),
        ("a.csv", b"a,b\n1,2\n3", "line 3: 1 fields"),
        ("a.json", b'[{"a": 1}] {"b": 2}', "goes on behind its list"),
        ("a.json", b'[{"a": 1}, {"a": "', "the list is not closed"),
        ("a.json", b'{"a": 1,\n "b": 2}\n', "one object instead of rows"),
        ("a.json", b'{\n"a": 1}', "one object instead of rows"),
    ],
)
def test_files_of_another_kind_say_what_they_are(tmp_path, name, raw, words):
    path = tmp_path / name
    path.write_bytes(raw)
    with pytest.raises(DataError) as caught:
        open_table(path)
    assert words in str(caught.value) and str(path) in str(caught.value)


def test_a_row_that_is_enormous(tmp_path, monkeypatch):
    monkeypatch.setattr(readers, "MAX_ROW_BYTES", 100)
    for name, raw in (("a.jsonl", b'{"a": 1}\n' + b"x" * 200), ("a.json", b'["' + b"x" * 200), ("a.csv", b"a" * 200)):
        (tmp_path / name).write_bytes(raw)
        with pytest.raises(DataError, match=r"(?s)larger than.*a\.(jsonl, line 2|json, row 0|csv, line 1)"):
            open_table(tmp_path / name)


def with_features(path: Path, features: Any) -> Path:
    table = pa.table({"prompt": ["a"]}).replace_schema_metadata({"huggingface": features})
    if path.suffix == ".parquet":
        pq.write_table(table, str(path))
    else:
        with pa.ipc.new_stream(str(path), table.schema) as writer:
            writer.write_table(table)
    return path


@pytest.mark.parametrize("name", ["a.parquet", "a.arrow"])
def test_feature_metadata(tmp_path, name):
    known = {"info": {"features": {"prompt": {"_type": "Value"}, "x": [{"_type": "Sequence"}]}}}
    assert len(read_rows(with_features(tmp_path / name, json.dumps(known)))) == 1
    unknown = {"info": {"features": {"prompt": {"dtype": "string", "_type": "Hologram"}}}}
    for features, words in ((json.dumps(unknown), "Hologram"), ("{no json", "metadata that is not JSON")):
        with pytest.raises(DataError, match=words) as caught:
            read_rows(with_features(tmp_path / name, features))
        assert str(tmp_path / name) in str(caught.value)


def test_two_columns_of_one_name(tmp_path):
    table = pa.Table.from_arrays([pa.array([1]), pa.array([2])], names=["a", "a"])
    pq.write_table(table, tmp_path / "a.parquet")
    with pytest.raises(DataError, match="two columns of one name"):
        open_table(tmp_path / "a.parquet")


# --- fuzzing: good rows, bad rows or a DataError that names the file; nothing else, ever


def reads_or_refuses(path: Path) -> list[RawRow]:
    try:
        table = open_table(path)
        rows = table.read(0, len(table))
    except DataError as error:
        assert path.name in str(error)
        return []
    assert len(rows) == len(table)
    for row in rows:
        assert isinstance(row.values, dict) and (row.problem is None or row.values == {})
        json.dumps(row.values, default=str)
    return rows


NAMES = st.sampled_from(["f.parquet", "f.jsonl", "f.json", "f.csv", "f.arrow"])


@settings(PLAIN, max_examples=150)
@given(raw=st.binary(max_size=200), name=NAMES)
def test_random_bytes(tmp_path, raw, name):
    (tmp_path / name).write_bytes(raw)
    reads_or_refuses(tmp_path / name)


PIECES = st.sampled_from(
    [b"{", b"}", b"[", b"]", b",", b'"', b"\\", b"\n", b"\r", b":", b"a", b"1", b" ", b"null", b"\xff", b"\xc3\xa9",
     b"\x00", b"NaN", b"\\ud800", b"\xe2\x80\xa8", b"\xef\xbb\xbf", b'{"a": 1}', b'"a"', b"1e999"]
)  # fmt: skip


@settings(PLAIN, max_examples=300)
@given(pieces=st.lists(PIECES, max_size=30), name=st.sampled_from(["f.jsonl", "f.json", "f.csv"]))
def test_almost_json_and_csv(tmp_path, pieces, name):
    (tmp_path / name).write_bytes(b"".join(pieces))
    reads_or_refuses(tmp_path / name)


@settings(PLAIN, max_examples=100)
@given(values=st.lists(st.text(), min_size=1, max_size=8), name=st.sampled_from([*KINDS]))
def test_any_text_comes_back_as_it_was(tmp_path, values, name):
    # Oracle: what was written. Lone surrogates are legal in JSON's escapes only.
    escaped = name in ("c.json",)
    clean = [v if escaped else v.encode("utf-8", "replace").decode() for v in values]
    clean = [v.replace("\x00", "") for v in clean]
    path = tmp_path / name
    path.write_bytes(KINDS[name]([{"a": v, "b": str(i)} for i, v in enumerate(clean)]))
    assert [row.values for row in read_rows(path)] == [{"a": v, "b": str(i)} for i, v in enumerate(clean)]


@settings(PLAIN, max_examples=250)
@given(data=st.data(), name=st.sampled_from([*KINDS]))
def test_any_cut_or_altered_byte(tmp_path, data, name):
    raw = bytearray(KINDS[name](ROWS))
    at = data.draw(st.integers(0, len(raw) - 1))
    if data.draw(st.booleans()):
        raw = raw[:at]
    else:
        raw[at] ^= data.draw(st.integers(1, 255))
    path = tmp_path / name
    path.write_bytes(bytes(raw))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a flipped byte may make a date that loses its nanoseconds
        reads_or_refuses(path)


@settings(PLAIN, max_examples=60)
@given(text=st.text(min_size=1, max_size=40), encoding=st.sampled_from(["utf-16", "utf-32-le", "latin-1", "cp1252"]))
def test_odd_encodings(tmp_path, text, encoding):
    raw = json.dumps({"prompt": text}, ensure_ascii=False).encode(encoding, "replace")
    for name in ("f.jsonl", "f.csv", "f.json"):
        (tmp_path / name).write_bytes(raw + b"\n")
        reads_or_refuses(tmp_path / name)
