"""``--option key=value`` on the command line: values parsed from text."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from typing import Any

from verl.errors import DataError


def parse_value(text: str) -> Any:
    """``3`` int, ``0.5`` and ``1e-3`` float, ``true``/``false`` bool, ``null``/``none`` None, JSON lists, objects and
    quoted text; anything else is text as it stands."""
    stripped = text.strip()
    words = {"true": True, "false": False, "null": None, "none": None}
    if stripped.lower() in words:
        return words[stripped.lower()]
    for kind in (int, float):
        try:
            value = kind(stripped)
        except ValueError:
            continue
        if math.isfinite(value):
            return value
    if stripped[:1] in ("[", "{", '"'):
        try:
            return json.loads(stripped)
        except ValueError as error:
            raise DataError("An option's value is not JSON.", text, str(error)) from None
    return text


def parse_pairs(pairs: Iterable[str]) -> dict[str, str]:
    """``["prompt=question"]`` to a dict of text. Raises DataError: a pair without ``=`` or without a name, or a name
    given twice."""
    found: dict[str, str] = {}
    for pair in pairs:
        name, equals, value = pair.partition("=")
        name = name.strip()
        if not equals or not name:
            raise DataError("An option is not of the form name=value.", pair, "for example min_terms=2")
        if name in found:
            raise DataError("An option is given twice.", name, "give it once")
        found[name] = value
    return found


def parse_options(pairs: Iterable[str]) -> dict[str, Any]:
    """``["min_terms=2", ...]`` to a dict of what :func:`parse_value` reads; raises as :func:`parse_pairs`."""
    return {name: parse_value(value) for name, value in parse_pairs(pairs).items()}
