"""A process of its own that ends what a local Ray leaves running when the run that started it was killed.

Most of Ray's processes die with the one that started them, but its two agents go on for a minute, trying to report the
death to a server that is gone. This process waits for the end of its standard input, which comes when the run ends, in
whatever way, and then kills every process that still writes into the folder of the run's Ray session, whose name ends
with the run's process id. What such a run kept in main memory goes as well. This file is run by path and needs nothing
but the standard library. A run that has cleaned up by itself says so with one byte before it closes the input; one look
is then enough.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path

SECONDS = 15.0  # a process that was being started when the run died shows up late
QUIET_SECONDS = 1.0


def main() -> None:
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):  # those are for the run
        signal.signal(number, signal.SIG_IGN)
    run = os.getppid()
    session = re.compile(rf"/session_[\d_-]+_{run}/")
    cleaned_up = bool(sys.stdin.buffer.read())
    for folder in [] if cleaned_up else Path("/dev/shm").glob(f"verl-restart-{run}-*"):
        shutil.rmtree(folder, ignore_errors=True)
    end = time.monotonic() + SECONDS
    quiet_since = time.monotonic()
    while True:
        for process in writers(session):
            if process not in (os.getpid(), run):
                quiet_since = time.monotonic()
                kill(process)
        if cleaned_up or time.monotonic() > min(end, quiet_since + QUIET_SECONDS):
            return
        time.sleep(0.1)


def writers(folder: re.Pattern[str]) -> Iterator[int]:
    """Processes that have a file in such a folder open for writing; readers, like a person's ``tail -f``, are not."""
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and _writes(entry, folder):
            yield int(entry.name)


def _writes(process: Path, folder: re.Pattern[str]) -> bool:
    try:
        links = list((process / "fd").iterdir())
    except OSError:  # it ended, or is another user's
        return False
    for link in links:
        with contextlib.suppress(OSError, IndexError, ValueError):  # closed meanwhile
            if folder.search(os.readlink(link)):
                flags = (process / "fdinfo" / link.name).read_text().split("flags:")[1].split()[0]
                if int(flags, 8) & os.O_ACCMODE != os.O_RDONLY:
                    return True
    return False


def kill(process: int) -> None:
    with contextlib.suppress(OSError):  # it ended by itself
        os.kill(process, signal.SIGKILL)


if __name__ == "__main__":
    main()
