"""Where metrics go: ``metrics.jsonl`` always, and what ``trainer.logger`` names.

A tracker is one class (:class:`MetricTracker`), with an entry in ``LOGGERS`` or in a file that the configuration names.
:class:`Tracker` feeds them all, and none of them can stop the training.
"""

from __future__ import annotations

import importlib.util
import logging
import math
import os
import re
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol, TypeVar

from rich.console import Console

from verl.config.names import did_you_mean
from verl.errors import ConfigError
from verl.json_lines import append_line, clean_text, json_line
from verl.run_dir import RunDir
from verl.tracking import region
from verl.tracking.console import ConsoleTracker
from verl.tracking.live import LiveTracker, StageClock
from verl.tracking.names import read_metrics
from verl.tracking.samples import SampleRow, Split, spread
from verl.tracking.services import SERVICES, require_service
from verl.user_code import describe, load_user_function

logger = logging.getLogger(__name__)
Result = TypeVar("Result")


class MetricTracker(Protocol):
    """What is told about every step. Any of these may raise: the facade reports it and goes on."""

    def start(self) -> None:
        """Training begins; from here on :meth:`close` comes, whatever happens."""
        return None

    def log(self, step: int, metrics: dict[str, float]) -> None:
        """Metrics of one step."""
        return None

    def samples(self, step: int, split: Split, rows: Sequence[SampleRow]) -> None:
        """Responses of a training step or of a validation."""
        return None

    def close(self) -> None:
        """Nothing more comes."""
        return None


class JsonlTracker(MetricTracker):
    """``metrics.jsonl``: one line a step, ``{"step": 3, "time": 1700000000.123, <name>: <number>, ...}``.

    ``time`` is seconds since 1970. JSON has no NaN or infinity: a value that is not finite is written as ``null``, and
    the facade notes the first one of each metric in ``events.log``. Every line is written at once and whole, and the
    file is opened anew each time, so that readers follow it and :meth:`RunDir.truncate_after` may replace it.
    """

    def __init__(self, run_dir: RunDir) -> None:
        self._path = run_dir.metrics

    def log(self, step: int, metrics: dict[str, float]) -> None:
        head = {"step": step, "time": round(time.time(), 3)}
        append_line(self._path, json_line(head | metrics | head))


class TensorBoardTracker(MetricTracker):
    """TensorBoard events in the run's ``tensorboard`` folder, under the same names; configuration and samples as text.
    Events of a killed run behind ``resumed_from``, the step that the run goes on from, are purged."""

    def __init__(self, run_dir: RunDir, resumed_from: int | None = None) -> None:
        if importlib.util.find_spec("tensorboard") is None:
            raise ConfigError("tensorboard is not installed", "trainer.logger", "pip install tensorboard")
        from torch.utils.tensorboard import SummaryWriter  # slow to import, and only wanted here

        purge = None if resumed_from is None else resumed_from + 1
        self._writer: Any = SummaryWriter(str(run_dir.tensorboard), purge_step=purge)
        self._config = run_dir.config

    def start(self) -> None:
        if self._config.is_file():
            self._writer.add_text("config", _markdown_code(self._config.read_text(encoding="utf-8")), 0)

    def log(self, step: int, metrics: dict[str, float]) -> None:
        for name, value in metrics.items():
            self._writer.add_scalar(name, value, step)
        self._writer.flush()

    def samples(self, step: int, split: Split, rows: Sequence[SampleRow]) -> None:
        for position in spread(len(rows), 3 if split == "val" else 0):
            row = rows[position]
            text = f"{row.prompt}\n\n{row.response}\n\nreward {row.score}"
            self._writer.add_text(f"samples/{position}", _markdown_code(text), step)

    def close(self) -> None:
        self._writer.close()


def _markdown_code(text: str) -> str:
    """Shown as it is: an indented block cannot be ended by anything in it."""
    return "".join(f"    {line}\n" for line in clean_text(text).splitlines())


