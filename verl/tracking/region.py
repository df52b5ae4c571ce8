"""Lines at the bottom of a terminal that are redrawn in place, while everything else is printed above them."""

from __future__ import annotations

import io
import logging
import os
import sys
import threading
from collections.abc import Callable, Sequence
from typing import IO, Any, cast

from rich.console import Console
from rich.text import Text

logger = logging.getLogger(__name__)

MAX_LINE = 10_000  # characters kept of a line that does not end, such as a progress bar's

Lines = Callable[
    [int, int], Sequence[Text]
]  # (columns, rows that there are) -> lines, cut to the columns by the region

_ERASE_LINE_END, _ERASE_BELOW = "\x1b[K", "\x1b[J"


def wanted(console: Console) -> bool:
    """Whether lines can be redrawn there, and somebody watches: a terminal, not a log, a pipe, CI or a notebook."""
    shown = console.is_interactive and not console.is_jupyter and not console.quiet
    return shown and console.file.isatty() and not os.environ.get("CI")


class Region:
    """A block of lines under whatever is printed to a terminal.

    The console and the standard streams write through it, so that text, and the block under it, reach the terminal in
    one piece whichever thread prints. A thread of its own redraws every ``interval`` seconds, and only what changed:
    nobody waits for a slow terminal. No mode of the terminal is switched (cursor, echo, screen): however the process
    ends, there is nothing to restore. ``lines`` is asked for each drawing, from any thread; should it raise, drawing
    ends with a warning.
    """

    def __init__(self, console: Console, lines: Lines, interval: float = 0.5) -> None:
        self._console, self._lines, self._interval = console, lines, interval
        self._file = console.file
        self._painter = Console(file=io.StringIO(), force_terminal=True, color_system=console.color_system)  # type: ignore[arg-type]
        self._lock = threading.RLock()  # of the terminal and of what is known to stand on it:
        self._shown: list[int] = []  # columns of each line of the block
        self._drawn: tuple[tuple[int, int], list[Text]] | None = None  # the terminal's size, and the lines
        self._open = False
        self._error: Exception | None = None
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._keep_drawing, name="verl-display", daemon=True)
        self._streams: dict[str, tuple[_Above, IO[str]]] = {}
        self._handlers: list[tuple[Any, IO[str]]] = []

    def start(self) -> None:
        self._open = True
        self._console.file = cast(IO[str], _Above(self.print, self._file))
        for name in ("stdout", "stderr"):
            stream = getattr(sys, name)
            if stream.isatty():
                above = _Above(lambda text: self.print(self._safe(text)), stream)
                self._streams[name] = (above, stream)
                self._lead_handlers(stream, above)
                setattr(sys, name, above)
        self._thread.start()

    def close(self, last: Sequence[Text]) -> None:
        """Take the block away and leave these lines in its place; harmless when done twice, or never started."""
        if self._ended.is_set() or not self._thread.ident:
            return
        self._ended.set()
        self._restore_streams()
        self._thread.join(1.0)
        with self._lock:
            self._open = False
            self._console.file = self._file
            self._write(self._home(erase=True) + "".join(f"{line}\n" for line in self._painted(self._cut(last))))

    def print(self, text: str) -> None:
        """Whole lines, above the block."""
        with self._lock:
            if self._open:
                self._draw(self._current(), text)
            else:
                self._write(text)

    def refresh(self) -> None:
        with self._lock:
            lines = self._current() if self._open else []
            if self._open and self._drawn != (self._size(), lines):
                self._draw(lines)

    # --- drawing; with the lock held

    def _draw(self, lines: list[Text], above: str = "") -> None:
        # Over the old block without erasing it first, which would flicker. Not so where something goes between, and
        # where the terminal has another size: what it wrapped, it may join again.
        same_size = self._drawn is not None and self._drawn[0] == self._size()
        home = self._home(erase=bool(above) or not lines or not same_size)
        block = f"{_ERASE_LINE_END}\n".join(self._painted(lines)) + _ERASE_LINE_END + _ERASE_BELOW if lines else ""
        self._shown, self._drawn = [line.cell_len for line in lines], (self._size(), lines)
        self._open = self._error is None
        self._write(home + above + block)

    def _write(self, text: str) -> None:
        self._file.write(text)
        self._file.flush()

    def _current(self) -> list[Text]:
        try:
            return self._cut(self._lines(*self._size()))
        except Exception as error:
            self._error = error
            return []

    def _keep_drawing(self) -> None:
        try:
            while self._error is None and not self._ended.wait(self._interval):
                self.refresh()
        except Exception as error:  # the terminal is gone, say
            self._error, self._open = error, False
        if self._error is not None:
            what = f"{type(self._error).__name__}: {self._error}"
            logger.warning("the live display ended (%s); training goes on", what)

    def _home(self, erase: bool) -> str:
        """To the start of the block as it stands on the screen: a terminal made narrower has wrapped its lines."""
        columns = self._size()[0]
        rows = sum(max(1, -(-length // columns)) for length in self._shown)
        # Row by row: erasing a whole screen at once makes tmux keep a copy of it.
        erase_row = "\x1b[2K" if erase else ""
        return "\r" + f"{erase_row}\x1b[A" * (rows - 1) + erase_row

    def _size(self) -> tuple[int, int]:
        columns, rows = self._console.size
        try:  # COLUMNS and LINES in the environment may say more than there are
            there = os.get_terminal_size(self._file.fileno())
            columns, rows = min(columns, there.columns or columns), min(rows, there.lines or rows)
        except (OSError, io.UnsupportedOperation):
            pass
        return max(columns, 2), rows

    def _cut(self, lines: Sequence[Text]) -> list[Text]:
        columns = max(1, self._size()[0] - 3)  # a full line would wrap in some terminals, and Ctrl-C echoes as ^C
        cut = [line.copy() for line in lines]
        for line in cut:
            line.truncate(columns, overflow="ellipsis")
        return cut

    # --- text

    def _painted(self, lines: Sequence[Text]) -> list[str]:
        """With the control sequences of its colours, and no others."""
        with self._painter.capture() as captured:
            for line in lines:
                self._painter.print(line, soft_wrap=True)
        return captured.get().split("\n")[: len(lines)]

    def _safe(self, text: str) -> str:
        """What others print keeps its colours; all else that a terminal would obey is left out."""
        # A progress bar rewrites its line: what a carriage return throws away is never shown.
        lines = [line.rstrip("\r").rpartition("\r")[2] for line in text.removesuffix("\n").split("\n")]
        return "".join(f"{line}\n" for line in self._painted([Text.from_ansi(line) for line in lines]))

    # --- what others print

    def _lead_handlers(self, stream: IO[str], above: _Above) -> None:
        """Log handlers that keep the stream they were made with write above the block, too."""
        for log in [logging.root, *logging.root.manager.loggerDict.values()]:
            for handler in getattr(log, "handlers", ()):
                if vars(handler).get("stream") is stream:
                    handler.setStream(above)
                    self._handlers.append((handler, stream))

    def _restore_streams(self) -> None:
        for name, (above, stream) in self._streams.items():
            if getattr(sys, name) is above:
                setattr(sys, name, stream)
            above.end_line()
        for handler, stream in self._handlers:
            handler.setStream(stream)


class _Above(io.TextIOBase):
    """Stands in for a stream: its whole lines are printed above the block, a begun one waits for its end."""

    def __init__(self, show: Callable[[str], None], file: IO[str]) -> None:
        self._show, self._file = show, file
        self._lock = threading.Lock()
        self._begun = ""

    def write(self, text: str) -> int:
        with self._lock:
            whole, newline, begun = (self._begun + text).rpartition("\n")
            self._begun = begun[-MAX_LINE:]
        if newline:
            self._show(whole + newline)
        return len(text)

    def end_line(self) -> None:
        if self._begun:
            self.write("\n")

    def flush(self) -> None:
        pass

    def isatty(self) -> bool:
        return self._file.isatty()

    def fileno(self) -> int:
        return self._file.fileno()

    @property
    def encoding(self) -> str:  # type: ignore[override]
        return getattr(self._file, "encoding", "utf-8")

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)
