"""JSON that gives back what it was given: tuples, sets, dates and dicts whose keys are not strings survive.

Problem generators compare metadata with ``==``; a tuple that comes back as a list would make a right answer wrong.
Encoded as ``{"__kind__": name, "items": ...}``; everything else is plain JSON.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from datetime import date, datetime, time, timedelta
from decimal import Decimal
from typing import Any

KIND = "__kind__"

# Values that JSON lacks and tables have: how they are written and read again.
_WRITTEN: dict[type, tuple[str, Callable[[Any], Any], Callable[[Any], Any]]] = {
    bytes: ("bytes", bytes.hex, bytes.fromhex),
    Decimal: ("decimal", str, Decimal),
    datetime: ("datetime", datetime.isoformat, datetime.fromisoformat),
    date: ("date", date.isoformat, date.fromisoformat),
    time: ("time", time.isoformat, time.fromisoformat),
    timedelta: ("timedelta", lambda value: [value.days, value.seconds, value.microseconds], lambda t: timedelta(*t)),
}
_READ: dict[str, Callable[[Any], Any]] = {
    **{name: read for name, _, read in _WRITTEN.values()},
    "tuple": lambda items: tuple(map(unpack, items)),
    "set": lambda items: set(map(unpack, items)),
    "dict": lambda items: {unpack(key): unpack(value) for key, value in items},
}


def dump_typed(value: Any) -> str:
    """One line of JSON. What JSON cannot hold and we do not know becomes its text."""
    return json.dumps(pack(value, str), ensure_ascii=True)


def load_typed(text: str) -> Any:
    return unpack(json.loads(text))


def pack(value: Any, other: Callable[[Any], Any] | None = None) -> Any:
    """``value`` as JSON can hold it; numpy's and torch's scalars and arrays become Python's numbers and lists.
    ``other``: makes something of what is no plain value; without it that is a TypeError."""
    if value is None or isinstance(value, str | int | float):
        return value
    if isinstance(value, list):
        return [pack(inner, other) for inner in value]
    if isinstance(value, dict):
        if all(isinstance(key, str) for key in value) and KIND not in value:
            return {key: pack(inner, other) for key, inner in value.items()}
        return {KIND: "dict", "items": [[pack(key, other), pack(inner, other)] for key, inner in value.items()]}
    if isinstance(value, tuple):
        return {KIND: "tuple", "items": [pack(inner, other) for inner in value]}
    if isinstance(value, set | frozenset):
        return {KIND: "set", "items": [pack(inner, other) for inner in sorted(value, key=repr)]}
    if type(value) in _WRITTEN:
        name, write, _ = _WRITTEN[type(value)]
        return {KIND: name, "items": write(value)}
    if hasattr(value, "tolist") and type(listed := value.tolist()) is not type(value):
        return pack(listed, other)
    if other is None:
        raise TypeError(f"{type(value).__name__} is no plain value")
    return other(value)


def unpack(told: Any) -> Any:
    """What :func:`pack` was given. Raises ValueError, TypeError and others where it is no such thing."""
    if isinstance(told, list):
        return [unpack(inner) for inner in told]
    if not isinstance(told, dict):
        return told
    return _READ[told[KIND]](told["items"]) if KIND in told else {key: unpack(inner) for key, inner in told.items()}
