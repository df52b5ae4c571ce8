"""The model of a run as something that can be loaded like any other model folder, without a copy of its weights."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from verl.checkpoint.export import HF_FOLDER, WEIGHTS
from verl.checkpoint.manifest import MANIFEST
from verl.checkpoint.store import Checkpoint, CheckpointStore
from verl.errors import CheckpointError
from verl.run_dir import RunDir


@dataclass(frozen=True)
class ModelSource:
    """A model that a command was given.

    Attributes:
        path: what ``model.path`` takes.
        run: the folder of the run that trained it, None where it is not of a run.
        step: of its checkpoint.
    """

    path: str
    run: RunDir | None = None
    step: int | None = None


def find_checkpoint(path: str) -> Checkpoint | None:
    """The checkpoint that ``path`` is, or the newest one of the run that it is; None where it is neither.

    Raises:
        CheckpointError: a run without a complete checkpoint, or a damaged checkpoint.
    """
    folder = Path(path).expanduser()
    if (folder / MANIFEST).is_file():
        return Checkpoint(folder)
    run = RunDir(folder)
    if not run.checkpoints.is_dir() or (folder / "config.json").is_file():
        return None
    latest = CheckpointStore(run.checkpoints).latest()
    if latest is None:
        raise CheckpointError("the run has no complete checkpoint", path, "train with trainer.save_freq above 0")
    return Checkpoint(latest)


@contextmanager
def opened_model(path: str) -> Iterator[ModelSource]:
    """What ``model.path`` takes, for a run or a checkpoint as well: those as a folder of links, for the duration.

    Raises:
        CheckpointError: as :func:`find_checkpoint`, or a file of the checkpoint is damaged.
    """
    checkpoint = find_checkpoint(path)
    if checkpoint is None:
        yield ModelSource(path)
        return
    with tempfile.TemporaryDirectory(prefix="verl-model-") as folder:
        for name in [WEIGHTS, *(name for name in checkpoint.files if name.startswith(f"{HF_FOLDER}/"))]:
            link = Path(folder) / (Path(name).name if name == WEIGHTS else name.removeprefix(f"{HF_FOLDER}/"))
            link.parent.mkdir(parents=True, exist_ok=True)
            link.symlink_to(checkpoint.file(name).resolve())
        yield ModelSource(folder, RunDir(checkpoint.path.resolve().parents[1]), checkpoint.step)
