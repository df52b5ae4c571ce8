"""The table of columns, and batches that are still being made."""

from __future__ import annotations

import pytest
import torch

from verl.errors import DataError
from verl.protocol import DataProto, DataProtoFuture, check_columns


def test_check_columns_names_the_producer() -> None:
    data = DataProto.from_dict({"responses": torch.zeros(1, 2)}, {"uid": ["a"], "reward_extra/len": [3], "values": [1]})
    check_columns(data, "responses", "uid", "reward_extra/len")
    with pytest.raises(DataError, match=r"'advantages' is missing.*made by the process stage"):
        check_columns(data, "responses", "advantages")
    with pytest.raises(DataError, match="'values' is in non_tensor_batch, not in batch"):
        check_columns(data, "values")
    with pytest.raises(DataError, match="no column 'advantage' in the table"):
        check_columns(data, "advantage")


def test_future_waits_until_asked() -> None:
    asked: list[list[str]] = []
    store = {"a": DataProto.from_dict({"x": torch.arange(3)}), "b": DataProto.from_dict({"x": torch.arange(4)})}

    def resolve(handles: list[str]) -> list[DataProto]:
        asked.append(handles)
        return [store[handle] for handle in handles]

    future = DataProtoFuture.concat(["a", "b"], resolve)
    last = future.chunk(2, allow_uneven=True)[1].chunk(3)[2]
    assert asked == []
    assert future.get().batch["x"].tolist() == [0, 1, 2, 0, 1, 2, 3]
    assert last.get().batch["x"].tolist() == [3]
    with pytest.raises(DataError, match="7 rows do not divide"):
        future.chunk(2)[0].get()
    with pytest.raises(DataError, match="nothing"):
        DataProtoFuture.concat([], resolve)
