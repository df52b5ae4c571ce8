"""DataProto: the cases of the batch container with known answers, and its corners."""

from __future__ import annotations

import copy
import itertools
import pickle
import tempfile
from pathlib import Path

import numpy as np
import pytest
import torch
from tensordict import TensorDict

import verl
from verl.errors import DataError
from verl.protocol import (
    DataProto,
    DataProtoItem,
    fold_batch_dim,
    pad_dataproto_to_divisor,
    unfold_batch_dim,
    union_numpy_dict,
    union_tensor_dict,
    unpad_dataproto,
)
from verl.protocol.rows import AUTO_PADDING_KEY


def rows(count: int, **meta: object) -> DataProto:
    """``x`` = row number (as a column of width 2), ``name`` = its text."""
    numbers = torch.arange(count)
    return DataProto.from_dict(
        {"x": torch.stack([numbers, 10 * numbers], dim=1)}, {"name": [str(row) for row in range(count)]}, meta
    )


def order(data: DataProto) -> list[int]:
    """Row numbers, checked to be the same in tensors and objects."""
    numbers = data.batch["x"][:, 0].tolist()
    assert data.non_tensor_batch["name"].tolist() == [str(number) for number in numbers]
    return numbers


def test_verl_dataproto_resolves() -> None:
    assert verl.DataProto is DataProto
    with pytest.raises(AttributeError, match="nope"):
        verl.nope  # noqa: B018


# --- the cases ------------------------------------------------------------------------------------


def test_b073_uneven_chunk_and_split() -> None:
    data = rows(22)
    pieces = data.split(3)
    assert [len(piece) for piece in pieces] == [3] * 7 + [1]
    assert order(DataProto.concat(pieces)) == list(range(22))
    chunks = data.chunk(7, allow_uneven=True)
    assert [len(chunk) for chunk in chunks] == [4, 3, 3, 3, 3, 3, 3]
    assert order(DataProto.concat(chunks)) == list(range(22))
    with pytest.raises(DataError, match="22 rows do not divide into 7"):
        data.chunk(7)
    data.meta_info[AUTO_PADDING_KEY] = True
    assert data.is_padding_enabled() and len(data.chunk(7)) == 7


def test_b074_padding_longer_than_the_batch() -> None:
    padded, pad = pad_dataproto_to_divisor(rows(3), 8)
    assert pad == 5 and order(padded) == [0, 1, 2, 0, 1, 2, 0, 1]
    assert unpad_dataproto(padded, pad).equal(rows(3))
    empty, pad = pad_dataproto_to_divisor(rows(0), 8)
    assert (len(empty), pad) == (0, 0)
    for wrong in (-1, 4):
        with pytest.raises(DataError, match="cannot drop"):
            unpad_dataproto(rows(3), wrong)


@pytest.mark.parametrize(("count", "pad"), [(8, 0), (9, 3)])
def test_b075_padding_is_never_a_full_block(count: int, pad: int) -> None:
    padded, added = pad_dataproto_to_divisor(rows(count), 4)
    assert added == pad
    pieces = padded.chunk(4)
    assert len({len(piece) for piece in pieces}) == 1
    assert order(unpad_dataproto(DataProto.concat(pieces), added)) == list(range(count))


def test_b076_worker_without_rows() -> None:
    assert [len(piece) for piece in rows(9).chunk(4, allow_uneven=True)] == [3, 2, 2, 2]
    pieces = rows(2).chunk(4, allow_uneven=True)
    assert [len(piece) for piece in pieces] == [1, 1, 0, 0]
    assert order(DataProto.concat(pieces)) == [0, 1]


def test_b077_union_with_nan_in_object_columns() -> None:
    def with_column(values: list) -> DataProto:
        return DataProto.from_dict(non_tensors={"k": values})

    nested = [[1, [np.array([1.0, float("nan")])]], {"a": (1, None)}, np.array([[1, 2]], dtype=object)]
    for values in ([1, "a", float("nan")], nested):
        left = with_column(values)
        assert left.union(with_column(copy.deepcopy(values))) is left
    with pytest.raises(DataError, match="'k'"):
        with_column([1, "a", 2]).union(with_column([1, "a", 3]))
    with pytest.raises(DataError, match="'k'"):
        with_column([np.array([1, 2])]).union(with_column([np.array([1, 3])]))


