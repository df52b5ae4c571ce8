"""Gathering what is wrong with a configuration into one error."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from verl.errors import ConfigError

_MOST_SHOWN = 20


@dataclass(frozen=True)
class Problem:
    """One thing that is wrong: ``what`` names the field, ``value`` is shown as the user would write it."""

    what: str
    value: object
    fix: str


def as_written(value: object) -> object:
    """A value as a user would write it in YAML: null and true rather than None and True."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    return '""' if value == "" else value


def raise_problems(problems: Sequence[Problem]) -> None:
    """Raise one :class:`ConfigError` that holds all problems; do nothing if there are none."""
    if not problems:
        return
    if len(problems) == 1:
        only = problems[0]
        raise ConfigError(only.what, as_written(only.value), only.fix)
    errors = [str(ConfigError(p.what, as_written(p.value), p.fix)) for p in problems[:_MOST_SHOWN]]
    blocks = ["- " + error.replace("\n", "\n  ") for error in errors]
    if len(problems) > _MOST_SHOWN:
        blocks.append(f"- and {len(problems) - _MOST_SHOWN} more")
    raise ConfigError(f"the configuration has {len(problems)} problems:\n" + "\n".join(blocks))
