"""What the report says at its top: how far the run came, and what went wrong on the way."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import Any

from verl.run_dir import EventRecord, json_line
from verl.tracking import names

# Events of every run; all other kinds are trouble. One without an end: it runs, or it was killed.
LIFE = ("started", "resumed", "stopped", "finished")
MAX_LISTED = 5  # steps or subjects named in one warning
MAX_MARKS = 200

# Counters of a step that should be zero.
_COUNTERS = {
    "reward/failed": "Responses not scored, the reward function raised an error",
    "reward/invalid": "Responses not scored, the reward function returned no usable number",
    "actor/skipped_steps": "Optimizer steps of the actor skipped, the gradient was not finite",
    "critic/skipped_steps": "Optimizer steps of the critic skipped, the gradient was not finite",
    "train/skipped_steps": "Optimizer steps skipped, the gradient was not finite",
}


def planned_steps(events: Iterable[EventRecord]) -> int | None:
    """Of the last start: how many steps the whole run has."""
    planned = None
    for event in events:
        match = re.search(r"\bof (\d+)$", str(event.detail)) if event.kind in ("started", "resumed") else None
        planned = int(match[1]) if match else planned
    return planned


def status(events: Iterable[EventRecord], steps: int) -> str:
    """``finished``, ``unfinished`` or ``stopped (why)``; without a word in the events, empty."""
    last = next((event for event in reversed(list(events)) if event.kind in LIFE), None)
    if last is None:
        return ""
    if last.kind == "stopped":
        return f"stopped ({last.detail})" if last.detail else "stopped"
    return "finished" if last.kind == "finished" and (last.step is None or last.step <= steps) else "unfinished"


def marks(events: Iterable[EventRecord]) -> list[dict[str, Any]]:
    """Steps to mark in the curves: ``{step, kind: resumed | trouble, text}``, one a step and kind."""
    found: dict[tuple[int, str], list[str]] = {}
    for event in events:
        if event.step is None or event.kind in ("started", "finished"):
            continue
        kind = "resumed" if event.kind == "resumed" else "trouble"
        texts = found.setdefault((event.step, kind), [])
        text = "resumed" if event.kind == "resumed" else f"{_words(event.kind)}: {event.subject}"
        if text not in texts:
            texts.append(text)
    listed = [{"step": step, "kind": kind, "text": _few(texts, 3)} for (step, kind), texts in sorted(found.items())]
    return listed[-MAX_MARKS:]


def warnings(steps: Sequence[dict[str, Any]], events: Sequence[EventRecord]) -> list[str]:
    """One sentence for each kind of trouble, from events and metrics."""
    return [*_stopped(events), *_from_counters(steps), *_not_finite(steps), *_from_events(events, steps)]


def skipped_updates(steps: Sequence[dict[str, Any]]) -> list[str]:
    """A sentence for each role that left out optimizer steps; without one, what the run learnt is not in doubt."""
    return _from_counters(steps, [name for name in _COUNTERS if name.endswith("/skipped_steps")])


def _stopped(events: Sequence[EventRecord]) -> list[str]:
    last = next((event for event in reversed(events) if event.kind in LIFE), None)
    if last is None or last.kind != "stopped":
        return []
    after = f" after step {last.step}" if last.step is not None else ""
    return [f"The run stopped{after}: {_text(last.detail) or 'no reason noted'}"]


def _from_counters(steps: Sequence[dict[str, Any]], counters: Iterable[str] = _COUNTERS) -> list[str]:
    found = []
    for name in counters:
        counts = {line["step"]: value for line in steps if (value := names.number(line, name))}
        if counts:
            found.append(f"{_COUNTERS[name]}: {sum(counts.values()):g} ({_steps(list(counts))})")
    return found


def _not_finite(steps: Sequence[dict[str, Any]]) -> list[str]:
    """``metrics.jsonl`` holds null for a number that was not finite."""
    nulls: dict[str, list[int]] = {}
    for line in steps:
        for name, value in line.items():
            if value is None:
                nulls.setdefault(name, []).append(line["step"])
    by_steps: dict[tuple[int, ...], list[str]] = {}
    for name, where in nulls.items():
        by_steps.setdefault(tuple(where), []).append(name)
    return [f"Not a finite number: {_few(found, MAX_LISTED)} ({_steps(where)})" for where, found in by_steps.items()]


def _from_events(events: Sequence[EventRecord], steps: Sequence[dict[str, Any]]) -> list[str]:
    seen_in_metrics = {name for line in steps for name, value in line.items() if value is None}
    by_kind: dict[str, list[EventRecord]] = {}
    for event in events:
        if event.kind not in LIFE and not (event.kind == "metric_not_finite" and event.subject in seen_in_metrics):
            by_kind.setdefault(event.kind, []).append(event)
    found = []
    for kind, group in by_kind.items():
        where = [event.step for event in group if event.step is not None]
        times = f" {len(group)} times" if len(group) > 1 else ""
        subjects = _few(list(dict.fromkeys(event.subject for event in group if event.subject)), 3)
        detail = f", {_text(group[0].detail)[:200]}" if len(group) == 1 and group[0].detail else ""
        found.append(
            f"{_words(kind).capitalize()}{times}"
            + (f" ({_steps(where)})" if where else "")
            + (f": {subjects}" if subjects else "")
            + detail
        )
    return found


def _words(kind: str) -> str:
    return kind.replace("_", " ")


def _text(detail: Any) -> str:
    return detail if isinstance(detail, str) else json_line(detail)


def _steps(where: Sequence[int]) -> str:
    """``step 4``; ``steps 4, 7 to 9``."""
    spans: list[list[int]] = []
    for step in sorted(set(where)):
        if spans and step == spans[-1][1] + 1:
            spans[-1][1] = step
        else:
            spans.append([step, step])
    texts = [str(first) if first == last else f"{first} to {last}" for first, last in spans]
    return ("step " if len(set(where)) == 1 else "steps ") + _few(texts, MAX_LISTED)


def _few(items: Sequence[str], limit: int) -> str:
    more = len(items) - limit
    return ", ".join(items[:limit]) + (f" and {more} more" if more > 0 else "")
