"""The dotted names of the schema, read off its classes, and what there is to say about each.

There are several schemas (training by RL, supervised training), and everything that is said about keys is said of the
one in use: :func:`using`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import cache
from types import NoneType
from typing import Any, Literal, get_args, get_origin

from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from verl.config.aliases import VERL_DEFAULTS, spellings
from verl.config.base import Section, Takes, Unit, plain_types
from verl.config.schema import Config

_SCHEMA: ContextVar[type[Section]] = ContextVar("schema", default=Config)


@contextmanager
def using(schema: type[Section]) -> Iterator[None]:
    """Inside, the keys are those of ``schema`` (outside, those of ``Config``)."""
    token = _SCHEMA.set(schema)
    try:
        yield
    finally:
        _SCHEMA.reset(token)


def _walk(section: type[Section], prefix: str = "") -> Iterator[tuple[str, FieldInfo, bool]]:
    for name, field in section.model_fields.items():
        key, kind = prefix + name, field.annotation
        inner = isinstance(kind, type) and issubclass(kind, Section)
        yield key, field, inner
        if inner:
            yield from _walk(kind, key + ".")  # type: ignore[arg-type]


@cache
def _keys(schema: type[Section]) -> tuple[dict[str, FieldInfo], dict[str, FieldInfo], frozenset[str]]:
    values = {key: field for key, field, inner in _walk(schema) if not inner}
    groups = {key: field for key, field, inner in _walk(schema) if inner}
    return values, groups, frozenset(key for key, field in values.items() if get_origin(field.annotation) is dict)


def leaves() -> dict[str, FieldInfo]:
    """Every key that holds a value, in the schema's order: ``{"data.train_files": FieldInfo, ...}``."""
    return _keys(_SCHEMA.get())[0]


def sections() -> dict[str, FieldInfo]:
    """Every key that holds other keys: ``{"data": FieldInfo, "actor.optim": ..., ...}``."""
    return _keys(_SCHEMA.get())[1]


def owner(key: str) -> type[Section]:
    """The section class that declares a key."""
    section = _SCHEMA.get()
    for name in key.split(".")[:-1]:
        section = section.model_fields[name].annotation  # type: ignore[assignment]
    return section


def free_dicts() -> frozenset[str]:
    """Keys whose value is a mapping of the user's own making."""
    return _keys(_SCHEMA.get())[2]


def free_dict_of(key: str) -> str | None:
    """The free mapping in which ``key`` lies, or None."""
    return next((owner for owner in free_dicts() if key.startswith(owner + ".")), None)


def holds_text(key: str) -> bool:
    """Whether a key takes text only (or a list of texts), so that an override needs no quoting."""
    field = leaves().get(key)
    kinds = plain_types(field.annotation) - {type(None)} if field else set()
    return bool(kinds) and all(kind is str or isinstance(kind, str) for kind in kinds)


def choices(key: str) -> list[str]:
    """The words that a key may take, if it takes a fixed set of words."""
    field = leaves().get(key.partition("[")[0])  # an entry of a list takes what the list does
    return list(_ordered_words(field.annotation)) if field else []


def _ordered_words(annotation: Any) -> Iterator[str]:
    if isinstance(annotation, str):
        yield annotation
    for part in get_args(annotation):
        yield from _ordered_words(part)


def defaults() -> dict[str, Any]:
    """The default of every key that has one."""
    found = {}
    for key, field in leaves().items():
        value = field.get_default(call_default_factory=True, validated_data={})
        if value is not PydanticUndefined:
            found[key] = value
    return found


_PLAIN = re.compile(r"[A-Za-z_/][\w/.+@-]*(?: [\w/.+@-]+)*", re.ASCII)
_YAML_WORDS = frozenset(["null", "true", "false", "yes", "no", "on", "off", "y", "n"])


def one_line(value: Any) -> str:
    """A value of a configuration as YAML in flow style; every YAML reader and :func:`load_config` read it back."""
    if isinstance(value, dict):
        return "{" + ", ".join(f"{one_line(str(name))}: {one_line(item)}" for name, item in value.items()) + "}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(one_line, value)) + "]"
    if isinstance(value, str):
        plain = _PLAIN.fullmatch(value) and value.lower() not in _YAML_WORDS
        return value if plain else visible(json.dumps(value, ensure_ascii=False))
    if isinstance(value, float):
        digits = repr(value)
        # Without a point YAML 1.1 reads 1e-06 as a text.
        return digits.replace("e", ".0e") if "e" in digits and "." not in digits else digits
    return json.dumps(value)


def visible(text: str) -> str:
    """Text on one line: what cannot be printed is written as in YAML's quotes, ``\\u000a``."""
    return "".join(
        char if char.isprintable() else f"\\u{ord(char):04x}" if ord(char) < 0x10000 else f"\\U{ord(char):08x}"
        for char in text
    )


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
