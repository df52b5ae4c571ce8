"""The far side of :mod:`verl.rewards.sandbox`: isolates itself, then runs one program, in a new process for each test.

Started alone in an interpreter of its own, with the standard library only, a socket as standard input and nothing else
of its parent's. Three kinds of process live here:

* the **keeper** (this process) makes the namespaces and stays outside of the PID namespace: the program cannot name it;
* the **init** of the PID namespace ends, after each test, whatever the program left running, and takes all with it when
  it ends itself;
* a **runner** is forked for each test, gives up what it may not have, and executes the program.

No expected output is ever here: the parent compares.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import resource
import select
import signal
import struct
import sys
import time
from _json import encode_basestring_ascii
from collections.abc import Callable
from types import CodeType, ModuleType
from typing import Any, NoReturn

if __package__:
    from verl.rewards.sandbox_isolation import Isolation, framed, prctl, syscall_filter, unframed
else:  # alone in its interpreter, with this folder on the path
    from sandbox_isolation import Isolation, framed, prctl, syscall_filter, unframed  # type: ignore[no-redef]

CONTROL = 0  # the parent's socket
VALUES = 3  # of a runner: where the values of calls and expressions go
MAX_DEPTH = 200  # of a value
STDERR_KEPT = 2000  # bytes, the last ones
PR_SET_PDEATHSIG, PR_SET_SECCOMP = 1, 22


def send(*fields: bytes) -> None:
    data = memoryview(framed(*fields))
    while data:
        data = data[os.write(CONTROL, data) :]


def receive() -> list[bytes]:
    """The fields of the next message. Raises EOFError when the parent has hung up."""
    return unframed(lambda most: os.read(CONTROL, most))


class Keeper:
    """Runs tests one after the other and leaves nothing of them behind."""

    def __init__(self, limits: dict[str, int], isolation: Isolation) -> None:
        self.limits = limits
        self.isolation = isolation
        self.filter = None if isolation.lacks("system call filter") else ctypes.create_string_buffer(syscall_filter())
        self._init = 0
        if isolation.pid_namespace:
            (asked, self._ask), (self._swept, tell) = os.pipe(), os.pipe()
            self._init = os.fork()
            if not self._init:
                _init_of_namespace(asked, tell)
            os.close(asked)
            os.close(tell)

    def run(self, kind: str, program: bytes, payload: bytes, stdin: bytes) -> list[bytes]:
        """One test in a process of its own. Returns how it ended (``exit N``, ``signal N``, ``time``, ``output``),
        stdout, the end of stderr, the values."""
        given = os.memfd_create("stdin")
        with open(os.dup(given), "wb") as file:
            file.write(stdin)
        pipes = [os.pipe() for _ in range(3)]  # stdout, stderr, values
        os.write(self.isolation.oom, b"1000")  # if memory runs out, the program goes first
        runner = os.fork()
        if not runner:
            _become_runner(self, given, [write for _, write in pipes], kind, program, payload)
        os.write(self.isolation.oom, b"0")
        os.close(given)
        for _, write in pipes:
            os.close(write)
        try:
            ended, texts = self._watch(runner, [read for read, _ in pipes])
        finally:
            for read, _ in pipes:
                os.close(read)
        return [ended.encode(), *texts]

    def _watch(self, runner: int, pipes: list[int]) -> tuple[str, list[bytes]]:
        most = self.limits["output"]
        texts = {pipe: bytearray() for pipe in pipes}
        handle = os.pidfd_open(runner)
        poll = select.poll()
        for descriptor in (CONTROL, handle, *pipes):
            poll.register(descriptor, select.POLLIN)
        deadline = time.monotonic() + self.limits["time_ms"] / 1000
        ended = ""
        while not ended:
            for descriptor, _ in poll.poll(max(0, int((deadline - time.monotonic()) * 1000) + 1)):
                if descriptor == CONTROL:
                    raise EOFError  # the parent says nothing while a test runs: it has hung up
                if descriptor == handle:
                    ended = "exit"
                elif not _take(descriptor, texts[descriptor], pipes[1] == descriptor):
                    poll.unregister(descriptor)
                if len(texts.get(descriptor, b"")) > most:
                    ended = "output"
                    break
            if not ended and time.monotonic() >= deadline:
                ended = "time"
        os.close(handle)
        os.kill(runner, signal.SIGKILL)
        _, status = os.waitpid(runner, 0)
        self.sweep()
        for pipe in pipes:  # nobody is left who could write
            while len(texts[pipe]) <= most and _take(pipe, texts[pipe], pipe == pipes[1]):
                pass
        code = os.waitstatus_to_exitcode(status)
        if ended == "exit":
            ended = "output" if any(len(text) > most for text in texts.values()) else f"exit {code}"
            ended = f"signal {-code}" if code < 0 and ended != "output" else ended
        return ended, [bytes(texts[pipe]) for pipe in pipes]

    def sweep(self) -> None:
        """End all that the program left running."""
        if self._init:
            os.write(self._ask, b".")
            os.read(self._swept, 1)
        else:
            _kill_all_others()  # of this user, which is the program's alone

    def end(self) -> None:
        if self._init:
            os.kill(self._init, signal.SIGKILL)
        else:
            _kill_all_others()
        _reap()  # the init ends when the whole namespace has


def _kill_all_others() -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(-1, signal.SIGKILL)


def _reap() -> None:
    with contextlib.suppress(ChildProcessError):
        while True:
            os.waitpid(-1, 0)


def _take(pipe: int, text: bytearray, only_the_end: bool) -> bool:
    """Read what is there, at most 64 KiB; False at the end."""
    part = os.read(pipe, 65536)
    text += part
    if only_the_end:
        del text[:-STDERR_KEPT]
    return bool(part)


def _init_of_namespace(asked: int, tell: int) -> NoReturn:
    prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # a signal without a handler cannot reach it from inside
    os.setsid()
    os.dup2(asked, 0)
    os.dup2(tell, 1)
    os.closerange(2, 1024)
    while os.read(0, 1):
        _kill_all_others()
        _reap()
        os.write(1, b".")
    os._exit(0)


# --- the runner -----------------------------------------------------------------------------------------------------


def _become_runner(
    keeper: Keeper, stdin: int, outputs: list[int], kind: str, program: bytes, payload: bytes
) -> NoReturn:
    code = 70
    try:
        for target, descriptor in enumerate([stdin, *outputs]):
            os.dup2(descriptor, target + 100)
        for target in range(4):
            os.dup2(target + 100, target)
        os.closerange(4, 1024)
        os.lseek(0, 0, os.SEEK_SET)
        os.environ.clear()
        os.setsid()  # the keeper is in the old process group
        _restrict(keeper)
        sys.argv = ["solution.py"]
        sys.stdin, sys.stdout, sys.stderr = (
            open(number, mode, encoding="utf-8", errors="surrogateescape", closefd=False)  # noqa: SIM115
            for number, mode in enumerate("rww")
        )
        code = _execute(kind, program.decode("utf-8", "surrogatepass"), payload.decode("utf-8", "surrogatepass"))
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else end.code is not None
    except BaseException:
        code = 1
        sys.__excepthook__(*sys.exc_info())  # type: ignore[misc]
    finally:
        with contextlib.suppress(BaseException):
            sys.stderr.flush()
        os._exit(int(code) & 255)


def _restrict(keeper: Keeper) -> None:
    limits = keeper.limits
    seconds = -(-limits["time_ms"] // 1000)
    for what, limit in (
        (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_FSIZE, limits["file"]),
        (resource.RLIMIT_NOFILE, 64),
        (resource.RLIMIT_CPU, seconds + 1),
        # The keeper and the init count too.
        (resource.RLIMIT_NPROC, limits["processes"] + 2),
        (resource.RLIMIT_AS, limits["memory"]),
    ):
        resource.setrlimit(what, (limit, limit))
    if keeper.filter is not None:
        program = struct.pack("HxxxxxxP", len(keeper.filter) // 8, ctypes.addressof(keeper.filter))
        prctl(PR_SET_SECCOMP, 2, program)


def _execute(kind: str, program: str, payload: str) -> int:
    """Run the program, and after it what the test wants of it.

    Args:
        kind: ``stdin``: the program alone; ``call``: ``payload`` is the function's name, a line break, and its
            arguments as a JSON list; ``values``: Python, which calls ``__send__`` with what is to be compared: a
            function for each of the values.
    """
    name = "__main__" if kind == "stdin" else "solution"
    module = ModuleType(name)
    sys.modules[name] = module
    compiled = compile(program, "solution.py", "exec")
    if kind != "stdin":
        _prelude(compiled, module.__dict__)
    exec(compiled, module.__dict__)
    if kind == "stdin":
        _end_as_python_does()
        return 0
    space = module.__dict__
    if kind == "call":
        import json

        name, _, arguments = payload.partition("\n")
        if name not in space and "Solution" not in space:
            raise NameError(f"name '{name}' is not defined")
        function = space[name] if name in space else getattr(space["Solution"](), name)
        _send_value(lambda: function(*json.loads(arguments)))
    else:
        space["__send__"] = _send_value
        exec(compile(payload, "test", "exec"), space)
    return 0


def _send_value(*functions: Callable[[], Any]) -> None:
    """One line of JSON: the function's value, or a list of those of several; or what was raised instead."""
    try:
        values = [function() for function in functions]
        text = encode(values[0] if len(values) == 1 else values)
    except BaseException as error:
        text = f'{{"error":{encode_basestring_ascii(f"{type(error).__name__}: {error}"[:300])}}}'
    data = memoryview(text.encode() + b"\n")
    while data:
        data = data[os.write(VALUES, data) :]


