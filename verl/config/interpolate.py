"""``${section.key}`` in values: resolved over the user's settings and the schema's defaults, and nothing else.

There are no resolvers: nothing in a configuration runs code or reads the environment.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from copy import deepcopy
from functools import reduce
from operator import getitem
from typing import Any

from verl.config.aliases import canonical
from verl.config.keys import defaults, free_dict_of, leaves
from verl.config.names import nearest
from verl.config.problems import Problem, raise_problems
from verl.config.settings import Setting
from verl.errors import ConfigError

_OPENING = re.compile(r"(?P<escape>\\*)\$\{(?:(?P<name>[^\W\d]\w*(?:\.\w+)*)\})?")
"""A ``${`` with the backslashes before it (an odd number: it is meant literally), and the reference that it begins."""


def nested(values: Mapping[str, Any]) -> dict[str, Any]:
    """A tree of mappings from dotted keys; values of keys inside a free mapping go on top of the mapping itself."""
    tree: dict[str, Any] = {}
    for key, value in sorted(values.items(), key=lambda item: item[0].count(".")):
        *parents, last = key.split(".")
        place = tree
        for parent in parents:
            if not isinstance(place.get(parent), dict):
                place[parent] = {}
            place = place[parent]
        place[last] = deepcopy(value)
    return tree


def _texts(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict | list):
        # Names in a mapping are never resolved, so ${ means nothing there.
        for item in value.values() if isinstance(value, dict) else value:
            yield from _texts(item)


def _complaints(setting: Setting, known: set[str]) -> Iterator[Problem]:
    for text in _texts(setting.value):
        names = [match["name"] for match in _OPENING.finditer(text) if len(match["escape"]) % 2 == 0]
        if None in names:
            only = "only ${section.key} may stand in a value; nothing runs code or reads the environment"
            yield Problem(f"{setting.spelled}: {only}", text, "name another key, or write a literal ${ as \\${")
            continue
        for name in (name for name in names if canonical(name) not in known):
            what, fix = f"{setting.spelled}: ${{{name}}} is no key", f"did you mean ${{{nearest(name, known)}}}?"
            if canonical(name) in leaves():
                what, fix = f"{setting.spelled}: ${{{name}}} is not set and has no default", f"set {name}"
            yield Problem(what, text, fix)


def resolve(settings: Mapping[str, Setting]) -> dict[str, Any]:
    """The settings' values without interpolations, by canonical key. Raises ConfigError: a reference names no key, is
    not of the form ``${section.key}``, or leads back to itself."""
    values = {key: setting.value for key, setting in settings.items()}
    open_keys = [key for key, value in values.items() if any("${" in text for text in _texts(value))]
    if not open_keys:
        return values
    whole = defaults() | values
    known = {key for key in whole if key in leaves() or free_dict_of(key)}
    raise_problems([problem for key in open_keys for problem in _complaints(settings[key], known)])
    tree = nested(whole)

    def look(name: str, trail: tuple[str, ...]) -> Any:
        key = canonical(name)
        if key in trail:
            what = "the references between keys cannot be resolved: they lead back to themselves"
            fix = "make sure that no key refers to itself, directly or through others"
            raise ConfigError(what, " -> ".join((*trail, key)), fix)
        return solved(reduce(getitem, key.split("."), tree), (*trail, key))

    def solved(value: Any, trail: tuple[str, ...]) -> Any:
        if isinstance(value, dict):
            return {name: solved(item, trail) for name, item in value.items()}
        if not isinstance(value, str):
            return [solved(item, trail) for item in value] if isinstance(value, list) else value
        only = _OPENING.fullmatch(value)
        if only and only["name"] and not only["escape"]:
            return look(only["name"], trail)

        def written(match: re.Match[str]) -> str:
            backslashes, odd = divmod(len(match["escape"]), 2)
            text = match[0].lstrip("\\") if odd else str(look(match["name"], trail))
            return "\\" * backslashes + text

        return _OPENING.sub(written, value)

    return values | {key: solved(values[key], (key,)) for key in open_keys}


def escape(value: Any) -> Any:
    """The value with every text written so that :func:`resolve` gives it back unchanged."""
    if isinstance(value, str):
        return re.sub(r"(\\*)\$\{", lambda m: m[1] * 2 + "\\${", value)
    if isinstance(value, dict):
        return {name: escape(item) for name, item in value.items()}
    return [escape(item) for item in value] if isinstance(value, list | tuple) else value