def test_b078_concat_merges_every_meta() -> None:
    assert DataProto.concat([rows(1, a=1), rows(1, b=2)]).meta_info == {"a": 1, "b": 2}
    with pytest.raises(DataError, match=r"meta_info\['a'\]"):
        DataProto.concat([rows(1, a=1), rows(1, a=2)])
    pieces = [rows(1, metrics={"loss": 0.5}), rows(1, metrics=None), rows(1, metrics=[{"loss": 0.25, "kl": 3.0}])]
    assert DataProto.concat(pieces).meta_info == {"metrics": {"loss": [0.5, 0.25], "kl": [3.0]}}
    assert DataProto.concat([rows(1, metrics=None), rows(1)]).meta_info == {}


def test_b080_differing_rows_stay_differing() -> None:
    data = DataProto.from_dict(non_tensors={"k": ["a", "b"]})
    data.padding(2, "last")
    assert data.non_tensor_batch["k"].tolist() == ["a", "b", "b", "b"]
    pieces = [DataProto.from_dict(non_tensors={"k": [value]}) for value in ("p", "q")]
    assert DataProto.concat(pieces).non_tensor_batch["k"].tolist() == ["p", "q"]


@pytest.mark.parametrize("kind", [list, np.array, torch.tensor])
def test_b081_boolean_and_list_index(kind: type) -> None:
    picked = rows(4)[kind([True, False, True, False])]
    assert order(picked) == [0, 2] and [order(piece) for piece in picked.chunk(2)] == [[0], [2]]
    nothing = rows(4)[kind([False] * 4)]
    assert len(nothing) == 0 and nothing.batch["x"].shape == (0, 2)
    assert len(nothing.repeat(3)) == 0 and nothing.split(2) == []
    assert order(rows(4)[kind([3, 0, 0, -1])]) == [3, 0, 0, 3]


def test_b081_empty_and_bad_indices() -> None:
    assert len(rows(4)[[]]) == 0
    with pytest.raises(IndexError):
        rows(4)[[4]]
    with pytest.raises(IndexError):
        rows(4)[-5]
    for wrong in ([True, False], [True, 1], [0.5], "x", (1, 2), torch.tensor([[0]]), None, True):
        with pytest.raises(DataError):
            rows(4)[wrong]


def test_b082_slice_and_item() -> None:
    data = rows(4, a=1)
    assert order(data[1:3]) == [1, 2]
    assert order(data[-2:]) == [2, 3] and order(data[::2]) == [0, 2] and order(data[::-1]) == [3, 2, 1, 0]
    assert len(data[3:1]) == 0 and len(data[1:3:-1]) == 0
    assert order(data.slice(1, None, 2)) == [1, 3]
    item = data[np.int64(1)]
    assert isinstance(item, DataProtoItem)
    assert item.batch["x"].tolist() == [1, 10] and item.non_tensor_batch == {"name": "1"} and item.meta_info == {"a": 1}
    assert [item.non_tensor_batch["name"] for item in data] == ["0", "1", "2", "3"]


def test_b083_empty_and_tensorless_batches_cross_whole() -> None:
    """Object columns only, no rows, nothing at all: by pickle and by file."""
    objects = DataProto.from_dict(non_tensors={"a": [1, None, [2]]}, meta_info={"m": 1})
    no_rows = DataProto.from_dict({"x": torch.zeros(0, 3)}, {"a": []})
    with tempfile.TemporaryDirectory() as folder:
        for number, (data, count) in enumerate([(objects, 3), (no_rows, 0), (DataProto(), 0)]):
            path = Path(folder) / str(number)
            data.save_to_disk(path)
            for received in (pickle.loads(pickle.dumps(data)), DataProto.load_from_disk(path)):
                assert received.equal(data) and len(received) == count
                assert set(received.tensors) == set(data.tensors)
    assert received.meta_info == {}


