"""Every metric that a run can log: what it means, how it is computed, what is healthy, and what to do when it is not.

The tables stand in ``metrics.md``, which is ``docs/metrics.md`` too. The report and ``verl metrics explain`` read them,
and a test fails on a logged name that they lack and on a row that nothing logs.
"""

from __future__ import annotations

import html
import itertools
import re
from functools import cache
from pathlib import Path
from typing import NamedTuple

PARTS_OF = re.compile(r"(\{[^}]*\}|<[^>]*>)")
PAGE = Path(__file__).with_name("metrics.md")


class Row(NamedTuple):
    """A metric or a family of them."""

    name: str  # {a,b} stands for a or b, <x> for any text
    meaning: str
    formula: str  # over what it is a mean or sum, and of what
    unit: str
    healthy: str  # values that need no thought
    otherwise: str  # what to do about other values


def tables(page: Path) -> dict[str, list[list[str]]]:
    """The rows of the tables of a Markdown page, without their heads, by the heading above."""
    found: dict[str, list[list[str]]] = {}
    for line in page.read_text(encoding="utf-8").splitlines():
        if line.startswith("#"):
            title = line.lstrip("# ")
        elif line.startswith("| `"):
            cells = re.split(r"(?<!\\)\|", line.strip("|"))
            texts = [html.unescape(cell.strip().replace("\\|", "|")).strip("`") for cell in cells]
            found.setdefault(title, []).append(texts)
    return found


TABLE = {title: [Row(*cells) for cells in rows] for title, rows in tables(PAGE).items()}


@cache
def pattern_of(name: str) -> re.Pattern[str]:
    """What names a row's name stands for."""
    return re.compile("".join(_part(part) for part in PARTS_OF.split(name)), re.DOTALL)


def _part(part: str) -> str:
    if part.startswith("{"):
        return "(?:" + "|".join(map(re.escape, part[1:-1].split(","))) + ")"
    return ".+" if part.startswith("<") else re.escape(part)


def row_of(name: str) -> Row | None:
    """The row of a logged metric, None for a name that no part of VeRL logs."""
    return next((row for rows in TABLE.values() for row in rows if pattern_of(row.name).fullmatch(name)), None)


def names() -> list[str]:
    """Every name, ``{a,b}`` written out, ``<x>`` as it is."""
    found = []
    for row in (row for rows in TABLE.values() for row in rows):
        choices = [part[1:-1].split(",") if part.startswith("{") else [part] for part in PARTS_OF.split(row.name)]
        found += ["".join(parts) for parts in itertools.product(*choices)]
    return found
