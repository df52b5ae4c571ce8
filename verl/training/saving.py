"""Weights and optimizer of a trained model in a checkpoint folder."""

from __future__ import annotations

from pathlib import Path

import torch

from verl.errors import CheckpointError
from verl.protocol.files import read_safetensors, write_safetensors
from verl.training.optimizer import MasterWeights, Optimizer

WEIGHTS_FILE, OPTIMIZER_FILE = "model.safetensors", "optimizer.safetensors"


def save_trained(folder: Path, weights: MasterWeights, optimizer: Optimizer) -> None:
    """Write both into ``folder``, made if missing."""
    folder.mkdir(parents=True, exist_ok=True)
    masters: dict[str, torch.Tensor] = {key: value.detach() for key, value in weights.masters.items()}
    write_safetensors(folder / WEIGHTS_FILE, masters, {"format": "pt"})
    write_safetensors(folder / OPTIMIZER_FILE, optimizer.state())


@torch.no_grad()
def load_trained(folder: Path, weights: MasterWeights, optimizer: Optimizer) -> None:
    """Take what :func:`save_trained` wrote.

    Raises:
        CheckpointError: it is of another model.
    """
    saved, _ = read_safetensors(folder / WEIGHTS_FILE)
    odd = sorted(saved.keys() ^ weights.masters.keys())[:1] + [
        f"{key}: {tuple(value.shape)} in the checkpoint, {tuple(weights.masters[key].shape)} here"
        for key, value in saved.items()
        if key in weights.masters and value.shape != weights.masters[key].shape
    ]
    if odd:
        raise CheckpointError(
            f"the checkpoint's {folder.name} is another model than the configuration's", odd[0], "resume with its model"
        )
    for key, value in saved.items():
        weights.masters[key].copy_(value)
    weights.publish()
    optimizer.load_state(read_safetensors(folder / OPTIMIZER_FILE)[0])
