"""Calling a reward function, built in or the user's, and reading what it returns. Free of torch: workers import it."""

from __future__ import annotations

import asyncio
import inspect
import resource
import time
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from verl.rewards.results import Score, check_batch, check_result
from verl.user_code import describe

ASYNC_LIMIT = 64  # async calls in flight at once
NOTICEABLE = 0.001  # seconds; noting that a call took less would take as long as a quick call


@dataclass(frozen=True)
class Call:
    """One call by keyword; ``count``: responses that a call for a batch is about; None: it is about one."""

    arguments: dict[str, Any]
    count: int | None = None


@dataclass(frozen=True)
class Callee:
    """A function at hand.

    Attributes:
        name: what messages call it.
        file: whose lines are named where it fails.
    """

    function: Callable[..., Any]
    name: str
    file: Path | None = None

    @property
    def is_async(self) -> bool:
        # An object may be called like a function.
        return any(map(inspect.iscoroutinefunction, (self.function, type(self.function).__call__)))

    def failure(self, error: BaseException) -> Score:
        reason, most = describe(error, self.file), resource.getrlimit(resource.RLIMIT_DATA)[0]
        if isinstance(error, MemoryError) and most != resource.RLIM_INFINITY:
            reason += f"; it may take {most / 2**30:.3g} GiB (reward.worker_memory_gb)"
        return Score(None, "failed", reason=reason)


Tell = Callable[[int, list[Score]], None]


def run(callee: Callee, calls: Sequence[Call], tell: Tell, limit: float | None = None) -> None:
    """Make the calls; ``tell`` gets the number of each and its scores (one, or ``count``) as soon as it is done.

    Async functions have ``ASYNC_LIMIT`` calls in flight, the others one.

    Args:
        limit: seconds for each call of an async function, from its start.

    Raises:
        RewardError: what was returned for a batch is not one value a response.
    """
    if callee.is_async and all(call.count is None for call in calls):
        _run_coroutine(_gather(callee, calls, tell, limit))
        return
    for number, call in enumerate(calls):
        start = time.perf_counter()
        try:
            result = _finished(callee.function(**call.arguments))
        except (Exception, SystemExit) as error:
            scores = [callee.failure(error)] * (call.count or 1)
        else:
            one = call.count is None
            scores = [check_result(result)] if one else check_batch(result, call.count or 0, callee.name)
        tell(number, _timed(scores, start))


def answers(callee: Callee, calls: Sequence[Call]) -> list[Score]:
    """Make the calls here; the scores of all, in order. Raises as :func:`run`."""
    scores: list[list[Score]] = [[] for _ in calls]
    run(callee, calls, scores.__setitem__)
    return [score for found in scores for score in found]


async def _gather(callee: Callee, calls: Sequence[Call], tell: Tell, limit: float | None) -> None:
    slots = asyncio.Semaphore(ASYNC_LIMIT)

    async def ask(number: int, call: Call) -> None:
        async with slots:
            own, start = asyncio.timeout(limit), time.perf_counter()
            try:
                async with own:
                    score = check_result(await callee.function(**call.arguments))
            except (Exception, SystemExit) as error:
                score = too_slow(limit) if own.expired() and limit is not None else callee.failure(error)
            tell(number, _timed([score], start))

    await asyncio.gather(*(ask(number, call) for number, call in enumerate(calls)))


def _timed(scores: list[Score], start: float) -> list[Score]:
    seconds = time.perf_counter() - start
    if seconds < NOTICEABLE:
        return scores
    return [replace(score, seconds=seconds / len(scores)) for score in scores]


def too_slow(limit: float) -> Score:
    return Score(None, "failed", reason=f"no answer within reward.timeout={limit:g} s")


def _finished(result: Any) -> Any:
    """The result, awaited where it must be: an async function, or one that returns what another has to await."""

    if isinstance(result, dict) or not inspect.isawaitable(result):
        return result

    async def awaited() -> Any:
        return await result

    return _run_coroutine(awaited())


def _run_coroutine(coroutine: Coroutine[Any, Any, Any]) -> Any:
    """Run to the end, also where this thread already runs an event loop (a notebook, an async worker)."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return asyncio.run(coroutine)
    with ThreadPoolExecutor(1, "reward-async") as thread:
        return thread.submit(asyncio.run, coroutine).result()
