"""The container that every batch travels in, its files and its table of columns."""

from verl.protocol.container import (
    DataProto,
    DataProtoFuture,
    fold_batch_dim,
    pad_dataproto_to_divisor,
    unfold_batch_dim,
    union_numpy_dict,
    union_tensor_dict,
    unpad_dataproto,
)
from verl.protocol.keys import COLUMNS, check_columns
from verl.protocol.rows import DataProtoItem

__all__ = [
    "COLUMNS",
    "DataProto",
    "DataProtoFuture",
    "DataProtoItem",
    "check_columns",
    "fold_batch_dim",
    "pad_dataproto_to_divisor",
    "unfold_batch_dim",
    "union_numpy_dict",
    "union_tensor_dict",
    "unpad_dataproto",
]
