"""The reference of all keys as Markdown: docs/configuration.md, which is reference.md with its tables filled in."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

from verl.config.aliases import ALIASES, GLOBAL_MICRO_BATCH, PREFIXES, VERL_DEFAULTS
from verl.config.keys import facts, leaves, one_line, owner, sections, using
from verl.config.schema_supervised import COMMANDS
from verl.config.settings import presets
from verl.config.translate import NO_MEANING, NOT_YET


def reference() -> str:
    spellings: dict[str, list[str]] = {}
    for old, new in (PREFIXES | ALIASES | GLOBAL_MICRO_BATCH).items():
        spellings.setdefault(new, []).append(old)
    tops = [key for key in sections() if "." not in key]
    parts = {
        "presets": _table((_code(name), about) for name, about in presets().items()),
        "sections": _sections(tops, 2),
        "spellings": _table((_code(key), ", ".join(map(_code, also))) for key, also in spellings.items()),
        "defaults": _table((_code(key), _code(facts(key).default), there) for key, there in VERL_DEFAULTS.items()),
        "no_meaning": _table((", ".join(map(_code, row.patterns)), row.reason) for row in NO_MEANING),
        "not_built": _table(
            (
                _code(row.pattern),
                ", ".join(_code(one_line(value)) for value in row.harmless) or "nothing",
                row.what,
                row.fix,
            )
            for row in NOT_YET
        ),
    }
    for (name, schema), own in zip(COMMANDS.items(), (("data", "optim", "cluster"), ("data",)), strict=True):
        with using(schema):
            parts[name] = _sections(own, 3)
    page = Path(__file__).with_suffix(".md").read_text(encoding="utf-8")
    return re.sub(r"\{\{(.+)\}\}\n", lambda match: parts[match[1]], page)


def _sections(tops: Iterable[str], depth: int) -> str:
    """A heading and a table for each of these sections and those in them."""
    inside = [key for top in tops for key in sections() if key == top or key.startswith(top + ".")]
    return "\n".join(_section(key, depth) for key in inside)


def _section(key: str, depth: int) -> str:
    found = [facts(name) for name in leaves() if name.rpartition(".")[0] == key]
    usual = owner(f"{key}.").acts_in
    rows = []
    for fact in found:
        takes = fact.takes + (f" ({fact.unit})" if fact.unit not in (None, "plain number", "seed") else "")
        meaning = fact.meaning + (f" *{fact.acts_in}*" if fact.acts_in != usual else "")
        rows.append((_code(fact.key), _code(fact.default), takes, meaning))
    head = f"{'#' * (depth + ('.' in key))} {key}\n\n{sections()[key].description} *{usual}*\n\n"
    return f"{head}| key | default | takes | meaning |\n| --- | --- | --- | --- |\n{_table(rows)}"


def _code(text: str) -> str:
    return f"`{text}`"


def _table(rows: Iterable[tuple[str, ...]]) -> str:
    return "".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |\n" for line in rows)
