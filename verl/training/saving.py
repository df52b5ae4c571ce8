"""Weights and optimizer of a trained model in a checkpoint folder.

The files are the same for any number of ranks: those that hold parts of the masters write their rows of one file, and
read the rows that are theirs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

import torch
from torch import Tensor

from verl.errors import CheckpointError
from verl.protocol.files import read_safetensors, write_safetensors, write_safetensors_share
from verl.protocol.wire import own_storage
from verl.training.optimizer import MasterWeights, Optimizer

WEIGHTS_FILE, OPTIMIZER_FILE = "model.safetensors", "optimizer.safetensors"


def save_trained(folder: Path, weights: MasterWeights, optimizer: Optimizer) -> None:
    """Write both into ``folder``, made if missing: what this rank has to write, which may be nothing."""
    trained_writer(folder, weights, optimizer, copy=False)()


def trained_writer(folder: Path, weights: MasterWeights, optimizer: Optimizer, copy: bool) -> Callable[[], None]:
    """What does the work of :func:`save_trained`.

    Args:
        copy: take the tensors as they are now into main memory, so that training may go on before they are written.
    """
    folder.mkdir(parents=True, exist_ok=True)
    if not weights.sharded and weights.ranks.rank != 0:
        return lambda: None

    def taken(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return {key: t.detach().to("cpu", copy=True) if copy else own_storage(t) for key, t in tensors.items()}

    files = {WEIGHTS_FILE: taken(weights.masters), OPTIMIZER_FILE: taken(optimizer.state())}

    def write() -> None:
        for name, tensors in files.items():
            if weights.sharded:
                _write_rows(folder / name, weights, tensors)
            else:
                write_safetensors(folder / name, tensors, {"format": "pt"})

    return write


def _write_rows(path: Path, weights: MasterWeights, tensors: dict[str, Tensor]) -> None:
    """Numbers, the same on all ranks, are written as often."""
    shapes = {key: tuple(weights.shapes[key.rpartition("/")[2]]) if t.dim() else () for key, t in tensors.items()}
    rows = {key: (weights.rows(shapes[key]).start if t.dim() else 0, t) for key, t in tensors.items()}
    write_safetensors_share(path, shapes, rows)


@torch.no_grad()
def load_trained(folder: Path, weights: MasterWeights, optimizer: Optimizer) -> None:
    """Take what :func:`save_trained` wrote, on any number of ranks.

    Raises:
        CheckpointError: it is of another model.
    """

    def another(odd: str) -> CheckpointError:
        what = f"the checkpoint's {folder.name} is another model than the configuration's"
        return CheckpointError(what, odd, "resume with its model")

    def rows(name: str, shape: list[int]) -> slice:
        here = weights.shapes.get(name.rpartition("/")[2])
        if here is None or tuple(here) != tuple(shape):
            raise another(name if here is None else f"{name}: {tuple(shape)} in the checkpoint, {tuple(here)} here")
        return weights.rows(shape)

    saved, _ = read_safetensors(folder / WEIGHTS_FILE, rows)
    for name in weights.masters.keys() - saved.keys():
        raise another(name)
    for name, master in weights.masters.items():
        master.copy_(saved[name])
    weights.publish()
    optimizer.load_state(read_safetensors(folder / OPTIMIZER_FILE, rows)[0])
