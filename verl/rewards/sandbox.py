"""Model-written Python, run where it can do no harm and cannot see what it is compared with (docs/rewards.md).

:class:`Sandbox` is one program in a process tree of its own (:mod:`verl.rewards.sandbox_child`), alive for the tests of
that program. It may be used from any thread of a process that has others: nothing is forked here without exec.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from verl.config.schema_reward import SandboxConfig
from verl.errors import RewardError
from verl.rewards.sandbox_isolation import FIRST_UID, UIDS, framed, unframed

MIB = 2**20
GRACE = 10.0  # seconds that the sandbox itself may take beyond the program's; a loaded machine is no lost sandbox
_OPTIONS = ("-P", "-s", "-S", "-X", "utf8", "-c")
_START = "import sys; sys.path.insert(0, {folder!r}); import sandbox_child; del sys.path[0]; sandbox_child.main()"

Kind = Literal["stdin", "call", "values"]


class SandboxError(RewardError):
    """The sandbox itself cannot start or was lost: no fault of the program, whose score is unknown."""


@dataclass(frozen=True)
class Run:
    """What a program did in one test."""

    ended: str  # ``exit N``, ``signal N``, ``time`` (over the limit), ``output`` (more than the limit)
    stdout: bytes
    stderr: bytes  # the end of it
    values: bytes  # sent out of calls and expressions, as the program's interpreter wrote them: believe nothing

    @property
    def trouble(self) -> str | None:
        """Why this was no regular end; None if it was one."""
        if self.ended == "exit 0":
            return None
        if self.ended in ("time", "output"):
            return {"time": "time-out", "output": "too much output"}[self.ended]
        lines = self.stderr.decode("utf-8", "replace").strip().splitlines()
        last = lines[-1].strip()[:200] if lines else ""
        if last.startswith("MemoryError"):
            return "memory"
        if self.ended.startswith("signal"):
            return "time-out" if self.ended == "signal 24" else f"killed by {self.ended}"
        return f"error: {last}" if last else f"ended with {self.ended}"


class Sandbox:
    """One program, ready to be tested; a context manager. ``program``: Python source. ``calls``: whether tests of kind
    ``call`` will come. Raises SandboxError: it cannot start, or the platform lacks something and ``allow_weaker`` is
    off."""

    def __init__(self, program: str, config: SandboxConfig, calls: bool = False) -> None:
        if sys.platform != "linux":
            raise SandboxError("Only Linux can isolate model-written code.", sys.platform, "score elsewhere")
        self._time_limit = config.time_limit
        self._folder = ""
        ours, theirs = socket.socketpair()
        self._socket = ours
        self.missing: list[str] = []
        python = getattr(sys, "_base_executable", None) or sys.executable
        try:
            self._folder = tempfile.mkdtemp(prefix="verl-sandbox-") if config.allow_weaker else "/"
            with theirs, open(os.devnull, "wb") as nowhere:
                self._process = subprocess.Popen(
                    # Hashes are the same in every run, so that a program that prints a set gets the same score again.
                    [python, *_OPTIONS, _START.format(folder=str(Path(__file__).parent))],
                    stdin=theirs.fileno(),
                    stdout=nowhere,
                    stderr=subprocess.PIPE,
                    cwd="/",
                    env={"PYTHONHASHSEED": "0"},
                    start_new_session=True,
                )
        except OSError as error:
            self.close()
            raise SandboxError("The sandbox cannot start.", error) from error
        try:
            limits = (
                round(1000 * config.time_limit),
                config.memory_limit * MIB,
                config.file_limit * MIB,
                config.output_limit * MIB,
                config.processes,
            )
            weaker = b"yes" if config.allow_weaker else b""
            text = program.encode("utf-8", "surrogatepass")
            ours.settimeout(GRACE)
            self._send(*(str(n).encode() for n in limits), self._folder.encode(), weaker, b"j" if calls else b"", text)
            can_end_all, *missing = (reason.decode() for reason in self._receive())
        except BaseException:
            self.close()
            raise
        self.missing = missing
        if missing and not (config.allow_weaker and can_end_all):
            self.close()
            fix = "run where that is allowed (docs/rewards.md, Code)"
            if can_end_all:
                fix += ", or set reward.sandbox.allow_weaker=true to run programs with what there is"
            elif config.allow_weaker:
                fix += "; without a PID namespace and without root's rights, nothing ends every process of a program"
            raise SandboxError("This machine cannot isolate model-written code.", f"missing: {', '.join(missing)}", fix)

    def run(self, kind: Kind, payload: str = "", stdin: str = "") -> Run:
        """One test (the kinds: :func:`verl.rewards.sandbox_child._execute`), at most ``time_limit`` seconds long.
        Raises SandboxError: the sandbox was lost."""
        self._socket.settimeout(self._time_limit + GRACE)
        self._send(kind.encode(), *(text.encode("utf-8", "surrogatepass") for text in (payload, stdin)))
        ended, stdout, stderr, values = self._receive()
        return Run(ended.decode(), stdout, stderr, values)

    def close(self) -> None:
        """End everything that it started; returns when nothing of it is left."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()
        if hasattr(self, "_process"):
            try:
                self._process.wait(GRACE)
            except subprocess.TimeoutExpired:
                self._process.kill()  # the rest of its namespace ends with it
                self._process.wait()
            assert self._process.stderr is not None
            self._process.stderr.close()
            if any(reason.startswith("PID namespace") for reason in self.missing) and os.geteuid() == 0:
                end_all_of(FIRST_UID + self._process.pid % UIDS)
        if self._folder not in ("", "/"):
            shutil.rmtree(self._folder, ignore_errors=True)

    def __enter__(self) -> Sandbox:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _send(self, *fields: bytes) -> None:
        try:
            self._socket.sendall(framed(*fields))
        except OSError as error:
            raise self._lost(error) from error

    def _receive(self) -> list[bytes]:
        try:
            return unframed(self._socket.recv)
        except (OSError, EOFError) as error:
            raise self._lost(error) from error

    def _lost(self, error: Exception) -> SandboxError:
        self._process.kill()
        self._process.wait()
        assert self._process.stderr is not None
        said = self._process.stderr.read(4000).decode("utf-8", "replace").strip().splitlines()
        return SandboxError("The sandbox was lost.", said[-1] if said else error)


