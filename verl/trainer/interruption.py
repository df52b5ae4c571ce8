"""Ctrl-C and SIGTERM that wait until a step is whole (``trainer.save_on_interrupt``)."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

TOLD = b"\nfinishing this step, to save a checkpoint; once more: stop at once, without\n"


@contextmanager
def held(wanted: bool) -> Iterator[Callable[[], bool]]:
    """The first Ctrl-C or SIGTERM within the block acts behind it; a second one at once, as if it were the first.
    Yields whether one is waiting, for whoever asks at the end of the block."""
    arrived: list[int] = []
    if not wanted or threading.current_thread() is not threading.main_thread():  # no other one can set handlers
        yield lambda: False
        return
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    # Who started the process may have it ignore one (a shell does so with Ctrl-C of what runs in the background).
    before = {number: handler for number, handler in handlers.items() if handler not in (signal.SIG_IGN, None)}

    def restore() -> None:
        for number, handler in before.items():
            signal.signal(number, handler)

    def wait(number: int, frame: FrameType | None) -> None:
        arrived.append(number)
        restore()
        os.write(2, TOLD)  # a print may be under way already

    for number in before:
        signal.signal(number, wait)
    try:
        yield lambda: bool(arrived)
    finally:
        restore()
        if arrived:
            signal.raise_signal(arrived[0])
