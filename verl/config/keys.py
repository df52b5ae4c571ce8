"""The dotted names of the schema, read off its classes.

There are several schemas (training by RL, supervised training), and everything that is said about keys is said of the
one in use: :func:`using`.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache
from typing import Any, get_args, get_origin

from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from verl.config.base import Section, plain_types
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
