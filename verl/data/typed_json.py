"""JSON that gives back what it was given: tuples, sets and dicts whose keys are not strings survive.

Problem generators compare metadata with ``==``; a tuple that comes back as a list would make a right answer wrong.
Encoded as ``{"__kind__": name, "items": [...]}``; everything else is plain JSON.
"""

from __future__ import annotations

import json
from typing import Any

KIND = "__kind__"


def dump_typed(value: Any) -> str:
    """One line of JSON. What JSON cannot hold and we do not know (numpy numbers apart) becomes its text."""
    return json.dumps(_encode(value), ensure_ascii=True)


def load_typed(text: str) -> Any:
    return _decode(json.loads(text))


def _encode(value: Any) -> Any:
    if value is None or isinstance(value, str | bool | int | float):
        return value
    if isinstance(value, list):
        return [_encode(v) for v in value]
    if isinstance(value, dict) and all(isinstance(k, str) for k in value) and KIND not in value:
        return {k: _encode(v) for k, v in value.items()}
    if isinstance(value, dict):
        return {KIND: "dict", "items": [[_encode(k), _encode(v)] for k, v in value.items()]}
    if isinstance(value, tuple):
        return {KIND: "tuple", "items": [_encode(v) for v in value]}
    if isinstance(value, set | frozenset):
        return {KIND: "set", "items": [_encode(v) for v in sorted(value, key=repr)]}
    if hasattr(value, "tolist"):  # numpy scalars and arrays
        return _encode(value.tolist())
    return str(value)


def _decode(value: Any) -> Any:
    if isinstance(value, list):
        return [_decode(v) for v in value]
    if not isinstance(value, dict):
        return value
    if KIND not in value:
        return {k: _decode(v) for k, v in value.items()}
    items = [_decode(v) for v in value["items"]]
    if value[KIND] == "tuple":
        return tuple(items)
    if value[KIND] == "set":
        return set(items)
    return dict(items)
