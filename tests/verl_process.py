"""The real command line in processes of its own: what it prints, what it leaves behind, what it leaves running."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]
GRPO = "examples/tiny/grpo.yaml"
PPO = "examples/tiny/ppo.yaml"

MARK = "VERL_TEST_MARK"

# Not part of what a run computes: clocks, speeds, memory.
_COSTS = re.compile(r"time|timing_s/.*|timing_per_token_ms/.*|perf/.*|rollout/.*")


def _prepare_child() -> None:
    # A test run started in the background ignores Ctrl-C, and its children would inherit that.
    signal.signal(signal.SIGINT, signal.SIG_DFL)


CLI = ("-m", "verl.cli")


def _command(
    arguments: tuple[str, ...], mark: str, program: tuple[str, ...] = CLI, enter: tuple[str, ...] = ()
) -> dict[str, Any]:
    return {
        "args": [*enter, sys.executable, *program, *arguments],
        "cwd": ROOT,
        "env": {**os.environ, "PYTHONPATH": str(ROOT), "COLUMNS": "200", MARK: mark},
        "stdin": subprocess.DEVNULL,
        "text": True,
        "start_new_session": True,
        "preexec_fn": _prepare_child,
    }


@dataclass
class Done:
    code: int
    out: str
    err: str


class Command:
    """``verl ...`` in a session of its own, so that everything that it ever started can be found.

    Args:
        enter: words of a command before it.
    """

    def __init__(self, *arguments: str, log: Path, program: tuple[str, ...] = CLI, enter: tuple[str, ...] = ()) -> None:
        self._out, self._err = log.with_suffix(".out"), log.with_suffix(".err")
        self._mark = uuid.uuid4().hex
        with self._out.open("w") as out, self._err.open("w") as err:
            self.process = subprocess.Popen(**_command(arguments, self._mark, program, enter), stdout=out, stderr=err)

    @property
    def pid(self) -> int:
        return self.process.pid

    def wait(self, seconds: float) -> Done:
        code = self.process.wait(seconds)
        return Done(code, self._out.read_text(), self._err.read_text())

    def wait_until(self, condition: Any, seconds: float = 200.0) -> None:
        """Until ``condition()`` holds; the process must be alive till then."""
        deadline = time.monotonic() + seconds
        while not condition():
            said = f"{self._out.read_text()[-2000:]}\n{self._err.read_text()[-2000:]}"
            assert self.process.poll() is None, f"ended with {self.process.returncode}:\n{said}"
            assert time.monotonic() < deadline, f"not within {seconds} s:\n{said}"
            time.sleep(0.05)

    def signal(self, number: int, whole_group: bool = False) -> None:
        """To the process, or as a terminal's Ctrl-C does to its whole group."""
        if whole_group:
            os.killpg(self.pid, number)
        else:
            os.kill(self.pid, number)

    def running(self) -> dict[int, str]:
        """Living processes that it started, by id: of its session, or with its mark in their environment."""
        return living(self.pid, self._mark)

    def wait_for_nothing_left(self, seconds: float = 30.0) -> None:
        deadline = time.monotonic() + seconds
        while self.running():
            assert time.monotonic() < deadline, f"still running after {seconds} s: {self.running()}"
            time.sleep(0.1)

    def end(self) -> None:
        """Kill whatever is left; for the clean-up of a test that failed."""
        for pid in self.running():
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.process.wait(10)


def living(session: int, mark: str) -> dict[int, str]:
    """Processes that are no zombies, of a session or with a mark in their environment: id and name."""
    found = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                name, _, rest = (entry / "stat").read_text().partition(" (")[2].rpartition(") ")
                marked = mark.encode() in (entry / "environ").read_bytes()
            except OSError:  # it ended meanwhile, or is another user's
                continue
            fields = rest.split()
            if (int(fields[3]) == session or marked) and fields[0] not in "ZX":
                found[int(entry.name)] = name
    return found


def listening(processes: Iterable[int]) -> dict[int, set[str]]:
    """Addresses without their ports at which these processes listen, by ``ss``."""
    if shutil.which("ss") is None:
        pytest.skip("no ss here")
    found: dict[int, set[str]] = {}
    said = subprocess.run(["ss", "-ltnpH"], capture_output=True, text=True, check=True).stdout
    for line in said.splitlines():
        address = line.split()[3].rpartition(":")[0].strip("[]")
        for process in {int(number) for number in re.findall(r"pid=(\d+)", line)} & set(processes):
            found.setdefault(process, set()).add(address)
    return found


@contextmanager
def verl_started(
    *arguments: str, log: Path, program: tuple[str, ...] = CLI, enter: tuple[str, ...] = ()
) -> Iterator[Command]:
    command = Command(*arguments, log=log, program=program, enter=enter)
    try:
        yield command
    finally:
        command.end()


