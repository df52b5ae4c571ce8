"""``verl watch``: a run's folder on a terminal, drawn again while it grows. Nothing here writes."""

from __future__ import annotations

import itertools
import os
import select
import sys
import termios
import time
import tty
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.text import Text

from verl.diagnostics import doctor
from verl.diagnostics.evidence import Finding
from verl.json_lines import parse_line
from verl.run_dir import EventRecord, RunDir
from verl.tracking import facts, names, region
from verl.tracking.console import ASCII_BLOCKS, BLOCKS, duration, figure, printable
from verl.tracking.live import ShownSample, best_and_worst, curve_lines, labelled, shares
from verl.tracking.names import merged_steps, summarize
from verl.tracking.region import Region
from verl.tracking.runs import STYLES, RunOverview, overview_of
from verl.tracking.samples import SampleRow, read_samples

RECENT = 20  # steps that pace and shares are of
WARNINGS, EVENTS = 4, 3
INTERVAL = 1.0  # seconds between looks


class LineFile:
    """The objects of a line file that grows: only what is new is read, all of it again where the file was cut."""

    def __init__(self, path: Path) -> None:
        self._path, self._offset, self._file = path, 0, 0
        self.records: list[dict[str, Any]] = []

    def read(self) -> bool:
        """Whether there was anything new."""
        try:
            with open(self._path, "rb") as file:
                there = os.fstat(file.fileno())
                if there.st_size < self._offset or there.st_ino != self._file:
                    self._offset, self._file, self.records = 0, there.st_ino, []
                file.seek(self._offset)
                whole, newline, _ = file.read().rpartition(b"\n")
        except OSError:
            return False
        self._offset += len(whole) + len(newline)
        self.records += [record for line in whole.split(b"\n") if (record := parse_line(line)) is not None]
        return bool(newline)


class Watcher:
    """What there is to see of a run now; :meth:`lines` looks again. ``blocks``: characters of the curves."""

    def __init__(self, run_dir: RunDir, blocks: str = BLOCKS) -> None:
        self._run_dir, self._blocks = run_dir, blocks
        self._metrics = LineFile(run_dir.metrics)
        self._steps: list[dict[str, Any]] = []
        self._events, self._warnings = 0, list[Finding]()
        self._sampled: tuple[int, float] | None = None
        self._samples: list[SampleRow] = []

    def lines(self, columns: int, rows: int) -> list[Text]:
        """The most important first; at most ``rows - 1`` lines."""
        run, events = self._look()
        steps, room = self._steps, max(1, rows - 1)
        curves = names.curves([names.figures(line) for line in steps], names.kl_label(steps))
        lines = [
            *self._head(run, columns),
            *curve_lines(curves, columns, self._blocks),
            *_cost_lines(steps[-RECENT:]),
        ]
        lines += [labelled("warning", warning.advice, "yellow") for warning in self._warnings[:WARNINGS]]
        for event in [event for event in events if event.kind not in facts.LIFE][-EVENTS:]:
            lines.append(labelled("event", _event(event), "dim"))
        for sample in self._shown_samples():
            own = sample.lines(columns)
            if len(lines) + len(own) <= room:
                lines += own
        return lines[:room]

    def snapshot(self) -> dict[str, Any]:
        """What :meth:`lines` tells, for programs; ``metrics`` of the last step, ``seconds_left`` at its pace."""
        run, events = self._look()
        self._shown_samples()
        return asdict(run) | {
            "seconds_left": time_left(self._steps, run.planned_steps),
            "metrics": self._steps[-1] if self._steps else {},
            "warnings": [asdict(finding) for finding in self._warnings],
            "events": [asdict(event) for event in events],
            "samples": [asdict(row) for row in self._samples],
        }

    def _look(self) -> tuple[RunOverview, list[EventRecord]]:
        events = self._run_dir.read_events()
        if self._metrics.read() or len(events) != self._events:
            self._steps, self._events = merged_steps(self._metrics.records)[0], len(events)
            self._warnings = doctor.warnings(self._run_dir, self._steps, events)
        return overview_of(self._run_dir, self._steps, summarize(self._steps), events), events

    def _head(self, run: RunOverview, columns: int) -> list[Text]:
        of = f"/{run.planned_steps}" if run.planned_steps else ""
        head = Text().append(printable(run.name), "bold").append(f"  {run.status}", STYLES.get(run.status, ""))
        head.append(f"  step {run.steps}{of}")
        left = time_left(self._steps, run.planned_steps)
        if run.planned_steps:
            share = min(1.0, run.steps / run.planned_steps)
            width, full = ("━", "─") if self._blocks == BLOCKS else ("#", "-"), round(20 * share)
            head.append(" ").append(width[0] * full, "cyan").append(width[1] * (20 - full), "dim")
            head.append(f" {100 * share:.0f}%")
        last = names.number(self._steps[-1], "time") if self._steps else None
        if run.status in ("running", "unknown"):
            if left is not None:
                head.append(f", {duration(left)} left")
            if last is not None:
                head.append(f", last step {duration(max(0.0, time.time() - last))} ago", "dim")
        elif run.seconds is not None:
            head.append(f", {duration(run.seconds)} of work", "dim")
        return [head, *([labelled("", printable(run.reason), "dim")] if run.reason else [])]

    def _shown_samples(self) -> list[ShownSample]:
        available = self._run_dir.sample_steps()
        if not available:
            return []
        path = self._run_dir.samples(available[-1])
        key = (available[-1], path.stat().st_mtime)
        if key != self._sampled:
            self._sampled, self._samples = key, best_and_worst(read_samples(path)[0])
        return [ShownSample.of(row, f"{row.split}, step {available[-1]}") for row in self._samples]


