"""DataProto as one file."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from verl.errors import DataError
from verl.protocol.files import write_tree

if TYPE_CHECKING:
    from verl.protocol.container import DataProto

_PARTS = {"batch_size", "batch", "non_tensor_batch", "meta_info"}


def to_tree(data: DataProto) -> dict[str, Any]:
    """See ``DataProto.to_tree``."""
    return {
        "batch_size": list(data.batch.batch_size),
        "batch": dict(data.batch.items()),
        "non_tensor_batch": data.non_tensor_batch,
        "meta_info": data.meta_info,
    }


def save(data: DataProto, path: Path) -> None:
    """Write the file; see ``DataProto.save_to_disk``."""
    if path.is_dir():
        raise DataError("a DataProto is saved as one file, and this is a directory", str(path), "add a file name")
    write_tree(path, to_tree(data))


def parts_of(
    tree: Any, where: str
) -> tuple[dict[str, torch.Tensor], dict[str, np.ndarray], dict[str, Any], tuple[int, ...]]:
    """Tensors, object columns, meta_info and batch size of a tree that :func:`to_tree` made."""
    if not isinstance(tree, dict) or tree.keys() != _PARTS:
        raise DataError("something else than a DataProto was saved here", where)
    return tree["batch"], tree["non_tensor_batch"], tree["meta_info"], tuple(tree["batch_size"])
