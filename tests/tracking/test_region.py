"""Lines redrawn in place: what stands on the screen, and that nothing of the terminal stays switched."""

from __future__ import annotations

import fcntl
import io
import logging
import os
import pty
import select
import signal
import struct
import sys
import termios
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from rich.console import Console
from rich.text import Text
from screen import Screen

from verl.tracking.region import Region, wanted

NEVER = 3600.0  # the tests draw themselves, not the region's thread


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


class Stage:
    """A region on a terminal of 40 columns, and the screen that it gave."""

    def __init__(self, columns: int = 40) -> None:
        self.out = Terminal()
        self.console = Console(file=self.out, force_terminal=True, width=columns, height=20, highlight=False)
        self.block = ["one", "two"]
        self.region = Region(self.console, lambda columns, rows: [Text(line) for line in self.block], NEVER)
        self.screen = Screen(columns)

    def draw(self) -> None:
        self.region.refresh()

    @property
    def lines(self) -> list[str]:
        written = self.out.getvalue()
        self.out.seek(0)
        self.out.truncate()
        return self.screen.feed(written).lines


@pytest.fixture
def stage() -> Iterator[Stage]:
    stage = Stage()
    yield stage
    stage.region.close([])


def test_it_is_drawn_in_place_and_leaves_its_last_lines(stage: Stage) -> None:
    stage.console.print("before")
    stage.region.start()
    stage.draw()
    stage.draw()
    assert stage.lines == ["before", "one", "two"]
    stage.block = ["1", "2", "3 is the last"]
    stage.draw()
    assert stage.lines == ["before", "1", "2", "3 is the last"]
    stage.block = ["x"]
    stage.draw()
    assert stage.lines == ["before", "x"]
    stage.region.close([Text("done")])
    stage.region.close([Text("again")])
    assert stage.console.file is stage.out
    stage.console.print("after")
    assert stage.lines == ["before", "done", "after"]


def test_what_is_printed_meanwhile_stands_above(stage: Stage) -> None:
    stage.region.start()
    stage.draw()
    stage.console.print("notice [bold]1[/bold]")
    stage.console.print("a notice longer than the terminal is wide, which wraps", soft_wrap=True)
    above = ["notice 1", "a notice longer than the terminal is wid", "e, which wraps"]
    assert stage.lines == [*above, "one", "two"]
    stage.block = []
    stage.draw()
    assert stage.lines == above


def test_lines_are_cut_to_the_terminal_with_room_for_an_echoed_ctrl_c(stage: Stage) -> None:
    stage.block = ["x" * 100, "漢" * 100]
    stage.region.start()
    stage.draw()
    cut, wide = stage.lines
    assert cut == "x" * 36 + "…" and wide == "漢" * 18 + "…"


def test_a_terminal_made_narrower_is_drawn_over(stage: Stage) -> None:
    stage.console.print("before")
    stage.region.start()
    stage.block = ["a" * 37, "b" * 30, "c"]
    stage.draw()
    assert len(stage.lines) == 4
    stage.screen.narrow(16)
    assert len(stage.screen.rows) == 1 + 3 + 2 + 1
    stage.console.width = 16
    stage.draw()
    assert "\x1b[2K" in stage.out.getvalue()  # what a terminal has wrapped is erased, else it may join it again
    assert stage.lines == ["before", "a" * 12 + "…", "b" * 12 + "…", "c"]
    stage.console.width = stage.screen.columns = 40
    stage.draw()
    assert stage.lines == ["before", "a" * 37, "b" * 30, "c"]


def test_a_defect_of_the_display_ends_it_and_nothing_else(stage: Stage, caplog: pytest.LogCaptureFixture) -> None:
    stage.region._interval = 0.01
    stage.region.start()
    stage.draw()
    stage.block = None  # type: ignore[assignment]
    stage.region._thread.join(5.0)
    stage.console.print("training goes on")
    assert stage.lines == ["training goes on"]
    assert "the live display ended (TypeError" in caplog.text
    stage.region.close([Text("summary")])
    assert stage.lines == ["training goes on", "summary"]


def test_its_thread_draws_what_changes_and_only_that(stage: Stage) -> None:
    stage.region._interval = 0.01
    stage.region.start()
    deadline = time.monotonic() + 5.0
    while "two" not in stage.out.getvalue() and time.monotonic() < deadline:
        time.sleep(0.01)
    time.sleep(0.1)
    assert stage.out.getvalue().count("two") == 1
    stage.block = ["three"]
    while "three" not in stage.out.getvalue() and time.monotonic() < deadline:
        time.sleep(0.01)
    assert stage.lines == ["three"]


