"""Seconds of the named parts of a step, and which part runs now."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager


class StepTimer:
    """``with timer("gen"): ...``; parts of one name add up until :meth:`flush`.

    Written by the training thread; a display may read :attr:`running` and :meth:`so_far` from another at any time.

    Attributes:
        running: the innermost part under way and when it began (``time.perf_counter``), None between parts.
    """

    def __init__(self) -> None:
        self._seconds: dict[str, float] = {}
        self.running: tuple[str, float] | None = None

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        outer, started = self.running, time.perf_counter()
        self.running = (name, started)
        try:
            yield
        finally:
            self.running = outer
            self._seconds[name] = self._seconds.get(name, 0.0) + time.perf_counter() - started

    def add(self, other: StepTimer) -> None:
        """The seconds of another one, whose parts ran beside these."""
        for name, seconds in other.so_far().items():
            self._seconds[name] = self._seconds.get(name, 0.0) + seconds

    def so_far(self) -> dict[str, float]:
        """Seconds by part since the last :meth:`flush`, of those that have ended."""
        return dict(self._seconds)

    def flush(self) -> dict[str, float]:
        """``timing_s/<name>`` of everything timed since the last call."""
        metrics = {f"timing_s/{name}": seconds for name, seconds in self._seconds.items()}
        self._seconds.clear()
        return metrics
