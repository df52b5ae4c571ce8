"""pydantic's complaints, retold: the dotted field, the value, and what to write instead."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from pydantic import ValidationError

from verl.config.aliases import OTHER_VALUES
from verl.config.base import FieldProblem
from verl.config.keys import choices, leaves, sections
from verl.config.names import did_you_mean, nearest
from verl.config.problems import Problem, as_written

_RULES = {
    "greater_than_equal": "at least {ge:g}",
    "greater_than": "above {gt:g}",
    "less_than_equal": "at most {le:g}",
    "less_than": "below {lt:g}",
    "int_type": "a whole number",
    "int_parsing": "a whole number",
    "int_parsing_size": "a smaller whole number",
    "int_from_float": "a whole number",
    "float_type": "a number",
    "float_parsing": "a number",
    "finite_number": "a finite number",
    "bool_type": "true or false",
    "bool_parsing": "true or false",
    "string_type": "text",
    "string_too_short": "a text that is not empty",
    "list_type": "a list",
    "tuple_type": "a list",
    "dict_type": "a mapping {{key: value}}",
    "too_long": "a list of {max_length} values",
}


def problems_of(error: ValidationError, places: Mapping[str, str]) -> list[Problem]:
    """One problem for every field that pydantic complains about, in the schema's order. ``places``: where the value of
    a key stands, shown behind the value."""
    by_key: dict[str, list[Any]] = {}
    for item in error.errors(include_url=False):
        by_key.setdefault(_key(item["loc"]), []).append(item)
    problems = {key: _problem(key, items) for key, items in by_key.items()}
    for key, problem in problems.items():
        if place := places.get(key.partition("[")[0]):
            problems[key] = replace(problem, value=f"{as_written(problem.value)} ({place})")
    return list(problems.values())


def _key(location: Sequence[int | str]) -> str:
    """The dotted name of a field, without the branches of a union that pydantic adds; ``[1]`` for a list's item."""
    key = ""
    for part in location:
        if key in leaves():
            return f"{key}[{part}]" if isinstance(part, int) else key
        key = f"{key}.{part}" if key else str(part)
    return key


def _problem(key: str, items: list[Any]) -> Problem:
    value, kinds = items[0]["input"], {item["type"] for item in items}
    if "missing" in kinds and key in leaves():
        return Problem(f"{key} is required", "not given", f"set {key} ({_meaning(key)})")
    if "missing" in kinds:
        owner = key.partition("[")[0]
        return Problem(f"{owner} has too few values", value, f"give all of them ({_meaning(owner)})")
    if "extra_forbidden" in kinds:
        known = [*leaves(), *sections()]
        return Problem(f"unknown key {key}", value, f"did you mean {nearest(key, known)}?")
    own = items[0].get("ctx", {}).get("error")
    if isinstance(own, FieldProblem):
        return Problem(f"{key}: {own.what}", value, own.fix)
    rule = " or ".join(dict.fromkeys(_rule(key, item) for item in items))
    hint = did_you_mean(value, [*choices(key), *OTHER_VALUES.get(key, [])]) if isinstance(value, str) else ""
    meaning, to = _meaning(key), "one of them" if rule.startswith("one of ") else rule
    return Problem(f"{key} must be {rule}", value, f"{hint}set {key} to {to}" + (f" ({meaning})" if meaning else ""))


def _rule(key: str, item: Any) -> str:
    if item["type"] == "literal_error":
        words = choices(key)
        return f"one of {', '.join(words)}" if len(words) > 1 else words[0]
    rule = _RULES.get(item["type"])
    return rule.format(**item.get("ctx", {})) if rule else f"valid: {item['msg']}"


def _meaning(key: str) -> str:
    field = leaves().get(key.partition("[")[0])
    return (field.description or "").rstrip(".") if field else ""
