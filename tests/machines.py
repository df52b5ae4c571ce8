"""Two machines of a Ray cluster, on this one.

Each has a network, an address and shared memory of its own, the second a /tmp as well, where the system lets us make
such (as root); else they are two addresses of the loopback interface. A machine's end is that of all its processes.
"""

from __future__ import annotations

import os
import shlex
import shutil
import signal
import subprocess
import sys
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from verl_process import MARK, ROOT, living

TOKEN = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": "two-machines" * 4}
PORT = 6379
STORE_BYTES = 2**27
OWN_MEMORY = "mount -t tmpfs tmpfs /dev/shm"
OWN_FILES = f"{OWN_MEMORY} && mount -t tmpfs tmpfs /tmp"


class Machine:
    """One of them; commands run there with ``enter`` before their own words."""

    def __init__(self, address: str, enter: tuple[str, ...], mark: str, first: str | None = None) -> None:
        self.address, self.enter = address, enter
        self._mark, self._first = mark, first

    def start(self, cpus: int, **resources: float) -> None:
        """Its Ray: the cluster's head on the first machine."""
        where = ("--head", f"--port={PORT}", "--include-dashboard=false") if self._first is None else ()
        named = ",".join(f'"{name}": {amount}' for name, amount in resources.items())
        command = [*self.enter, "env", "--chdir=/", sys.executable, "-m", "ray.scripts.scripts", "start", *where]
        command += [f"--address={self._first}:{PORT}"] if self._first is not None else []
        command += [f"--node-ip-address={self.address}", f"--num-cpus={cpus}", f"--resources={{{named}}}"]
        command += [f"--object-store-memory={STORE_BYTES}", "--disable-usage-stats"]
        environment = {**os.environ, **TOKEN, "PYTHONPATH": str(ROOT), MARK: self._mark}
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)
        assert done.returncode == 0, done.stdout + done.stderr

    def die(self) -> None:
        for pid in living(-1, self._mark):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


@contextmanager
def two_machines(shared: Path | None = None) -> Iterator[tuple[Machine, Machine]]:
    """The first is where runs are started, and has this system's files; both still without Ray.

    Args:
        shared: a folder that the second has as well, where it has its own files.
    """
    marks = [uuid.uuid4().hex for _ in range(2)]
    with _rooms(shared) as rooms:
        addresses = ("10.99.0.1", "10.99.0.2") if rooms else ("127.0.0.2", "127.0.0.3")
        enter = rooms or ((), ())
        first = Machine(addresses[0], enter[0], marks[0])
        second = Machine(addresses[1], enter[1], marks[1], first.address)
        try:
            yield first, second
        finally:
            second.die()
            first.die()


def _own_files_but(folders: list[Path]) -> str:
    """A command that gives a /tmp of its own, where these are still what they are outside."""
    words = ["mount --bind /tmp /mnt", OWN_FILES]
    for folder in sorted(folder.resolve() for folder in folders):
        if folder.is_relative_to("/tmp"):
            inside, outside = shlex.quote(str(folder)), shlex.quote(f"/mnt/{folder.relative_to('/tmp')}")
            words.append(f"mkdir -p {inside} && mount --bind {outside} {inside}")
    return " && ".join(words)


@contextmanager
def _rooms(shared: Path | None) -> Iterator[tuple[tuple[str, ...], ...]]:
    """Words that have a command run in the first, and in the second, of two namespaces; none: there are no such."""
    if not all(map(shutil.which, ("unshare", "nsenter", "ip"))) or os.geteuid() != 0:
        yield ()
        return
    holders: list[subprocess.Popen[bytes]] = []
    try:
        for mounts in (OWN_MEMORY, _own_files_but([ROOT, Path(sys.prefix), *([shared] if shared else [])])):
            script = f"{mounts} && ip link set lo up && echo there && exec sleep infinity"
            holders.append(
                subprocess.Popen(["unshare", "--net", "--mount", "sh", "-c", script], stdout=subprocess.PIPE)
            )
        if [holder.stdout.readline() for holder in holders if holder.stdout] != [b"there\n"] * 2:
            yield ()
            return
        first, second = (holder.pid for holder in holders)
        ends = ("cable", "netns", str(first), "type", "veth", "peer", "name", "cable", "netns", str(second))
        subprocess.run(["ip", "link", "add", *ends], check=True)
        enter = tuple(("nsenter", f"--target={pid}", "--net", "--mount", f"--wdns={ROOT}") for pid in (first, second))
        for words, address in zip(enter, ("10.99.0.1", "10.99.0.2"), strict=True):
            subprocess.run([*words, "ip", "address", "add", f"{address}/24", "dev", "cable"], check=True)
            subprocess.run([*words, "ip", "link", "set", "cable", "up"], check=True)
        yield enter
    finally:
        for holder in holders:
            holder.kill()
            holder.communicate()
