"""What ``verl data inspect`` finds, counted by hand."""

from __future__ import annotations

import json

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from verl.data.inspection import _histogram, inspect_files
from verl.errors import DataError


def user(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}]


def test_lengths_are_those_of_the_ids_that_the_engine_gets(write, row_of, words_of, make_tokenizer):
    # 1 to 9 words, <u> and </s> and <a> of the template, one BOS.
    path = write("a.jsonl", [row_of(user(words_of(n))) for n in range(1, 10)])
    report = inspect_files(str(path), make_tokenizer(adds_bos=True), limit=10)
    lengths = report.lengths
    assert (lengths.unit, lengths.least, lengths.mean, lengths.most) == ("tokens", 5, 9.0, 13)
    assert (lengths.limit, lengths.over) == (10, 3)
    assert lengths.percentiles == {"p50": 9, "p90": 13, "p95": 13, "p99": 13}
    assert sum(count for _, _, count in lengths.histogram) == 9 and lengths.histogram[0] == (5, 6, 1)
    assert [(shown.length, shown.text[:9]) for shown in report.shown] == [
        (5, "<s> <u> w"),
        (9, "<s> <u> w"),
        (13, "<s> <u> w"),
    ]
    assert report.shown[0].text == "<s> <u> w0 </s> <a>" and report.shown[0].truth == "1"


def test_without_a_model_characters_are_counted(write, row_of):
    report = inspect_files(str(write("a.jsonl", [row_of("abc"), row_of("abcdefg")])))
    assert (report.lengths.unit, report.lengths.least, report.lengths.most) == ("characters", 3, 7)
    assert report.lengths.over is None and [shown.text for shown in report.shown] == ["abc", "abcdefg"]


def test_columns_types_and_examples(write):
    rows = [{"prompt": "a", "label": 1, "x": None}, {"prompt": "b", "label": "2"}, {"prompt": "c", "label": [1, "a"]}]
    columns = inspect_files(str(write("a.jsonl", rows))).columns
    assert {name: column.types for name, column in columns.items()} == {
        "prompt": {"text": 3},
        "label": {"int": 1, "text": 1, "list of int or text": 1},
        "x": {"null": 1},
    }
    assert columns["prompt"].example == "a" and columns["x"].example is None


def test_sources_and_their_rules(write, row_of):
    rows = [row_of("a", source="openai/gsm8k"), row_of("b", source="mine"), row_of("c", source="mine")]
    report = inspect_files(str(write("a.jsonl", rows)))
    assert report.sources == {"openai/gsm8k": 1, "mine": 2} and report.rules == {"openai/gsm8k": "gsm8k", "mine": None}


def test_duplicates_and_those_that_contradict(write, row_of):
    rows = [row_of("a", "1"), row_of("b", "1"), row_of("a", "1"), row_of("a", "2"), row_of(user("a"), "1")]
    path = write("a.jsonl", rows)
    report = inspect_files(str(path))
    assert (report.duplicates, report.conflicting) == (2, 1)
    assert report.duplicate_places == [(f"{path}, line 1", f"{path}, line 3"), (f"{path}, line 1", f"{path}, line 4")]


ODD = {
    "the answer in it": (("what is 12345, please", "12345"), "the ground truth stands in the prompt"),
    "a short answer": (("what is 4 + 0", "4"), None),
    "a part of a word": (("redistribution", "distribution"), None),
    "a whole solution": (("q", "x" * 201), "more than 200 characters"),
    "a broken encoding": (("caf\ufffd", "1"), "control or replacement characters"),
    "a lone surrogate": (("caf\ud835", "1"), "control or replacement characters"),
    "a control character": (("a\x1bb", "1"), "control or replacement characters"),
    "an odd role": (([{"role": "robot", "content": "a"}, *user("b")], "1"), "role 'robot'"),
    "an answer at the end": (([*user("b"), {"role": "assistant", "content": "a"}], "1"), "the last message is of role"),
    "enormous": (("w0 " * 400_000, "1"), "larger than 1 MiB"),
    "a special token": (("a <a> b", "1"), "special token <a> stands in the text"),
    "nothing odd": (("a\tb\n中文🙂", "1"), None),
}


@pytest.mark.parametrize("name", ODD)
def test_suspicious_rows(write, row_of, make_tokenizer, name):
    (prompt, truth), expected = ODD[name]
    path = write("a.jsonl", [row_of("fine"), row_of(prompt, truth)])
    found = inspect_files(str(path), make_tokenizer(template=None) if "special" in name else None).suspicious
    if expected is None:
        assert found == {}
    else:
        ((reason, count),) = found.items()
        assert expected in reason and (count.rows, count.places) == (1, [f"{path}, line 2"])


