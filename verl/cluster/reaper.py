"""A process of its own that ends what a local Ray leaves running when the run that started it was killed.

Most of Ray's processes die with the one that started them, but its two agents go on for a minute, trying to report the
death to a server that is gone. This process waits for the end of its standard input, which comes when the run ends, in
whatever way, and then kills every process that still writes into the folder of that Ray session. It is run by path and
needs nothing but the standard library. A run that has cleaned up by itself says so with one byte before it closes the
input; one look is then enough.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path

SECONDS = 15.0  # a process that was being started when the run died shows up late
QUIET_SECONDS = 1.0


def main(session: str) -> None:
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):  # those are for the run
        signal.signal(number, signal.SIG_IGN)
    run = os.getppid()
    cleaned_up = bool(sys.stdin.buffer.read())
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


def writers(folder: str) -> Iterator[int]:
    """Processes that have a file in the folder open for writing; readers, such as a person's ``tail -f``, are not."""
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and any(_written_files(entry, folder)):
            yield int(entry.name)


def _written_files(process: Path, folder: str) -> Iterator[str]:
    try:
        links = list((process / "fd").iterdir())
    except OSError:  # it ended, or is another user's
        return
    for link in links:
        try:
            target = os.readlink(link)
            if target.startswith(folder + "/"):
                flags = (process / "fdinfo" / link.name).read_text().split("flags:")[1].split()[0]
                if int(flags, 8) & os.O_ACCMODE != os.O_RDONLY:
                    yield target
        except (OSError, IndexError, ValueError):
            continue


def kill(process: int) -> None:
    with contextlib.suppress(OSError):  # it ended by itself
        os.kill(process, signal.SIGKILL)


if __name__ == "__main__":
    main(sys.argv[1])
