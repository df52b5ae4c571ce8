"""The sandbox on hostile programs (B162): nothing gets out, nothing stays behind, nothing lasts beyond its limit."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from hostile_programs import PROGRAMS, filled

from verl.config import SandboxConfig
from verl.rewards import sandbox as module
from verl.rewards.sandbox import Sandbox, SandboxError

LIMITS = SandboxConfig(time_limit=0.4, memory_limit=128, file_limit=2, output_limit=1)


def leftovers() -> list[str]:
    """Processes that belong to a sandbox, and folders of one."""
    found = [str(path) for path in Path("/tmp").glob("verl-sandbox-*")]
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if str(Path(module.__file__).parent).encode() in (process / "cmdline").read_bytes():
                found.append((process / "status").read_text())
        except OSError:
            pass
    return found


@pytest.fixture(scope="module", autouse=True)
def nothing_stays():
    mounts = Path("/proc/self/mountinfo").read_text()
    yield
    assert not leftovers()
    assert Path("/proc/self/mountinfo").read_text() == mounts


@pytest.fixture(scope="module")
def outside(tmp_path_factory):
    """What programs try to reach."""
    folder = tmp_path_factory.mktemp("outside")
    (folder / "secret").write_text("secret")
    name = f"verl-test-{os.getpid()}"
    with socket.create_server(("127.0.0.1", 0)) as server, socket.socket(socket.AF_UNIX) as abstract:
        abstract.bind("\0" + name)
        abstract.listen()
        yield {
            "pid": os.getpid(), "secret": folder / "secret", "folder": folder, "file": __file__,
            "port": server.getsockname()[1], "abstract": name,
        }  # fmt: skip
        assert [path.name for path in folder.iterdir()] == ["secret"]


def run(program: str, config: SandboxConfig = LIMITS, kind: str = "stdin", payload: str = "", stdin: str = ""):
    with Sandbox(program, config) as box:
        return box.run(kind, payload, stdin)


def check_hostile(body: str, outside: dict, config: SandboxConfig = LIMITS) -> None:
    started = time.monotonic()
    with Sandbox(filled(body, **outside, most=config.processes), config) as box:
        ran = box.run("stdin")
        if ran.ended == "exit 0":
            box.run("stdin")  # it can be used again
    seconds = time.monotonic() - started
    shown = (ran.ended, ran.stdout[:500], ran.stderr)
    assert b"BREACH" not in ran.stdout, shown
    assert len(ran.stdout) <= config.output_limit * 2**20 + 65536 and len(ran.stderr) <= 2000
    assert seconds < 2 * config.time_limit + 4, (seconds, shown)  # a machine with other work to do


@pytest.mark.parametrize("name", PROGRAMS)
def test_hostile_program(name, outside, monkeypatch):
    monkeypatch.setenv("SECRET_OF_THE_TESTS", "1")
    check_hostile(PROGRAMS[name], outside)


@pytest.mark.drill
@pytest.mark.timeout(1200)
def test_a_thousand_hostile_programs(outside):
    """Pairs, in one process or in two at once, by seed; many sandboxes at the same time."""

    def one(seed: int) -> None:
        draw = random.Random(seed)
        first, second = draw.sample(sorted(PROGRAMS.values()), 2)
        ways = (
            "try: exec({0!r})\nexcept BaseException: pass\nexec({1!r})",
            "if os.fork(): exec({0!r})\nelse: exec({1!r})",
            "threading.Thread(target=exec, args=({0!r}, globals())).start()\nexec({1!r})",
        )
        body = draw.choice(ways).format(first, second)
        try:
            check_hostile(body, outside, LIMITS.model_copy(update={"processes": draw.choice([1, 2, 8, 32])}))
        except AssertionError as error:
            raise AssertionError(f"seed {seed}: {body}") from error

    with ThreadPoolExecutor(4) as threads:
        list(threads.map(one, range(1000)))
    assert not leftovers()


def test_what_a_program_sees():
    program = "import os, sys\nprint(os.listdir('/tmp'), dict(os.environ), os.getcwd(), sorted(os.listdir('/dev')))\n"
    ran = run(program + "print(input(), sys.argv, __name__)", stdin="ü\n")
    assert ran.stdout.decode().splitlines() == [
        "[] {} /tmp ['null', 'random', 'urandom', 'zero']",
        "ü ['solution.py'] __main__",
    ]
    import_all = (
        "import asyncio, bisect, collections, datetime, decimal, fractions, hashlib, json, sqlite3, ssl, zlib\n"
    )
    used = "print(asyncio.run(asyncio.sleep(0, 7)), hashlib.sha256(b'').hexdigest()[:4])\nopen('x', 'w').write('1')"
    assert run(import_all + used, LIMITS.model_copy(update={"time_limit": 10})).stdout == b"7 e3b0\n"


def test_ends_like_an_ordinary_program():
    thread = "import atexit, threading, time\natexit.register(lambda: print('c'))\n"
    thread += "def f():\n    time.sleep(.1)\n    print('b')\nprint('a')\nthreading.Thread(target=f).start()"
    assert run(thread).stdout == b"a\nb\nc\n"
    assert [run(f"import sys; sys.exit({code})").ended for code in ("", "0", "3", "'no'")] == [
        "exit 0", "exit 0", "exit 3", "exit 1",
    ]  # fmt: skip
    assert run("1 / 0").trouble == "error: ZeroDivisionError: division by zero"
    assert run("def f(:").trouble == "error: SyntaxError: invalid syntax"
    assert run("x = [0] * 10**12").trouble == "memory"
    assert run("while True: pass").trouble == "time-out"
    assert run("while True: print('x' * 9999)").trouble == "too much output"
    assert run("import os; os.abort()").trouble == "killed by signal 6"


def test_same_output_every_time():
    assert len({run("print(set('abcdefgh'), hash('x'))").stdout for _ in range(3)}) == 1


def test_threads_of_a_process_use_it_at_once():
    with ThreadPoolExecutor(8) as threads:
        outputs = list(threads.map(lambda n: run(f"print({n})").stdout, range(24)))
    assert outputs == [f"{n}\n".encode() for n in range(24)]


def test_a_lost_sandbox_is_no_answer():
    with Sandbox("import time; time.sleep(30)", LIMITS.model_copy(update={"time_limit": 30})) as box:
        threading.Timer(0.2, box._process.send_signal, [signal.SIGKILL]).start()
        with pytest.raises(SandboxError, match="The sandbox was lost"):
            box.run("stdin")
    deadline = time.monotonic() + 5
    while leftovers() and time.monotonic() < deadline:  # the namespace ends with its keeper, and not at once
        time.sleep(0.05)
    assert not leftovers()


def test_all_ends_when_the_parent_hangs_up():
    box = Sandbox("import os\nos.fork()\nwhile True: pass", LIMITS.model_copy(update={"time_limit": 30}))
    box._send(b"stdin", b"", b"")
    time.sleep(0.2)
    box.close()
    assert not leftovers()


CANNOT = "import sys; sys.path.insert(0, {folder!r}); import sandbox_isolation as i\ncall = i.call\n"
CANNOT += (
    "def refuse(name, *rest):\n    if name in %r and (not %r or rest[0] in %r): raise PermissionError(1, 'not here')\n"
)
CANNOT += "    return call(name, *rest)\ni.call = refuse\nimport sandbox_child; sandbox_child.main()"


@pytest.mark.parametrize(
    ("calls", "flags", "missing"),
    [
        (("unshare",), (), ("user namespace", "mount namespace", "PID namespace", "network namespace")),
        (("unshare",), (0x20000000,), ("PID namespace",)),
        (("mount",), (), ("file system of its own",)),
    ],
)
def test_says_what_the_machine_lacks(monkeypatch, calls, flags, missing):
    start = CANNOT % (calls, flags, flags)
    monkeypatch.setattr(module, "_START", start)
    with pytest.raises(SandboxError, match="cannot isolate") as caught:
        Sandbox("print(1)", LIMITS)
    for feature in missing:
        assert f"{feature} (not here)" in str(caught.value)


def test_weaker_where_it_is_allowed(monkeypatch):
    monkeypatch.setattr(module, "_START", CANNOT % (("unshare",), (0x20000000,), (0x20000000,)))
    weaker = LIMITS.model_copy(update={"allow_weaker": True})
    if os.geteuid() != 0:
        with pytest.raises(SandboxError, match="nothing ends every process"):
            Sandbox("print(1)", weaker)
        return
    assert run("print(6 * 7)", weaker).stdout == b"42\n"
    for name in ("fork bomb", "daemon", "daemon ignores signals", "memory in a list", "kills all"):
        with contextlib.suppress(SandboxError), Sandbox(filled(PROGRAMS[name]), weaker) as box:
            assert b"BREACH" not in box.run("stdin").stdout
        assert not leftovers()


def test_refuses_to_start_without_an_interpreter(monkeypatch):
    monkeypatch.setattr(module.sys, "_base_executable", "/nowhere/python")
    with pytest.raises(SandboxError, match="cannot start"):
        Sandbox("print(1)", LIMITS)
