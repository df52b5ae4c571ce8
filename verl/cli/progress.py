"""How far a command is, on standard error: a bar on a terminal, else a line now and then."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

SECONDS_BETWEEN_LINES = 30.0


@contextmanager
def progress(total: int, what: str, plain: bool = False) -> Iterator[Callable[[int], None]]:
    """Gives a function that is told how many of ``total`` are done. No terminal, or ``plain``: lines, and none at all
    for what takes less than half a minute."""
    if plain or not sys.stderr.isatty():
        yield _lines(total, what)
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(what, total=total)
        yield lambda done: bar.update(task, completed=done)


def _lines(total: int, what: str) -> Callable[[int], None]:
    from verl.tracking.console import duration

    start = last = time.monotonic()

    def tell(done: int) -> None:
        nonlocal last
        now = time.monotonic()
        if now - last >= SECONDS_BETWEEN_LINES and done < total:
            last = now
            left = (now - start) / done * (total - done)
            print(f"{what}: {done} of {total}, {duration(left)} left", file=sys.stderr, flush=True)

    return tell