def end_all_of(uid: int) -> None:
    """End every process of a user that only a sandbox had, should its keeper have been killed."""
    end = f"import os; os.setresuid({uid}, {uid}, {uid}); os.kill(-1, 9)"
    subprocess.run([sys.executable, "-S", "-c", end], stderr=subprocess.DEVNULL, timeout=GRACE, check=False)


# --- values that a program sent out, read as hostile data: nothing here costs much more than their length -------------

MOST_HASHED = 5000  # items with hashes that a program can choose; equal hashes make sets and dicts quadratic


@dataclass(frozen=True, eq=False)
class Other:
    """A value that is no plain data; equal to nothing."""

    kind: str  # the name of its type
    true: bool  # what the program's interpreter said of its truth

    def __bool__(self) -> bool:
        return self.true


@dataclass(frozen=True)
class Raised:
    """In place of a value: why there is none."""

    reason: str


def decode(data: bytes) -> Any:
    """What ``sandbox_child.encode`` made of a value. Raises ValueError: it did not make this, or it is more than will
    be compared."""
    try:
        return _plain(json.loads(data))
    except (RecursionError, TypeError, AttributeError, KeyError) as error:
        raise ValueError("not a value") from error


def hashable(items: Collection[Any]) -> Collection[Any]:
    """The items, to be put into a set or dict. Raises ValueError if that might take long."""
    if len(items) > MOST_HASHED and not all(map(_hash_is_harmless, items)):
        raise ValueError("too many items whose hashes may be equal")
    return items


def _hash_is_harmless(item: Any) -> bool:
    # Hashes of text differ from process to process; small integers and floats have too few of one hash.
    if isinstance(item, tuple):
        return all(map(_hash_is_harmless, item))
    return item is None or isinstance(item, str | float | bytes) or (isinstance(item, int) and abs(item) < 2**60)


def _plain(value: Any) -> Any:
    if isinstance(value, list):
        return [_plain(item) for item in value]
    if not isinstance(value, dict):
        return value
    if "error" in value:
        return Raised(
            "wrong answer" if value["error"].startswith("AssertionError") else f"error: {value['error'][:200]}"
        )
    if "other" in value:
        return Other(str(value["other"]), value["true"] is True)
    ((tag, content),) = value.items()
    return _READ[tag](content)


_READ: dict[str, Callable[[Any], Any]] = {
    "int": lambda text: int(text, 16),
    "bytes": bytes.fromhex,
    "complex": lambda parts: complex(*map(float, parts)),
    "tuple": lambda items: tuple(map(_plain, items)),
    "set": lambda items: set(hashable([_plain(item) for item in items])),
    "dict": lambda pairs: dict(
        zip(hashable([_plain(key) for key, _ in pairs]), [_plain(item) for _, item in pairs], strict=True)
    ),
}
