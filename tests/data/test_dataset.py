"""Datasets: bad rows skipped and counted, what is kept in memory, a class of the user's own (B058, B059, B065)."""

from __future__ import annotations

import json
import mmap
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from in_memory import dataset_in_memory

from verl.config import DataConfig
from verl.data import dataset as dataset_module
from verl.data.dataset import PromptDataset, TokenStore
from verl.data.loader import PromptLoader
from verl.errors import DataError


@pytest.fixture
def load(make_tokenizer):
    def loader(*files: Path, max_samples: int = -1, **fields) -> PromptDataset:
        fields = {"max_prompt_length": 8, **fields}
        config = DataConfig(train_files=[str(file) for file in files], **fields)
        return PromptDataset.load(config.train_files, config, make_tokenizer(), max_samples)

    return loader


# --- bad rows


def mixed(write, row_of, good: int, bad: int) -> Path:
    return write("a.jsonl", [row_of(f"w{i % 50}") for i in range(good)] + [row_of("")] * bad)


def test_one_bad_row_in_a_hundred_is_skipped_and_listed(write, row_of, load):
    path = mixed(write, row_of, 99, 1)
    dataset = load(path)
    assert len(dataset) == 99
    (bad,) = dataset.skipped
    assert (bad.file, bad.row, bad.where) == (str(path), 99, "line 100") and "is empty" in bad.reason


def test_two_bad_rows_in_a_hundred_are_too_many_by_default(write, row_of, load):
    path = mixed(write, row_of, 98, 2)
    with pytest.raises(DataError) as caught:
        load(path)
    text = str(caught.value)
    assert "2 of 100 rows in data.train_files cannot be used" in text and f"{path}, line 99: the prompt" in text
    assert "data.max_skipped_fraction (now 0.01)" in text
    assert len(load(path, max_skipped_fraction=0.02)) == 98


def test_on_bad_row_error_takes_none(write, row_of, load):
    with pytest.raises(DataError, match="1 of 100 rows"):
        load(mixed(write, row_of, 99, 1), on_bad_row="error")
    assert len(load(mixed(write, row_of, 99, 0), on_bad_row="error")) == 99


def test_only_the_first_bad_rows_are_shown(write, row_of, load):
    with pytest.raises(DataError) as caught:
        load(mixed(write, row_of, 0, 9))
    text = str(caught.value)
    assert "9 of 9" in text and "and 4 more" in text and "line 5" in text and "line 6" not in text


def test_every_kind_of_bad_row_is_skipped(write, row_of, load, tmp_path):
    good = [row_of("w0")] * 3
    path = write("a.jsonl", good)
    lines = path.read_bytes() + b"{no json\n" + b'{"prompt": "caf\xe9"}\n' + b"[]\n"
    path.write_bytes(lines + json.dumps(row_of([{"role": "user", "content": "x"}], truth=None)).encode() + b"\n")
    dataset = load(path, max_skipped_fraction=0.9)
    assert len(dataset) == 3 and [row.index for row in dataset.skipped] == [3, 4, 5, 6]
    assert [row.reason.split(" ")[0:2] for row in dataset.skipped] == [
        ["not", "JSON"],
        ["not", "UTF-8"],
        ["not", "a"],
        ["no", "ground"],
    ]


def test_a_row_that_the_template_refuses_is_a_bad_row(write, row_of, make_tokenizer):
    template = "{% if messages[0].content == 'bad' %}{{ raise_exception('no') }}{% endif %}w1"
    rows = [row_of([{"role": "user", "content": text}]) for text in ("w1", "bad", "w2")]
    path = write("a.jsonl", rows)
    config = DataConfig(train_files=str(path), max_skipped_fraction=0.5)
    dataset = PromptDataset.load(config.train_files, config, make_tokenizer(template=template))
    assert [row.row_index for row in dataset.rows] == [0, 2]
    (bad,) = dataset.skipped
    assert (bad.file, bad.row, bad.where) == (str(path), 1, "line 2") and bad.reason.endswith("refuses it: no")


