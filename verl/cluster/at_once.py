"""Calls to different worker groups at the same time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from typing import TypeVar

T = TypeVar("T")


def at_once(calls: Sequence[tuple[object, Callable[[], T]]]) -> list[T]:
    """The results of all calls, in their order.

    Calls of one owner (a worker group) are made one after another, in order; those of different owners at the same
    time, each owner's in a thread of its own. With one owner everything happens in the calling thread.

    Raises:
        Exception: the first that one of them raises, at once: other owners' calls may still be under way, and end
            with their workers.
    """
    results: list[T | None] = [None] * len(calls)
    places: dict[int, list[int]] = {}
    for place, (owner, _) in enumerate(calls):
        places.setdefault(id(owner), []).append(place)

    def make(own: list[int]) -> None:
        for place in own:
            results[place] = calls[place][1]()

    if len(places) < 2:
        for own in places.values():
            make(own)
    else:
        threads = ThreadPoolExecutor(len(places), "at-once")
        try:
            done, _ = wait([threads.submit(make, own) for own in places.values()], return_when=FIRST_EXCEPTION)
            for future in done:
                future.result()
        finally:
            threads.shutdown(wait=False, cancel_futures=True)
    return results  # type: ignore[return-value]  # every place has its result
