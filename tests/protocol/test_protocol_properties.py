"""DataProto laws over random schemas: what is taken apart, moved or stored comes back as it was."""

from __future__ import annotations

import pickle
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from verl.protocol import (
    DataProto,
    fold_batch_dim,
    pad_dataproto_to_divisor,
    unfold_batch_dim,
    unpad_dataproto,
)

few = settings(max_examples=40)

DTYPES = [
    torch.float32,
    torch.float64,
    torch.float16,
    torch.bfloat16,
    torch.int64,
    torch.int32,
    torch.int8,
    torch.uint8,
    torch.bool,
    torch.complex64,
]
LAYOUTS = ["plain", "transposed", "strided", "expanded"]

scalars = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=6)
arrays = st.sampled_from([np.float32, np.int16, np.bool_]).flatmap(
    lambda dtype: st.lists(st.integers(0, 1), max_size=3).map(lambda values: np.array(values, dtype=dtype))
)
values = st.recursive(
    scalars | arrays,
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3) | st.tuples(inner, inner)
    ),
    max_leaves=6,
)
names = st.text(min_size=1, max_size=5)


@st.composite
def tensors(draw: st.DrawFn, rows: int) -> torch.Tensor:
    shape = (rows, *draw(st.lists(st.integers(0, 3), max_size=2)))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 99)))
    layout, dtype = draw(st.sampled_from(LAYOUTS)), draw(st.sampled_from(DTYPES))

    def make(*size: int) -> torch.Tensor:
        made = torch.randn(*size, generator=generator) * 3
        if dtype.is_floating_point:
            made[made > 5] = float("nan")
        return made.to(dtype)

    if layout == "transposed":
        return make(*reversed(shape)).permute(*reversed(range(len(shape))))
    if layout == "strided":
        return make(2 * rows, *shape[1:])[::2]
    if layout == "expanded":
        return make(1, *shape[1:]).expand(shape)
    return make(*shape)


@st.composite
def batches(draw: st.DrawFn) -> DataProto:
    rows = draw(st.integers(0, 7))
    columns = draw(st.lists(names, unique=True, max_size=5))
    split = draw(st.integers(0, len(columns)))
    return (
        DataProto.from_dict(
            {name: draw(tensors(rows)) for name in columns[:split]},
            {name: draw(st.lists(values, min_size=rows, max_size=rows)) for name in columns[split:]},
            draw(st.dictionaries(names.filter(lambda name: name != "metrics"), values, max_size=3)),
        )
        if columns
        else DataProto(meta_info=draw(st.dictionaries(names, scalars, max_size=2)))
    )


def picked(data: DataProto, order: list[int]) -> tuple[Any, Any]:
    """The rows of an index, by plain loops: an oracle for everything that moves rows."""
    return (
        {name: [tensor[row] for row in order] for name, tensor in data.tensors.items()},
        {name: [column[row] for row in order] for name, column in data.non_tensor_batch.items()},
    )


def assert_rows(data: DataProto, order: list[int], source: DataProto) -> None:
    from verl.protocol.columns import same

    assert len(data) == len(order)
    assert same(picked(data, list(range(len(order)))), picked(source, order))
    assert same(data.meta_info, source.meta_info)


@few
@given(batches(), st.integers(1, 9))
def test_concat_undoes_chunk_and_split(data: DataProto, size: int) -> None:
    pieces = data.chunk(size, allow_uneven=True)
    assert len(pieces) == size and max(map(len, pieces)) - min(map(len, pieces)) <= 1
    assert DataProto.concat(pieces).equal(data)
    if len(data):
        parts = data.split(size)
        assert all(len(part) == size for part in parts[:-1]) and 0 < len(parts[-1]) <= size
        assert DataProto.concat(parts).equal(data)


@few
@given(batches(), st.integers(1, 9))
def test_unpad_undoes_pad(data: DataProto, divisor: int) -> None:
    padded, pad = pad_dataproto_to_divisor(data, divisor)
    assert len(padded) % divisor == 0 and (pad < divisor)
    if len(data):
        assert_rows(padded, [row % len(data) for row in range(len(data) + pad)], data)
    assert unpad_dataproto(padded, pad).equal(data)


@few
@given(batches(), st.randoms(use_true_random=False))
def test_reorder_by_the_inverse_restores(data: DataProto, random: Any) -> None:
    order = list(range(len(data)))
    random.shuffle(order)
    moved = data.select().reorder(order)
    assert_rows(moved, order, data)
    inverse = [order.index(row) for row in range(len(data))]
    assert moved.reorder(inverse).equal(data)


@few
@given(batches(), st.integers(0, 3))
def test_repeat_and_select(data: DataProto, times: int) -> None:
    rows = range(len(data))
    interleaved, blocks = data.repeat(times), data.repeat(times, interleave=False)
    assert_rows(interleaved, [row for row in rows for _ in range(times)], data)
    assert_rows(blocks, list(rows) * times, data)
    assert data.sample_level_repeat([times] * len(data)).equal(interleaved)
    if times:
        assert interleaved[::times].equal(data) and blocks[: len(data)].equal(data)
        assert unfold_batch_dim(fold_batch_dim(interleaved, len(data))).equal(interleaved) if len(data) else True


@few
@given(batches(), st.lists(st.integers(-20, 20), max_size=8), st.slices(7))
def test_indices_mean_what_lists_mean(data: DataProto, raw: list[int], span: slice) -> None:
    index = [number % (2 * len(data)) - len(data) for number in raw] if len(data) else []
    expected = [range(len(data))[number] for number in index]
    for kind in (list, np.array, torch.tensor):
        assert_rows(data[kind(index) if index else []], expected, data)
    mask = [row in expected for row in range(len(data))]
    assert_rows(data[torch.tensor(mask, dtype=torch.bool)], sorted(set(expected)), data)
    assert_rows(data[span], list(range(len(data)))[span], data)


@few
@given(batches(), st.data())
def test_union_of_column_halves_restores(data: DataProto, draw: st.DataObject) -> None:
    left_keys = [key for key in data.tensors if draw.draw(st.booleans())]
    objects = list(data.non_tensor_batch)
    left = data.select(left_keys, objects[::2])
    right = data.select([key for key in data.tensors if key not in left_keys], objects[1:])
    assert left.union(right).equal(data)


@few
@given(batches())
def test_pickle_round_trip(data: DataProto) -> None:
    for protocol in (2, 4, 5):
        assert pickle.loads(pickle.dumps(data, protocol=protocol)).equal(data)
    buffers: list[pickle.PickleBuffer] = []
    text = pickle.dumps(data, protocol=5, buffer_callback=buffers.append)
    received = pickle.loads(text, buffers=[bytes(buffer.raw()) for buffer in buffers])
    assert received.equal(data)
    assert {name: tensor.dtype for name, tensor in received.tensors.items()} == {
        name: tensor.dtype for name, tensor in data.tensors.items()
    }


@few
@given(batches())
def test_save_and_load_round_trip(data: DataProto) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "batch"
        data.save_to_disk(path)
        loaded = DataProto.load_from_disk(path)
        assert [entry.name for entry in Path(folder).iterdir()] == ["batch"]
    assert loaded.equal(data)
    assert list(loaded.tensors) == list(data.tensors)