class Tracker:
    """Feeds every tracker; one that fails is reported once, tried again at the next step, and never stops training.
    Failures, and values that are not finite, are noted in ``events.log``."""

    def __init__(self, run_dir: RunDir, trackers: Mapping[str, MetricTracker]) -> None:
        self._run_dir = run_dir
        self._trackers = dict(trackers)
        self._reported: set[str] = set()

    def log(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Logs one step. Call it once a step: merge validation metrics into the step's own."""
        values = {name: _as_number(value) for name, value in metrics.items()}
        for name, value in values.items():
            if not math.isfinite(value):
                self._report(f"metric {name}", "metric_not_finite", name, f"logged as {value}", step)
        for name, tracker in self._trackers.items():
            self.attempt(name, partial(tracker.log, step, dict(values)), step)

    def samples(self, step: int, split: Split, rows: Sequence[SampleRow]) -> None:
        for name, tracker in self._trackers.items():
            self.attempt(name, partial(tracker.samples, step, split, rows), step)

    def attempt(self, name: str, action: Callable[[], Result], step: int | None = None) -> Result | None:
        """Does what may fail without harm (samples, report): a failure is reported once by ``name``; None then."""
        try:
            return action()
        except Exception as error:
            detail = without_secrets(f"{type(error).__name__}: {error}")
            self._report(f"tracker {name}", "tracker_failed", name, detail, step)
            return None

    def close(self) -> None:
        for name, tracker in self._trackers.items():
            self.attempt(name, tracker.close)

    def __enter__(self) -> Tracker:
        for name, tracker in self._trackers.items():
            self.attempt(name, tracker.start)
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _report(self, key: str, kind: str, subject: str, detail: str, step: int | None) -> None:
        if key in self._reported:
            return
        self._reported.add(key)
        self._run_dir.log_event(kind, subject, detail, step)
        logger.warning("%s: %s, %s (reported once; training goes on)", kind, subject, detail)


_SECRET_NAME = re.compile(r"KEY|TOKEN|SECRET|PASSW|CREDENTIAL", re.IGNORECASE)


def without_secrets(text: str) -> str:
    """``text`` without log-ins in addresses and without the values of environment variables that hold keys."""
    for name, value in os.environ.items():
        if _SECRET_NAME.search(name) and len(value) >= 8:
            text = text.replace(value, f"<{name}>")
    return re.sub(r"(\w+://)[^/@\s]+@", r"\1<log-in>@", text)


def _as_number(value: Any) -> float:
    if isinstance(value, int | float):
        return value
    try:
        return float(value)  # numpy and torch scalars
    except (TypeError, ValueError):
        return math.nan


@dataclass(frozen=True)
class TrackerContext:
    """What a tracker may be built from."""

    run_dir: RunDir
    total_steps: int  # for "step k/N" and the time left
    resumed_from: int | None = None  # step of the checkpoint that the run goes on from, None for a fresh run
    console: Console | None = None  # where a person looks
    parts: StageClock | None = None  # which part of a step runs now; None: nobody knows, and nothing is shown live
    samples: int = 3  # validation samples to show


def _console_tracker(context: TrackerContext) -> MetricTracker:
    console = context.console or Console(highlight=False)
    if context.parts is None or not region.wanted(console):
        return ConsoleTracker(context.total_steps, console, samples=context.samples)
    history, _ = read_metrics(context.run_dir)
    name = context.run_dir.path.resolve().name
    return LiveTracker(name, context.total_steps, console, context.parts, history, min(2, context.samples))


def _service(name: str, context: TrackerContext) -> MetricTracker:
    return SERVICES[name](context.run_dir, context.resumed_from is not None)


# trainer.logger name -> how it is built. jsonl is always on, naming it is harmless.
LOGGERS: dict[str, Callable[[TrackerContext], MetricTracker]] = {
    "jsonl": lambda context: JsonlTracker(context.run_dir),
    "console": _console_tracker,
    "tensorboard": lambda context: TensorBoardTracker(context.run_dir, context.resumed_from),
    **{name: partial(_service, name) for name in SERVICES},
}


def _builder(name: str) -> Callable[[TrackerContext], MetricTracker]:
    """How a tracker is built: one of ``LOGGERS``, or for ``file.py:Class`` the user's own class. Raises ConfigError:
    there is none of that name, its package is missing, or its file cannot be imported."""
    path, _, class_name = name.partition(":")
    if path.endswith(".py"):
        make, file = load_user_function(path, class_name, "tracker", "trainer.logger", ConfigError, is_class=True)

        def own(context: TrackerContext) -> MetricTracker:
            try:
                return make(context)  # type: ignore[no-any-return]
            except Exception as error:
                fix = "it is made with one argument, a TrackerContext; see docs/extending.md"
                raise ConfigError(f"the tracker {name} cannot be made", describe(error, file), fix) from error

        return own
    if name not in LOGGERS:
        fix = f"{did_you_mean(name, LOGGERS)}available: {', '.join(sorted(LOGGERS))}, and FILE.py:CLASS of your own"
        raise ConfigError("unknown logger in trainer.logger", name, fix)
    if name in SERVICES:
        require_service(name)
    return LOGGERS[name]


def check_loggers(names: Sequence[str]) -> None:
    """Raises ConfigError where ``trainer.logger`` names what is not there or not installed."""
    for name in names:
        _builder(name)


def build_tracker(names: Sequence[str], context: TrackerContext) -> Tracker:
    """The trackers of a run: jsonl first, then ``names`` (``trainer.logger``) in their order. Raises ConfigError: as
    :func:`check_loggers`, or a class of the user's own cannot be made."""
    return Tracker(context.run_dir, {name: _builder(name)(context) for name in dict.fromkeys(["jsonl", *names])})