def test_b084_mismatched_keys_in_concat() -> None:
    left = DataProto.from_dict({"x": torch.zeros(1), "y": torch.zeros(1)})
    with pytest.raises(DataError, match="'y'"):
        DataProto.concat([left, DataProto.from_dict({"x": torch.zeros(1)})])
    with pytest.raises(DataError, match="'x'"):
        DataProto.concat([rows(1).select(["x"], []), DataProto.from_dict({"x": torch.zeros(1, 3)})])
    with pytest.raises(DataError, match="'x'"):
        DataProto.concat([left.select(["x"]), DataProto.from_dict({"x": torch.zeros(1, dtype=torch.float64)})])
    with pytest.raises(DataError, match="nothing"):
        DataProto.concat([])


def test_b085_repeat_order() -> None:
    data = rows(2)
    assert order(data.repeat(3, interleave=True)) == [0, 0, 0, 1, 1, 1]
    assert order(data.repeat(3, interleave=False)) == [0, 1, 0, 1, 0, 1]
    assert order(data.sample_level_repeat([0, 2])) == [1, 1]
    assert order(data.sample_level_repeat(torch.tensor([2, 1]))) == [0, 0, 1]
    for wrong in ([1], [1, -1], [0.5, 1.0]):
        with pytest.raises(DataError):
            data.sample_level_repeat(wrong)


def test_b087_filtered_batch_loses_no_row() -> None:
    kept = rows(8)[[0, 2, 3, 5, 7]]
    pieces = kept.chunk(2, allow_uneven=True)
    assert [len(piece.split(2)) for piece in pieces] == [2, 1]
    padded, pad = pad_dataproto_to_divisor(kept, 2)
    assert [len(piece.split(2)) for piece in padded.chunk(2)] == [2, 2]
    assert order(unpad_dataproto(padded, pad)) == [0, 2, 3, 5, 7]
    with pytest.raises(DataError, match="5 rows do not divide"):
        kept.make_iterator(2, 1)
    lengths = [len(piece) for piece in kept.make_iterator(2, 1, dataloader_kwargs={"drop_last": False})]
    assert lengths == [2, 2, 1]


# --- construction -----------------------------------------------------------------------------------


def test_from_single_dict_routes_by_kind() -> None:
    data = DataProto.from_single_dict(
        {"t": torch.zeros(2, 3), "a": np.array([1, 2]), "l": [[1], [2]], "lr": 0.5, "s": "text", "none": None},
        meta_info={"more": [1]},
    )
    assert list(data.batch.keys()) == ["t"] and data.tensor_batch is data.batch
    assert data.non_tensor_batch["a"].dtype == object and data.non_tensor_batch["l"].shape == (2,)
    assert data.meta_info == {"lr": 0.5, "s": "text", "none": None, "more": [1]}


@pytest.mark.parametrize("value", [{"a": 1}, object(), torch.tensor(1.0), np.array(1.0), (1, 2), [1, 2, 3]])
def test_from_single_dict_refuses_by_name(value: object) -> None:
    with pytest.raises(DataError) as caught:
        DataProto.from_single_dict({"x": torch.zeros(2), "odd": value})
    assert "odd" in str(caught.value)


def test_empty_and_object_only() -> None:
    nothing = DataProto()
    assert len(nothing) == 0 and len(nothing.chunk(2)) == 2 and "0 rows" in nothing.get_data_info()
    objects = DataProto.from_dict(non_tensors={"name": [None, "a", [1]]})
    assert len(objects) == 3 and objects[1].non_tensor_batch == {"name": "a"}
    objects.pop(non_tensor_batch_keys=["name"])
    assert len(objects) == 3 and objects.non_tensor_batch == {}
    assert order(DataProto().union(rows(2))) == [0, 1] and order(rows(2).union(DataProto())) == [0, 1]


