"""How far a run came, and the steps to mark; what is wrong with it, verl/diagnostics says."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import Any

from verl.diagnostics.evidence import few
from verl.run_dir import EventRecord

# Events of every run; all other kinds are trouble. One without an end: it runs, or it was killed.
LIFE = ("started", "resumed", "stopped", "finished")
# What stops from outside leave in the events, in words; every other reason of a stop is an error.
BY_HAND = {
    "KeyboardInterrupt": "Ctrl-C",
    "_Terminated": "SIGTERM",
    "AlarmRaised": "an alarm, see trainer.alarms",
    "SystemExit": "SIGTERM",
    "BrokenPipeError": "the reader of its output was gone",
}
MAX_MARKS = 200


def planned_steps(events: Iterable[EventRecord]) -> int | None:
    """Of the last start: how many steps the whole run has."""
    planned = None
    for event in events:
        match = re.search(r"\bof (\d+)$", str(event.detail)) if event.kind in ("started", "resumed") else None
        planned = int(match[1]) if match else planned
    return planned


def last_of_life(events: Sequence[EventRecord]) -> EventRecord | None:
    """The last event that says whether the run goes on."""
    return next((event for event in reversed(events) if event.kind in LIFE), None)


def why_stopped(event: EventRecord) -> str:
    """In words where it was stopped from outside, else the error's name."""
    return BY_HAND.get(str(event.detail), str(event.detail))


def status(events: Sequence[EventRecord], steps: int) -> str:
    """``finished``, ``unfinished`` or ``stopped (why)``; without a word in the events, empty."""
    last = last_of_life(events)
    if last is None:
        return ""
    if last.kind == "stopped":
        return f"stopped ({why_stopped(last)})" if last.detail else "stopped"
    return "finished" if last.kind == "finished" and (last.step is None or last.step <= steps) else "unfinished"


def marks(events: Iterable[EventRecord]) -> list[dict[str, Any]]:
    """Steps to mark in the curves: ``{step, kind: resumed | trouble, text}``, one a step and kind."""
    found: dict[tuple[int, str], list[str]] = {}
    for event in events:
        if event.step is None or event.kind in ("started", "finished"):
            continue
        kind = "resumed" if event.kind == "resumed" else "trouble"
        texts = found.setdefault((event.step, kind), [])
        text = "resumed" if event.kind == "resumed" else f"{words(event.kind)}: {event.subject}"
        if text not in texts:
            texts.append(text)
    listed = [{"step": step, "kind": kind, "text": few(texts, 3)} for (step, kind), texts in sorted(found.items())]
    return listed[-MAX_MARKS:]


def words(kind: str) -> str:
    """An event's kind as a person reads it."""
    return kind.replace("_", " ")
