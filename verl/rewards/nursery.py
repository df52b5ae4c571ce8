"""The process that forks reward workers: started fresh, free of torch and threads, and the end of all it ever forked.

It is told over its control socket, in JSON: ``["spawn", number, idle]`` with the descriptor that the worker is to
serve, or ``["kill", number, null]``. A worker has a session of its own. When one ends, in whatever way, all that it
started ends with it: its process group, and what left the group and was handed on to this process (it is the
subreaper). When the run ends, killed or not, the control socket does or the parent's id changes; then everything here
ends.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import importlib
import json
import os
import resource
import select
import signal
import socket
import sys
import time
from pathlib import Path

LOOK_SECONDS = 0.5  # how often the parent is looked for
END_SECONDS = 5.0
MESSAGE_BYTES = 64  # of every message, so that none is read with the next
_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36


def main(descriptor: int, parent: int, modules: list[str], memory: int) -> None:
    """Serve the control socket until the ``parent`` process is gone. ``modules``: what workers need and take long to
    import; missing ones are left to them. ``memory``: bytes that each process here may have for itself."""
    os.dup2(2, 1)  # what a reward function prints must not get between a command's own output
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):  # those are for the run
        signal.signal(number, signal.SIG_IGN)
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)
    hard = resource.getrlimit(resource.RLIMIT_DATA)[1]
    resource.setrlimit(resource.RLIMIT_DATA, (memory if hard == resource.RLIM_INFINITY else min(memory, hard), hard))
    with contextlib.suppress(OSError):  # if the machine runs out of memory, these go before the run
        Path("/proc/self/oom_score_adj").write_text("1000")
    from verl.rewards import pool_worker

    for module in modules:
        with contextlib.suppress(ImportError):
            importlib.import_module(module)
    gc.freeze()  # what is there already is never looked at again, so that workers share its memory
    woken, wakes = socket.socketpair()
    for end in (woken, wakes):
        end.setblocking(False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(wakes.fileno(), warn_on_full_buffer=False)
    control = socket.socket(fileno=descriptor)
    workers: dict[int, int] = {}  # process by number
    while os.getppid() == parent:
        ready, _, _ = select.select([control, woken], [], [], LOOK_SECONDS)
        if woken in ready:
            woken.recv(4096)
        _bury(workers)
        if control in ready:
            try:
                message, descriptors, _, _ = socket.recv_fds(control, MESSAGE_BYTES, 1)
            except OSError:
                break
            if not message:
                break
            word, number, idle = json.loads(message)
            if word == "kill":
                _kill(workers.get(number))
                continue
            own_id, process = os.getpid(), os.fork()
            if process == 0:
                for own in (control, woken, wakes):
                    own.close()
                _become_worker(descriptors[0], pool_worker.serve, idle, own_id)
            os.close(descriptors[0])
            workers[number] = process
    patience = time.monotonic() + END_SECONDS
    while (left := _orphans() | set(workers.values())) and time.monotonic() < patience:
        for process in left:
            _kill(process)
        _bury(workers)
        time.sleep(0.01)


def _become_worker(descriptor, serve, idle, nursery) -> None:  # type: ignore[no-untyped-def]
    try:
        signal.set_wakeup_fd(-1)
        for number in (signal.SIGCHLD, signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, signal.SIG_DFL)
        os.setsid()
        _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() == nursery:
            serve(descriptor, idle)
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
    finally:
        os._exit(0)


def _bury(workers: dict[int, int]) -> None:
    """Reap what has ended, and end what it leaves."""
    found = False
    with contextlib.suppress(ChildProcessError):
        while ended := os.waitpid(-1, os.WNOHANG)[0]:
            found = True
            with contextlib.suppress(OSError):  # its id is not given away while there is a group of that number
                os.killpg(ended, signal.SIGKILL)
            for number in [number for number, process in workers.items() if process == ended]:
                del workers[number]
    for process in _orphans() - set(workers.values()) if found else ():
        with contextlib.suppress(OSError):
            os.kill(process, signal.SIGKILL)


def _orphans() -> set[int]:
    """All children of this process; where the system does not list them, none."""
    try:
        return set(map(int, Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()))
    except OSError:
        return set()


def _kill(process: int | None) -> None:
    if process is not None:
        for kill in (os.killpg, os.kill):  # a worker that is only just forked has no group yet
            with contextlib.suppress(OSError):
                kill(process, signal.SIGKILL)


def _prctl(option: int, value: int) -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(option, value, 0, 0, 0)
