"""Keys of verl's that this system does not have: those without a meaning here, and those not supported yet.

Both tables stand in foreign.json. Keys of the first are accepted and named once at start; those of the second are
accepted at the values that ask for nothing, and refused at any other: dropping them silently would train something else
than was asked for.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import cache

from verl.config.aliases import read_table


@dataclass(frozen=True)
class NoMeaning:
    """Keys that change nothing here (``*`` stands for anything), and why."""

    reason: str
    patterns: tuple[str, ...]


@dataclass(frozen=True)
class NotYet:
    """A key that asks for something not built yet, unless it has one of the harmless values."""

    pattern: str
    harmless: list[object]
    what: str
    fix: str = "remove it"


_TABLE = read_table("foreign.json")
NO_MEANING = [NoMeaning(reason, tuple(patterns)) for reason, patterns in _TABLE["no_meaning"].items()]
NOT_YET = [NotYet(pattern, **row) for pattern, row in _TABLE["not_yet"].items()]


def _fits(key: str, pattern: str) -> bool:
    # "x.*" also stands for x itself, given whole (x: {} or x: null).
    return fnmatchcase(key, pattern) or (pattern.endswith(".*") and fnmatchcase(key, pattern[:-2]))


def no_meaning(key: str) -> NoMeaning | None:
    """The row of the first table that covers a key."""
    return next((row for row in NO_MEANING if any(_fits(key, pattern) for pattern in row.patterns)), None)


def not_yet(key: str) -> NotYet | None:
    """The row of the second table that covers a key."""
    return next((row for row in NOT_YET if _fits(key, row.pattern)), None)


def is_harmless(row: NotYet, value: object) -> bool:
    """Whether a value asks for nothing; words are compared without case, so that "False" and "null" count."""
    words = {str(harmless).lower() for harmless in row.harmless} | ({"null"} if None in row.harmless else set())
    return str(value).lower() in words


def folded(keys: Iterable[str]) -> list[str]:
    """Keys without meaning in few words: a family by its name and number, keys of one section in braces."""
    families: dict[str, list[str]] = {}
    for key in keys:
        families.setdefault(_family(key), []).append(key)
    alone: dict[str, list[str]] = {}
    named = []
    for family, members in families.items():
        if family and len(members) > 1:
            named.append(f"{family}.* ({len(members)} keys)")
            continue
        for key in members:
            section, _, name = key.rpartition(".")
            alone.setdefault(section, []).append(name)
    return named + [
        (f"{section}.{{{', '.join(names)}}}" if len(names) > 1 else f"{section}.{names[0]}").lstrip(".")
        for section, names in alone.items()
    ]


def _family(key: str) -> str:
    """The shortest name ``x`` with a row for ``x.*`` that ``key`` lies in, such as ``actor.megatron``; else empty."""
    parts = key.split(".")
    names = [".".join(parts[:end]) for end in range(1, len(parts))]
    families = [pattern for pattern in _patterns() if pattern.endswith(".*")]
    return next((name for name in names if any(fnmatchcase(name, pattern[:-2]) for pattern in families)), "")


@cache
def _patterns() -> tuple[str, ...]:
    return (*(row.pattern for row in NOT_YET), *(pattern for row in NO_MEANING for pattern in row.patterns))


@cache
def exact_names() -> frozenset[str]:
    """The keys of both tables that stand there in full."""
    return frozenset(pattern for pattern in _patterns() if "*" not in pattern)


def foreign_keys(section: str) -> list[tuple[str, str]]:
    """The rows of both tables that lie in a section: pattern, and what is said about it."""
    rows = [(row.pattern, f"not built: {row.what}") for row in NOT_YET]
    rows += [(pattern, row.reason) for row in NO_MEANING for pattern in row.patterns]
    return [(pattern, said) for pattern, said in rows if pattern.startswith(section + ".")]


@cache
def foreign_sections() -> frozenset[str]:
    """Names that hold other keys only in these tables, such as ``algorithm.filter_groups``."""
    found: set[str] = set()
    for pattern in _patterns():
        parts = pattern.split(".")
        found.update(".".join(parts[:end]) for end in range(1, len(parts)))
    return frozenset(name for name in found if "*" not in name)