def test_standard_streams_and_old_log_handlers_are_led_above(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdout", stage.out)
    errors = Terminal()
    monkeypatch.setattr(sys, "stderr", errors)
    handler = logging.StreamHandler()  # keeps today's sys.stderr
    logging.getLogger("test_region").addHandler(handler)
    try:
        stage.region.start()
        stage.draw()
        print("begun, ", end="", flush=True)
        assert stage.lines == ["one", "two"]
        print("ended [/b] \x1b[31mred\x1b[0m \x1b[2J")
        sys.stdout.write("10%\r50%\r100%\nleft")
        print("careful\r", file=sys.stderr)
        logging.getLogger("test_region").warning("logged")
        above = ["begun, ended [/b] red", "100%", "careful", "logged"]
        assert stage.lines == [*above, "one", "two"]
        stage.region.close([Text("done")])
        assert (sys.stdout, sys.stderr, handler.stream) == (stage.out, errors, errors)
        assert stage.lines == [*above, "left", "done"] and not errors.getvalue()
    finally:
        logging.getLogger("test_region").removeHandler(handler)


def test_threads_that_print_at_once_never_tear_it(stage: Stage) -> None:
    """The block is redrawn all the time meanwhile; each thread's lines come out whole and in its order."""
    stage.region.start()
    done = threading.Event()

    def draw() -> None:
        number = 0
        while not done.is_set():
            number += 1
            stage.block = [f"frame {number}"] * (1 + number % 3)
            stage.draw()

    def say(name: str) -> None:
        for number in range(150):
            stage.console.print(f"{name} {number}")

    drawing, *saying = [threading.Thread(target=draw), *(threading.Thread(target=say, args=(name,)) for name in "ab")]
    for thread in (drawing, *saying):
        thread.start()
    for thread in saying:
        thread.join()
    done.set()
    drawing.join()
    stage.region.close([Text("end")])
    *said, end = stage.lines
    assert end == "end" and len(said) == 300
    for name in "ab":
        assert [line for line in said if line[0] == name] == [f"{name} {number}" for number in range(150)]


@pytest.mark.parametrize(
    ("settings", "environment", "live"),
    [
        ({}, {}, True),
        ({"force_terminal": False}, {}, False),
        ({"force_interactive": False}, {}, False),  # --plain
        ({"quiet": True}, {}, False),
        ({"force_jupyter": True}, {}, False),
        ({}, {"TERM": "dumb"}, False),
        ({}, {"CI": "true"}, False),
    ],
    ids=str,
)
def test_where_it_is_wanted(
    settings: dict[str, bool], environment: dict[str, str], live: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("CI", "TERM"):
        monkeypatch.delenv(name, raising=False)
    for name, value in ({"TERM": "xterm"} | environment).items():
        monkeypatch.setenv(name, value)
    assert wanted(Console(file=Terminal(), **{"force_terminal": True, **settings})) is live


def test_a_pipe_with_forced_colours_is_no_terminal() -> None:
    assert not wanted(Console(file=io.StringIO(), force_terminal=True))


# --- on a real terminal ---------------------------------------------------------------------------------------------

# A run with everything but the models, ended as the command line ends one.
RUN = """
import sys, time, warnings
from rich.console import Console
from verl.cli.entry import guarded
from verl.run_dir import RunDir
from verl.tracking.samples import SampleRow
from verl.tracking.trackers import TrackerContext, build_tracker
from verl.trainer.timer import StepTimer

def run():
    timer = StepTimer()
    console = Console(highlight=False)
    console.print("before")
    context = TrackerContext(RunDir(sys.argv[1]).create(), 9999, None, console, timer)
    with build_tracker(["console"], context) as tracker:
        for step in range(1, 10000):
            with timer("gen"):
                time.sleep(0.02)
            if step == 5:
                warnings.warn("a warning of step 5")
            if step == 60 and sys.argv[2] == "error":
                raise ZeroDivisionError
            tracker.samples(step, "train", [SampleRow("train", "u", 0, "prompt", "response " * 50, score=1.0)])
            tracker.log(step, {"critic/score/mean": step / 100} | timer.flush())
    return 0

sys.exit(guarded(run, debug=False))
"""


def set_size(descriptor: int, columns: int, rows: int) -> None:
    fcntl.ioctl(descriptor, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))


def read_until(descriptor: int, text: str | None, seconds: float = 20.0) -> str:
    """What the terminal was sent until ``text`` came and it fell silent; None: until the process closed it.

    Silence matters: a terminal throws away what is still under way when Ctrl-C comes.
    """
    output, deadline = b"", time.monotonic() + seconds
    while time.monotonic() < deadline:
        if select.select([descriptor], [], [], 0.1)[0]:
            try:
                output += os.read(descriptor, 65536)
            except OSError:  # how Linux says that the other side is closed
                if text is None:
                    return output.decode(errors="replace")
                break
        elif text is not None and text.encode() in output:
            return output.decode(errors="replace")
    raise AssertionError(f"{text!r} did not come: {output.decode(errors='replace')}")


@pytest.mark.parametrize(
    ("end", "code", "said"),
    [("ctrl-c", 130, "interrupted"), ("term", 143, "terminated"), ("error", 1, "ZeroDivisionError")],
)
def test_a_terminal_is_left_as_it_was_found(tmp_path: Path, end: str, code: int, said: str) -> None:
    """However it ends, resized on the way: summary and error stand under what was printed, no mode is switched."""
    environment = {name: value for name, value in os.environ.items() if name not in ("CI", "COLUMNS", "LINES")}
    child, terminal = pty.fork()
    if child == 0:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        arguments = [sys.executable, "-c", RUN, str(tmp_path / "run"), end]
        os.execve(sys.executable, arguments, environment | {"TERM": "xterm-256color"})
    try:
        set_size(terminal, 100, 30)
        modes = termios.tcgetattr(terminal)
        output = read_until(terminal, "a warning of step 5")
        screen = Screen(100).feed(output)
        set_size(terminal, 60, 12)
        screen.narrow(60)
        rest = read_until(terminal, "now")
        if end == "ctrl-c":
            os.write(terminal, b"\x03")
        elif end == "term":
            os.kill(child, signal.SIGTERM)
        rest += read_until(terminal, None)
        assert termios.tcgetattr(terminal) == modes
    finally:
        os.close(terminal)
        _, status = os.waitpid(child, 0)
    output += rest
    assert os.waitstatus_to_exitcode(status) == code, output
    assert "\x1b[?" not in output  # no cursor hidden, no other screen, no mouse
    lines = screen.feed(rest).lines
    assert lines[0] == "before"
    assert any("a warning of step 5" in line for line in lines)
    start = next(i for i, line in enumerate(lines) if line.startswith("run: stopped after step "))
    assert lines[start + 1].startswith("reward")
    assert said in "".join(lines[start:])
    assert not any(line.startswith("now ") for line in lines[start:])
