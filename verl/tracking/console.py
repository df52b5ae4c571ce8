"""What a person sees in a log: one line a step, and a few samples at each evaluation."""

from __future__ import annotations

import itertools
import math
import re
import time
import unicodedata
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from statistics import mean

from rich.console import Console
from rich.text import Text

from verl.json_lines import clean_text
from verl.tracking import names
from verl.tracking.samples import SampleRow, Split, spread

# Whole terminal sequences (CSI, OSC and other strings up to their end, two-byte ones), so that no rest of them shows.
_TERMINAL_SEQUENCE = re.compile(
    r"(?:\x1b\[|\x9b)[0-?]*[ -/]*[@-~]"
    r"|(?:\x1b[\]PX^_]|[\x9d\x90\x98\x9e\x9f])[^\x07\x1b\x90\x98\x9c-\x9f]*(?:\x07|\x1b\\|\x9c)"
    r"|\x1b[ -/]*[0-~]?"
)

_BIDI = frozenset("\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069\u200e\u200f")


def printable(text: str, limit: int | None = None) -> str:
    """Untrusted ``text`` for a terminal: control sequences, control and direction-changing characters removed. Line
    breaks and tabs stay. ``limit``: longest kept, in characters; a longer text is cut in its middle, saying how much is
    missing."""
    text = _TERMINAL_SEQUENCE.sub("", clean_text(text).replace("\r\n", "\n"))
    text = "".join(c for c in text if c in "\n\t" or (unicodedata.category(c) != "Cc" and c not in _BIDI))
    if limit is not None and len(text) > limit:
        tail = limit // 4
        text = f"{text[: limit - tail]} […{len(text) - limit} characters…] {text[len(text) - tail :]}"
    return text


def one_line(text: str, limit: int | None = None) -> str:
    """The same without line breaks and runs of spaces."""
    return " ".join(printable(text, limit).split())


def duration(seconds: float | None) -> str:
    """Seconds for people: ``0.08s``, ``8.3s``, ``4m05s``, ``2h07m``, ``3d04h``; ``-`` for none and for no end."""
    if seconds is None or not math.isfinite(seconds):
        return "-"
    if seconds < 0.995:
        return f"{seconds:.2f}s"
    if seconds < 59.95:
        return f"{seconds:.1f}s"
    whole = round(seconds)
    if whole < 3600:
        return f"{whole // 60}m{whole % 60:02d}s"
    if whole < 86400:
        return f"{whole // 3600}h{whole % 3600 // 60:02d}m"
    return f"{whole // 86400}d{whole % 86400 // 3600:02d}h"


BLOCKS, ASCII_BLOCKS = "▁▂▃▄▅▆▇█", "_.:-=+*#"


