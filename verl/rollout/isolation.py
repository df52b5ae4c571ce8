"""Which request an engine fails with.

A step computes many requests at once. An exception tells that one of them cannot be computed, not which one, nor
whether the engine can compute anything any more.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import replace
from itertools import chain
from traceback import extract_tb

from verl.errors import VerlError
from verl.rollout.protocol import Request, Result, Resume, RolloutEngine, SamplingParams, Slot, generate

PROBE = Request(Slot("probe", 0), [0], SamplingParams(max_new_tokens=1, temperature=0.0))


class Isolation:
    """Runs an engine, and gives back the requests that it fails with; the others end as if undisturbed.

    When a step fails, what was there goes on in halves, one after the other, each as far as it had come, until a
    request fails by itself. It is to blame when the engine then still answers another one. What is a
    :class:`VerlError` is no request's fault, and raised.
    """

    def __init__(self, engine: RolloutEngine) -> None:
        self._engine = engine
        self._running: dict[Slot, Request] = {}  # in the engine
        self._halves: deque[list[Request]] = deque()  # whose turn comes when the engine is done with what it has
        self._new: list[Request] = []

    @property
    def busy(self) -> bool:
        return bool(self._running or self._halves or self._new)

    def submit(self, requests: Iterable[Request]) -> None:
        self._new += requests

    def step(self) -> tuple[list[Result], dict[Slot, str]]:
        """What the engine's step has finished, and what it fails with, each with the exception in words.

        Raises:
            Exception: the engine does not work any more, with any request.
        """
        given: list[Request] = []
        if not self._halves:
            given, self._new = self._new, []
        elif not self._running:
            given = self._halves.popleft()
        self._running |= {request.slot: request for request in given}
        try:
            self._engine.submit(given)
            results = self._engine.step()
        except VerlError:
            raise
        except Exception as error:
            return [], self._divide(error)
        self._forget(results)
        return results, {}

    def abort(self, slots: list[Slot] | None = None) -> list[Result]:
        """Give these (None: all) back as far as they are."""
        waiting = [*chain(*self._halves), *self._new]
        self._halves.clear()
        self._new.clear()
        self._running |= {request.slot: request for request in waiting}
        self._engine.submit(waiting)
        results = self._engine.abort(slots)
        self._forget(results)
        return results

    def _forget(self, ended: Iterable[Result]) -> None:
        for result in ended:
            self._running.pop(result.slot, None)

    def _divide(self, error: Exception) -> dict[Slot, str]:
        parts = {part.slot: part for part in self._engine.abort()}
        back = [_resumed(request, parts.get(slot)) for slot, request in self._running.items()]
        self._running.clear()
        if len(back) > 1:
            half = len(back) // 2
            self._halves.extendleft([back[half:], back[:half]])
            return {}
        generate(self._engine, [PROBE])
        frame = extract_tb(error.__traceback__)[-1]
        reason = f"{type(error).__name__}: {error} ({frame.filename}:{frame.lineno})"
        return {request.slot: reason for request in back}


def _resumed(request: Request, part: Result | None) -> Request:
    """The request, to go on where it was before the step that failed, which may not have looked at its token."""
    before = len(request.resume.response_ids) if request.resume else 0
    if part is None or len(part.response_ids) - 1 <= before:
        return request
    return replace(request, resume=Resume.of(part, len(part.response_ids) - 1))
