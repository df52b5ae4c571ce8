"""How many rollout workers there should be, between ``rollout.min_workers`` and ``rollout.max_workers``.

By itself it follows the queue: one worker more when requests have waited long for some time, one fewer when for a long
time even the busiest moment would have fitted the others. Growing is quick and shrinking slow, and after each change it
watches anew, so that the pool does not swing. A wish of the user (``verl scale``) holds until it is taken back.
Either way one worker at a time comes or goes, and none while another still starts or drains.
"""

from __future__ import annotations

from dataclasses import dataclass

GROW_WAIT = 5.0  # seconds that the oldest request in the queue has waited ...
GROW_SECONDS = 15.0  # ... without a break for so long: one worker more
SHRINK_SECONDS = 120.0  # for so long ...
SHRINK_LOAD = 0.8  # ... at most this share of the places of one worker fewer was ever needed: one worker fewer


@dataclass(frozen=True)
class Load:
    """The pool at a moment.

    Attributes:
        workers: that are given work.
        moving: that start or drain.
        places: requests that one worker takes at a time.
        queued, oldest_wait, in_flight: as the dispatcher says.
    """

    workers: int
    moving: int
    places: int
    queued: int
    oldest_wait: float
    in_flight: int


class ScalingPolicy:
    """Decides again and again whether a worker is to come or to go; :meth:`decide` is told the time.

    Args:
        min_workers, max_workers: bounds, whatever the load or the wish.
        wish: workers wanted by the user, kept within the bounds; None: by load. May be set at any time.
    """

    def __init__(self, min_workers: int, max_workers: int, wish: int | None = None) -> None:
        if not 1 <= min_workers <= max_workers:
            raise ValueError(f"no number of workers is at least {min_workers}, at most {max_workers} and 1 or more")
        self.min_workers, self.max_workers, self.wish = min_workers, max_workers, wish
        self._waiting_since: float | None = None
        self._spare_since: float | None = None

    def decide(self, now: float, load: Load) -> int:
        """1: start a worker; -1: drain one; 0: leave it so."""
        waits = load.queued > 0 and load.oldest_wait >= GROW_WAIT
        needed = load.queued + load.in_flight
        spare = needed <= SHRINK_LOAD * load.places * (load.workers - 1)
        self._waiting_since = _since(self._waiting_since, waits, now)
        self._spare_since = _since(self._spare_since, spare, now)
        change = 0 if load.moving else self._towards(load.workers, now)
        if load.moving or change:
            self._waiting_since = self._spare_since = None
        return change

    def _towards(self, workers: int, now: float) -> int:
        wanted = workers
        if self.wish is not None:
            wanted = self.wish
        elif self._waiting_since is not None and now - self._waiting_since >= GROW_SECONDS:
            wanted = workers + 1
        elif self._spare_since is not None and now - self._spare_since >= SHRINK_SECONDS:
            wanted = workers - 1
        wanted = min(max(wanted, self.min_workers), self.max_workers)
        return (wanted > workers) - (wanted < workers)


def _since(before: float | None, holds: bool, now: float) -> float | None:
    """Since when something holds, from when it held before."""
    return (now if before is None else before) if holds else None
