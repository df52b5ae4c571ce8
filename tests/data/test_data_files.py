"""What a user names, and the files it stands for."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from verl.data.tables import expand_entries, expand_files
from verl.errors import DataError


def touch(folder: Path, *names: str) -> None:
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text("x")


def test_one_file_many_patterns_and_folders_keep_their_order(tmp_path):
    touch(tmp_path, "b.jsonl", "a1.jsonl", "a0.jsonl", "deep/x.csv", "deep/y.parquet", "deep/inner/z.csv")
    entries = expand_entries([str(tmp_path / "b.jsonl"), str(tmp_path / "a*.jsonl"), str(tmp_path / "deep")])
    assert [[path.name for path in entry] for entry in entries] == [
        ["b.jsonl"],
        ["a0.jsonl", "a1.jsonl"],
        ["x.csv", "y.parquet"],
    ]
    assert [path.name for path in expand_files(str(tmp_path / "**/*.csv"))] == ["z.csv", "x.csv"]


def test_home_and_environment_variables(tmp_path, monkeypatch):
    touch(tmp_path, "a.jsonl")
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("MY_DATA", str(tmp_path))
    for name in ("~/a.jsonl", "$MY_DATA/a.jsonl", "${MY_DATA}/*.jsonl", "~/a*.jsonl"):
        assert expand_files(name) == [tmp_path / "a.jsonl"]
    with pytest.raises(DataError, match=r"\$NOT_SET_HERE is not set"):
        expand_files("$NOT_SET_HERE/a.jsonl")


def test_a_name_with_brackets_is_a_file_before_it_is_a_pattern(tmp_path):
    touch(tmp_path, "a[1].jsonl", "a1.jsonl")
    assert expand_files(str(tmp_path / "a[1].jsonl")) == [tmp_path / "a[1].jsonl"]


def test_a_folder_is_its_data_files_alone(tmp_path):
    touch(tmp_path, "b.arrow", "a.JSONL", "README.md", ".hidden.csv", "_tmp.csv", "dataset_infos.json", "sub/x.csv")
    assert [path.name for path in expand_files(str(tmp_path))] == ["a.JSONL", "b.arrow"]
    with pytest.raises(DataError, match=r"(?s)without data files.*sub-folders: inner"):
        touch(tmp_path, "empty/inner/readme.md")
        expand_files(str(tmp_path / "empty"))


def saved(folder: Path, *shards: str, **state: object) -> Path:
    folder.mkdir()
    (folder / "dataset_info.json").write_text("{}")
    (folder / "state.json").write_text(json.dumps({"_data_files": [{"filename": s} for s in shards], **state}))
    return folder


def test_a_saved_dataset_is_its_shards_in_the_order_of_its_state(tmp_path):
    folder = saved(tmp_path / "d", "data-1.arrow", "data-0.arrow")
    touch(folder, "data-0.arrow", "data-1.arrow", "cache-other.arrow")
    assert [path.name for path in expand_files(str(folder))] == ["data-1.arrow", "data-0.arrow"]


def test_what_is_refused_of_saved_datasets(tmp_path):
    with pytest.raises(DataError, match=r"lacks gone\.arrow"):
        expand_files(str(saved(tmp_path / "a", "gone.arrow")))
    indexed = saved(tmp_path / "b", "x.arrow", _indices_data_files=[{"filename": "indices.arrow"}])
    with pytest.raises(DataError, match="flatten_indices"):
        expand_files(str(indexed))
    (indexed / "state.json").write_text("{ no json")
    with pytest.raises(DataError, match=r"state\.json"):
        expand_files(str(indexed))
    touch(tmp_path, "splits/dataset_dict.json", "splits/train/x", "splits/test/x")
    with pytest.raises(DataError, match=r"(?s)several splits.*splits/test, .*splits/train"):
        expand_files(str(tmp_path / "splits"))


def test_a_missing_file_names_the_nearest(tmp_path):
    touch(tmp_path, "train.parquet")
    with pytest.raises(DataError) as caught:
        expand_files(str(tmp_path / "trian.parquet"))
    assert "trian.parquet" in str(caught.value) and f"did you mean {tmp_path / 'train.parquet'}?" in str(caught.value)


@pytest.mark.parametrize("name", ["nowhere/a.parquet", "*.parquet", ".", "a" * 5000])
def test_paths_that_name_no_file(tmp_path, name):
    with pytest.raises(DataError) as caught:
        expand_files(str(tmp_path / name))
    assert str(tmp_path) in str(caught.value)


def test_one_file_twice_and_none_at_all(tmp_path):
    touch(tmp_path, "a.jsonl")
    with pytest.raises(DataError, match="named twice"):
        expand_files([str(tmp_path / "a.jsonl"), str(tmp_path / "*.jsonl")])
    with pytest.raises(DataError, match="No data file"):
        expand_files([])


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(name=st.text(max_size=30))
def test_any_name_is_files_or_a_data_error(tmp_path, name):
    touch(tmp_path, "a.jsonl")
    with contextlib.suppress(DataError):
        assert all(path.is_file() for path in expand_files(f"{tmp_path}/{name}"))
