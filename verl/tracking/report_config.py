"""The report's table of the configuration: every key beside its default."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import yaml

from verl.config import Config
from verl.config.keys import defaults, leaves, using
from verl.config.schema_supervised import schema_of
from verl.json_lines import json_value
from verl.run_dir import RunDir


def read_config(run_dir: RunDir) -> tuple[str, dict[str, Any] | None]:
    """The text of ``config.yaml`` (empty where there is none) and its tree (None where it holds none)."""
    try:
        text = run_dir.config.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return "", None
    try:
        tree = yaml.load(text, Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader))
    except (yaml.YAMLError, RecursionError, ValueError):  # a date that does not exist is a ValueError
        return text, None
    return text, tree if isinstance(tree, dict) else None


def get(tree: dict[str, Any] | None, key: str) -> Any:
    """The value of a dotted key, None where it is absent."""
    found: Any = tree
    for part in key.split("."):
        if not isinstance(found, dict):
            return None
        found = found.get(part)
    return found


def settings(tree: dict[str, Any]) -> list[dict[str, Any]]:
    """``{key, value, meaning, set, default?, unknown?}`` of every value; ``set``: it differs from the default.

    A key without ``default`` has none. Keys that this version does not know are ``unknown``.
    """
    with using(schema_of(tree) or Config):
        return _settings(tree)


def _settings(tree: dict[str, Any]) -> list[dict[str, Any]]:
    known, standard = leaves(), json_value(defaults())
    found = []
    for key, value in _flat(tree, ""):
        value = json_value(value)
        field = known.get(key)
        entry = {"key": key, "value": value, "meaning": (field.description or "") if field else ""}
        entry["set"] = key not in standard or standard[key] != value
        if key in standard:
            entry["default"] = standard[key]
        if field is None:
            entry["unknown"] = True
        found.append(entry)
    return found


def _flat(tree: dict[Any, Any], prefix: str) -> Iterator[tuple[str, Any]]:
    for name, value in tree.items():
        key = f"{prefix}{name}"
        if isinstance(value, dict) and value and key not in leaves():
            yield from _flat(value, f"{key}.")
        else:
            yield key, value
