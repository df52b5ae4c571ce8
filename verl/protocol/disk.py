"""DataProto as one file."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from verl.errors import DataError
from verl.protocol.files import read_tree, write_tree

if TYPE_CHECKING:
    from verl.protocol.container import DataProto

_PARTS = {"batch_size", "batch", "non_tensor_batch", "meta_info"}


def save(data: DataProto, path: Path) -> None:
    """Write the file; see ``DataProto.save_to_disk``."""
    if path.is_dir():
        raise DataError("a DataProto is saved as one file, and this is a directory", str(path), "add a file name")
    tree = {
        "batch_size": list(data.batch.batch_size),
        "batch": dict(data.batch.items()),
        "non_tensor_batch": data.non_tensor_batch,
        "meta_info": data.meta_info,
    }
    write_tree(path, tree)


def load(
    path: Path,
) -> tuple[dict[str, torch.Tensor], dict[str, np.ndarray], dict[str, Any], tuple[int, ...]]:
    """Tensors, object columns, meta_info and batch size of a file; see ``DataProto.load_from_disk``."""
    tree = read_tree(path)
    if not isinstance(tree, dict) or tree.keys() != _PARTS:
        raise DataError("the file holds something else than a DataProto", str(path))
    return tree["batch"], tree["non_tensor_batch"], tree["meta_info"], tuple(tree["batch_size"])
