"""Going on within one command after a process of actor, critic, reference or reward has died."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from tempfile import TemporaryDirectory

from verl.checkpoint.store import CheckpointStore
from verl.config import Config
from verl.errors import WorkerDiedError

MEMORY = "/dev/shm"  # files here lie in main memory, and outlive the processes that wrote them


@contextmanager
def kept_in_memory(config: Config) -> Iterator[CheckpointStore | None]:
    """Where ``trainer.memory_save_freq`` keeps the run's last state; None: nowhere. It is gone when the run ends.

    A run that is killed leaves it to its reaper (:mod:`verl.cluster.reaper`), which knows the folder by its name.
    """
    trainer = config.trainer
    if trainer.memory_save_freq <= 0 or not trainer.max_restarts or config.cluster.backend == "inline":
        yield None
        return
    with TemporaryDirectory(prefix=f"verl-restart-{os.getpid()}-", dir=MEMORY, ignore_cleanup_errors=True) as folder:
        yield CheckpointStore(folder, keep_last=1)


def newest(disk: CheckpointStore, memory: CheckpointStore | None) -> CheckpointStore:
    """Of the two the one with the later step."""
    return max(filter(None, (disk, memory)), key=lambda store: store.steps()[-1:])


def require_restart(error: WorkerDiedError, config: Config, store: CheckpointStore, restarts: int) -> None:
    """Raises the error where starting again cannot help, or is not wanted any more."""
    if not error.while_training:
        raise error
    if store.latest() is None:
        keys = "trainer.save_freq or trainer.memory_save_freq"
        error.fix = f"there is no checkpoint to go on from: set {keys}, then a run restarts by itself"
        raise error
    if restarts >= config.trainer.max_restarts:
        if restarts:
            error.fix = f"{error.fix}; {restarts} restart{'s'[: restarts > 1]} did not help (trainer.max_restarts)"
        raise error
