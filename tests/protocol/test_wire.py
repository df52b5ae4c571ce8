"""Crossing processes: tensors as shared buffers, read-only in truth."""

from __future__ import annotations

import pickle
import warnings

import numpy as np
import pytest
import torch

from verl.errors import DataError
from verl.protocol import DataProto
from verl.protocol.wire import CHECK_VARIABLE, tensor_over


def sent(data: DataProto) -> tuple[bytes, list[bytearray]]:
    """What an object store keeps: the pickle, and the memory of the buffers."""
    buffers: list[pickle.PickleBuffer] = []
    text = pickle.dumps(data, protocol=5, buffer_callback=buffers.append)
    return text, [bytearray(buffer.raw()) for buffer in buffers]


def received(text: bytes, stored: list[bytearray]) -> DataProto:
    return pickle.loads(text, buffers=[memoryview(memory).toreadonly() for memory in stored])


def test_tensors_cross_as_buffers_and_come_back_as_views() -> None:
    big = DataProto.from_dict(
        {"x": torch.randn(64, 1024), "b": torch.randn(64, 1024).bfloat16(), "m": torch.ones(64, 1024, dtype=torch.bool)}
    )
    text, stored = sent(big)
    assert len(text) < 2000 and sorted(map(len, stored)) == [64 * 1024, 2 * 64 * 1024, 4 * 64 * 1024]
    one, two = received(text, stored), received(text, stored)
    assert one.equal(big)
    for name, tensor in one.tensors.items():
        assert tensor.data_ptr() == two.batch[name].data_ptr()
        addresses = {np.frombuffer(memory, dtype=np.uint8).ctypes.data for memory in stored}
        assert tensor.data_ptr() in addresses


def test_a_slice_sends_its_own_bytes_only() -> None:
    text, stored = sent(DataProto.from_dict({"x": torch.zeros(1000, 100)})[10:12])
    assert sum(map(len, stored)) + len(text) < 2000


def test_in_place_methods_leave_received_memory_alone() -> None:
    data = DataProto.from_dict({"x": torch.arange(4), "y": torch.zeros(4, 0)}, {"o": list("abcd")}, {"m": [1]})
    text, stored = sent(data)
    before = [bytes(memory) for memory in stored]
    view = received(text, stored)
    view.reorder([3, 2, 1, 0]).padding(2).to("cpu").rename("x", "z").union(DataProto.from_dict({"n": torch.ones(6)}))
    view.pop(["z"])
    private = received(text, stored).writable()
    private.batch["x"] += 5
    private.non_tensor_batch["o"][0] = "z"
    assert [bytes(memory) for memory in stored] == before and received(text, stored).equal(data)


def test_no_warning_and_the_filters_of_others_stay() -> None:
    text, stored = sent(DataProto.from_dict({"x": torch.arange(4)}))
    read_only = np.arange(3)
    read_only.flags.writeable = False
    always = torch.is_warn_always_enabled()
    torch.set_warn_always(True)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            filters = list(warnings.filters)
            received(text, stored)
            assert warnings.filters == filters
            with pytest.raises(UserWarning, match="not writable"):
                torch.from_numpy(read_only)  # only tensors received here are exempt
    finally:
        torch.set_warn_always(always)


def test_a_view_keeps_its_memory_alive() -> None:
    array = np.full(100_000, 7)
    array.flags.writeable = False
    tensor = tensor_over(array)
    del array
    np.full(100_000, 8)
    assert int(tensor.sum()) == 700_000


def test_checked_mode_names_the_column_that_was_written(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(CHECK_VARIABLE, "1")
    text, stored = sent(DataProto.from_dict({"x": torch.arange(4), "y": torch.arange(4)}))
    first = received(text, stored)
    first.check_consistency()
    first.batch["y"][0] = 9  # a raw write into the shared memory
    with pytest.raises(DataError, match="'y' was written to"):
        first.check_consistency()
    with pytest.raises(DataError, match="'y' was written to"):
        received(text, stored)


def test_gradients_and_exotic_layouts() -> None:
    data = DataProto.from_dict(
        {"g": torch.ones(2, requires_grad=True), "c": torch.ones(2, dtype=torch.complex64).conj()}
    )
    back = pickle.loads(pickle.dumps(data))
    assert not back.batch["g"].requires_grad and back.batch["c"].tolist() == [1, 1]
    with pytest.raises(DataError, match="'s' is not a plain dense tensor"):
        pickle.dumps(DataProto.from_dict({"s": torch.eye(2).to_sparse()}))