def sparkline(values: Sequence[float], width: int, blocks: str = BLOCKS) -> str:
    """A curve in one line of at most ``width`` characters, from its lowest value to its highest. Neighbours are
    averaged where there are more values than characters. All equal: a flat line."""
    count = min(len(values), width)
    if count <= 0:
        return ""
    edges = [i * len(values) // count for i in range(count + 1)]
    means = [sum(values[a:b]) / (b - a) for a, b in itertools.pairwise(edges)]
    low, span = min(means), max(means) - min(means)
    if not 0 < span < math.inf:
        return blocks[0] * count
    return "".join(blocks[round((value - low) / span * 7)] for value in means)


def figure(value: float | None) -> str:
    """A number in at most 8 characters: plain where that shows three digits, else scientific."""
    if value is None:
        return "-"
    if value == 0:
        return "0"
    size = abs(value)
    if size < 0.001 or size >= 100_000:
        return f"{value:.1e}"
    return f"{value:.{4 if size < 1 else 3 if size < 10 else 1}f}"


class TimeLeft:
    """Guesses how long the remaining steps take, from how long the last ones took. ``total_steps``: of the whole run.
    ``clock``: seconds."""

    def __init__(self, total_steps: int, clock: Callable[[], float]) -> None:
        self._total, self._clock = total_steps, clock
        self._last: float | None = None
        self._durations: deque[float] = deque(maxlen=20)

    def after(self, step: int, metrics: Mapping[str, object]) -> float | None:
        """Remaining steps times the mean wall time between the last calls (the first step: its own seconds)."""
        now, last = self._clock(), self._last
        own = names.number(metrics, names.STEP_SECONDS)
        trained = names.number(metrics, names.REWARD) is not None or own is not None
        took = now - last if trained and last is not None else own
        self._durations.extend([] if took is None else [took])
        self._last = now
        return max(0, self._total - step) * mean(self._durations) if self._durations else None


_WIDTHS = {"reward": 8, "val": 8, "length": 7, "KL": 9, "entropy": 8, "grad": 8}
_SUPERVISED_WIDTHS = {"loss": 8, "accuracy": 8, "val": 8, "length": 7, "grad": 8, "update": 7}
_STAGE_WIDTHS = {"gen": 7, "process": 7, "update": 7}
# On a narrow terminal, the first ones first.
_LEFT_OUT_FIRST = ("process", "update", "grad", "gen", "entropy", "KL", "length", "accuracy", "val")


class ConsoleTracker:
    """One aligned line a step, under 100 columns, coloured on a terminal; a narrow one gets fewer figures.

    Reward (``critic/score/mean``), validation, response length, KL, entropy, gradient norm, seconds by stage and the
    time left; of supervised training loss, accuracy (reward models), validation, length, gradient norm. ``-`` where a
    step has no such figure. Of each validation ``samples`` responses. The header comes again every ``header_every``
    lines.
    """

    def __init__(
        self,
        total_steps: int,
        console: Console | None = None,
        header_every: int = 20,
        clock: Callable[[], float] = time.monotonic,
        samples: int = 3,
    ) -> None:
        self._total = total_steps
        self._console = console or Console(highlight=False)
        self._header_every = header_every
        self._time_left = TimeLeft(total_steps, clock)
        self._samples = samples
        self._lines = 0
        self._kl_label = "KL"
        self._widths = _WIDTHS | _STAGE_WIDTHS

    def start(self) -> None:
        pass

    def log(self, step: int, metrics: dict[str, float]) -> None:
        if self._lines == 0 and (names.LOSS in metrics or names.VAL_LOSS in metrics):
            scored = names.ACCURACY in metrics or names.VAL_ACCURACY in metrics
            self._widths = {name: w for name, w in _SUPERVISED_WIDTHS.items() if scored or name != "accuracy"}
        kl = names.kl(metrics)
        new_label = kl is not None and self._kl_label not in ("KL", kl[0])  # another KL under a header that named one
        if kl is not None:
            self._kl_label = kl[0]
        if new_label or self._lines % self._header_every == 0:
            self._print(self._header())
            self._lines = 0
        self._lines += 1
        self._print(self._line(step, metrics))

    def samples(self, step: int, split: Split, rows: Sequence[SampleRow]) -> None:
        if split == "val":
            print_samples(self._console, rows, self._samples)

    def close(self) -> None:
        pass

    def _header(self) -> Text:
        cells = [f"{'step':>{self._step_width}}"]
        cells += [f"{self._kl_label if name == 'KL' else name:>{width}}" for name, width in self._columns().items()]
        return Text(" ".join([*cells, f"{'ETA':>6}"]), style="dim")

    def _line(self, step: int, metrics: dict[str, float]) -> Text:
        figures, stages = names.figures(metrics), names.stage_seconds(metrics)
        styles = {"reward": "bold cyan", "loss": "bold cyan", "val": "bold green"} | dict.fromkeys(_STAGE_WIDTHS, "dim")
        line = Text(f"{f'{step}/{self._total}':>{self._step_width}}")
        for name, width in self._columns().items():
            text = duration(stages.get(name)) if name in _STAGE_WIDTHS else figure(figures[name])
            line.append(" ").append(f"{text:>{width}}", style=styles.get(name, ""))
        return line.append(f" {duration(self._time_left.after(step, metrics)):>6}")

    def _columns(self) -> dict[str, int]:
        columns = dict(self._widths)
        for name in _LEFT_OUT_FIRST:
            taken = self._step_width + sum(width + 1 for width in columns.values()) + 7
            if self._console.is_terminal and taken > self._console.width:
                columns.pop(name, None)
        return columns

    @property
    def _step_width(self) -> int:
        return 2 * len(str(self._total)) + 1

    def _print(self, line: Text) -> None:
        self._console.print(line, soft_wrap=True)


def print_samples(console: Console, rows: Sequence[SampleRow], k: int = 3, limit: int = 400) -> None:
    """Prints ``k`` of the rows with their scores: evenly spread, hence the same problems at each evaluation. Prompts
    and responses are untrusted: control sequences are stripped, each is cut to ``limit`` characters."""
    for position in spread(len(rows), k):
        row = rows[position]
        console.print(sample_head(row), soft_wrap=True)
        console.print(Text(printable(row.prompt.strip(), limit), style="dim"))
        console.print(Text().append("→ ", "bold").append(printable(row.response.strip(), limit) or "(empty)"))


def sample_head(row: SampleRow) -> Text:
    """One line about a response: its score first, on one line whatever the row holds."""
    score = "not scored" if row.score is None else f"reward {row.score:.4g}"
    style = "yellow" if row.score is None else "green" if row.score > 0 else "red"
    facts: Mapping[str, str] = {
        "truth": "" if row.ground_truth is None else one_line(str(row.ground_truth), 60),
        "tokens": str(row.response_length) if row.response_length else "",
        "ended by": printable(row.finish_reason, 20),
    }
    head = Text("── ").append(score, style=f"bold {style}")
    return head.append("".join(f" · {name} {value}" for name, value in facts.items() if value), style="dim")