def test_wrong_columns_are_named() -> None:
    with pytest.raises(DataError, match="rows"):
        DataProto.from_dict({"x": torch.zeros(2)}, {"y": [1]})
    with pytest.raises(DataError, match="'x' of tensors"):
        DataProto.from_dict({"x": [1, 2]})  # type: ignore[dict-item]
    with pytest.raises(DataError, match="'x'"):
        DataProto(TensorDict({"x": TensorDict({}, [2])}, [2]))
    with pytest.raises(DataError, match="'x'"):
        DataProto.from_dict({"x": torch.zeros(2)}, {"x": [1, 2]})
    data = rows(2)
    data.non_tensor_batch["late"] = np.array([1, 2, 3], dtype=object)
    with pytest.raises(DataError, match="'late' has 3 rows"):
        data.check_consistency()


@pytest.mark.parametrize("count", [0, 1, 3])
def test_tensordict_round_trip(count: int) -> None:
    data = rows(count, lr=0.5, names=["a"]).union(DataProto.from_dict(non_tensors={"o": [{"k": None}] * count}))
    assert DataProto.from_tensordict(data.to_tensordict()).equal(data)
    with pytest.raises(DataError, match="name of a column"):
        rows(count, x=1).to_tensordict()


# --- in place, and what is shared --------------------------------------------------------------------


def test_pieces_never_share_meta() -> None:
    source = {"deep": {"list": [1]}}
    data = rows(4, **source)
    made = [
        data.select(),
        data[1:3],
        *data.chunk(2),
        data.repeat(2),
        DataProto.concat([data]),
        data[0],
        data.writable(),
    ]
    made += [next(iter(data.make_iterator(2, 1))), copy.copy(data), data.pop(meta_info_keys=["deep"])]
    data.meta_info["deep"] = source["deep"]
    for number, piece in enumerate(made):
        piece.meta_info["deep"]["list"].append(number)
        assert piece.meta_info["deep"]["list"] == [1, number]
    assert source == {"deep": {"list": [1]}}


def test_in_place_methods_do_not_reach_other_objects() -> None:
    data = rows(4)
    piece, selected = data[1:3], data.select()
    data.reorder([3, 2, 1, 0])
    data.rename(["x", "name"], ["y", "title"])
    data.pop(["y"])
    data.padding(2, "first")
    assert order(piece) == [1, 2] and order(selected) == [0, 1, 2, 3]
    piece.non_tensor_batch["name"][0] = "changed"
    assert order(selected) == [0, 1, 2, 3]
    other = rows(2).union(piece.rename(["x", "name"], ["x2", "name2"]))
    other.non_tensor_batch["name2"][1] = "changed too"
    assert piece.non_tensor_batch["name2"].tolist() == ["changed", "2"]
    for view in (selected[1:3], selected.select(), selected.chunk(2)[0], fold_batch_dim(selected, 4)):
        view.non_tensor_batch["name"][0] = "changed"
        assert order(selected) == [0, 1, 2, 3]
    private = selected.writable()
    private.batch["x"][:] = -1
    assert order(selected) == [0, 1, 2, 3]


def test_chunks_are_views() -> None:
    data = rows(4)
    assert data.chunk(2)[1].batch["x"].data_ptr() == data.batch["x"][2:].data_ptr()


def test_union_is_all_or_nothing() -> None:
    data, other = rows(2, a=1), rows(2, a=2)
    other.batch["z"] = torch.ones(2)
    with pytest.raises(DataError, match="'a'"):
        data.union(other)
    assert list(data.batch.keys()) == ["x"] and data.meta_info == {"a": 1}
    with pytest.raises(DataError, match="rows"):
        rows(2).union(rows(3))
    conflicting = rows(2)
    conflicting.batch["x"] = conflicting.batch["x"] + 1
    with pytest.raises(DataError, match="'x'"):
        rows(2).union(conflicting)


