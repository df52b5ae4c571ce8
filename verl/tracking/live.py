"""The live display of a run on a terminal: progress, curves, stage times and samples, redrawn in place."""

from __future__ import annotations

import re
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from rich.cells import cell_len, chop_cells
from rich.console import Console
from rich.text import Text

from verl.tracking import names
from verl.tracking.console import ASCII_BLOCKS, BLOCKS, TimeLeft, duration, figure, one_line, sample_head, sparkline
from verl.tracking.region import Region
from verl.tracking.samples import SampleRow, Split

SAMPLE_SECONDS = 5.0  # a sample stays on the screen at least that long, so that it can be read
READ_AT_MOST = 2000  # characters of a text that may be very long
LABEL_WIDTH = 9
MARGIN = 3  # columns on the right that the region leaves free

_CHAT_MARK = re.compile(r"<\|[^|>\s]*\|>")


class StageClock(Protocol):
    """Which part of a step runs now; see :class:`verl.trainer.timer.StepTimer`."""

    @property
    def running(self) -> tuple[str, float] | None: ...

    def so_far(self) -> dict[str, float]: ...


class LiveTracker:
    """Shows a run while it trains and leaves its curves in the scrollback.

    The training thread only hands over figures; a thread of the region draws them. ``parts``: which part of a step runs
    now, by ``clock`` (seconds). ``history``: steps that the run has already (:func:`verl.tracking.names.read_metrics`).
    ``samples``: how many are shown at most, the best of a batch, then the worst.
    """

    def __init__(
        self,
        title: str,
        total_steps: int,
        console: Console,
        parts: StageClock,
        history: Sequence[Mapping[str, Any]] = (),
        samples: int = 2,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._title, self._total, self._parts, self._clock = title, total_steps, parts, clock
        self._step = max((line["step"] for line in history), default=0)
        self._curves = [names.figures(line) for line in history]
        self._curves_made = (0, 0)  # of how many steps and for how many columns
        self._curves_shown: list[Text] = []
        self._kl_label = names.kl_label(history)
        self._time_left = TimeLeft(total_steps, clock)
        self._left: tuple[float | None, float] = (None, 0.0)  # seconds, and when they were guessed
        self._last: Mapping[str, float] = {}
        self._stages: Counter[str] = Counter()  # seconds of all steps of this session
        self._limit = samples
        self._samples: list[ShownSample] = []
        self._sampled = -SAMPLE_SECONDS
        self._started = clock()
        self._console = console
        ascii_only = console.options.ascii_only
        self._blocks, self._bar = (ASCII_BLOCKS, "#-") if ascii_only else (BLOCKS, "━─")
        self._region = Region(console, self.lines)

    def start(self) -> None:
        self._region.start()

    def log(self, step: int, metrics: dict[str, float]) -> None:
        self._step, self._last = step, metrics
        self._curves.append(names.figures(metrics))
        found = names.kl(metrics)
        self._kl_label = found[0] if found else self._kl_label
        self._left = (self._time_left.after(step, metrics), self._clock())
        self._stages.update(names.stage_seconds(metrics))

    def samples(self, step: int, split: Split, rows: Sequence[SampleRow]) -> None:
        if self._clock() - self._sampled >= SAMPLE_SECONDS:
            kind = "held-out, " if split == "val" else ""
            self._samples = [ShownSample.of(row, f"{kind}step {step}") for row in best_and_worst(rows)[: self._limit]]
            self._sampled = self._clock()

    def close(self) -> None:
        self._region.close(self.summary(min(80, self._console.width)))

    # --- what is drawn

    def lines(self, columns: int, rows: int) -> list[Text]:
        """As much as there is room for, the most important first; the whole is at most ``rows - 1`` lines high."""
        room = max(1, rows - 1)
        lines = [self._progress(columns), self._now(), *self._curve_lines(columns)]
        if self._last:
            lines.append(self._last_step())
        for sample in self._samples:
            found = sample.lines(columns)
            if len(lines) + len(found) <= room:
                lines += found
        return lines[:room]

    def summary(self, columns: int = 80) -> list[Text]:
        done = self._step >= self._total
        state = f"{self._total} steps" if done else f"stopped after step {self._step} of {self._total}"
        spent = duration(self._clock() - self._started)
        head = Text().append(f"{self._title}: ", "bold").append(f"{state}, {spent}", "green" if done else "yellow")
        times = [labelled("time").append(shares(self._stages))] if self._stages else []
        return [head, *self._curve_lines(columns), *times]

    def _progress(self, columns: int) -> Text:
        left, guessed = self._left
        now = self._clock()
        head = Text().append(self._title, "bold").append(f"  step {self._step}/{self._total} ", style="bold cyan")
        tail = f" {100 * self._step // max(self._total, 1)}%  {duration(now - self._started)}"
        if left is not None:
            tail += f", {duration(max(0.0, left - (now - guessed)))} left"
        if head.cell_len + len(tail) > columns - MARGIN:
            head = Text().append(f"{self._step}/{self._total} ", "bold cyan")  # the name is not what matters
        width = min(60, columns - MARGIN - head.cell_len - len(tail))
        if width >= 4:
            full = width * min(self._step, self._total) // max(self._total, 1)
            head.append(self._bar[0] * full, style="cyan").append(self._bar[1] * (width - full), style="dim")
        return head.append(tail)

    def _now(self) -> Text:
        """The parts of the step under way, the one that runs now with its seconds so far."""
        running = self._parts.running
        name = running[0] if running is not None and running[0] != "step" else None
        ended = [
            f"{part} {duration(spent)}" for part, spent in self._parts.so_far().items() if part not in ("step", name)
        ]
        line = labelled("now").append(", ".join(ended))
        if running is not None and name is not None:
            spent = duration(max(0.0, self._clock() - running[1]))
            line.append(f"{', ' if ended else ''}{name} {spent} …", style="bold yellow")
        return line

    def _curve_lines(self, columns: int) -> list[Text]:
        """Made once a step and width: all steps are looked at."""
        key = (len(self._curves), columns)
        if key != self._curves_made:
            lines = curve_lines(names.curves(self._curves[: key[0]], self._kl_label), columns, self._blocks)
            self._curves_made, self._curves_shown = key, lines
        return self._curves_shown

    def _last_step(self) -> Text:
        stages, whole = names.stage_seconds(self._last), names.number(self._last, names.STEP_SECONDS)
        line = labelled("last")
        line.append(shares(stages) if whole is None else f"{duration(whole)}: {shares(stages)}")
        speed = names.number(self._last, "perf/throughput")
        return line if speed is None else line.append(f", {speed:,.0f} tokens/s")


CURVE_STYLES = {"reward": "cyan", "loss": "cyan", "held-out": "green"}


def curve_lines(curves: Mapping[str, Sequence[float]], columns: int, blocks: str = BLOCKS) -> list[Text]:
    """A line for each of :func:`verl.tracking.names.curves`, the gradient norm left out."""
    return [curve_line(label, curves[label], columns, blocks) for label in curves if label != "grad norm"]


def curve_line(label: str, values: Sequence[float], columns: int, blocks: str = BLOCKS, widest: int = 60) -> Text:
    """Its newest value, the curve, and from where to where it goes."""
    style = CURVE_STYLES.get(label, "")
    line = labelled(label).append(f"{figure(values[-1]):>8} ", style)
    span = f" {figure(min(values))} to {figure(max(values))}"
    width = columns - MARGIN - line.cell_len
    if width >= 30:
        width -= 20
    else:
        span = ""
    curve = sparkline(values, min(width, widest), blocks)
    return line.append(curve.ljust(min(width, widest) if span else 0), style).append(span, "dim")


def labelled(label: str, text: str = "", style: str = "") -> Text:
    return Text().append(label.ljust(LABEL_WIDTH), "dim").append(one_line(text), style)


def shares(seconds: Mapping[str, float]) -> str:
    """``gen 55%, update 40%``: each stage's part of all of them."""
    whole = sum(seconds.values())
    stages = [name for name in names.STAGES if name in seconds]
    return ", ".join(f"{name} {100 * seconds[name] / whole:.0f}%" for name in stages) if whole > 0 else ""


def best_and_worst(rows: Sequence[SampleRow]) -> list[SampleRow]:
    """The row with the highest score and the one with the lowest; one row where they are the same or none is scored."""
    scored = sorted((row for row in rows if row.score is not None), key=lambda row: -(row.score or 0.0))
    if not scored:
        return list(rows[:1])
    return scored[:1] if scored[0].score == scored[-1].score else [scored[0], scored[-1]]


@dataclass(frozen=True)
class ShownSample:
    """A response made safe to show."""

    head: Text
    prompt: str  # each on one line
    response: str

    @classmethod
    def of(cls, row: SampleRow, title: str) -> ShownSample:
        prompt = one_line(_CHAT_MARK.sub(" ", row.prompt[-READ_AT_MOST:]))
        head = sample_head(row).append(f" · {title}", style="dim")
        return cls(head, prompt, one_line(row.response[:READ_AT_MOST]) or "(empty)")

    def lines(self, columns: int) -> list[Text]:
        """Three or four: scores, the end of the prompt, and the start of the response in at most two lines."""
        width = max(4, columns - MARGIN - 3)
        prompt = self.prompt[-width:]
        if cell_len(prompt) > width or len(self.prompt) > width:
            # The question stands at the end, behind a system prompt.
            prompt = "…" + chop_cells(prompt[::-1], width - 1)[0][::-1]
        response = chop_cells(self.response[: 3 * width], width)
        if len(response) > 2:
            response = [response[0], response[1] + "…"]
        shown = [Text("→ " if i == 0 else "  ").append(part) for i, part in enumerate(response)]
        return [self.head, Text("  " + prompt, style="dim"), *shown]
