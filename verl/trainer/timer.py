"""Seconds of the named parts of a step, and which part runs now."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager


class StepTimer:
    """``with timer("gen"): ...``; parts of one name add up until :meth:`flush`.

    Parts may run in several threads at once; a display may read :attr:`running` and :meth:`so_far` at any time.
    """

    def __init__(self) -> None:
        self._ended: list[tuple[str, float, float]] = []
        self._open: list[tuple[str, float]] = []
        self._lock = threading.Lock()

    @property
    def running(self) -> tuple[str, float] | None:
        """The part begun last of those under way, and when (``time.perf_counter``); None between parts."""
        with self._lock:
            return self._open[-1] if self._open else None

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        part = (name, time.perf_counter())
        with self._lock:
            self._open.append(part)
        try:
            yield
        finally:
            with self._lock:
                self._open.remove(part)
                self._ended.append((*part, time.perf_counter()))

    def add(self, other: StepTimer) -> None:
        """The parts of another one, which ran beside these."""
        with self._lock:
            self._ended += other.intervals()

    def intervals(self) -> list[tuple[str, float, float]]:
        """Of each part that has ended since the last :meth:`flush`: its name, beginning and end."""
        with self._lock:
            return list(self._ended)

    def timeline(self) -> list[tuple[str, float, float]]:
        """As :meth:`intervals`, in seconds from the first beginning, in the order in which the parts began."""
        parts = sorted(self.intervals(), key=lambda part: part[1])
        return [(name, round(began - parts[0][1], 4), round(ended - parts[0][1], 4)) for name, began, ended in parts]

    def so_far(self) -> dict[str, float]:
        """Seconds by part since the last :meth:`flush`, of those that have ended."""
        seconds: dict[str, float] = {}
        for name, started, ended in self.intervals():
            seconds[name] = seconds.get(name, 0.0) + ended - started
        return seconds

    def flush(self) -> dict[str, float]:
        """``timing_s/<name>`` of everything timed since the last call."""
        metrics = {f"timing_s/{name}": seconds for name, seconds in self.so_far().items()}
        with self._lock:
            self._ended.clear()
        return metrics