def test_union_functions() -> None:
    nan = torch.tensor([1.0, float("nan")])
    left = TensorDict({"a": nan}, [2])
    merged = union_tensor_dict(left, TensorDict({"a": nan.clone(), "b": nan}, [2]))
    assert set(merged.keys()) == {"a", "b"} and set(left.keys()) == {"a"}
    with pytest.raises(DataError, match="'a'"):
        union_tensor_dict(left, TensorDict({"a": nan.double()}, [2]))
    assert list(union_numpy_dict({"a": np.array([1], dtype=object)}, {"b": np.array([2], dtype=object)})) == ["a", "b"]


def test_pop_rename_reorder_errors_are_named() -> None:
    data = rows(3)
    with pytest.raises(DataError, match="'nope'"):
        data.pop(["x", "nope"])
    assert "x" in data
    with pytest.raises(DataError, match="'name' is already there"):
        data.rename("x", "name")
    with pytest.raises(DataError, match="'nope'"):
        data.rename("nope", "y")
    with pytest.raises(DataError, match=r"\['x'\]"):
        data.select("x")
    for wrong in ([0, 1], [0, 1, 1]):
        with pytest.raises(DataError, match="every row exactly once"):
            data.reorder(wrong)


def test_rename_swaps() -> None:
    data = DataProto.from_dict({"a": torch.zeros(1), "b": torch.ones(1)})
    assert data.rename(["a", "b"], ["b", "a"]) is data
    assert data.batch["a"].item() == 1 and data.batch["b"].item() == 0


def test_to_auto_is_in_place() -> None:
    data = rows(2)
    assert data.to("cpu") is data and data.to("auto") is data
    expected = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else torch.device("cpu")
    assert data.batch["x"].device.type == expected.type


# --- folding and iterating ----------------------------------------------------------------------------


def test_fold_and_unfold() -> None:
    data = rows(6)
    folded = fold_batch_dim(data, 2)
    assert len(folded) == 2 and folded.batch["x"].shape == (2, 3, 2) and folded.non_tensor_batch["name"].shape == (2, 3)
    assert unfold_batch_dim(folded).equal(data)
    with pytest.raises(DataError, match="6 rows do not fold"):
        fold_batch_dim(data, 4)


def test_unfold_column_chunks() -> None:
    data = DataProto.from_dict({"pair": torch.arange(8).view(2, 4), "one": torch.tensor([0, 1])}, {"n": ["a", "b"]})
    cut = data.unfold_column_chunks(2, ["pair"])
    assert cut.batch["pair"].tolist() == [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert cut.batch["one"].tolist() == [0, 0, 1, 1] and cut.non_tensor_batch["n"].tolist() == ["a", "a", "b", "b"]


def test_make_iterator() -> None:
    data = rows(6)
    assert [order(batch) for batch in data.make_iterator(2, 2)] == [[0, 1], [2, 3], [4, 5]] * 2
    shuffle = {"shuffle": True}
    first = [order(batch) for batch in data.make_iterator(2, 3, seed=1, dataloader_kwargs=shuffle)]
    assert first == [order(batch) for batch in data.make_iterator(2, 3, seed=1, dataloader_kwargs=shuffle)]
    epochs = [list(itertools.chain(*first[start : start + 3])) for start in (0, 3, 6)]
    assert all(sorted(epoch) == list(range(6)) for epoch in epochs) and epochs[0] != epochs[1]
    dropped = data.make_iterator(4, 1, dataloader_kwargs={"drop_last": True})
    assert [order(batch) for batch in dropped] == [[0, 1, 2, 3]]
    with pytest.raises(DataError, match="num_workers"):
        data.make_iterator(2, 1, dataloader_kwargs={"num_workers": 2})


def test_print_size(capsys: pytest.CaptureFixture[str]) -> None:
    rows(4).print_size("batch")
    assert capsys.readouterr().out == "batch: 4 rows, 0.000000 GiB of tensors\n"
    assert rows(4).size_in_bytes() == 4 * 2 * 8
