"""Files: the encoding, atomic writing, and refusal of what is cut, damaged or foreign."""

from __future__ import annotations

import collections
import datetime
import os
import pickle
import random
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from verl.errors import DataError
from verl.protocol import DataProto, codec, files
from verl.protocol.columns import same


class Marker:
    """Makes a file when unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple:
        return (os.mkdir, (str(self.path),))


def through_json(tree: object) -> object:
    value, tensors = codec.encode(tree)
    return codec.decode(codec.from_json_bytes(codec.to_json_bytes(value)), tensors)


@pytest.mark.parametrize(
    "tree",
    [
        None,
        random.Random(1).getstate(),
        np.random.default_rng(1).bit_generator.state,
        {"rng": torch.get_rng_state(), "nested": [{"t": torch.zeros(2, 0)}, (torch.tensor(1.5).bfloat16(),)]},
        {1: "int key", (1, "a"): 2, None: 3, 1.5: 4, "": {"$odd": 1, "": 2}},
        [float("nan"), float("inf"), -float("inf"), -0.0, 1e-320, 2**200, "\ud800 \x00 é", b"\x00\xff"],
        [np.float32(0.1), np.int64(-3), np.bool_(True), np.float16("nan"), np.array(2.5), np.zeros((2, 0), np.int8)],
        {"text": np.array(["a", "bcd"]), "objects": np.array([[None, "x"], [(1,), [2]]], dtype=object)},
        {"big_endian": np.arange(3, dtype=">i4").astype("<i4"), "strided": np.arange(10)[::-2]},
        {"a/b": torch.ones(1), "a": {"b": torch.zeros(1)}, "__metadata__": torch.ones(2)},
    ],
)
def test_trees_come_back(tree: object, tmp_path: Path) -> None:
    assert same(through_json(tree), tree)
    files.write_tree(tmp_path / "tree", tree)
    back = files.read_tree(tmp_path / "tree")
    assert same(back, tree) and repr(type(back)) == repr(type(tree))


def test_kinds_survive() -> None:
    tree = {"f": np.float32(0.1), "t": (1,), "b": True, "i": 1, "neg": -0.0, "a": np.array([True])}
    back = through_json(tree)
    assert isinstance(back, dict) and {key: type(value) for key, value in back.items()} == {
        key: type(value) for key, value in tree.items()
    }
    assert str(back["neg"]) == "-0.0" and back["a"].dtype == bool
    assert type(through_json(collections.OrderedDict(a=1))) is dict


@pytest.mark.parametrize(
    ("value", "named"),
    [
        (lambda: 1, "function"),
        ({1, 2}, "set"),
        (datetime.date(2020, 1, 1), "date"),
        (1j, "complex"),
        (np.array(["2020"], dtype="M8[D]"), "datetime64"),
        (torch.eye(2).to_sparse(), "sparse"),
        pytest.param(2**20000, "bits", id="huge"),
    ],
)
def test_what_cannot_be_saved_is_named(value: object, named: str, tmp_path: Path) -> None:
    data = DataProto.from_dict(non_tensors={"odd": [1, {"deep": value}]})
    with pytest.raises(DataError) as caught:
        data.save_to_disk(tmp_path / "x")
    assert "non_tensor_batch/odd/1/deep" in str(caught.value) and named in str(caught.value)
    assert list(tmp_path.iterdir()) == []


def test_values_that_contain_themselves_are_refused(tmp_path: Path) -> None:
    loop: list = []
    loop.append(loop)
    with pytest.raises(DataError, match="contains itself"):
        files.write_tree(tmp_path / "x", loop)


def sample() -> DataProto:
    return DataProto.from_dict(
        {"x": torch.arange(6).view(3, 2), "h": torch.randn(3).bfloat16()}, {"name": ["a", None, {"k": [1.5]}]}, {"s": 1}
    )


def test_every_truncation_is_refused_by_name(tmp_path: Path) -> None:
    path = tmp_path / "batch"
    sample().save_to_disk(path)
    whole = path.read_bytes()
    for length in {*range(0, len(whole), 7), len(whole) - 1}:
        path.write_bytes(whole[:length])
        with pytest.raises(DataError, match=str(path)):
            DataProto.load_from_disk(path)


def test_every_changed_byte_is_refused_or_harmless(tmp_path: Path) -> None:
    path, data = tmp_path / "batch", sample()
    data.save_to_disk(path)
    whole = path.read_bytes()
    refused = 0
    for position in range(len(whole)):
        changed = bytearray(whole)
        changed[position] ^= 1 << (position % 8)
        path.write_bytes(changed)
        try:
            assert DataProto.load_from_disk(path).equal(data)  # e.g. a blank of the header's padding
        except DataError as error:
            assert str(path) in str(error)
            refused += 1
    assert refused > 0.95 * len(whole)


def test_foreign_files_are_refused_and_run_nothing(tmp_path: Path) -> None:
    path, marker = tmp_path / "file", tmp_path / "marker"
    contents = [
        pickle.dumps(Marker(marker)),
        b"",
        b"{}",
        b"\xff" * 100,
        (1 << 62).to_bytes(8, "little") + b"{}",
        (2).to_bytes(8, "little") + b"{}",
    ]
    for content in contents:
        path.write_bytes(content)
        with pytest.raises(DataError, match=str(path)):
            DataProto.load_from_disk(path)
    torch.save(Marker(marker), path)
    with pytest.raises(DataError, match=str(path)):
        DataProto.load_from_disk(path)
    save_file({"w": torch.ones(2)}, path)
    with pytest.raises(DataError, match="not a file of VeRL's"):
        DataProto.load_from_disk(path)
    files.write_tree(path, {"other": 1})
    with pytest.raises(DataError, match="something else than a DataProto"):
        DataProto.load_from_disk(path)
    for missing in (tmp_path / "none", tmp_path):
        with pytest.raises(DataError, match=str(missing)):
            DataProto.load_from_disk(missing)
    assert not marker.exists()
    pickle.loads(pickle.dumps(Marker(marker)))
    assert marker.exists()  # the marker would have shown


def test_decoding_refuses_what_encode_does_not_write() -> None:
    for value in ({"$float": "1"}, {"$x": 1}, {"$tensor": ["a", "int64", [1]]}, {"$tuple": 3}, {"$dict": [[[1], 2]]}):
        with pytest.raises(DataError):
            codec.decode(value, {})
    with pytest.raises(DataError, match="not what the JSON part says"):
        codec.decode({"$tensor": ["a", "int64", [1]]}, {"a": torch.ones(1)})
    for text in (b"NaN", b"\xff", b"[", b"[" * 100_000):
        with pytest.raises((ValueError, RecursionError)):
            codec.from_json_bytes(text)


def test_safetensors_are_what_the_library_reads(tmp_path: Path) -> None:
    shared = torch.randn(4, 6)
    tensors = {
        "a": shared,
        "tied": shared,
        "t": shared.t(),
        "scalar": torch.tensor(3),
        "empty": torch.zeros(0, 5),
        "f8": torch.randn(3).to(torch.float8_e4m3fn),
        "b": torch.tensor([True, False, True]),
        "h": torch.randn(5).bfloat16(),
    }
    record = files.write_safetensors(tmp_path / "w", tensors, {"format": "pt"})
    loaded = load_file(tmp_path / "w")
    assert loaded.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert loaded[name].dtype == tensor.dtype and torch.equal(loaded[name].float(), tensor.float())
    assert record == files.FileRecord((tmp_path / "w").stat().st_size, files.crc32_of(tmp_path / "w"))
    with pytest.raises(DataError, match="'c'"):
        files.write_safetensors(tmp_path / "z", {"c": torch.ones(1, dtype=torch.complex128)})


def test_a_failed_write_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, data = tmp_path / "batch", sample()
    data.save_to_disk(path)

    def fail(handle: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(files.os, "fsync", fail)
    with pytest.raises(DataError, match="No space left on device") as caught:
        data.repeat(2).save_to_disk(path)
    monkeypatch.undo()
    assert "free space" in str(caught.value) and str(path) in str(caught.value)
    assert DataProto.load_from_disk(path).equal(data) and list(tmp_path.iterdir()) == [path]
    with pytest.raises(DataError, match="directory"):
        data.save_to_disk(tmp_path)
    with pytest.raises(DataError, match="No such file"):
        data.save_to_disk(tmp_path / "none" / "x")