def _end_as_python_does() -> None:
    if "threading" in sys.modules:
        sys.modules["threading"]._shutdown()  # waits for threads that are no daemons
    import atexit

    atexit._run_exitfuncs()
    sys.stdout.flush()


# What solutions in the style of LeetCode use without importing it.
_GIVEN = {
    "typing": "List Dict Set Tuple Optional Union Any Callable Iterable Iterator Sequence Deque DefaultDict FrozenSet",
    "collections": "Counter OrderedDict defaultdict deque namedtuple",
    "heapq": "heapify heappop heappush heappushpop heapreplace nlargest nsmallest",
    "bisect": "bisect_left bisect_right insort insort_left insort_right",
    "functools": "cache cmp_to_key lru_cache partial reduce",
    "itertools": "accumulate chain combinations count cycle groupby pairwise permutations product zip_longest",
    "math": "ceil comb factorial floor gcd inf isqrt lcm log log2 pi prod sqrt",
    "string": "ascii_lowercase ascii_uppercase digits",
}
_MODULES = (*_GIVEN, "operator", "random", "re", "sys")


def _prelude(code: CodeType, space: dict[str, Any]) -> None:
    """Give the program the well-known names that it uses; its own definitions and imports replace them."""
    used: set[str] = set()
    codes = [code]
    while codes:
        one = codes.pop()
        used.update(one.co_names)
        codes += [constant for constant in one.co_consts if isinstance(constant, CodeType)]
    for module, names in _GIVEN.items():
        for name in used.intersection(names.split()):
            space[name] = getattr(__import__(module), name)
    for module in used.intersection(_MODULES):
        space[module] = __import__(module)


