"""Writing a run's checkpoints, at once or while training goes on."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field

from verl.checkpoint.store import Checkpoint, CheckpointStore, PendingCheckpoint
from verl.cluster.roles import Roles
from verl.config import Config
from verl.errors import VerlError
from verl.trainer.sources import Source
from verl.trainer.state import STATE_NAME, TrainerState

POLL_SECONDS = 0.02
_log = logging.getLogger(__name__)


@dataclass
class _Flight:
    """A checkpoint under way."""

    pending: PendingCheckpoint
    metrics: Mapping[str, float]
    commit: Future[Checkpoint] | None = None


@dataclass
class Saver:
    """Writes ``checkpoints/step_…`` with models, optimizers and the run's state: complete, or not there at all.

    In the ``background`` (``trainer.async_save``) the workers only copy their tensors while training waits; a thread of
    theirs writes the copy, and one of this process commits it. One checkpoint is under way at a time: the next one
    waits for it. What goes wrong is raised between steps, and by :meth:`finish`.
    """

    config: Config
    store: CheckpointStore
    roles: Roles
    state: TrainerState
    source: Source
    background: bool = False
    _flight: _Flight | None = None
    _thread: ThreadPoolExecutor = field(default_factory=lambda: ThreadPoolExecutor(1, "commit"))

    @property
    def busy(self) -> bool:
        """Whether a checkpoint is under way."""
        return self._flight is not None

    def save(self, metrics: Mapping[str, float]) -> None:
        """This step's checkpoint, unless it is there already; ``metrics``: of the step."""
        self.finish()
        if self.state.step in self.store.steps():
            return
        self._flight = _Flight(self.store.begin(self.state.step), metrics)
        pending = self._flight.pending
        self.roles.save(str(pending.path.absolute()), self.background)  # a worker may stand in another folder
        pending.write_state(STATE_NAME, self.state.tree(self.config, self.source.state_dict()))
        if not self.background:
            self.finish()

    def advance(self) -> None:
        """Commit what has been written by now; called between steps."""
        flight = self._flight
        if flight is None:
            return
        if flight.commit is None and self.roles.saved():
            config = self.config
            meta = {"model": config.model.path, "reward_model": config.reward.model.path}
            flight.commit = self._thread.submit(flight.pending.commit, meta, flight.metrics)
        if flight.commit is not None and flight.commit.done():
            self._flight = None
            flight.commit.result()

    def finish(self) -> None:
        """Wait until nothing is under way; every ``cluster.stall_seconds`` it is said what for. Raises CheckpointError:
        it could not be written."""
        began, said, every = time.monotonic(), 0.0, self.config.cluster.stall_seconds
        while self._flight is not None:
            self.advance()
            waited = time.monotonic() - began
            if self._flight is not None and waited >= said + every:
                said = waited
                _log.warning("waiting for %s to be written, since %.0f s", self._flight.pending.path, waited)
            if self._flight is not None:
                time.sleep(POLL_SECONDS)

    def abandon(self) -> None:
        """The run ends before its time: leave nothing half written."""
        flight, self._flight = self._flight, None
        if flight is None:
            return
        if flight.commit is not None:
            with suppress(VerlError):
                flight.commit.result()
        flight.pending.abort()