def time_left(steps: Sequence[dict[str, Any]], planned: int | None) -> float | None:
    """Seconds that the remaining steps take at the pace of the last ones: the median time between their lines."""
    times = [when for line in steps[-RECENT:] if (when := names.number(line, "time")) is not None]
    gaps = sorted(max(0.0, b - a) for a, b in itertools.pairwise(times))
    if not gaps or not planned:
        return None
    return gaps[len(gaps) // 2] * max(0, planned - steps[-1]["step"])


def _cost_lines(recent: Sequence[dict[str, Any]]) -> list[Text]:
    """Where the time went, and what each process does and holds, of the last steps."""
    if not recent:
        return []
    seconds: Counter[str] = Counter()
    for line in recent:
        seconds.update(names.stage_seconds(line))
    lines, last = [], recent[-1]
    if seconds:
        whole, speed = names.number(last, names.STEP_SECONDS), names.number(last, "perf/throughput")
        text = shares(seconds) + (f"; last step {duration(whole)}" if whole is not None else "")
        lines.append(labelled("time", text + (f", {speed:,.0f} tokens/s" if speed is not None else "")))
    workers = []
    for kind, shown in (("idle", lambda v: f"idle {100 * v:.0f}%"), ("memory_gb", lambda v: f"{figure(v)} GiB")):
        for name in [name for name in last if name.startswith(f"perf/{kind}/")]:
            value = names.number(last, name)
            workers += [f"{name.rpartition('/')[2]} {shown(value)}"] if value else []
    return lines + ([labelled("workers", ", ".join(workers))] if workers else [])


def _event(event: EventRecord) -> str:
    where = f" (step {event.step})" if event.step is not None else ""
    when = time.strftime("%H:%M:%S", time.localtime(event.time))
    return f"{when} {event.kind} {event.subject}{where}: {event.detail}"


def watch(run_dir: RunDir, console: Console, once: bool = False) -> None:
    """Show the run until q or Ctrl-C; a single frame where nobody could press them."""
    watcher = Watcher(run_dir, ASCII_BLOCKS if console.options.ascii_only else BLOCKS)
    if once or not region.wanted(console) or not sys.stdin.isatty():
        for line in watcher.lines(console.width if console.is_terminal else 100, 1000):
            console.print(line, soft_wrap=True)
        return
    drawn = Region(console, watcher.lines, INTERVAL)
    before = termios.tcgetattr(sys.stdin)
    try:
        tty.setcbreak(sys.stdin)  # keys come as they are pressed; Ctrl-C stays what it is
        drawn.start()
        drawn.refresh()
        while not (select.select([sys.stdin], [], [], INTERVAL)[0] and sys.stdin.read(1) in ("q", "Q", "")):
            pass
    except KeyboardInterrupt:
        pass
    finally:
        termios.tcsetattr(sys.stdin, termios.TCSADRAIN, before)
        drawn.close(watcher.lines(*console.size))
