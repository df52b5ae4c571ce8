"""Seconds of the named parts of a step."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager


class StepTimer:
    """``with timer("gen"): ...``; parts of one name add up until :meth:`flush`."""

    def __init__(self) -> None:
        self._seconds: dict[str, float] = defaultdict(float)

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        started = time.perf_counter()
        try:
            yield
        finally:
            self._seconds[name] += time.perf_counter() - started

    def flush(self) -> dict[str, float]:
        """``timing_s/<name>`` of everything timed since the last call."""
        metrics = {f"timing_s/{name}": seconds for name, seconds in self._seconds.items()}
        self._seconds.clear()
        return metrics
