"""The dotted names of the schema, read off its classes."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from typing import Any, get_args

from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from verl.config.base import Section, plain_types
from verl.config.schema import Config


def _walk(section: type[Section], prefix: str = "") -> Iterator[tuple[str, FieldInfo, bool]]:
    for name, field in section.model_fields.items():
        key, kind = prefix + name, field.annotation
        inner = isinstance(kind, type) and issubclass(kind, Section)
        yield key, field, inner
        if inner:
            yield from _walk(kind, key + ".")  # type: ignore[arg-type]


@cache
def leaves() -> dict[str, FieldInfo]:
    """Every key that holds a value, in the schema's order: ``{"data.train_files": FieldInfo, ...}``."""
    return {key: field for key, field, inner in _walk(Config) if not inner}


@cache
def sections() -> dict[str, FieldInfo]:
    """Every key that holds other keys: ``{"data": FieldInfo, "actor.optim": ..., ...}``."""
    return {key: field for key, field, inner in _walk(Config) if inner}


def owner(key: str) -> type[Section]:
    """The section class that declares a key."""
    section: type[Section] = Config
    for name in key.split(".")[:-1]:
        section = section.model_fields[name].annotation  # type: ignore[assignment]
    return section


@cache
def free_dicts() -> frozenset[str]:
    """Keys whose value is a mapping of the user's own making."""
    return frozenset(key for key, field in leaves().items() if Any in get_args(field.annotation))


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
    field = leaves().get(key)
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
