"""Requests, results and a simulated pool for the tests of dispatcher and buffer."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from verl.rollout.dispatch import Dispatcher
from verl.rollout.protocol import FinishReason, Request, Result, SamplingParams, Slot


def uid(draw: int) -> str:
    return f"train:{draw}:0:{draw}"


def group(draw: int, n: int = 1, prompt: int = 8, new: int = 16) -> list[Request]:
    """The ``n`` requests of one prompt of ``prompt`` tokens."""
    return [Request(Slot(uid(draw), index), [1] * prompt, SamplingParams(new)) for index in range(n)]


def result(slot: Slot, versions: int | list[int] = 0, reason: FinishReason = "stop", length: int = 4) -> Result:
    """A response whose tokens have these weight versions (one number: ``length`` of that)."""
    made = np.array([versions] * length if isinstance(versions, int) else versions, np.int32)
    ids = np.arange(len(made), dtype=np.int32)
    return Result(slot, ids, -ids.astype(np.float32), np.ones(len(made), np.bool_), made, reason)


class SimulatedPool:
    """Workers that sample ``speed`` tokens a second, shared evenly by what they have in hand, under a virtual clock."""

    def __init__(self, dispatcher: Dispatcher, speeds: dict[str, float], length: Callable[[Slot], int]) -> None:
        self.dispatcher, self.speeds, self.length = dispatcher, speeds, length
        self.now = 0.0
        self.left: dict[str, dict[Slot, float]] = {name: {} for name in speeds}
        self.sent: dict[str, list[list[Slot]]] = {name: [] for name in speeds}

    def run(self) -> list[Result]:
        """Until nothing is in flight; every result in the order in which they finish."""
        results = []
        while True:
            for name, requests in self.dispatcher.assign(self.now).items():
                slots = [request.slot for request in requests]
                self.sent[name].append(slots)
                self.left[name].update((slot, float(self.length(slot))) for slot in slots)
            busy = {name: left for name, left in self.left.items() if left}
            if not busy:
                return results
            rates = {name: self.speeds[name] / len(left) for name, left in busy.items()}
            elapsed = min(min(left.values()) / rates[name] for name, left in busy.items())
            self.now += elapsed
            for name, left in busy.items():
                for slot in left:
                    left[slot] -= elapsed * rates[name]
                done = [slot for slot, tokens in left.items() if tokens < 1e-6]
                for slot in done:
                    del left[slot]
                answers = [result(slot, length=self.length(slot)) for slot in done]
                self.dispatcher.complete(name, answers, self.now)
                results += answers


def with_workers(*capacities: int, **budgets: float) -> Dispatcher:
    """Workers "0", "1", ... with so many places."""
    dispatcher = Dispatcher(**budgets)  # type: ignore[arg-type]
    for number, capacity in enumerate(capacities):
        dispatcher.add_worker(str(number), capacity, 0.0)
    return dispatcher