def encode(value: Any, depth: int = 0) -> str:
    """A value as JSON: what JSON does not have is an object with one key that says what it is."""
    if depth > MAX_DEPTH:
        raise ValueError("the value is nested too deeply to be compared")
    depth += 1
    if value is None or value is True or value is False:
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, int):
        value = int(value)
        return str(value) if value.bit_length() < 64 else f'{{"int":"{value:x}"}}'
    if isinstance(value, float):
        return float.__repr__(value).replace("inf", "Infinity").replace("nan", "NaN")
    if isinstance(value, str):
        return encode_basestring_ascii(str.__str__(value))
    if isinstance(value, bytes | bytearray):
        return f'{{"bytes":"{value.hex()}"}}'
    if isinstance(value, complex):
        return f'{{"complex":{encode([value.real, value.imag], depth)}}}'
    if isinstance(value, dict):
        pairs = ",".join(f"[{encode(k, depth)},{encode(v, depth)}]" for k, v in value.items())
        return f'{{"dict":[{pairs}]}}'
    for kinds, tag in (((list,), ""), ((tuple,), "tuple"), ((set, frozenset), "set")):
        if isinstance(value, kinds):
            items = f"[{','.join([encode(item, depth) for item in value])}]"
            return f'{{"{tag}":{items}}}' if tag else items
    return f'{{"other":{encode_basestring_ascii(type(value).__name__)},"true":{encode(bool(value))}}}'


def main() -> None:
    *numbers, folder, weaker, preload, program = receive()
    limits = dict(zip(("time_ms", "memory", "file", "output", "processes"), map(int, numbers), strict=True))
    isolation = Isolation(limits["file"], folder.decode())
    send(b"yes" if isolation.can_end_all else b"", *(reason.encode() for reason in isolation.missing))
    if not isolation.can_end_all or (isolation.missing and weaker != b"yes"):
        return
    if preload:
        import json  # noqa: F401  (once, not in each runner)
    keeper = Keeper(limits, isolation)
    try:
        while True:
            kind, payload, stdin = receive()
            send(*keeper.run(kind.decode(), program, payload, stdin))
    except EOFError:
        pass
    finally:
        keeper.end()
