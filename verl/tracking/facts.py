"""What ``config.yaml`` and ``events.log`` of a run say: keys beside their defaults, how far it came, steps to mark."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import yaml

from verl.config import Config
from verl.config.keys import defaults, leaves, using
from verl.config.schema_supervised import schema_of
from verl.diagnostics.evidence import few
from verl.json_lines import json_value
from verl.run_dir import EventRecord, RunDir


def read_config(run_dir: RunDir) -> tuple[str, dict[str, Any] | None]:
    """The text of ``config.yaml`` (empty where there is none) and its tree (None where it holds none)."""
    try:
        text = run_dir.config.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return "", None
    try:
        tree = yaml.load(text, Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader))
    except (yaml.YAMLError, RecursionError, ValueError):  # a date that does not exist is a ValueError
        return text, None
    return text, tree if isinstance(tree, dict) else None


def get(tree: dict[str, Any] | None, key: str) -> Any:
    """The value of a dotted key, None where it is absent."""
    found: Any = tree
    for part in key.split("."):
        if not isinstance(found, dict):
            return None
        found = found.get(part)
    return found


def settings(tree: dict[str, Any]) -> list[dict[str, Any]]:
    """``{key, value, meaning, set, default?, unknown?}`` of every value; ``set``: it differs from the default. A key
    without ``default`` has none. Keys that this version does not know are ``unknown``."""
    with using(schema_of(tree) or Config):
        known, standard, found = leaves(), json_value(defaults()), []
        for key, value in _flat(json_value(tree), ""):
            field = known.get(key)
            entry = {"key": key, "value": value, "meaning": (field.description or "") if field else ""}
            entry["set"] = key not in standard or standard[key] != value
            entry |= {"default": standard[key]} if key in standard else {}
            found.append(entry | ({} if field else {"unknown": True}))
        return found


def _flat(tree: dict[str, Any], prefix: str) -> Iterator[tuple[str, Any]]:
    for name, value in tree.items():
        key = f"{prefix}{name}"
        if isinstance(value, dict) and value and key not in leaves():
            yield from _flat(value, f"{key}.")
        else:
            yield key, value


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
    return kind.replace("_", " ")
