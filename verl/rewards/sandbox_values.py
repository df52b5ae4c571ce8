"""Values that a program under test sent out, read as hostile data: nothing here costs much more than their length."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any

MOST_HASHED = 5000  # items with hashes that a program can choose; equal hashes make sets and dicts quadratic


@dataclass(frozen=True, eq=False)
class Other:
    """A value that is no plain data; equal to nothing.

    Attributes:
        kind: the name of its type.
        true: what the program's interpreter said of its truth.
    """

    kind: str
    true: bool

    def __bool__(self) -> bool:
        return self.true


@dataclass(frozen=True)
class Raised:
    """In place of a value: why there is none."""

    reason: str


def decode(data: bytes) -> Any:
    """What ``sandbox_child.encode`` made of a value. Raises ValueError: it did not make this, or it is more than will
    be compared."""
    try:
        return _plain(json.loads(data))
    except (RecursionError, TypeError, AttributeError, KeyError) as error:
        raise ValueError("not a value") from error


def hashable(items: Collection[Any]) -> Collection[Any]:
    """The items, to be put into a set or dict. Raises ValueError if that might take long."""
    if len(items) > MOST_HASHED and not all(map(_hash_is_harmless, items)):
        raise ValueError("too many items whose hashes may be equal")
    return items


def _hash_is_harmless(item: Any) -> bool:
    # Hashes of text differ from process to process; small integers and floats have too few of one hash.
    if isinstance(item, tuple):
        return all(map(_hash_is_harmless, item))
    return item is None or isinstance(item, str | float | bytes) or (isinstance(item, int) and abs(item) < 2**60)


def _plain(value: Any) -> Any:
    if isinstance(value, list):
        return [_plain(item) for item in value]
    if not isinstance(value, dict):
        return value
    if "error" in value:
        return Raised(
            "wrong answer" if value["error"].startswith("AssertionError") else f"error: {value['error'][:200]}"
        )
    if "other" in value:
        return Other(str(value["other"]), value["true"] is True)
    ((tag, content),) = value.items()
    return _READ[tag](content)


_READ: dict[str, Callable[[Any], Any]] = {
    "int": lambda text: int(text, 16),
    "bytes": bytes.fromhex,
    "complex": lambda parts: complex(*map(float, parts)),
    "tuple": lambda items: tuple(map(_plain, items)),
    "set": lambda items: set(hashable([_plain(item) for item in items])),
    "dict": lambda pairs: dict(
        zip(hashable([_plain(key) for key, _ in pairs]), [_plain(item) for _, item in pairs], strict=True)
    ),
}