def verl(*arguments: str, log: Path, seconds: float = 120.0, enter: tuple[str, ...] = ()) -> Done:
    """Run to its end; nothing that it started may outlive it by more than a moment."""
    with verl_started(*arguments, log=log, enter=enter) as command:
        done = command.wait(seconds)
        command.wait_for_nothing_left(10.0)
        return done


class WarmVerl:
    """``verl ...`` in forks of one interpreter that has imported everything: a process of its own for each command,
    without the seconds that the imports take. For commands without Ray."""

    SERVER = """
import json, os, sys, traceback
import verl.checkpoint.export, verl.cli, verl.cluster.worker
import verl.rollout.offline, verl.tracking.report, verl.trainer.run
sys.path.append("tests")
import dying

for line in sys.stdin:
    job = json.loads(line)
    child = os.fork()
    if child == 0:
        os.setsid()
        for number, name in ((1, "out"), (2, "err")):
            os.dup2(os.open(job[name], os.O_WRONLY | os.O_CREAT | os.O_TRUNC), number)
        if job["moment"]:
            dying.arm(**job["moment"])
        try:
            code = verl.cli.main(job["arguments"])
        except SystemExit as stop:
            code = stop.code
        except BaseException:
            traceback.print_exc()
            code = 99
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    _, status = os.waitpid(child, 0)
    print(json.dumps([child, os.waitstatus_to_exitcode(status)]), flush=True)
"""

    def __init__(self) -> None:
        self._mark = uuid.uuid4().hex
        settings = _command((), self._mark) | {"args": [sys.executable, "-c", self.SERVER]}
        settings["stdin"] = subprocess.PIPE
        self._server = subprocess.Popen(**settings, stdout=subprocess.PIPE)

    def __call__(self, *arguments: str, log: Path, moment: dict[str, Any] | None = None) -> Done:
        """``moment``: when it kills itself with SIGKILL, see :func:`dying.arm`."""
        files = {"out": str(log.with_suffix(".out")), "err": str(log.with_suffix(".err"))}
        assert self._server.stdin and self._server.stdout
        self._server.stdin.write(json.dumps({"arguments": arguments, "moment": moment, **files}) + "\n")
        self._server.stdin.flush()
        pid, code = json.loads(self._server.stdout.readline())
        deadline = time.monotonic() + (30 if code == -signal.SIGKILL else 0)
        while left := living(pid, self._mark).keys() - {self._server.pid}:
            assert time.monotonic() < deadline, left
            time.sleep(0.05)
        return Done(code, Path(files["out"]).read_text(), Path(files["err"]).read_text())

    def close(self) -> None:
        self._server.kill()
        self._server.communicate()


def train(config: str, folder: Path, *overrides: str) -> tuple[str, ...]:
    """Arguments of a training run into ``folder``, inline on one thread unless overridden."""
    return (
        "train",
        config,
        f"trainer.default_local_dir={folder}",
        "cluster.backend=inline",
        "cluster.threads=1",
        "trainer.device=cpu",
        *overrides,
    )


# --- what a run leaves -------------------------------------------------------------------------------------------


def metric_lines(folder: Path) -> list[dict[str, Any]]:
    file = folder / "metrics.jsonl"
    if not file.exists():
        return []
    return [json.loads(line) for line in file.read_text().splitlines() if line.endswith("}")]


def steps(folder: Path) -> list[int]:
    return [line["step"] for line in metric_lines(folder)]


def reached(folder: Path, step: int) -> Any:
    """A condition: the run has written down this step."""
    return lambda: max(steps(folder), default=-1) >= step


def computed(folder: Path) -> list[dict[str, Any]]:
    """Every metric of every step that is a result, not a cost."""
    return [{k: v for k, v in line.items() if not _COSTS.fullmatch(k)} for line in metric_lines(folder)]


def checkpoint_bytes(folder: Path, step: int) -> dict[str, bytes]:
    """Every tensor file and state of a checkpoint, by name."""
    root = folder / "checkpoints" / f"step_{step:06d}"
    return {
        str(path.relative_to(root)): path.read_bytes()
        for path in sorted(root.rglob("*"))
        if path.is_file() and (path.suffix == ".safetensors" or path.name == "trainer.json")
    }


def assert_same_run(expected: Path, found: Path, last_step: int) -> None:
    """Every step once, every result and the last checkpoint equal to the bit."""
    assert steps(found) == list(range(last_step + 1)) == steps(expected)
    for one, other in zip(computed(expected), computed(found), strict=True):
        assert one == other
    one, other = checkpoint_bytes(expected, last_step), checkpoint_bytes(found, last_step)
    assert "actor/model.safetensors" in one and "actor/optimizer.safetensors" in one and "trainer.json" in one
    assert one.keys() == other.keys()
    assert [name for name in one if one[name] != other[name]] == []