def test_text_for_a_chat_model_looks_odd(write, row_of, make_tokenizer):
    path = write("a.jsonl", [row_of(user("a")), row_of("a b")])
    ((reason, count),) = inspect_files(str(path), make_tokenizer()).suspicious.items()
    assert "verl data convert" in reason and count.places == [f"{path}, line 2"]
    path = write("b.jsonl", [row_of("a b")])
    assert inspect_files(str(path), make_tokenizer(template=None)).suspicious == {}


def test_rows_that_cannot_be_used_are_told_by_kind(write, row_of):
    path = write("a.jsonl", [row_of("a"), row_of(""), row_of("b", truth=None)])
    path.write_bytes(path.read_bytes() + b"".join(b"{%d\n" % i for i in range(5)))
    report = inspect_files(str(path))
    assert (report.rows, report.usable) == (8, 1)
    counts = {reason.partition(" (")[0]: (count.rows, len(count.places)) for reason, count in report.bad.items()}
    assert counts == {
        "the prompt in column 'prompt' is empty": (1, 1),
        "no ground truth in column 'reward_model.ground_truth'": (1, 1),
        "not JSON": (5, 3),
    }


def test_other_names_of_prompt_and_truth(write):
    path = write("a.jsonl", [{"question": "q", "answer": "1"}])
    report = inspect_files(str(path))
    assert (report.prompt_key, report.truth_key, report.usable) == ("question", "answer", 1)
    path = write("b.jsonl", [{"frage": "q", "antwort": "1"}])
    report = inspect_files(str(path))
    assert (report.prompt_key, report.truth_key, report.usable, report.shown) == (None, None, 0, [])
    report = inspect_files(str(path), prompt_key="frage")
    assert (report.truth_key, report.usable, report.suspicious) == (None, 1, {})
    assert inspect_files(str(path), prompt_key="frage", answer_key="antwort").shown[0].truth == "1"
    with pytest.raises(DataError, match=r"(?s)--prompt-key.*did you mean frage\?"):
        inspect_files(str(path), prompt_key="frgae")


def test_several_files_are_one_dataset(write, row_of, tmp_path):
    write("a.jsonl", [row_of("a"), row_of("b")])
    write("b.parquet", [row_of("c"), row_of("a")])
    report = inspect_files(str(tmp_path / "*"))
    assert report.rows == report.usable == 4 and report.duplicates == 1
    assert report.duplicate_places[0][1].endswith("b.parquet, row 1 (counted from 0)")


def test_the_report_is_strict_json(write, row_of, make_tokenizer):
    path = write("a.jsonl", [row_of("x\ud835y", note=float("inf")), row_of("w0")])
    text = json.dumps(inspect_files(str(path), make_tokenizer()).as_json(), allow_nan=False)
    assert json.loads(text)["lengths"]["unit"] == "tokens" and json.loads(text)["rows"] == 2


@pytest.mark.parametrize("lengths", [[5], [1, 1000], [3, 14], [0, 11], [7, 7, 8], list(range(100, 4000, 7))])
def test_histograms_have_few_bars_and_every_prompt(lengths):
    bars = _histogram(np.array(lengths))
    assert 1 <= len(bars) <= 12
    for start, stop, count in bars:
        assert count == sum(start <= length < stop for length in lengths)
    assert sum(count for *_, count in bars) == len(lengths) and bars[0][2] and bars[-1][2]


VALUES = st.none() | st.integers() | st.text(max_size=6) | st.lists(st.text(max_size=3), max_size=2)
MESSAGE = st.fixed_dictionaries({"role": st.text(max_size=4), "content": VALUES})
ROWS = st.fixed_dictionaries(
    {}, optional={"prompt": VALUES | st.lists(MESSAGE, max_size=2), "label": VALUES, "x": VALUES}
)


@settings(max_examples=80, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(rows=st.lists(ROWS, min_size=1, max_size=5), model=st.booleans())
def test_any_rows_are_told_about(write, make_tokenizer, rows, model):
    report = inspect_files(str(write("a.jsonl", rows)), make_tokenizer() if model else None)
    assert report.rows == len(rows) == report.usable + sum(count.rows for count in report.bad.values()) or (
        report.prompt_key is None
    )
    json.dumps(report.as_json(), allow_nan=False)
