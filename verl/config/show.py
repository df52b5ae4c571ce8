"""A configuration as text: the resolved tree with the origin of every value, and what differs between two."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict
from typing import Any

from verl.config.aliases import canonical
from verl.config.base import Section
from verl.config.interpolate import escape
from verl.config.keys import defaults, leaves
from verl.config.load import LoadedConfig
from verl.config.overrides import OPEN
from verl.config.text import one_line, visible
from verl.json_lines import json_value

_WIDEST = 56
"""Columns that a line may take before its origin; longer lines push their origin aside."""


def values_of(config: Section) -> dict[str, Any]:
    """The value of every key, as JSON knows it, in the schema's order."""
    tree, found = config.model_dump(mode="json"), {}
    for key in leaves():
        place = tree
        for name in key.split("."):
            place = place[name]
        found[key] = place
    return found


def select(loaded: LoadedConfig, only: Sequence[str] = (), changed: bool = False) -> list[str]:
    """Keys to be shown, in the schema's order.

    Args:
        only: keys and sections, in any spelling; empty for all.
        changed: leave out what has its default value.
    """
    wanted, standard, values = [canonical(name) for name in only], json_value(defaults()), values_of(loaded.config)
    return [
        key
        for key, value in values.items()
        if (not wanted or any(key == name or key.startswith(name + ".") for name in wanted))
        and not (changed and key in standard and standard[key] == value)
    ]


def tree(loaded: LoadedConfig, keys: Iterable[str], with_origins: bool = True) -> list[tuple[str, str]]:
    """Lines of YAML, each with its origin as a comment (empty for sections, and where none is wanted)."""
    values, opened, lines = values_of(loaded.config), set(), []
    for key in keys:
        *parents, name = key.split(".")
        for depth, parent in enumerate(parents):
            if (section := tuple(parents[: depth + 1])) not in opened:
                opened.add(section)
                lines.append(("  " * depth + parent + ":", ""))
        missing = key in loaded.missing
        origin = "required, not given" if missing else visible(str(loaded.origins[key]))
        text = OPEN if missing else one_line(escape(values[key]))
        lines.append(("  " * len(parents) + f"{name}: {text}", f"# {origin}" if with_origins else ""))
    width = max((len(line) for line, origin in lines if origin and len(line) <= _WIDEST), default=0)
    return [(f"{line:{width}}  " if origin else line, origin) for line, origin in lines]


def as_json(loaded: LoadedConfig, keys: Iterable[str]) -> dict[str, Any]:
    """``{key: {"value", "default", "origin": {"kind", "place", "written"}}}``; null where there is no value."""
    values, standard = values_of(loaded.config), json_value(defaults())
    return {
        key: {
            "value": None if key in loaded.missing else values[key],
            "default": standard.get(key),
            "origin": asdict(loaded.origins[key]),
        }
        for key in keys
    }


def difference(one: Section, other: Section) -> dict[str, tuple[Any, Any]]:
    """The keys whose values differ, with both values."""
    theirs = values_of(other)
    return {key: (value, theirs[key]) for key, value in values_of(one).items() if value != theirs[key]}
