"""Calling a reward function, built in or the user's, and what is made of what it returns: a value is a score or it is
not, nothing is guessed. Free of torch: workers import it."""

from __future__ import annotations

import asyncio
import inspect
import math
import resource
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from numbers import Real
from pathlib import Path
from typing import Any, Literal

from verl.errors import RewardError
from verl.user_code import describe

MAX_SCORE = 3.4028234663852886e38  # scores travel in float32

MEANINGFUL = ("acc", "pred", "answer")  # keys of a result that validation and majorities read

Outcome = Literal["scored", "none", "invalid", "failed", "empty"]


@dataclass(frozen=True)
class Score:
    """Outcome for one response.

    Attributes:
        value: the score, None unless ``outcome`` is ``scored``.
        outcome: ``scored``; ``none`` (the function said None), ``invalid`` (it returned something that is no score),
            ``failed`` (it raised), ``empty`` (the response has no token to bear a score; the function was not asked).
        extras: the other keys of a dict result.
        reason: why it is invalid or failed.
        seconds: that the call took, an equal share of it where it was for a batch.
    """

    value: float | None
    outcome: Outcome
    extras: dict[str, Any] = field(default_factory=dict)
    reason: str | None = None
    seconds: float = field(default=0.0, compare=False)


def check_result(result: Any) -> Score:
    """Read what a reward function returned.

    Numbers are Python's, numpy's and zero-dimensional tensors; a bool counts as 0 or 1. None is unscored. NaN, an
    infinity, text, a list or a dict without ``"score"`` is invalid: never a zero, never the first element of it.
    """
    extras: dict[str, Any] = {}
    if isinstance(result, dict):
        extras = {str(key): _plain(value) for key, value in result.items() if key != "score"}
        if "score" not in result:
            keys = ", ".join(map(str, result)) or "none"
            return Score(None, "invalid", extras, f'a dict without "score" (keys: {keys})')
        result = result["score"]
    if result is None:
        return Score(None, "none", extras)
    value = _number(_plain(result))
    if value is None:
        return Score(None, "invalid", extras, f"{type(result).__name__} {_short(result)}, not a number")
    if not math.isfinite(value) or abs(value) > MAX_SCORE:
        return Score(None, "invalid", extras, f"{_short(result)}, not a finite float32")
    return Score(value, "scored", extras)


def check_batch(result: Any, count: int, name: str) -> list[Score]:
    """Read what a function returned for ``count`` responses at once: a list, one entry a response.

    A tuple, a one-dimensional array or tensor is a list too, and each entry is read as by :func:`check_result`.
    OpenRLHF's dict has the list under ``"rewards"``; its ``"scores"`` and the entries of its ``"extra_logs"`` (lists as
    long, or one value for all) become extras. Raises RewardError: anything else, or a list of another length. Nothing
    is broadcast, cut or filled up.

    Args:
        name: what the function is called in messages.
    """
    extras: dict[str, list[Any]] = {}
    rewards = result
    if isinstance(result, Mapping) and "rewards" in result:
        rewards = result["rewards"]
        logs = result.get("extra_logs") or {}
        if not isinstance(logs, Mapping):
            raise RewardError(
                f'"extra_logs" is no dict: {name}', f"{type(logs).__name__} {_short(logs)}", "return a dict"
            )
        for key, value in {"scores": result.get("scores"), **logs}.items():
            single = isinstance(_plain(value), str | Real)
            if value is not None:
                extras[str(key)] = [value] * count if single else _aligned(value, count, f"{key} of {name}")
    scores = [check_result(entry) for entry in _aligned(rewards, count, name)]
    for i, score in enumerate(scores):
        score.extras.update({key: _plain(values[i]) for key, values in extras.items()})
    return scores


def _aligned(values: Any, count: int, name: str) -> list[Any]:
    if getattr(values, "ndim", None) == 1 and hasattr(values, "tolist"):
        values = values.tolist()
    fix = "return one number (or None: cannot be scored) for each response, in their order"
    if not isinstance(values, list | tuple):
        raise RewardError(
            f"The reward function returned no list for {count} responses: {name}",
            f"{type(values).__name__} {_short(values)}",
            fix,
        )
    if len(values) != count:
        raise RewardError(f"The reward function returned {len(values)} values for {count} responses: {name}", None, fix)
    return list(values)


def _plain(value: Any) -> Any:
    """Numpy scalars and zero-dimensional arrays and tensors as Python numbers; anything else as it is."""
    return value.item() if getattr(value, "ndim", None) == 0 and hasattr(value, "item") else value


def _number(value: Any) -> float | None:
    if type(value) is float:
        return value
    if not isinstance(value, Real):
        return None
    try:
        return float(value)
    except OverflowError:
        return math.inf


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


ASYNC_LIMIT = 64  # async calls in flight at once
NOTICEABLE = 0.001  # seconds; noting that a call took less would take as long as a quick call


@dataclass(frozen=True)
class Call:
    """One call by keyword; ``count``: responses that a call for a batch is about; None: it is about one."""

    arguments: dict[str, Any]
    count: int | None = None


@dataclass(frozen=True)
class Callee:
    """A function at hand."""

    function: Callable[..., Any]
    name: str  # what messages call it
    file: Path | None = None  # whose lines are named where it fails

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

    Async functions have ``ASYNC_LIMIT`` calls in flight, the others one. ``limit``: seconds for each call of an async
    function, from its start. Raises RewardError: what was returned for a batch is not one value a response.
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
