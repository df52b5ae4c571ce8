"""Seconds of the named parts of a step, and which part runs now."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from verl.cluster.profiling import now


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

    def timeline(self, step: int, workers: Mapping[str, Sequence[tuple[str, float, float]]]) -> dict[str, Any]:
        """The step's line of ``timeline.jsonl``: when it began (seconds since 1970), and its parts and what each worker
        did, in seconds from then. ``workers``: what they did, by the clock that counts from 1970; what ended before the
        step began is left out."""
        parts = sorted(self.intervals(), key=lambda part: part[1])
        zero = parts[0][1]
        began = now() - time.perf_counter() + zero

        def since(spans: Iterable[tuple[str, float, float]], zero: float) -> list[tuple[str, float, float]]:
            return [(name, round(start - zero, 4), round(end - zero, 4)) for name, start, end in spans if end >= zero]

        held = {name: since(spans, began) for name, spans in workers.items()}
        return {"step": step, "began": round(began, 4), "parts": since(parts, zero), "workers": held}

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