@pytest.mark.parametrize("ending", ["jsonl", "parquet"])
def test_a_cut_file_is_no_skip_and_the_good_one_is_not_used_alone(write, row_of, load, ending):
    good, bad = write(f"good.{ending}", [row_of("w0")] * 200), write(f"bad.{ending}", [row_of("w0")])
    bad.write_bytes(bad.read_bytes()[:-10])
    with pytest.raises(DataError, match=rf"(?s)cut.*bad\.{ending}"):
        load(good, bad, max_skipped_fraction=1.0)


KEYS = st.sampled_from(["role", "content", "ground_truth", "x"])
LEAVES = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=8)
VALUES = st.recursive(
    LEAVES, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(KEYS, inner, max_size=4), max_leaves=8
)
MESSAGES = st.lists(st.fixed_dictionaries({"role": st.sampled_from(["user", "x", 3]), "content": VALUES}), max_size=3)
ROWS = st.fixed_dictionaries(
    {},
    optional={"prompt": VALUES | MESSAGES, "label": VALUES, "data_source": VALUES, "extra_info": VALUES, "x": VALUES},
)


@settings(max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(rows=st.lists(ROWS, max_size=6))
def test_any_rows_are_used_or_bad(write, load, rows):
    path = write("a.jsonl", [*rows, {"prompt": "w0", "label": "1"}])
    dataset = load(path, max_skipped_fraction=1.0, truncation="left")
    assert len(dataset) + len(dataset.skipped) == len(rows) + 1
    dataset.batch(range(len(dataset)), "train", range(len(dataset)))


def test_a_file_without_a_single_readable_row_says_what_is_wrong_with_them(tmp_path, load):
    path = tmp_path / "a.jsonl"
    path.write_bytes(b"{'prompt': 1}\n[1]\n")
    with pytest.raises(DataError, match=r"(?s)2 of 2 rows .*line 1: not JSON.*line 2: not a JSON object"):
        load(path)
    with pytest.raises(DataError, match="holds no row that can be used"):
        load(path, max_skipped_fraction=1.0)


# --- max_samples, hash, exemplars


def test_what_comes_behind_max_samples_is_not_looked_at(write, row_of, load):
    path = write("a.jsonl", [row_of("w0"), row_of(""), row_of("w1"), row_of(""), row_of("w " * 20)])
    dataset = load(path, max_samples=2, max_skipped_fraction=0.5)
    assert [row.row_index for row in dataset.rows] == [0, 2] and [bad.index for bad in dataset.skipped] == [1]
    with pytest.raises(DataError, match="1 of 3 prompts are longer"):
        load(path, max_samples=3, max_skipped_fraction=0.5)
    ends_with_bad = write("b.jsonl", [row_of("w0"), row_of("w1"), row_of(""), row_of("w " * 20)])
    assert not load(ends_with_bad, max_samples=2).skipped


def test_the_hash_is_of_the_content_alone(write, row_of, load, monkeypatch):
    rows = [row_of(f"w{i % 50}", truth=str(i)) for i in range(40)]
    a, b = write("a.jsonl", rows), write("b.parquet", rows)
    base = load(a).content_hash
    assert load(b).content_hash == base
    first, second = write("c.jsonl", rows[:17]), write("d.jsonl", rows[17:])
    assert load(first, second).content_hash == base != load(second, first).content_hash
    monkeypatch.setattr(dataset_module, "IDS_IN_MEMORY", 0)
    monkeypatch.setattr("verl.data.prepare.CHUNK", 7)
    again = load(a)
    assert again.content_hash == base and [list(ids) for ids in again.prompt_ids] == [[10 + i] for i in range(40)]
    assert [row.row_index for row in again.rows] == list(range(40))
    rows[39]["reward_model"]["ground_truth"] = "other"
    assert load(write("e.jsonl", rows)).content_hash != base


def test_a_dataset_in_memory_has_the_same_hash(write, row_of, load):
    dataset = load(write("a.jsonl", [row_of("w0"), row_of("w1 w2")]))
    assert dataset_in_memory(list(dataset.rows), list(dataset.prompt_ids)).content_hash == dataset.content_hash


def test_exemplars_show_every_source_and_column_once(write, row_of, load):
    rows = [row_of("w0", source="a"), row_of("w1", source="a"), row_of("w2", source="b"), row_of("w3", note="x")]
    dataset = load(write("a.jsonl", rows))
    assert [row.row_index for row in dataset.exemplars] == [0, 2, 3] and list(dataset.sources) == ["a", "a", "b", "s"]


def test_token_ids_are_compact_and_beyond_a_size_not_in_memory(monkeypatch):
    monkeypatch.setattr(dataset_module, "IDS_IN_MEMORY", 40)
    parts = [np.arange(i, dtype=np.int32) for i in range(8)]
    store = TokenStore()
    for part in parts:
        store.add(part)
    rows = store.finish(np.arange(8))
    assert [rows[i] for i in range(8)] == [part.tolist() for part in parts] and rows[-1] == list(range(7))
    assert len(rows) == 8 and rows._map is not None
    told: list[int] = []
    rows._map = type("Map", (), {"madvise": staticmethod(told.append)})()
    assert rows[3] == [0, 1, 2] and told == [mmap.MADV_DONTNEED]  # pages that were read are let go
    with pytest.raises(IndexError):
        rows[8]


def test_rows_are_read_on_demand(write, row_of, load, monkeypatch):
    dataset = load(write("a.jsonl", [row_of(f"w{i}") for i in range(9)]))
    asked = []
    read = dataset.rows.source.read
    monkeypatch.setattr(
        dataset.rows.source, "read", lambda start, stop: asked.append((start, stop)) or read(start, stop)
    )
    loader = PromptLoader(dataset, 2)
    loader.next_batch()
    assert asked == [(0, 1), (1, 2)]


# --- a class of the user's own

CLASS = """
class Mine:
    def __init__(self, data_files, tokenizer, config, processor=None, max_samples=-1):
        self.rows = [{"prompt": f"w{i}", "label": str(i), "data_source": "own"} for i in range(5)]
        self.max_samples = max_samples
    def __len__(self):
        return len(self.rows)
    def __getitem__(self, i):
        return self.rows[i]
"""


@pytest.fixture
def custom(tmp_path, load):
    def loader(code: str, name: str = "Mine", **fields) -> PromptDataset:
        path = tmp_path / "mine.py"
        path.write_text(code)
        return load(Path("never-read.parquet"), custom_cls={"path": str(path), "name": name}, **fields)

    return loader


def test_a_dataset_class(custom):
    dataset = custom(CLASS, answer_key="label")
    batch = dataset.batch([4, 0], "train", [7, 8]).non_tensor_batch
    assert batch["uid"].tolist() == ["train:7:own:4", "train:8:own:0"] and batch["prompt_ids"].tolist() == [[14], [10]]
    assert batch["ground_truth"].tolist() == ["4", "0"] and list(dataset.sources) == ["own"] * 5


def test_a_dataset_class_takes_what_it_wants(custom):
    least = CLASS.replace(", processor=None, max_samples=-1", "").replace("self.max_samples = max_samples", "")
    assert len(custom(least, max_samples=2)) == 2
    wants = CLASS.replace("range(5)", "range(max_samples)").replace("processor=None, max_samples=-1", "max_samples")
    assert len(custom(wants, max_samples=3)) == 3


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (("class Mine:", "class Mein:"), "no such"),
        (("data_files, ", ""), "data_files"),
        (("range(5)", "range(0)"), "has no rows"),
        (("    def __len__(self):\n        return len(self.rows)\n", ""), "has no len"),
        (("return self.rows[i]", "raise KeyError('lost')"), "5 of 5 rows"),
        (("return self.rows[i]", "return [1]"), "the class gives list, not a dict"),
        (("class Mine:", "import nothing_of_this_name\nclass Mine:"), "cannot be imported"),
    ],
)
def test_what_is_refused_of_a_dataset_class(custom, change, words):
    with pytest.raises(DataError) as caught:
        custom(CLASS.replace(*change))
    assert words in str(caught.value) and "mine.py" in str(caught.value)


def test_a_class_that_changes_its_mind(custom):
    forgets = "return self.rows[i] if i != 2 else self.rows.__setitem__(2, None) or {'prompt': 'w2', 'label': '2'}"
    dataset = custom(
        CLASS.replace("return self.rows[i]", f"if self.rows[i] is None: raise IndexError\n        {forgets}")
    )
    assert dataset.batch([1, 3], "train", [0, 1]).non_tensor_batch["row_index"].tolist() == [1, 3]
    with pytest.raises(DataError, match="cannot be read again"):
        dataset.batch([2], "train", [0])
