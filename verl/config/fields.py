"""What there is to say about a key: the values it takes, unit, default, where it acts, its other spellings."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from types import NoneType
from typing import Any, Literal, get_args, get_origin

from verl.config.aliases import VERL_DEFAULTS, spellings
from verl.config.base import Takes, Unit
from verl.config.keys import defaults, leaves, owner
from verl.config.text import one_line


@dataclass(frozen=True)
class Facts:
    """What there is to say about one key."""

    key: str
    meaning: str
    takes: str  # the values that it may have, in words
    unit: str | None  # what its number counts; None where it is no number
    default: str  # as YAML, or "required"
    acts_in: str  # the stage of a run, and the role or part, that reads it
    spellings: list[str]  # other names under which it is accepted
    verl: str  # verl's default where it is another; else empty


def facts(key: str) -> Facts:
    """Everything about a key that holds a value."""
    field, section = leaves()[key], owner(key)
    extra = field.json_schema_extra
    hints = list(_hints(field.annotation, field.metadata))
    return Facts(
        key,
        field.description or "",
        _takes(field.annotation, hints),
        next((hint.name for hint in hints if isinstance(hint, Unit)), None),
        one_line(defaults()[key]) if key in defaults() else "required",
        str(extra["acts_in"]) if isinstance(extra, dict) and "acts_in" in extra else section.acts_in,
        spellings(key),
        VERL_DEFAULTS.get(key, ""),
    )


def _hints(annotation: Any, metadata: list[Any]) -> Iterator[Any]:
    """Everything that is noted beside the types of a field, from outside to inside."""
    yield from metadata
    if hasattr(annotation, "__metadata__"):
        yield from annotation.__metadata__
    for part in get_args(annotation):
        yield from _hints(part, [])


_WORDS = {bool: "true or false", int: "whole number", float: "number", str: "text", NoneType: "null"}
_BOUNDS = {"ge": "at least", "gt": "above", "le": "at most", "lt": "below"}


def _takes(annotation: Any, hints: list[Any]) -> str:
    words = [hint.words for hint in hints if isinstance(hint, Takes)]
    kinds = words[:1] or list(dict.fromkeys(kind for kind in _kinds(annotation) if kind != "null"))
    for bound, said in _BOUNDS.items():
        found = [getattr(hint, bound) for hint in hints if getattr(hint, bound, None) is not None]
        kinds[0] += f", {said} {found[0]:g}" if found and found[0] < 1e15 else ""
    return " or ".join(kinds) + (", or null" if "null" in _kinds(annotation) else "")


def _kinds(annotation: Any) -> list[str]:
    """The alternatives of a type, each in words."""
    origin, parts = get_origin(annotation), get_args(annotation)
    if hasattr(annotation, "__metadata__"):
        return _kinds(parts[0])
    if origin is Literal:
        return [("one of " if len(parts) > 1 else "") + ", ".join(map(str, parts))]
    if origin is list:
        return [f"list of {_kinds(parts[0])[0]}s"]
    if origin is tuple:
        return [f"list of {len(parts)} {_kinds(parts[0])[0]}s"]
    if origin is dict:
        return ["mapping"]
    return [kind for part in parts for kind in _kinds(part)] if parts else [_WORDS[annotation]]
